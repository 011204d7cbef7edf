"""Which tensor gets which scheme, on the tiny model and on the exact names of the 26B one."""

from collections import Counter
from pathlib import Path

import pytest

from quantize.checkpoints.layout import (
    bf16_layout,
    quantized_layout,
    schemes_by_module,
)
from quantize.checkpoints.reader import Checkpoint, known_config
from quantize.checkpoints.targets import module_class, named_by, plan_targets, sum_bytes
from quantize.errors import InputError
from quantize.host.units import size
from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Quantization
from quantize.stages.plan.plan import plan_table, tensors_from_config

REAL = "google/diffusiongemma-26B-A4B-it"
LAYERS, EXPERTS, FULL_LAYERS = 30, 128, 5
IGNORE = ["lm_head", "re:.*router.*", "re:.*self_conditioning.*", "re:.*vision.*"]


def test_the_26b_layout_is_the_published_one() -> None:
    """1,047 tensors and 51,647,562,456 bytes: the index of the published checkpoint says so."""
    config = known_config(REAL)
    assert config is not None
    tensors = tensors_from_config(config)
    assert len(tensors) == 1047
    assert sum(info.nbytes for info in tensors.values()) == 51_647_562_456


@pytest.mark.parametrize(("recipe", "gigabytes"), [("fp8_dynamic", 27.2), ("nvfp4", 16.45)])
def test_the_26b_plan_has_the_published_counts_and_size(recipe: str, gigabytes: float) -> None:
    targets = plan_targets(
        tensors_from_config(known_config(REAL) or {}), load_recipe(recipe).quantization
    )
    assert targets is not None
    modules = Counter[str]()
    for target in targets:
        modules[target.module_class] += len(target.modules)
    dense = LAYERS * 4 - FULL_LAYERS  # q, k, v, o; full-attention layers have no v_proj
    assert +modules == {"experts": LAYERS * EXPERTS * 3, "attention": dense, "mlp": LAYERS * 3}
    assert sum_bytes(targets)[1] / 1e9 == pytest.approx(gigabytes, abs=0.005)


def test_the_rows_of_a_plan_add_up_to_the_whole(tiny_checkpoint: Path) -> None:
    tensors = Checkpoint.open(tiny_checkpoint).tensors
    targets = plan_targets(tensors, load_recipe("nvfp4_w4a4").quantization)
    *rows, whole = zip(*(column.cells for column in plan_table(targets, "").columns), strict=True)
    counts = Counter[bool]()
    for _, count, becomes, *_ in rows:
        counts[becomes == "BF16"] += int(str(count).replace(",", ""))
    kept = [target for target in targets if target.scheme is None]
    assert counts == {True: len(kept), False: sum(len(t.modules) for t in targets)}
    assert len(targets) == len(tensors)
    assert whole[1:5] == (f"{counts[False]:,}", "quantized", *map(size, sum_bytes(targets)))


def test_no_router_vision_or_self_conditioning_is_quantized(tiny_checkpoint: Path) -> None:
    targets = plan_targets(
        Checkpoint.open(tiny_checkpoint).tensors, load_recipe("nvfp4_w4a4").quantization
    )
    kept = {t.module_class for t in targets if t.scheme is None}
    assert {"router", "vision", "self_conditioning", "embedding", "norm"} <= kept
    assert {t.module_class for t in targets if t.scheme} == {"experts", "attention", "mlp"}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"scheme": "NVFP4", "ignore": IGNORE[:1]}, "ignore: .re:[.][*]router"),
        (
            {"scheme": {"NVFP4": ["re:.*experts.*"], "FP8_DYNAMIC": ["Linear"]}, "ignore": IGNORE},
            "matched by two schemes",
        ),
        ({"scheme": "NVFP4", "targets": ["re:.*nothing"], "ignore": IGNORE}, "matches no module"),
        (
            {"scheme": "NVFP4", "targets": [r"re:.*experts\.[0-3]\..*"], "ignore": IGNORE},
            "one scheme a layer",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(
    tiny_checkpoint: Path, quantization: dict[str, object], message: str
) -> None:
    tensors = Checkpoint.open(tiny_checkpoint).tensors
    with pytest.raises(InputError, match=message):
        plan_targets(tensors, Quantization.model_validate(quantization))


def test_an_unknown_tensor_is_an_error() -> None:
    with pytest.raises(InputError, match=r"unknown tensor 'model\.decoder\.layers\.0\.extra'"):
        module_class("model.decoder.layers.0.extra")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("re:.*mlp.*", True), ("re:mlp", False), ("model.layers.0.mlp", True), ("mlp", False)],
)
def test_matching_follows_compressed_tensors(pattern: str, found: bool) -> None:
    from compressed_tensors.utils.match import match_name

    name = "model.layers.0.mlp"
    assert named_by([pattern])(name) is match_name(name, pattern) is found


def test_bf16_layout_is_what_transformers_saves(tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    layout = {
        name: (spec.dtype, spec.shape) for name, spec in bf16_layout(checkpoint.config).items()
    }
    saved = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    assert layout == saved


def test_planned_bytes_equal_the_bytes_of_the_tensors_a_scheme_writes() -> None:
    from quantize.checkpoints.reader import DTYPES
    from quantize.checkpoints.targets import layout_bytes
    from quantize.schemes.records import SCHEMES

    for scheme in SCHEMES.values():
        written = 0
        for dtype, shape in scheme.compressed.tensors(704, 2816).values():
            size = DTYPES[dtype].itemsize
            for length in shape:
                size *= length
            written += size
        assert written == layout_bytes(scheme.compressed, 704, 2816)


def test_a_foreign_quantization_config_is_refused(tiny_checkpoint: Path) -> None:
    config = Checkpoint.open(tiny_checkpoint).config
    assert schemes_by_module(config) == {}
    for bad, message in (
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "nothing is quantized"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 3}}},
            },
            "no known scheme",
        ),
    ):
        with pytest.raises(InputError, match=message):
            quantized_layout({**config, "quantization_config": bad})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"ignore": [*IGNORE, "re:.*ruoter.*"]},
            r"quantization\.ignore: 're:\.\*ruoter\.\*' matches no",
        ),
        ({"ignore": [*IGNORE, "model.decoder.layers.99.mlp.up_proj"]}, "matches no module"),
        (
            {"scheme": {"NVFP4A16": ["re:.*experts.*", "re:.*self_atn.*"]}, "ignore": IGNORE},
            "quantization.targets: 're:.*self_atn.*' matches no",
        ),
    ],
)
def test_an_entry_that_matches_nothing_is_refused(
    tiny_checkpoint: Path, changed: dict, message: str
) -> None:
    tensors = Checkpoint.open(tiny_checkpoint).tensors
    fields = {"scheme": "NVFP4A16", "ignore": IGNORE} | changed
    with pytest.raises(InputError, match=message):
        plan_targets(tensors, Quantization.model_validate(fields))


def test_an_optional_entry_may_match_nothing_and_still_ignores(tiny_checkpoint: Path) -> None:
    tensors = Checkpoint.open(tiny_checkpoint).tensors
    ignore = [*IGNORE, "optional:re:.*ruoter.*", "optional:re:.*layers.2.mlp.*"]
    recipe = Quantization.model_validate({"scheme": "NVFP4A16", "ignore": ignore})
    kept = {t.name for t in plan_targets(tensors, recipe) if t.reason == "ignored by the recipe"}
    assert kept == {f"model.decoder.layers.2.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
