"""docs/structure.md's list of modules, made from the first sentence of each module's docstring.

python -m tests.support.structure     writes it anew
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "structure.md"
BEGIN, END = "<!-- modules: made by tests/support/structure.py -->\n", "<!-- end of modules -->\n"
WINGS = (
    "quantize",
    "quantize/cli",
    "quantize/pipeline",
    "quantize/stages",
    "quantize/stages/plan",
    "quantize/stages/calibrate",
    "quantize/stages/round_weights",
    "quantize/stages/convert",
    "quantize/stages/verify",
    "quantize/stages/fidelity",
    "quantize/stages/evaluate",
    "quantize/stages/report",
    "quantize/bench",
    "quantize/reports",
    "quantize/hub",
    "quantize/exports",
    "quantize/serve",
    "quantize/runtime",
    "quantize/runtime/engine",
    "quantize/runtime/record",
    "quantize/runtime/model",
    "quantize/runtime/weights",
    "quantize/runtime/gpu",
    "quantize/runtime/sampler",
    "quantize/runtime/prompt",
    "quantize/runs",
    "quantize/checkpoints",
    "quantize/recipe",
    "quantize/schemes",
    "quantize/host",
    "quantize/bundled",
    "kernels/fused_dequant",
    "kernels/fused_dequant/launch",
    "kernels/fused_dequant/inputs",
    "kernels/fused_dequant/weights",
    "kernels/fused_dequant/products",
    "kernels/fused_dequant/attention",
    "kernels/fused_dequant/layer",
    "kernels/fused_dequant/vocabulary",
    "kernels/fused_dequant/sampler",
    "kernels/fused_dequant/gptq",
    "kernels/fused_dequant/tune",
    "evaluation/recovery",
    "evaluation/experiments",
    "evaluation/experiments/bundled",
)  # fmt: skip


def sentence(file: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def modules() -> str:
    """Return the list: a heading a folder, and its modules."""
    lines: list[str] = []
    for wing in WINGS:
        folder = ROOT / wing
        lines += [f"**`{wing}/`** {sentence(folder / '__init__.py')}", ""]
        files = [file for file in sorted(folder.glob("*.py")) if not file.name.startswith("__")]
        lines += [f"- `{file.name}` {sentence(file)}" for file in files] + [""]
    return "\n".join(lines)


def page() -> str:
    """Return the whole page with the list as it should be."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + modules() + END + after


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
