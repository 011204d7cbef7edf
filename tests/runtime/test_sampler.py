"""Noise and sampler on their own: known answers, distributions, settings."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_dequant.sampler.canvas import (
    CanvasState,
    accepted,
    philox,
    sample,
    sample_by_inverse_cdf,
    token_entropy,
    uniforms,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
)

from quantize.bundled import CHECKPOINT
from quantize.errors import InputError
from quantize.runtime import Sample
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import complete
from quantize.runtime.sampler.sampler import WITHOUT_EFFECT, Sampler
from quantize.runtime.weights.load import load_packed
from tests.support.synthetic import GENERATION

ONES = 0xFFFFFFFF


# The known-answer vectors of Random123 for philox4x32, 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    k0, k1 = (torch.tensor(word) for word in key)
    assert tuple(philox((c0, c1, c2, c3), (k0, k1)).tolist()) == expected


def test_every_address_has_its_own_noise() -> None:
    seeds = torch.tensor([0, 1, 2**32, -1])
    draws = torch.stack(
        [uniforms(seeds, canvas, step, 64) for canvas in range(3) for step in range(3)]
    )
    assert draws.min() >= 0
    assert draws.max() < 1
    assert len(draws.unique()) > 0.99 * draws.numel()
    assert abs(draws.mean().item() - 0.5) < 0.01
    again = uniforms(seeds[2:3], 1, 2, 64)
    assert torch.equal(again[0], draws[5, 2])


def test_inverse_cdf_samples_the_distribution() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.2, 0.05, 0.0])
    u = (torch.arange(100_000) + 0.5) / 100_000
    tokens = sample_by_inverse_cdf(probabilities.expand(len(u), -1), u)
    frequency = tokens.bincount(minlength=7) / len(u)
    torch.testing.assert_close(frequency, probabilities, atol=1e-4, rtol=0)
    edges = sample_by_inverse_cdf(probabilities.expand(2, -1), torch.tensor([0.0, 1 - 2.0**-24]))
    assert edges.tolist() == [1, 5]


def test_a_step_samples_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125]).expand(50, 64, 4).contiguous()
    state = CanvasState.begin(torch.zeros(50, 64, dtype=torch.long), torch.arange(50), 1)
    draw = sample(probabilities.log(), state, torch.ones(1))
    flat = torch.full((4,), 0.25)
    for tokens, expected in ((draw.sampled, probabilities[0, 0]), (draw.replacement, flat)):
        counts = tokens.flatten().bincount(minlength=4)
        chi_square = ((counts - 3200 * expected) ** 2 / (3200 * expected)).sum()
        assert chi_square < 16.3  # 0.1 % point at 3 degrees of freedom


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(0.01, 8))
def test_acceptance_is_that_of_transformers(seed: int, bound: float) -> None:
    logits = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(seed)) * 4
    reference = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), 16, 40, 48)
    canvas = torch.zeros(3, 16, dtype=torch.long)
    reference.accept_canvas(canvas, canvas, logits, 1)
    taken = accepted(token_entropy(logits), bound)
    assert reference.accepted_token_mask is not None
    assert torch.equal(taken, reference.accepted_token_mask)
    assert taken.any(-1).all()


def test_temperature_is_that_of_transformers() -> None:
    sampler = Sampler()
    schedule = LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, 48)
    ids = torch.zeros(1, 1, dtype=torch.long)
    for step in range(1, 49):
        remaining = torch.tensor(48 - step + 1, dtype=torch.int32)
        expected = schedule(ids, torch.ones(1), remaining)
        assert torch.equal(torch.ones(1) / sampler.temperature(step), expected)
        assert torch.equal(sampler.schedule()[step - 1], sampler.temperature(step))
    assert sampler.temperature(1) == pytest.approx(0.8)
    assert sampler.temperature(48) == pytest.approx(0.4 + 0.4 / 48)


def test_settings_come_from_transformers_own_file(tmp_path: Path) -> None:
    config = DiffusionGemmaGenerationConfig(
        max_new_tokens=512,
        max_denoising_steps=24,
        sampler_config=EntropyBoundSamplerConfig(0.2),
        t_min=0.3,
        t_max=0.9,
        stability_threshold=2,
        confidence_threshold=0.01,
        eos_token_id=[1, 106, 50],
        pad_token_id=0,
        bos_token_id=2,
    )
    config.save_pretrained(tmp_path)
    assert Sampler.from_checkpoint(tmp_path) == Sampler(
        max_new_tokens=512, max_denoising_steps=24, entropy_bound=0.2, t_min=0.3, t_max=0.9,
        stability_threshold=2, confidence_threshold=0.01, eos_token_ids=(1, 106, 50), pad_token_id=0,
    )  # fmt: skip
    assert Sampler.from_checkpoint(tmp_path / "none") == Sampler()
    assert Sampler.from_config({"eos_token_id": 1, "t_min": None}).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"top_k": 5}, "'top_k'"),
        ({"cache_implementation": "static"}, "cache_implementation 'static'"),
        ({"cache_config": {"max_cache_len": 3}}, "'cache_config'"),
        ({"sampler_config": {"_cls_name": "Other", "x": 1}}, "sampler_config 'Other'"),
        ({"max_denoising_steps": 0}, "max_denoising_steps"),
        ({"t_max": 0.2}, "t_max"),
        ({"confidence_threshold": 0.0}, "confidence_threshold"),
    ],
)
def test_a_field_is_honoured_or_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampler.from_config(config)


def test_every_field_of_transformers_config_is_known() -> None:
    """A field that a later transformers adds must be decided on here."""
    fields = json.loads(DiffusionGemmaGenerationConfig(t_min=0.4).to_json_string(use_diff=False))
    Sampler.from_config(fields)


# Every field of the real model's generation_config.json, and of the bundled one's: another value.
CHANGED: dict[str, Any] = {
    "max_new_tokens": 512,
    "max_denoising_steps": 20,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.2},
    "t_max": 0.9,
    "t_min": 0.3,
    "stability_threshold": 2,
    "confidence_threshold": 0.01,
    "eos_token_id": [1],
    "pad_token_id": None,
    "bos_token_id": 3,
    "return_dict_in_generate": False,
    "transformers_version": "9",
}


def test_every_field_of_the_real_config_changes_the_settings_or_cannot_matter() -> None:
    bundled = json.loads((CHECKPOINT / "generation_config.json").read_text("utf-8"))
    assert CHANGED.keys() == GENERATION.keys() | bundled.keys()
    for field, value in CHANGED.items():
        config = {**bundled, **GENERATION}
        same = Sampler.from_config(config) == Sampler.from_config({**config, field: value})
        assert same == (field in WITHOUT_EFFECT), field


@pytest.mark.parametrize("stated", [None, {}, {"eos_token_id": None}, {"eos_token_id": [1]}])
def test_config_json_says_what_ends_an_answer_where_generation_config_does_not(
    tmp_path: Path, stated: dict[str, Any] | None
) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 106]}')
    if stated is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    ends = (stated or {}).get("eos_token_id")
    assert Sampler.from_checkpoint(tmp_path).eos_token_ids == tuple(ends or (1, 106))


def test_every_setting_reaches_the_canvases(tiny_checkpoint: Path) -> None:
    """Each setting alone changes what is generated."""
    ids, L = list(range(110, 130)), 16  # tokens of a canvas
    engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=1, max_context=64)

    def answer(sampler: Sampler) -> tuple[Sample, list[Any]]:
        """The sample, and every step's draft with what it accepts."""
        drafts: list[Any] = []
        budget = sampler.max_new_tokens
        (sample,) = complete(
            engine, [ids], [4], max_new_tokens=budget, sampler=sampler,
            on_draft=lambda *draft: drafts.append(draft),
        )  # fmt: skip
        return sample, drafts

    base = Sampler(
        max_new_tokens=L, max_denoising_steps=4, confidence_threshold=1e-30, entropy_bound=4.0
    )
    usual, drafts = answer(base)
    assert usual.denoising_steps == 4
    for changed in (
        {"max_denoising_steps": 3},
        {"entropy_bound": 1e-6},
        {"t_min": 0.01},
        {"t_max": 3.0},
        {"max_new_tokens": L + 1},
        {"eos_token_ids": (usual.committed[0][3],)},
    ):
        found, steps = answer(replace(base, **changed))
        assert (found.tokens, steps) != (usual.tokens, drafts), changed
    short = replace(base, max_new_tokens=L + 1, max_length=len(ids) + L)
    assert answer(short)[0].canvases == 1
    eager = replace(base, confidence_threshold=10.0)
    for given_settings, count in ((eager, 4), (replace(eager, stability_threshold=0), 1)):
        assert answer(given_settings)[0].denoising_steps == count
    assert answer(replace(base, stability_threshold=0))[0].denoising_steps == 4  # not sure enough
    ended = replace(base, eos_token_ids=(usual.committed[0][3],), pad_token_id=0)
    assert answer(ended)[0].committed[0][4:] == [0] * (L - 4)
