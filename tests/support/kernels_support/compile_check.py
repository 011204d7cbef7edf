"""Compile a kernel for a GPU that is not there and read its machine code.

Triton's wheel brings ptxas, cuobjdump and nvdisasm, and `triton.compile` takes an explicit target, so a
machine without a driver can answer: does it compile, does it spill, how much shared memory, which
tensor-core instruction, how many instructions a weight in the main loop.

What was read is kept under the hash of Triton's version, the kernel's source, types, constants, options
and target: in RECORD, which is in the repository, and in Triton's cache. So what did not change is not
compiled again, which takes five minutes of a core; QUANTIZE_TEST_COMPILE=1 compiles it all the same.
"""

import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import triton
from fused_dequant.launch.targets import Capability, name_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_manager

from tests.support.kernels_support.launches import Launch

RECORD = Path(__file__).parents[2] / "data" / "compiled.json"
COMPILE = "QUANTIZE_TEST_COMPILE"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TENSOR_CORE = re.compile(r"\b(?:[HQIO]MMA|[HQI]GMMA|UTC\w*MMA)\b")
PTX = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.[\w.:]*")


@cache
def assembles(capability: Capability) -> bool:
    """Return whether Triton's assembler knows a target: that of 3.6 has no sm_110."""
    tool = "ptxas-blackwell" if capability >= (10, 0) else "ptxas"
    return name_of(capability) in _run(tool, "--help")


@dataclass(frozen=True)
class Size:
    """What a launch takes of its target: bytes of shared memory, of a thread stack in bytes and
    registers, PTX products.
    """

    shared: int
    stack: int
    registers: int
    products: frozenset[str]


def size(launch: Launch) -> Size:
    """Compile a launch, unless that has been done before."""
    *numbers, products = _kept("size 2", launch.key, lambda: _sizes(launch))
    return Size(*numbers, frozenset(products))


def _sizes(launch: Launch) -> tuple[int, int, int, list[str]]:
    compiled = triton.compile(launch.source, target=launch.target, options=launch.options.__dict__)
    products = sorted(set(PTX.findall(compiled.asm["ptx"])))
    return compiled.metadata.shared, *_usage(compiled.asm["cubin"]), products


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return a thread's bytes of stack, where what is spilled lies, and its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[2]), int(found[1])


@dataclass(frozen=True)
class Report:
    """What the machine code says."""

    stack: int
    spills: int
    loop: dict[str, int]  # opcodes of the innermost loop that holds a tensor-core instruction

    @property
    def loop_instructions(self) -> int:
        return sum(self.loop.values())


def compile_for(
    capability: int,
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    **options: int,
) -> Report:
    """Compile `kernel` for sm_<capability>; pointers, N and K are divisible by 16 as at launch."""
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    missing = [n for n, t in types.items() if t == "constexpr" and n not in constants]
    assert not missing, f"no value for {missing}"
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, type_) in enumerate(types.items())
        if type_.startswith("*") or name in ("N", "K", "V", "H", "length")
    }
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = source_type(kernel, types, values, divisible)

    def made() -> tuple[int, int, Counter[str]]:
        target = GPUTarget("cuda", capability, 32)
        return _report(triton.compile(source, target=target, options=options).asm["cubin"])

    key = f"{source.hash()} {sorted(options.items())} {capability}"
    return Report(*_kept("report 2", key, made))


def _report(cubin: bytes) -> tuple[int, int, Counter[str]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        machine_code = _run("nvdisasm", "-c", file.name)
    spills = len(re.findall(r"\bSTL\b", machine_code))
    return _usage(cubin)[0], spills, _main_loop(machine_code)


@cache
def recorded() -> dict[str, Any]:
    """Return the repository's record, by the hash of what was compiled; {} for another Triton."""
    record = json.loads(RECORD.read_text())
    return record["found"] if record["triton"] == triton.__version__ else {}


asked: dict[str, Any] = {}  # what this process was told, by hash


def _kept(what: str, key: str, make: Callable[[], Any]) -> Any:
    """Return what was made under a key once, from the record or Triton's cache: JSON."""
    digest = sha256(f"{what} {triton.__version__} {key}".encode()).hexdigest()
    if digest not in recorded() or os.environ.get(COMPILE):
        cache = get_cache_manager(digest)
        name = f"{what.split()[0]}.json"
        if (known := cache.get_file(name)) is None:
            known = cache.put(json.dumps(make()), name, binary=False)
        asked[digest] = json.loads(Path(known).read_text())
    else:
        asked[digest] = recorded()[digest]
    return asked[digest]


def write_record() -> None:
    """Write what this process was told as the record, a line each."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(asked[key])}" for key in sorted(asked))
    RECORD.write_text(f'{{"triton": "{triton.__version__}", "found": {{\n{lines}\n}}}}\n')


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run(
        [str(TOOLS / tool), *arguments], capture_output=True, text=True, check=True
    ).stdout


def _main_loop(machine_code: str) -> Counter[str]:
    lines = machine_code.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    best: list[str] = []
    for end, line in enumerate(lines):
        target = re.search(r"BRA\b.*`\((\.L_x_\d+)\)", line)
        if target and (start := labels.get(target[1], end)) < end:
            body = lines[start : end + 1]
            if any(TENSOR_CORE.search(text) for text in body) and (
                not best or len(body) < len(best)
            ):
                best = body
    opcode = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
    return Counter(m[1] for line in best if (m := opcode.search(line)))
