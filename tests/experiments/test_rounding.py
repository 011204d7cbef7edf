"""The experiment on rounding: what its variants quantize, and the figures of its tables."""

from pathlib import Path

import click
import pytest
from experiments.rounding import ANSWERED, VARIANTS, Variant, per_problem, recipe_of, table

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.host.files import write_json


def test_every_variant_plans_what_it_says() -> None:
    source = Checkpoint.open(CHECKPOINT)
    for variant in VARIANTS.values():
        targets = plan_targets(source.tensors, recipe_of(variant, 4).quantization)
        schemes = {t.module_class: t.scheme.name for t in targets if t.scheme}
        assert schemes == {
            "experts": variant.experts, "mlp": variant.mlp, "attention": variant.attention,
        }  # fmt: skip
    assert {name for name, _ in ANSWERED} <= {"bf16", *VARIANTS}
    assert Variant(rounding="gptq").quantization().rounding == "gptq"


def test_the_table_pairs_kl_by_trajectory_and_answers_by_problem(tmp_path: Path) -> None:
    for part in ("replay", "answers", "served"):
        (tmp_path / part).mkdir()
    write_json(tmp_path / "replay" / "w4a4-none.json", {"kl": [0.010, 0.030]})
    write_json(tmp_path / "replay" / "a16-gptq-none.json", {"kl": [0.004, 0.012]})
    write_json(tmp_path / "replay" / "a16-gptq-fp8.json", {"kl": [0.005, 0.015]})
    right = {"bf16": [[True, True], [True, False]], "w4a4": [[True, False], [False, False]]}
    for name, answers in right.items():
        steps = 30 if name == "w4a4" else 20
        write_json(
            tmp_path / "answers" / f"{name}-none.json",
            {"right": answers, "tokens": 100, "steps": steps},
        )
    write_json(tmp_path / "served" / "w4a4.json", {"right": "11"})
    assert per_problem(right["w4a4"]) == [0.5, 0.0]
    lines = "\n".join(table(tmp_path))
    assert "| a16-gptq | none | 8.00 | -12.00 [-18.00, -6.00] | 0.400 |" in lines
    paired = "+0.00 [+0.00, +0.00] | 1.000 | +2.00 [+1.00, +3.00]"  # no w4a4 in that mode
    assert f"| a16-gptq | fp8 | 10.00 | {paired} |" in lines
    own = "-50.00 [-50.00, -50.00] | +0.00 [+0.00, +0.00] | +50.0%"
    assert f"| w4a4 | none | 0.2500 | {own} |" in lines
    assert "| w4a4 | 1.0000 | 0.5000 | +50.00 [+0.00, +100.00] |" in lines


def test_an_empty_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="nothing is measured"):
        table(tmp_path)
