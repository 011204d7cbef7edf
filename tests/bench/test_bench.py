"""What `quantize bench` times, on a CPU: the figures themselves need a GPU."""

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantize.bench import speed as bench
from quantize.bench.one_token import Continuation
from quantize.host.gauge import Clock, Gauge
from quantize.runtime import Sampler
from quantize.runtime.fused.engine import FusedEngine
from quantize.runtime.fused.rates import Rates
from quantize.runtime.fused.weights import load_packed


@pytest.mark.parametrize("context", [100, 7])
def test_canvases_stand_behind_the_context(
    context: int, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every timed canvas but the first has `context` tokens before it, its last canvas among them."""
    weights = load_packed(tiny_checkpoint, "cpu")
    length = weights.config.canvas_length
    engine = FusedEngine(weights, capacity=2, max_context=context + 2 * length)
    before: list[tuple[int, int]] = []
    plain = engine.denoise

    def denoise(slots: Sequence[int], *rest: Any) -> Any:
        state = engine._slots[slots[0]]
        before.append((state.context, len(state.unencoded)))
        return plain(slots, *rest)

    monkeypatch.setattr(engine, "denoise", denoise)
    monkeypatch.setattr(bench, "profile_step", lambda *_: {})
    monkeypatch.setattr(bench, "time_step", lambda *_: 1.0)
    sampler = replace(Sampler(), max_denoising_steps=2, confidence_threshold=1e-30)
    prompts = [[5] * context] * 2
    times = bench._measure(engine, prompts, sampler, 3)
    assert times["forwards_a_canvas"] == 3
    assert times["tokens_a_joule"] is None
    timed = before[4:]
    assert len(timed) == 3
    assert all(sum(parts) == max(context, 1 + length) for parts in timed), before
    assert all(parts[1] == length for parts in timed), before


def test_a_repeated_canvas_is_the_same_canvas(tiny_checkpoint: Path) -> None:
    """What bench times again and again: the same tokens behind the same tokens."""
    engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=1, max_context=300)
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
    context: int, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens as a canvas has, half of them before `context`: as far behind it on average."""
    engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=2, max_context=context + 128)
    engine.canvas_length = 8  # so many tokens are written, in place of 16
    began: list[int] = []
    plain = Continuation.rewind
    monkeypatch.setattr(
        Continuation, "rewind", lambda self: (began.extend(self._first.tolist()), plain(self))
    )
    prompts = [list(range(200, 200 + context)), list(range(300, 300 + context))]
    times, hit = bench._measure_tokens(engine, prompts, 2)
    assert times["forwards_a_canvas"] == 8
    assert began[-4:] == [max(1, context - 1 - 4)] * 4
    topk = engine.model.topk
    assert topk <= hit <= 2 * topk
    assert not engine._slots


def repeated(
    monkeypatch: pytest.MonkeyPatch, forwards: int, count: int, seconds: float, gauge: Any
) -> dict[str, Any]:
    """What bench says of 1,024 tokens that take `seconds`."""
    now = itertools.accumulate(itertools.cycle([seconds, 0.0]), initial=0.0).__next__
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=now))
    monkeypatch.setattr(bench.Gauge, "of", lambda device: gauge)
    return bench._repeated(lambda: forwards, count, torch.device("cpu"), 1024)


def test_rows_say_what_a_token_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens a second and a joule, price a million, clock, and their table; worked by hand."""
    clocks = [Clock(1500, True), Clock(1600, True), Clock(1980, False), Clock(1500, True)]
    gauge = SimpleNamespace(joules=iter([0.0, 400.0]).__next__, clock=iter(clocks).__next__)
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    own = repeated(monkeypatch, 17, 4, 0.25, gauge)
    parts = dict.fromkeys((*bench.PARTS, "rest"), 0.0) | {"experts": 5.5}
    more = {"first_canvas_ms": 50.0, "ms_a_step": 8.0, "parts": parts}
    row = bench._row(4, "16", 127.0, {"experts": 0.005}, own | more, 3.6)
    assert row.tokens_a_second == 1024 / 0.25
    assert row.tokens_a_joule == 10.24
    assert (row.clock_mhz, row.power_capped) == (1645, 0.75)
    assert row.ms_a_forward == pytest.approx(250 / 17)
    assert (row.ms_a_step, row.unexplained) == (8.0, 2.5)
    assert row.price_a_million_tokens == pytest.approx(1e6 / 4096 / 3600 * 3.6)
    mute = repeated(monkeypatch, 17, 4, 0.25, None)
    silent = bench._row(4, "16", 127.0, {"experts": 0.005}, mute | more, None)
    assert silent.price_a_million_tokens is None
    assert (silent.tokens_a_joule, silent.clock_mhz, silent.power_capped) == (None, None, None)
    result = bench.Bench("m", "GPU", "2", 1024, 1, 1, 1.0, [], Rates(1.0, 1.0, 1.0), [row, silent])
    shown = list(bench.tables(result)[0].columns)
    cells = {str(column.header): list(column.cells) for column in shown}
    assert (cells["MHz"], cells["power-capped"]) == (["1645", ""], ["75%", ""])


class Driver:
    """What Gauge calls of NVML: a GPU of one UUID, a joule a reading, held at 1,600 MHz by `held`."""

    def __init__(self, refuses: str = "", held: int = 0) -> None:
        self.refuses, self.held, self.millijoules = refuses, held, 500

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return int(self.refuses == "init")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 7
        return int(self.refuses == "handle" or uuid != b"GPU-1234")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, found: Any) -> int:  # noqa: N802
        self.millijoules += 1000
        return self._answer("energy", handle, found, self.millijoules)

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, found: Any) -> int:  # noqa: N802
        assert kind == 1
        return self._answer("clock", handle, found, 1600)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, found: Any) -> int:  # noqa: N802
        return self._answer("reasons", handle, found, self.held)

    def _answer(self, what: str, handle: Any, found: Any, value: int) -> int:
        assert handle.value == 7
        found._obj.value = value
        return 3 if self.refuses == what else 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that is not there, of the UUID that `Driver` knows."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234")
    )
    return torch.device("cuda")


def test_energy_is_read_in_joules_or_not_at_all(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    gauge = Gauge.of(gpu)
    assert gauge is not None
    first, second = gauge.joules(), gauge.joules()
    assert (first, second) == (1.5, 2.5)
    assert Gauge.of(torch.device("cpu")) is None
    for part in ("init", "handle"):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, part=part: Driver(part))
        assert Gauge.of(gpu) is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver("energy"))
    gauge = Gauge.of(gpu)
    assert gauge is not None
    assert gauge.joules() is None

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert Gauge.of(gpu) is None


@pytest.mark.parametrize(
    ("held", "capped"),
    [(0x4, True), (0x80, True), (0x84, True), (0x1, False), (0x20 | 0x40 | 0x2, False), (0, False)],
)
def test_a_clock_that_power_holds_down_is_told_from_an_idle_or_a_hot_one(
    held: int, capped: bool, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(held=held))
    gauge = Gauge.of(gpu)
    assert gauge is not None
    assert gauge.clock() == Clock(1600, capped)


@pytest.mark.parametrize("part", ["clock", "reasons"])
def test_a_clock_that_the_driver_does_not_tell_is_none(
    part: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(part))
    gauge = Gauge.of(gpu)
    assert gauge is not None
    assert gauge.clock() is None


def test_canvases_are_repeated_until_energy_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a counter as often as asked; with one for SECONDS, each canvas its share of joules."""
    read: list[Clock] = []
    clock = lambda: read.append(Clock(1600, True)) or read[-1]  # noqa: E731
    gauge = SimpleNamespace(joules=iter([100.0, 160.0]).__next__, clock=clock)
    monkeypatch.setattr(bench, "SECONDS", 3.0)
    assert repeated(monkeypatch, 17, 1, 1.0, gauge)["tokens_a_joule"] == 1024 / 20
    assert len(read) == 3
    assert repeated(monkeypatch, 17, 2, 1.0, None)["tokens_a_joule"] is None
