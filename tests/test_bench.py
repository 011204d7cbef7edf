"""What `quantize bench` times, on a CPU: the figures themselves need a GPU."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantize import bench
from quantize.bundled import CHECKPOINT
from quantize.runtime import Sampler
from quantize.runtime.fused.continuation import Continuation
from quantize.runtime.fused.energy import EnergyCounter
from quantize.runtime.fused.engine import FusedEngine
from quantize.runtime.fused.weights import load_packed


@pytest.mark.parametrize("context", [100, 7])
def test_canvases_stand_behind_the_context(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timed canvas but the first has `context` tokens before it, its last canvas among them."""
    weights = load_packed(CHECKPOINT, "cpu")
    length = weights.config.canvas_length
    engine = FusedEngine(weights, capacity=2, max_context=context + 2 * length)
    before: list[tuple[int, int]] = []
    plain = engine.denoise

    def denoise(slots: Sequence[int], *rest: Any) -> Any:
        state = engine._slots[slots[0]]
        before.append((state.context, len(state.unencoded)))
        return plain(slots, *rest)

    monkeypatch.setattr(engine, "denoise", denoise)
    monkeypatch.setattr(engine, "profile_step", lambda slots: {})
    monkeypatch.setattr(engine, "time_step", lambda slots: 1.0)
    sampler = replace(Sampler(), max_denoising_steps=2, confidence_threshold=1e-30)
    prompts = [[5] * context] * 2
    times = bench._measure(engine, prompts, sampler, 3)
    assert times.forwards == 3
    assert times.joules is None
    timed = before[4:]
    assert len(timed) == 3
    assert all(sum(parts) == max(context, 1 + length) for parts in timed), before
    assert all(parts[1] == length for parts in timed), before


def test_a_repeated_canvas_is_the_same_canvas() -> None:
    """What bench times again and again: the same tokens behind the same tokens."""
    engine = FusedEngine(load_packed(CHECKPOINT, "cpu"), capacity=1, max_context=300)
    sampler = replace(Sampler(), max_denoising_steps=3)
    engine.admit(0, list(range(200, 260)), 7, sampler)
    (before,), (second,) = engine.denoise([0]), engine.denoise([0])
    assert before is not None
    assert second is not None
    engine.rewind(0, before.tokens)
    assert engine.denoise([0]) == [second]
    (third,) = engine.denoise([0])
    assert third != second


@pytest.mark.parametrize("context", [40, 7])
def test_tokens_one_by_one_stand_around_the_context(
    context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens as a canvas has, half of them before `context`: as far behind it on average."""
    engine = FusedEngine(load_packed(CHECKPOINT, "cpu"), capacity=2, max_context=context + 128)
    engine.canvas_length = 8  # so many tokens are written, in place of 64
    began: list[int] = []
    plain = Continuation.rewind
    monkeypatch.setattr(
        Continuation, "rewind", lambda self: (began.extend(self._first.tolist()), plain(self))
    )
    prompts = [list(range(200, 200 + context)), list(range(300, 300 + context))]
    times, hit = bench._measure_tokens(engine, prompts, 2)
    assert times.forwards == 8
    assert began[-4:] == [max(1, context - 1 - 4)] * 4
    topk = engine.model.topk
    assert topk <= hit <= 2 * topk
    assert not engine._slots


def test_rows_say_what_a_token_costs() -> None:
    """Tokens a second and a joule, price a million, and the table that shows them; worked by hand."""
    times = bench._Times(
        first_canvas=50.0, canvas=200.0, forwards=17, step=8.0, parts={"experts": 5.5}, joules=100.0
    )
    row = bench._row(times, 4, "16", 256, {"experts": 0.005}, 127.0)
    assert row.tokens_a_second == 4 * 256 / 0.2
    assert row.tokens_a_joule == 10.24
    assert row.ms_a_forward == pytest.approx(200 / 17)
    assert (row.ms_a_step, row.unexplained) == (8.0, 2.5)
    price = bench._priced(row, 3.6).price_a_million_tokens
    assert price == pytest.approx(1e6 / 5120 / 3600 * 3.6)
    assert bench._priced(row, None).price_a_million_tokens is None
    silent = bench._row(replace(times, joules=None), 4, "16", 256, {"experts": 0.005}, 127.0)
    assert silent.tokens_a_joule is None


class Driver:
    """What EnergyCounter calls of NVML: a GPU of one UUID that takes a joule a reading."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.millijoules = refuses, 500

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return int(self.refuses == "init")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 7
        return int(self.refuses == "handle" or uuid != b"GPU-1234")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, found: Any) -> int:  # noqa: N802
        assert handle.value == 7
        self.millijoules += 1000
        found._obj.value = self.millijoules
        return 3 if self.refuses == "energy" else 0


def test_energy_is_read_in_joules_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234")
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    counter = EnergyCounter.of(gpu)
    assert counter is not None
    first, second = counter.joules(), counter.joules()
    assert (first, second) == (2.5, 3.5)
    assert EnergyCounter.of(torch.device("cpu")) is None
    for part in ("init", "handle", "energy"):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, part=part: Driver(part))
        assert EnergyCounter.of(gpu) is None

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert EnergyCounter.of(gpu) is None


def test_canvases_are_repeated_until_energy_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a counter as often as asked; with one for SECONDS, each canvas its share of joules."""
    counter = SimpleNamespace(joules=iter([100.0, 160.0]).__next__)
    monkeypatch.setattr(bench.EnergyCounter, "of", lambda device: counter)
    clock = iter([0, 1, 10, 11, 20, 21]).__next__  # a second a canvas
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(bench, "SECONDS", 3.0)
    assert bench._repeated(lambda: 17, 1, torch.device("cpu")) == (1, 17, 20.0)
    monkeypatch.setattr(bench.EnergyCounter, "of", lambda device: None)
    clock = iter([0, 1, 10, 11]).__next__
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=clock))
    assert bench._repeated(lambda: 17, 2, torch.device("cpu")) == (1, 17, None)
