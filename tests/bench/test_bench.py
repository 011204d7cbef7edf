"""What `quantize bench` times, on a CPU: the figures themselves need a GPU."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from quantize.bench import speed as bench
from quantize.bench.one_token import Continuation
from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import ResourceError
from quantize.host import gauge, progress
from quantize.host.gauge import Clock, Gauge
from quantize.runtime import Sampler
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.gpu.rates import Rates, settled
from quantize.runtime.weights.load import load_packed
from quantize.runtime.weights.random_weights import random_weights


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
        state = engine.sequences[slots[0]]
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
    assert not engine.sequences


def test_random_routers_reach_as_many_experts_as_were_measured() -> None:
    config = Checkpoint.open(CHECKPOINT).config
    config["text_config"] |= {"num_experts": 128, "top_k_experts": 8}
    kinds = dict.fromkeys(("experts", "attention", "mlp"), "bf16")
    weights = random_weights(config, kinds, "cpu")
    engine = FusedEngine(weights, capacity=1, max_context=128)
    routers = [layer.router.clone() for layer in weights.layers]
    hits = [bench._reach(engine, routers, share, [9, 8, 7]) for share in (1.0, 0.4, 1.0)]
    assert all(48 <= hit <= 52 for hit in hits[1])
    assert hits[0] == hits[2]
    assert min(hits[0]) > 100
    bench._reach(engine, [], 0.1, [9, 8, 7])  # a checkpoint's routers stay
    layers = zip(weights.layers, routers, strict=True)
    assert all(torch.equal(layer.router, router) for layer, router in layers)


def test_a_cold_gpu_is_warmed_up_until_two_readings_agree(capsys: pytest.CaptureFixture) -> None:
    """By a scripted clock: slow at first, in steps, as an idle H100 was."""
    cold = [0.081, 0.081, 0.08, 0.07, 0.06, 0.055, *[0.055] * 100]
    assert settled(iter(cold).__next__) == 0.055  # two agree before WARM seconds: they do not count
    assert settled(iter([0.3, 0.3, 9.9]).__next__) == 0.3
    assert settled(iter([9.0, 5.0, 5.05, 1.0]).__next__) == 5.0
    hot = [0.07, *[0.05] * 4, 0.058, *[0.06] * 100]  # an H200 at its power limit: 4.46 for 4.18 ms
    assert settled(iter(hot).__next__) == 0.05
    assert capsys.readouterr().err == ""
    assert settled(itertools.cycle([3.0, 4.0]).__next__) in (3.0, 4.0)
    assert "does not settle: the last two readings differ by" in capsys.readouterr().err


def test_a_part_below_its_floor_is_an_error_of_the_gauge() -> None:
    times = {
        "forwards_a_canvas": 13, "ms_a_canvas": 130.0, "ms_a_forward": 10.0, "tokens_a_second": 2e3,
        "watts": None, "joules_a_forward": None, "tokens_a_joule": None, "clock_mhz": None,
        "power_capped": None, "first_canvas_ms": 150.0, "ms_a_step": 9.6,
    }  # fmt: skip

    def row(taken: float, least: float) -> bench.SpeedRow:
        parts = {"experts": taken, "dense": 2.0, "rest": 0.5}
        floor = {"experts": least / 1e3, "dense": 1.5e-3}
        return bench._row(1, "12", 123.0, floor, times | {"parts": parts}, None)

    assert row(5.49, 4.25).floor_parts["experts"] == 4.25
    assert row(5.49, 5.6).parts["experts"] == 5.49  # an error of 2 %
    assert row(0.01, 0.02).parts["experts"] == 0.01  # all of it fits a GPU's cache
    with pytest.raises(ResourceError, match=r"experts took 5\.49 ms, less than its floor of 8\.09"):
        row(5.49, 8.09)


def test_a_rate_that_was_read_too_slow_is_replaced() -> None:
    cold, hot = Rates(3e12, 600e12, 1200e12), Rates(4e12, 590e12, 1300e12, 5e12)
    assert cold.or_faster(hot) == Rates(4e12, 600e12, 1300e12, 5e12)


def test_a_gauge_reads_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joules of mJ, a share of percent, a clock that power holds down; None for the unsaid."""
    card = torch.device("cuda")
    assert Gauge.of(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0-1"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", {"GPU-0-1": "handle"}.__getitem__)
    said: dict[str, Any] = {
        "TotalEnergyConsumption": 2500, "UtilizationRates": SimpleNamespace(gpu=40, memory=7),
        "ClockInfo": 1755, "CurrentClocksThrottleReasons": 0x4,
    }  # fmt: skip
    for name, value in said.items():
        answer = {("handle",): value, ("handle", pynvml.NVML_CLOCK_SM): value}
        read = lambda *asked, answer=answer: answer[asked]  # noqa: E731
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", read)
    driver = Gauge.of(card)
    assert driver is not None
    assert (driver.joules(), driver.busy(), driver.clock()) == (2.5, 0.4, Clock(1755, True))
    reasons = "nvmlDeviceGetCurrentClocksThrottleReasons"
    # the limit and the brake; idle, what a user set, heat, and nothing
    held = {0x4: True, 0x80: True, 0x84: True, 0x1: False, 0x2 | 0x20 | 0x40: False, 0: False}
    for bits, capped in held.items():
        monkeypatch.setattr(pynvml, reasons, lambda _, bits=bits: bits)
        assert driver.clock() == Clock(1755, capped)

    def refuse(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, reasons, refuse)
    assert (driver.joules(), driver.busy(), driver.clock()) == (2.5, 0.4, None)
    for name in said:
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", refuse)
    assert (driver.joules(), driver.busy(), driver.clock()) == (None, None, None)
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)  # there is no driver
    assert Gauge.of(card) is None


class Card:
    """A GPU that takes `before` watts, and `watts` from 0 ms on; its counter steps every `step` ms.

    `age` is how old a reading is at 0 ms. It stands in for the module `time` and for the event that the
    gauge's thread waits on: time passes in `work` alone, and at each LOOK of it the thread looks once.
    """

    def __init__(self, watts: float, step: int, age: int = 0, before: float = 120) -> None:
        self.watts, self.step, self.age, self.before, self.ms = watts, step, age, before, 0
        self.clocks: Iterator[Clock] = itertools.repeat(Clock(1600, True))
        self.looks, self.ends = SimpleQueue[None](), SimpleQueue[bool]()

    def perf_counter(self) -> float:
        return self.ms / 1e3

    def joules(self) -> float:
        last = (self.ms + self.age) // self.step * self.step - self.age
        return 1e6 + last / 1e3 * (self.watts if last > 0 else self.before)

    def clock(self) -> Clock:
        return next(self.clocks)

    def wait(self, seconds: float) -> bool:
        assert seconds == gauge.LOOK
        self.looks.put(None)
        return self.ends.get(timeout=5)

    def set(self) -> None:
        self.ends.put(True)

    def work(self, ms: int, watched: bool) -> None:
        for _ in range(0, ms, round(1e3 * gauge.LOOK)):
            if watched:
                self.looks.get(timeout=5)
            self.ms += round(1e3 * gauge.LOOK)
            if watched:
                self.ends.put(False)


def repeated(
    monkeypatch: pytest.MonkeyPatch, card: Card, count: int, ms: int, watched: bool = True
) -> dict[str, Any]:
    """What bench says of 1,024 tokens that take 17 forwards and so many ms."""
    monkeypatch.setattr(bench, "time", card)
    monkeypatch.setattr(gauge, "time", card)
    monkeypatch.setattr(progress, "Event", lambda: card)
    monkeypatch.setattr(bench.Gauge, "of", lambda device: card if watched else None)
    return bench._repeated(lambda: card.work(ms, watched) or 17, count, torch.device("cpu"), 1024)


@pytest.mark.parametrize("step", [20, 73, 100])
@pytest.mark.parametrize(("age", "before"), [(0.0, 120), (0.9, 120), (0.9, 700), (0.5, 0)])
def test_power_is_known_to_a_five_hundredth(
    step: int, age: float, before: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ran before, and however old the counter's last step is at both ends.

    Readings at both ends of 2 s are up to 4 % off: 725 W behind other work. An H200 once showed 727.
    """
    card = Card(700, step, int(age * step), before)
    own = repeated(monkeypatch, card, 1, 370)
    assert own["watts"] == pytest.approx(700, rel=2e-3)
    assert own["joules_a_forward"] == pytest.approx(700 * 0.37 / 17, rel=2e-3)
    assert own["tokens_a_joule"] == pytest.approx(1024 / 0.37 / 700, rel=2e-3)
    assert card.ms == 28 * 370  # 10 s at least


def test_rows_say_what_a_token_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens a second and a joule, price a million, clock, and their table; worked by hand."""
    card = Card(400, 250)
    clocks = [Clock(1500, True), Clock(1600, True), Clock(1980, False), Clock(1500, True)]
    card.clocks = iter(clocks)  # one at each step of the counter
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    own = repeated(monkeypatch, card, 2, 500)
    parts = dict.fromkeys((*bench.PARTS, "rest"), 0.0) | {"experts": 5.5}
    more = {"first_canvas_ms": 50.0, "ms_a_step": 8.0, "parts": parts}
    row = bench._row(4, "16", 127.0, {"experts": 0.005}, own | more, 3.6)
    assert row.tokens_a_second == 1024 / 0.5
    assert row.tokens_a_joule == pytest.approx(5.12)
    assert row.joules_a_forward == pytest.approx(200 / 17)
    assert (row.clock_mhz, row.power_capped) == (1645, 0.75)
    assert row.ms_a_forward == pytest.approx(500 / 17)
    assert (row.ms_a_step, row.unexplained) == (8.0, 2.5)
    assert row.price_a_million_tokens == pytest.approx(1e6 / 2048 / 3600 * 3.6)
    mute = repeated(monkeypatch, card, 4, 250, watched=False)
    silent = bench._row(4, "16", 127.0, {"experts": 0.005}, mute | more, None)
    assert silent.price_a_million_tokens is None
    assert (silent.watts, silent.joules_a_forward, silent.tokens_a_joule) == (None, None, None)
    assert (silent.clock_mhz, silent.power_capped) == (None, None)
    result = bench.Bench("m", "GPU", "2", 1024, 1, 1, 1.0, [], Rates(1.0, 1.0, 1.0), [row, silent])
    shown = list(bench.tables(result)[0].columns)
    cells = {str(column.header): list(column.cells) for column in shown}
    assert (cells["MHz"], cells["power-capped"]) == (["1645", ""], ["75%", ""])
    assert [cells[head] for head in ("W", "J/forward", "tokens/J")] == [
        ["400", ""], ["11.76", ""], ["5.12", ""]
    ]  # fmt: skip


def test_canvases_are_repeated_until_energy_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a counter as often as asked; with one for SECONDS, the clock read at each step of it."""
    monkeypatch.setattr(bench, "SECONDS", 3.0)
    card = Card(60, 100)
    read: list[int] = []
    monkeypatch.setattr(card, "clock", lambda: read.append(card.ms) or Clock(1600, True))
    assert repeated(monkeypatch, card, 1, 1000)["watts"] == pytest.approx(60)
    assert (card.ms, len(read)) == (3000, 30)
    for card, watched in ((Card(60, 100), False), (Card(60, 10_000), True)):
        assert repeated(monkeypatch, card, 2, 1000, watched)["tokens_a_joule"] is None
        assert card.ms == (3000 if watched else 2000)
    monkeypatch.setattr(card, "joules", lambda: None)
    assert repeated(monkeypatch, card, 1, 1000)["watts"] is None
    assert card.ms == 4000
