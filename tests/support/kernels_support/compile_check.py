"""Compile a kernel for a GPU that is not there and read its machine code.

Triton's wheel brings ptxas, cuobjdump and nvdisasm, and `triton.compile` takes an explicit target, so a
machine without a driver can answer: does it compile, does it spill, how much shared memory, which
tensor-core instruction, how many instructions a weight in the main loop.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from fused_dequant.targets import TARGETS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TENSOR_CORE = re.compile(r"\b(?:[HQIO]MMA|[HQI]GMMA|UTC\w*MMA)\b")
SHARED_LIMIT = {10 * major + minor: own.shared for (major, minor), own in TARGETS.items()}  # KiB


@dataclass(frozen=True)
class Report:
    """What the machine code says."""

    registers: int
    stack: int
    spills: int
    shared: int
    tensor_core: frozenset[str]
    loop: Counter[str]  # opcodes of the innermost loop that holds a tensor-core instruction

    @property
    def loop_instructions(self) -> int:
        return self.loop.total()


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
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        machine_code = _run("nvdisasm", "-c", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return Report(
        registers,
        stack,
        len(re.findall(r"\bSTL\b", machine_code)),
        compiled.metadata.shared,
        frozenset(TENSOR_CORE.findall(machine_code)),
        _main_loop(machine_code),
    )


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
