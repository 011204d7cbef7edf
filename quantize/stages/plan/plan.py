"""Plans what a recipe would do to a model: module groups, schemes, bytes.

A plan needs only the headers of the model's shards or, if the weights are missing, config.json.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from quantize.checkpoints.layout import bf16_layout, check_layout
from quantize.checkpoints.reader import Checkpoint, TensorInfo, config_from, known_config, resolve
from quantize.checkpoints.targets import Target, plan_targets, sum_bytes
from quantize.host.files import write_text
from quantize.host.units import size
from quantize.recipe.reading import load_recipe, shipped_recipes
from quantize.recipe.sections import Recipe
from quantize.runs.folder import RunDir


def write_plan(run: RunDir, recipe: Recipe, targets: list[Target]) -> None:
    """Write recipe.yaml, and targets.csv: what becomes of each source tensor, why, and its bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = ("class", "scheme", "reason_kept", "shape", "modules", "bytes", "bytes_after")
    writer.writerow(("tensor", *heads))
    for t in targets:
        shape = "x".join(map(str, t.shape))
        row = (t.name, t.module_class, t.scheme or "", t.reason, shape, len(t.modules))
        writer.writerow((*row, t.bytes_before, t.bytes_after))
    write_text(run.recipe_yaml, recipe.to_yaml())
    write_text(run.targets_csv, text.getvalue())


def described(
    model: str | None, revision: str | None = None
) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Return a model's config and its tensors by name, from a checkpoint or only from a config.json.

    Raises:
        InputError, ResourceError: the model cannot be found, or its checkpoint cannot be read.
    """
    if model and revision is None and not Path(model).is_dir():
        is_file = model.endswith(".json")
        config = config_from(Path(model)) if is_file else known_config(model)
        if config is not None:
            return config, tensors_from_config(config)
    source = Checkpoint.open(resolve(model, revision))
    check_layout(source)
    return source.config, source.tensors


def tensors_from_config(config: dict[str, Any]) -> dict[str, TensorInfo]:
    """Return the tensors that a BF16 checkpoint with this config would hold; no file is read."""
    return {
        name: TensorInfo(name, spec.dtype, spec.shape, Path("config.json"), 0, spec.nbytes)
        for name, spec in bf16_layout(config).items()
    }


def plans_of(tensors: Mapping[str, TensorInfo]) -> dict[str, list[Target]]:
    """Return the plan of every shipped recipe for these tensors: the recipe's name -> its targets."""
    return {
        name: plan_targets(tensors, load_recipe(name).quantization) for name in shipped_recipes()
    }


def narrow_table(title: str | None, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return an empty table for 80 characters with columns `names`, of which `numbers` align right."""
    columns = [
        Column(name, justify="right" if name in numbers else "left", no_wrap=True) for name in names
    ]
    return Table(
        *columns, title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )  # fmt: skip


def plan_table(targets: list[Target], title: str) -> Table:
    """Return the plan as a table; targets of equal class, scheme and reason share a row."""
    groups: dict[tuple[str, str, str], list[Target]] = {}
    for target in targets:
        key = target.module_class, str(target.scheme or "BF16"), target.reason
        groups.setdefault(key, []).append(target)
    count, *sizes = (Column(n, justify="right", no_wrap=True) for n in ("count", "before", "after"))
    heads = ("modules", count, "becomes", *sizes, "kept because")
    table = Table(*heads, title=title, title_justify="left")
    for (kind, scheme, reason), group in sorted(groups.items(), key=lambda g: -sum_bytes(g[1])[0]):
        linears = sum(len(target.modules) for target in group)  # rows that stay BF16 count tensors
        table.add_row(
            kind, f"{linears or len(group):,}", scheme, *map(size, sum_bytes(group)), reason
        )
    before, after = sum_bytes(targets)
    modules = sum(len(target.modules) for target in targets)
    table.add_section()
    ratio = f"{after / before:.1%} of BF16"
    table.add_row("all", f"{modules:,}", "quantized", size(before), size(after), ratio)
    return table
