"""Finds what a checkpoint holds, which tensors stay BF16, and what is wrong with it.

Only JSON files, headers, global scales and input scales are read. A module's tensors show its scheme.
A config.json that states another scheme is a problem. Two layouts are known (`schemes.records`):
compressed-tensors' (ours, llm-compressor's, RedHatAI's) and ModelOpt's (NVIDIA's).

A problem makes servers fail or answer nonsense. Problems are: scales on modules that servers read in
BF16; two tensors for one module; missing tensors or experts; several schemes in one layer's experts; a
wrong config or index; no tokenizer; scales that are not above 0, unequal if fused, or missing in part.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Column, Table

from quantize.checkpoints.layout import check_layout
from quantize.checkpoints.reader import Checkpoint, TensorInfo, check_tokenizer, check_total_size
from quantize.checkpoints.scales import complete, positive, read_scales, shared
from quantize.checkpoints.targets import DROPPED, QUANTIZABLE, linear_modules, module_class
from quantize.errors import InputError
from quantize.host.units import size
from quantize.schemes.records import GROUP, LAYOUTS, SUFFIXES

SUFFIX = re.compile(rf"(.+)\.({'|'.join(SUFFIXES)})")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj")

PLAIN = ("BF16", "F16", "F32", "F64")
# (suffixes, dtype of the codes) -> name of the scheme
SCHEME_OF = {
    (frozenset(tensors), next(iter(tensors.values()))[0]): name
    for name, layout in LAYOUTS
    for tensors in [layout.tensors(1, GROUP)]
}


@dataclass(frozen=True)
class Module:
    """One module, and the scheme that its tensors show."""

    name: str
    tensors: dict[str, TensorInfo]  # suffix, "" for a bare parameter -> where the tensor is stored
    scheme: str  # a quantization scheme, a dtype where nothing is quantized, or "incomplete"

    @property
    def quantized(self) -> bool:
        """Whether the module has codes or scales."""
        return self.scheme == "incomplete" or self.scheme in SCHEME_OF.values()

    @property
    def kind(self) -> str:
        """The module's class (`targets.module_class`), or `tied copy`, or `unknown`."""
        if EXPERT.fullmatch(self.name):
            return "experts"
        name = self.name if "" in self.tensors else f"{self.name}.weight"
        if DROPPED.fullmatch(name):
            return "tied copy"
        try:
            return module_class(name)
        except InputError:
            return "unknown"

    @property
    def linears(self) -> int:
        """How many Linears a fused tensor of experts holds; 1 for any other module."""
        return sum(len(linear_modules(t.name, t.shape)) for t in self.tensors.values()) or 1

    @property
    def nbytes(self) -> int:
        """Bytes of all the module's tensors."""
        return sum(info.nbytes for info in self.tensors.values())


@dataclass(frozen=True)
class ModuleRow:
    """All Linears (or other parameters) of one `kind` and `scheme`: their number and their bytes."""

    kind: str
    scheme: str
    quantized: bool
    count: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds, and what is wrong with it; `rows` are sorted, most bytes first."""

    folder: Path
    format: str
    tensors: int
    shards: int
    nbytes: int
    rows: list[ModuleRow]
    problems: list[str]

    @property
    def quantized_modules(self) -> int:
        """Number of quantized Linears."""
        return sum(row.count for row in self.rows if row.quantized)


def inspect(folder: Path, looks: Sequence[Callable[[Path], object]] = ()) -> Inspection:
    """Return what a DiffusionGemma checkpoint holds and what is wrong with it.

    `looks` are further checks of the folder; the InputError of one that raises it is a problem too.
    Raise InputError if it is another model, a file is missing or damaged, or index and headers differ.
    """
    checkpoint = Checkpoint.open(folder)
    modules = _modules(checkpoint.tensors)
    return Inspection(
        folder=checkpoint.folder,
        format=_format(checkpoint, modules),
        tensors=len(checkpoint.tensors),
        shards=len(checkpoint.shards),
        nbytes=checkpoint.nbytes,
        rows=_rows(modules),
        problems=list(dict.fromkeys(_problems(checkpoint, modules, looks))),
    )


def _modules(tensors: dict[str, TensorInfo]) -> list[Module]:
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        match = SUFFIX.fullmatch(name)
        module, suffix = (match[1], match[2]) if match else (name, "")
        modules[module][suffix] = info
    return [Module(name, parts, _scheme(parts)) for name, parts in modules.items()]


def _scheme(parts: dict[str, TensorInfo]) -> str:
    codes = parts.get("weight_packed") or parts.get("weight") or parts.get("")
    if codes and len(parts) == 1 and codes.dtype in PLAIN:
        return codes.dtype
    return SCHEME_OF.get((frozenset(parts), codes.dtype if codes else ""), "incomplete")


def _rows(modules: list[Module]) -> list[ModuleRow]:
    groups: dict[tuple[str, str, bool], list[Module]] = defaultdict(list)
    for module in modules:
        groups[module.kind, module.scheme, module.quantized].append(module)
    rows = [
        ModuleRow(*key, sum(m.linears for m in group), sum(m.nbytes for m in group))
        for key, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.nbytes)


def _format(checkpoint: Checkpoint, modules: list[Module]) -> str:
    """Name the tool that may have written the checkpoint, judging by config and names."""
    stated = checkpoint.config.get("quantization_config")
    if isinstance(stated, dict) and stated.get("quant_method") == "compressed-tensors":
        version = stated.get("version", "of unknown version")
        return f"compressed-tensors {version}, {stated.get('format')}"
    if isinstance(stated, dict):
        return " ".join(str(stated.get(key, "")) for key in ("quant_method", "quant_algo")).strip()
    if any(module.quantized for module in modules):
        return "quantized, and nothing says how"
    fused = any(name.endswith("experts.gate_up_proj") for name in checkpoint.tensors)
    return f"not quantized, {'fused experts' if fused else 'one Linear an expert'}"


def _problems(
    checkpoint: Checkpoint, modules: list[Module], more: Sequence[Callable[[Path], object]]
) -> Iterator[str]:
    """Yield problems, grave ones first, one line for each kind: its first fault, and how many more."""
    quantized = [module for module in modules if module.quantized]
    kept = [m.name for m in quantized if m.kind not in QUANTIZABLE]
    # In BF16 the copies are compared with their originals (`ties`).
    twice = [name for name, count in owners(checkpoint).items() if count > 1 and quantized]
    incomplete = [m.name for m in quantized if m.scheme == "incomplete"]
    yield from _first(kept, ": quantized, but servers read it in BF16")
    yield from _first(twice, ": has two tensors once servers merge both trees")
    yield from _first(incomplete, ": lacks tensors of its scheme, or has some of two")
    yield from _expert_problems(checkpoint, modules)
    stated = checkpoint.is_quantized
    if stated != bool(quantized):
        yield f"config.json says {'quantized' if stated else 'nothing'}, {len(quantized)} modules are"
    scales = read_scales(checkpoint)
    for check in (positive, complete, shared):
        yield from _first([fault for ok, fault in check(scales) if not ok])
    looks: list[Callable[[], object]] = [
        partial(check_total_size, checkpoint), partial(check_tokenizer, checkpoint.folder),
        *(partial(look, checkpoint.folder) for look in more),
    ]  # fmt: skip
    config = checkpoint.config.get("quantization_config") or {}
    if not config or config.get("quant_method") in ("compressed-tensors", "modelopt"):
        looks.append(partial(check_layout, checkpoint))
    yield from filter(None, map(refusal, looks))


def _first(faults: Sequence[str], what: str = "") -> Iterator[str]:
    if faults:
        yield faults[0] + what + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else "")


def owners(checkpoint: Checkpoint) -> Counter[str]:
    """Return name in servers' merged tree -> number of tensors that get it; no layer scalars."""
    return Counter(
        re.sub(r"^model\.(decoder|encoder\.language_model)\.", "model.", name)
        for name in checkpoint.tensors
        if not name.endswith("layer_scalar")
    )


def _expert_problems(checkpoint: Checkpoint, modules: list[Module]) -> Iterator[str]:
    """Yield a line for layers whose unfused experts are incomplete or of several schemes."""
    layers: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    for module in modules:
        if match := EXPERT.fullmatch(module.name):
            layers[match[1]][int(match[2]), match[3]] = module.scheme
    count = checkpoint.config["text_config"]["num_experts"]
    wanted = {(e, projection) for e in range(count) for projection in ("gate", "up", "down")}
    for layer, experts in layers.items():
        if missing := sorted(wanted - experts.keys()):
            expert, projection = missing[0]
            yield f"{layer}.{expert}.{projection}_proj is missing ({len(missing)} in this layer)"
        if len(schemes := set(experts.values())) > 1:
            yield f"{layer}: several schemes in one layer ({', '.join(sorted(schemes))})"


def refusal(look: Callable[[], object]) -> str:
    """Run the check `look`; return the message of its InputError, or "" if it raises none."""
    try:
        look()
    except InputError as error:
        return str(error)
    return ""


def inspection_table(inspection: Inspection) -> Table:
    """Return an inspection as a table for the terminal."""
    count, nbytes = (Column(name, justify="right") for name in ("count", "size"))
    title = f"{inspection.folder}: {inspection.format}"
    table = Table("modules", "scheme", count, nbytes, title=title, title_justify="left")
    for row in inspection.rows:
        table.add_row(row.kind, row.scheme, f"{row.count:,}", size(row.nbytes))
    table.add_section()
    all_of_it = f"{inspection.tensors:,} tensors in {inspection.shards} shards"
    quantized = f"{inspection.quantized_modules:,}"
    table.add_row(all_of_it, "quantized Linears", quantized, size(inspection.nbytes))
    return table
