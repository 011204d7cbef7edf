"""The GPU's sampler against plain numbers and against torch's, on a GPU or interpreted.

`test_every_kernel_in_the_interpreter` runs this file in a process of its own with the interpreter on.
"""

import fused_dequant as fd
import pytest
import torch
from fused_dequant import CanvasState
from fused_dequant.sampler import canvas
from fused_dequant.sampler.canvas import uniforms

from quantize.runtime import Sampler
from tests.support.kernels_support.device import DEVICE, INTERPRETED, MARKS
from tests.support.kernels_support.draws import assert_drawn, begin

pytestmark = MARKS
SETTINGS = Sampler(
    max_denoising_steps=12, entropy_bound=2.0, stability_threshold=2, confidence_threshold=0.3
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("B", "L", "V"), [(2, 5, 300), (1, 8, 20000)] + ([] if INTERPRETED else [(2, 256, 262144)])
)
def test_draws_are_those_of_the_distribution(dtype: torch.dtype, B: int, L: int, V: int) -> None:
    """Positions from flat to one-hot, and one whose mass is all in the last tokens."""
    temperatures = SETTINGS.schedule(DEVICE)
    state = begin(B, L, V)
    state.step.copy_(torch.tensor([4, 9, 1, 1][:B]))
    state.canvas_index.fill_(2)
    logits = (
        torch.randn(B, L, V, device=DEVICE) * torch.linspace(0.01, 15, L, device=DEVICE)[:, None]
    )
    logits[0, 1, : V - 3] = -float("inf")
    logits[0, 2, V - 1] = 30
    logits = logits.to(dtype)
    draw = fd.sample(logits, state, temperatures)
    u = torch.cat([uniforms(state.seeds[b : b + 1], 2, int(state.step[b]), L) for b in range(B)])
    assert_drawn(logits, temperatures[state.step.long() - 1], u, draw)
    assert torch.equal(draw.argmax, logits.float().argmax(-1))
    assert torch.equal(draw.replacement, (u[..., 1] * V).long())
    assert (draw.sampled[0, 1] >= V - 3).all()


def test_noise_has_the_bits_of_the_runtime() -> None:
    """A flat distribution over 2^18 tokens shows 18 bits of word 0; V = 2^20 shows 20 of word 1."""
    state = begin(4, 8, 2**12)
    state.step.copy_(torch.tensor([1, 2, 3, 48]))
    state.canvas_index.copy_(torch.tensor([0, 1, 1000, 7]))
    for b in range(4):
        index, step = int(state.canvas_index[b]), int(state.step[b])
        expected = uniforms(state.seeds[b : b + 1], index, step, 8)
        ours = uniforms(state.seeds, state.canvas_index, state.step, 8)[b : b + 1]
        assert torch.equal(ours, expected)
    logits = torch.zeros(4, 8, 2**12, device=DEVICE)
    draw = fd.sample(logits, state, torch.ones(48, device=DEVICE))
    u = uniforms(state.seeds, state.canvas_index, state.step, 8)
    assert torch.equal(draw.sampled, (u[..., 0] * 2**12).long())
    assert torch.equal(draw.replacement, (u[..., 1] * 2**12).long())


def test_the_operations_on_a_cpu_give_what_the_kernels_give() -> None:
    """Kernels and torch make the same state in each of 3 steps."""
    temperatures, first = SETTINGS.schedule(DEVICE), begin(2, 6, 100, 2)
    states = [
        CanvasState(**{k: v.to(d).clone() for k, v in vars(first).items()}) for d in (DEVICE, "cpu")
    ]
    for step in range(3):
        logits = torch.randn(2, 6, 100, device=DEVICE) * 8
        SETTINGS.decide(fd.sample(logits, states[0], temperatures), states[0], temperatures)
        draw = canvas.sample(logits.cpu(), states[1], temperatures.cpu())
        SETTINGS.decide(draw, states[1], temperatures.cpu())
        for name, expected in vars(states[1]).items():
            ours = getattr(states[0], name).cpu()
            torch.testing.assert_close(
                ours, expected, msg=lambda m, n=name, s=step: f"{n} {s}: {m}"
            )
    assert states[1].accepted.any()
    with pytest.raises(ValueError, match=r"do not fit a canvas \(2, 6\)"):
        fd.sample(logits[:, :5], states[0], temperatures)


def test_ties_and_damage() -> None:
    temperatures = SETTINGS.schedule(DEVICE)
    state = begin(1, 4, 20000)
    logits = torch.randn(1, 4, 20000, device=DEVICE)
    logits[0, 0, [7, 9000, 19999]] = 25.0
    logits[0, 1, 12345] = float("nan")
    logits[0, 2] = float("nan")
    draw = fd.sample(logits, state, temperatures)
    assert draw.argmax[0, 0] == 7
    assert draw.entropy[0].isnan().tolist() == [False, True, True, False]
    for tokens in (draw.sampled, draw.argmax, draw.replacement):
        assert ((tokens >= 0) & (tokens < 20000)).all()
    SETTINGS.decide(draw, state, temperatures)
    assert not state.accepted[0, 1:3].any()
    assert not state.finished.any()


@pytest.mark.parametrize("stability", [0, 2] if INTERPRETED else [0, 1, 2])
def test_a_whole_canvas_follows_the_runtime(stability: int) -> None:
    """All steps of three sequences, one of which stops early: each state is torch's of it alone."""
    torch.manual_seed(stability)
    settings = Sampler(
        max_denoising_steps=3 + stability, entropy_bound=4.0, stability_threshold=stability,
        confidence_threshold=1e-3,
    )  # fmt: skip
    B, L, V = 3, 10 if INTERPRETED else 24, 200
    temperatures, state = settings.schedule(DEVICE), begin(B, L, V, stability)
    initial = state.canvas.clone()
    rows = [
        CanvasState.begin(initial[b : b + 1].cpu(), state.seeds[b : b + 1].cpu(), stability)
        for b in range(B)
    ]
    base = torch.randn(B, L, V, device=DEVICE) * torch.linspace(1, 40, L, device=DEVICE)[:, None]
    base[1].scatter_(-1, base[1].argmax(-1, keepdim=True), 300.0)  # certain from the start
    base[2, 5:9] = base[2, 5:9].roll(3, -1)
    accepted_somewhere = 0
    for step in range(1, settings.max_denoising_steps + 1):
        logits = base.clone()
        if step <= 2:
            logits[2] = logits[2].roll(step, -1)  # the third sequence is not stable at first
        settings.decide(fd.sample(logits, state, temperatures), state, temperatures)
        for b in range(B):
            if rows[b].finished.any():
                continue
            draw = canvas.sample(logits[b : b + 1].cpu(), rows[b], temperatures.cpu())
            settings.decide(draw, rows[b], temperatures.cpu())
            accepted_somewhere += int(rows[b].accepted.sum())
        for b in range(B):
            for name in ("accepted", "canvas", "argmax", "finished", "step"):
                own, alone = getattr(state, name)[b].cpu(), getattr(rows[b], name)[0]
                assert torch.equal(own, alone), (step, b, name)
            assert torch.equal(state.history[:, b].cpu(), rows[b].history[:, 0])
            sharpness = state.inverse_temperature[b].cpu(), rows[b].inverse_temperature[0]
            torch.testing.assert_close(*sharpness)
    assert 0 < accepted_somewhere < settings.max_denoising_steps * B * L
    assert state.finished.tolist()[:2] == [False, True]
    assert state.step.tolist()[:2] == [4 + stability, 2 + stability]


def test_a_sequence_past_its_last_step_is_left() -> None:
    temperatures, state = SETTINGS.schedule(DEVICE), begin(2, 6, 50, 1)
    state.step.copy_(torch.tensor([13, 12]))
    before = {name: getattr(state, name).clone() for name in ("canvas", "argmax", "history")}
    logits = torch.randn(2, 6, 50, device=DEVICE)
    SETTINGS.decide(fd.sample(logits, state, temperatures), state, temperatures)
    for name, old in before.items():
        new = getattr(state, name)
        rows = (new[:, 0], old[:, 0]) if name == "history" else (new[0], old[0])
        assert torch.equal(*rows), name
    assert state.step.tolist() == [13, 13]
    assert not torch.equal(state.canvas[1], before["canvas"][1])


@pytest.mark.skipif(INTERPRETED, reason="the tests of noise and of draws hold each number and draw")
def test_frequencies_on_fixed_logits() -> None:
    """Chi-square of draws over steps and positions; 8 tokens, some in the last range."""
    V = 262144
    tokens = torch.linspace(0, V - 1, 8, device=DEVICE).long()
    row = torch.full((V,), -float("inf"), device=DEVICE)
    row[tokens] = torch.linspace(-0.7, 0.7, 8, device=DEVICE)
    B, L, steps = 4, 256, 12
    temperatures, state = SETTINGS.schedule(DEVICE), begin(B, L, V)
    temperatures.fill_(0.7)
    expected = (row[tokens].double() / 0.7).softmax(-1).cpu() * B * L * steps
    counts = torch.zeros(V, dtype=torch.long)
    for step in range(1, steps + 1):
        state.step.fill_(step)
        draw = fd.sample(row.expand(B, L, V).contiguous(), state, temperatures)
        counts += torch.bincount(draw.sampled.flatten().cpu(), minlength=V)
    assert counts.sum() == B * L * steps
    seen = counts[tokens.cpu()].double()
    assert seen.sum() == B * L * steps
    assert float(((seen - expected) ** 2 / expected).sum()) < 24.3  # 99.9 % of chi-square with 7


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
def test_one_graph_replays_every_step() -> None:
    temperatures = SETTINGS.schedule(DEVICE)
    logits = (torch.randn(2, 256, 4096, device=DEVICE) * 20).to(torch.bfloat16)
    states = [begin(2, 256, 4096, 2) for _ in range(2)]
    for name in ("canvas", "argmax"):
        getattr(states[1], name).copy_(getattr(states[0], name))

    def step(state: CanvasState) -> None:
        draw = fd.sample(logits, state, temperatures)
        fd.accept(draw, state, temperatures, fd.Rules(2.0, 1e-6))

    step(begin(2, 256, 4096, 2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(states[1])
    for number in range(1, 5):
        step(states[0])
        graph.replay()
        assert states[1].step.tolist() == [number + 1] * 2
        assert torch.equal(states[0].canvas, states[1].canvas)
        assert torch.equal(states[0].accepted, states[1].accepted)
