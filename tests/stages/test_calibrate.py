"""Calibration on a tiny random model: scales against the products' inputs, fallback, files."""

import gc
import json
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fused_dequant
import pytest
import torch
from fused_dequant import Activation, Weight, simulated
from safetensors.torch import load_file

from quantize.checkpoints.load import load
from quantize.errors import InputError, QuantizeError, ResourceError
from quantize.host.files import read_json
from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Calibration, Quantization, Recipe
from quantize.runtime import Sampler, generate, open
from quantize.runtime.model.inputs import ProductInputs
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.runtime.record.ranges import Ranges
from quantize.runtime.record.trajectory import load_trajectories
from quantize.schemes.hessians import Hessians
from quantize.stages import denoising
from quantize.stages.calibrate.calibrate import (
    calibrate,
    calibrated_modules,
    check_scales,
    fall_back,
    input_scales,
)
from quantize.stages.calibrate.coverage import Coverage
from quantize.stages.fidelity.replay import replay
from quantize.stages.prompts import load_prompts
from tests.support.chats import add_chats
from tests.support.llm_compressor_oracle import need_llm_compressor
from tests.support.modules_oracle.engine import ModelEngine
from tests.support.modules_oracle.inputs import watch_inputs
from tests.support.tiny import CANVAS, EXPERTS, LAYERS
from tests.support.two_processes import in_two

NVFP4_MODULES = LAYERS * EXPERTS * 3 + LAYERS * 7 - 1  # the full-attention layer has no v_proj
HELD_OUT = 5  # a batch of four, and one more


@pytest.fixture(scope="module", autouse=True)
def few_held_out() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(denoising, "HELD_OUT", HELD_OUT)
        yield


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a tokenizer, a short schedule, and a jsonl of chats beside it."""
    folder = tmp_path_factory.mktemp("calibrate") / "source"
    shutil.copytree(tiny_checkpoint, folder)
    add_chats(folder)
    return folder


def recipe_for(source: Path, **changes: object) -> Recipe:
    settings = Calibration(
        datasets=[str(source / "chats.jsonl")],
        prompts=6,
        canvases=2,
        thinking=0.5,
        batch_size=4,
        min_tokens_per_expert=1,
    )
    recipe = load_recipe("nvfp4_w4a4")
    return recipe.model_copy(update={"calibration": settings.model_copy(update=changes)})


@pytest.fixture(scope="module")
def calibrated(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calibrated") / "calibration"
    calibrate(source, recipe_for(source), out)
    return out


def scales_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "input_scales.safetensors")


def test_every_planned_module_has_a_scale(source: Path, calibrated: Path) -> None:
    scales = scales_of(calibrated)
    assert len(scales) == NVFP4_MODULES
    modules = calibrated_modules(source, load_recipe("nvfp4_w4a4").quantization)
    assert scales.keys() == {f"{m}.input_global_scale" for m in modules}
    for scale in scales.values():
        assert scale.dtype == torch.float32
        assert scale.shape == (1,)


class Products:
    """amax of what each Linear multiplies, seen at the products themselves, no observer between."""

    def __init__(self, model: FusedModel, patch: pytest.MonkeyPatch) -> None:
        self.amax: dict[str, float] = {}
        self._model, self._names = model, dict[int, list[str]]()
        for index, layer in enumerate(model.weights.layers):
            name = f"model.decoder.layers.{index}"
            heads = ("q_proj", "k_proj", "v_proj") if layer.sliding else ("q_proj", "k_proj")
            self._name(layer.qkv, [f"{name}.self_attn.{own}" for own in heads])
            self._name((layer.o,), [f"{name}.self_attn.o_proj"])
            self._name(layer.gate_up, [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"])
            self._name((layer.down,), [f"{name}.mlp.down_proj"])
            self._name((layer.experts_gate_up,), [f"{name}.experts"])
        self._linear, self._experts = fused_dequant.linear, simulated.routed_experts
        patch.setattr(fused_dequant, "linear", self.linear)
        patch.setattr(simulated, "routed_experts", self.experts)

    def _name(self, weights: Sequence[Weight], names: list[str]) -> None:
        self._names |= {weight.data.data_ptr(): names for weight in weights}

    def _see(self, names: Sequence[str], rows: torch.Tensor) -> None:
        for name in names:
            if len(rows):
                self.amax[name] = max(self.amax.get(name, 0.0), rows.abs().max().item())

    def _real(self, rows: torch.Tensor) -> torch.Tensor:
        real = self._model.inputs and self._model.inputs.real
        return rows if real is None else rows[real]

    def linear(self, x: torch.Tensor, weight: Weight, *rest: Any) -> torch.Tensor:
        if names := self._names.get(weight.data.data_ptr()):  # self-conditioning has none
            self._see(names, self._real(x))
        return self._linear(x, weight, *rest)

    def experts(
        self, x: torch.Tensor, scale: None, ids: torch.Tensor, routing: torch.Tensor,
        gate_up: Weight, down: Weight, between: Any,
    ) -> torch.Tensor:  # fmt: skip
        (name,) = self._names[gate_up.data.data_ptr()]

        def seen(hidden: torch.Tensor) -> Activation:
            rows, unscaled = between(hidden)
            inner = rows.view(*ids.shape, -1)
            for expert in range(EXPERTS):
                chosen = self._real(ids == expert)
                routed = self._real(x)[chosen.any(-1)]
                for own in ("gate_proj", "up_proj"):
                    self._see([f"{name}.{expert}.{own}"], routed)
                self._see([f"{name}.{expert}.down_proj"], self._real(inner)[chosen])
            return rows, unscaled

        return self._experts(x, scale, ids, routing, gate_up, down, seen)


def test_scales_are_those_of_what_is_multiplied(
    source: Path, calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trajectories, sampler = load_trajectories(calibrated)
    observed = [t for t in trajectories if not t.held_out]
    engine = open(source, capacity=4)
    products = Products(engine.model, monkeypatch)
    with engine.watching(lambda *_: None):  # experts compute differently where nobody watches
        replay(engine, [], observed, sampler, batch_size=4)
    scales = scales_of(calibrated)
    assert len(products.amax) == NVFP4_MODULES
    # The same bits entered: only the quotient 448 * 6 / amax is rounded, to float32.
    for name, amax in products.amax.items():
        assert scales[f"{name}.input_global_scale"].item() * amax == pytest.approx(2688, rel=2**-23)


def test_coverage_counts_every_routed_token(calibrated: Path) -> None:
    coverage = read_json(calibrated / "coverage.json")["tokens_per_expert"]
    trajectories, _ = load_trajectories(calibrated)
    tokens = 0
    for item in (t for t in trajectories if not t.held_out):
        committed = len(item.steps)
        tokens += len(item.prompt.ids) + (committed - 1) * CANVAS  # the last canvas is not encoded
        tokens += sum(len(steps) for steps in item.steps) * CANVAS
    assert len(coverage) == LAYERS
    for counts in coverage.values():
        assert sum(counts) == 2 * tokens  # top-2 routing


def test_trajectories_replay_their_own_generation(source: Path, calibrated: Path) -> None:
    trajectories, sampler = load_trajectories(calibrated)
    assert [t.held_out for t in trajectories] == [False] * 6 + [True] * HELD_OUT
    assert [t.prompt.thinking for t in trajectories[:4]] == [False, True, False, True]
    assert sampler == Sampler(max_denoising_steps=3, eos_token_ids=(1,), pad_token_id=0)
    item = trajectories[-1]
    sample = generate(
        open(source, device="cpu", capacity=1, max_context=256),
        [item.prompt.ids],
        [item.seed],
        max_new_tokens=2 * CANVAS,
        sampler=sampler,
    )[0]
    assert item.committed.tolist() == sample.committed
    assert [len(steps) for steps in item.steps] == sample.steps_per_canvas


def test_the_same_inputs_give_the_same_bytes(
    source: Path, calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate(source, recipe_for(source), tmp_path / "again")
    said = " ".join(capsys.readouterr().err.split())
    counted = (
        f"{6 + HELD_OUT} prompts ({HELD_OUT} held out for the replay, at most 2 canvases each)"
    )
    assert f"calibrating: {counted} to do" in said
    names = sorted(file.name for file in calibrated.iterdir())
    assert names == sorted(
        ["coverage.json", "input_scales.safetensors", "trajectories.json", "trajectories.safetensors"]
    )  # fmt: skip
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (calibrated / name).read_bytes(), name


def test_the_model_is_gone_when_it_has_calibrated(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine refers to itself, and `work` freezes what the next stage finds."""
    engines, opened = list[Any](), denoising.Denoising._opened

    def noting(self: denoising.Denoising) -> Any:
        engine = opened(self)
        engines.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(denoising.Denoising, "_opened", noting)
    gc.disable()
    try:
        calibrate(source, recipe_for(source), tmp_path / "out")
        assert [engine() for engine in engines] == [None]
    finally:
        gc.enable()


def test_only_what_the_recipe_quantizes_is_calibrated(source: Path, tmp_path: Path) -> None:
    recipe = recipe_for(source, prompts=2)
    quantization = Quantization(
        scheme={"NVFP4": [r"re:.*layers\.[0-3]\.experts.*"], "FP8_DYNAMIC": [r"re:.*self_attn.*"]},
        ignore=["lm_head", "re:.*router.*", "re:.*vision.*", r"re:model\.decoder\.layers\.1\..*"],
    )
    calibrate(
        source, recipe.model_copy(update={"quantization": quantization}), tmp_path / "calibration"
    )
    scales = scales_of(tmp_path / "calibration")
    assert len(scales) == 3 * EXPERTS * 3
    assert {name.split(".")[3] for name in scales} == {"0", "2", "3"}


def test_under_covered_experts_take_their_layers_maximum(
    source: Path, calibrated: Path, tmp_path: Path
) -> None:
    counts = read_json(calibrated / "coverage.json")["tokens_per_expert"]
    fewest = min(min(row) for row in counts.values())
    calibrate(source, recipe_for(source, min_tokens_per_expert=fewest + 1), tmp_path / "out")
    before, after = scales_of(calibrated), scales_of(tmp_path / "out")
    fallbacks = read_json(tmp_path / "out" / "coverage.json")["fallbacks"]
    expected = [
        f"{layer}.{expert}"
        for layer, row in counts.items()
        for expert, count in enumerate(row)
        if count <= fewest
    ]
    assert fallbacks == expected != []
    for name, scale in after.items():
        layer, _, rest = name.partition(".experts.")
        expert, _, projection = rest.partition(".")
        if f"{layer}.experts.{expert}" in fallbacks:
            layers_scales = [before[f"{layer}.experts.{e}.{projection}"] for e in range(EXPERTS)]
            assert scale == min(layers_scales)
        else:
            assert torch.equal(scale, before[name])


def test_fallback_ignores_experts_that_saw_nothing() -> None:
    scales = {
        f"l.experts.{e}.{p}_proj": torch.tensor([v])
        for e, v in enumerate((float("nan"), 5.0, 7.0))
        for p in ("gate", "up", "down")
    }
    fixed, fallbacks = fall_back(scales, {"l.experts": [0, 3, 90]}, 64)
    assert fallbacks == ["l.experts.0", "l.experts.1"]
    assert [fixed[f"l.experts.{e}.down_proj"].item() for e in range(3)] == [5.0, 5.0, 7.0]
    with pytest.raises(QuantizeError, match="no token reached any expert"):
        fall_back(scales, {"l.experts": [0, 0, 0]}, 64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_an_unusable_scale_is_an_error_that_names_the_module(bad: float) -> None:
    with pytest.raises(QuantizeError, match=r"layers\.0\.mlp\.down_proj"):
        check_scales({"layers.0.mlp.down_proj": torch.tensor([bad])})


def test_modules_that_share_an_input_share_a_scale() -> None:
    good = {f"l.0.mlp.{part}_proj": torch.tensor([2.0]) for part in ("gate", "up")}
    check_scales(good)
    with pytest.raises(
        QuantizeError, match=r"l\.0\.mlp\.up_proj.* is 3 and l\.0\.mlp\.gate_proj's is 2"
    ):
        check_scales(good | {"l.0.mlp.up_proj": torch.tensor([3.0])})


def test_scales_are_those_of_llm_compressors_oneshot(source: Path) -> None:
    need_llm_compressor()
    from tests.support.oneshot import oneshot_scales

    quantization = load_recipe("nvfp4_w4a4").quantization
    modules = calibrated_modules(source, quantization)
    prompts = [[2, *range(110 + 7 * i, 130 + 9 * i), 100] for i in range(6)]

    def denoise(model: Any) -> None:
        sampler = Sampler.from_checkpoint(source)
        generate(ModelEngine(model), prompts, range(6), max_new_tokens=2 * CANVAS, sampler=sampler)

    model, ranges = load(source), Ranges(EXPERTS)
    with watch_inputs(model, ranges.see):
        denoise(model)
    ours = input_scales(ranges, modules)
    theirs = oneshot_scales(source, quantization, denoise)
    assert ours.keys() == theirs.keys()
    # The same maxima, of FP32 sums in another order, which denoising carries on: up to 1.3e-4 apart on
    # 22 settings of the CPU's libraries. An input that is missed, the encoder's say, moves scales by
    # percents; they multiply block scales in e4m3, whose own rounding is up to 6 %.
    for module, scale in ours.items():
        torch.testing.assert_close(scale, theirs[module], rtol=1e-3, atol=0)


def test_observers_keep_their_tensors_where_they_are() -> None:
    """Or a replayed graph would write to memory that is no longer theirs."""
    ranges, coverage = observers = Ranges(4), Coverage(4)
    rows, ids = torch.randn(6, 8), torch.randint(4, (6, 2))
    found: list[list[int]] = []
    for factor in (1, 3):
        for end, experts in (("self_attn.q_proj", None), ("experts.gate_up_proj", ids)):
            for own in observers:
                assert own.launches_alone
                own.see(f"model.decoder.layers.0.{end}", factor * rows, experts)
        kept = (*ranges._amax.values(), *coverage._counts.values())
        found.append([tensor.data_ptr() for tensor in kept])
    assert found[0] == found[1]
    assert ranges.amax("model.decoder.layers.0.self_attn.q_proj") == 3 * rows.abs().max()
    assert coverage.tokens == {
        "model.decoder.layers.0.experts": (2 * ids.flatten().bincount(minlength=4)).tolist()
    }


def test_a_graph_holds_only_observers_that_launch_alone() -> None:
    inputs = ProductInputs(SimpleNamespace(num_hidden_layers=1, layer_types=[]), None, bf16=True)
    ranges = Ranges(4)
    for observers, expected in (
        ([], True), ([ranges.see], True), ([ranges.see, Hessians(["a"], 4).see], False),
        ([lambda *_: None], False),
    ):  # fmt: skip
        with inputs.shown_to(observers):
            assert inputs.replayable == expected
        assert not inputs.replayable


def test_watching_changes_no_logit_and_leaves_no_trace(source: Path) -> None:
    model = load(source)
    ids, canvas = torch.arange(120, 150)[None], torch.arange(200, 200 + CANVAS)[None]
    seen: set[str] = set()
    with torch.no_grad():
        before = model(input_ids=ids, decoder_input_ids=canvas).logits
        with watch_inputs(model, lambda name, rows, experts: seen.add(name)):
            watched = model(input_ids=ids, decoder_input_ids=canvas).logits
        assert len(seen) == LAYERS * 9 - 1  # q, k, v, o, gate, up, down, two of the experts
        seen.clear()
        after = model(input_ids=ids, decoder_input_ids=canvas).logits
    assert torch.equal(before, watched)
    assert torch.equal(before, after)
    assert not seen
    assert all("_apply_gate" not in vars(layer.experts) for layer in model.model.decoder.layers)


def test_experts_that_do_not_run_grouped_are_refused(source: Path) -> None:
    model = load(source)
    model.config.get_text_config()._experts_implementation = "eager"
    with pytest.raises(InputError, match="grouped_mm"), watch_inputs(model):
        pass


def test_prompts_alternate_and_end_with_the_user(source: Path) -> None:
    calibration = recipe_for(source).calibration
    assert calibration is not None
    prompts = load_prompts(source, calibration, 10)
    assert [p.thinking for p in prompts] == [False, True] * 5
    assert [p.ids[-1] for p in prompts] == [100, 98] * 5
    assert all(400 not in p.ids for p in prompts)  # the assistant's answer is not shown
    quarter = load_prompts(source, calibration.model_copy(update={"thinking": 0.25}), 8)
    assert sum(p.thinking for p in quarter) == 2


def test_a_template_that_refuses_a_chat_is_quoted(source: Path) -> None:
    tokenizer = load_tokenizer(source)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="chat template refuses them: roles must alternate"):
        encode_chat(tokenizer, [{"role": "user", "content": "w7"}], thinking=False)


def test_a_data_set_folder_is_read_by_the_datasets_library(source: Path, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows = [json.dumps({"problem": f"w{200 + i}", "solution": "w5"}) for i in range(3)]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(rows))
    settings = Calibration(datasets=[str(tmp_path / "set")], prompts=3, canvases=1, thinking=0)
    prompts = load_prompts(source, settings, 3)
    assert [p.ids for p in prompts] == [(2, 200 + i, 100) for i in range(3)]


def test_a_chat_may_hold_any_end_of_a_line(source: Path, tmp_path: Path) -> None:
    """Text from the web has U+2028 and U+0085 in it, which Python's splitlines would split at."""
    row = json.dumps({"question": "w7\u2028w8\x85w9"}, ensure_ascii=False)
    (tmp_path / "chats.jsonl").write_text(f"{row}\r\n{row}\n", "utf-8")
    settings = Calibration(
        datasets=[str(tmp_path / "chats.jsonl")], prompts=2, canvases=1, thinking=0
    )
    assert len({p.ids for p in load_prompts(source, settings, 2)}) == 1


@pytest.mark.parametrize(
    ("dataset", "content", "error", "message"),
    [
        ("missing.jsonl", None, InputError, "missing.jsonl: this calibration file cannot be read"),
        ("broken.jsonl", "{", InputError, "broken.jsonl"),
        ("deep.jsonl", "[" * 100_000, InputError, "deep.jsonl"),
        ("two.jsonl", '{"question": "w5", "question": "w6"}', InputError, "key 'question' stands"),
        ("fields.jsonl", '{"text": "w5"}', InputError, "row 1 has neither"),
        ("few.jsonl", '{"question": "w5"}', InputError, "1 usable prompts"),
        ("list.jsonl", '["w5"]', InputError, "list.jsonl: row 1 is no chat"),
        ("turns.jsonl", '{"messages": ["w5"]}', InputError, "row 1 is no chat of texts"),
        (
            "role.jsonl",
            '{"messages": [{"content": "w5"}]}',
            InputError,
            "row 1 is no chat of texts",
        ),
        (
            "parts.jsonl",
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            InputError,
            "row 1 is no chat of texts .*is neither",
        ),
        ("nobody/unreachable", None, ResourceError, "nobody/unreachable"),
    ],
)
def test_bad_data_sets_end_with_a_clear_line(
    source: Path, tmp_path: Path, dataset: str, content: str | None,
    error: type[QuantizeError], message: str,
) -> None:  # fmt: skip
    path = tmp_path / dataset
    if content is not None:
        path.write_text(content)
    name = str(path) if dataset.endswith(".jsonl") else dataset
    settings = Calibration(datasets=[name], prompts=5, canvases=1, thinking=0)
    with pytest.raises(error, match=message):
        load_prompts(source, settings, 5)


def test_two_processes_give_the_files_of_one(source: Path, tmp_path: Path) -> None:
    """Three observed batches and two held-out ones; sums in one order: one thread each."""
    recipe = recipe_for(source, prompts=12, canvases=1, batch_size=4)
    in_two(lambda _: calibrate(source, recipe, tmp_path / "two"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calibrate(source, recipe, tmp_path / "one")
    finally:
        torch.set_num_threads(threads)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 4
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), (
            name
        )
