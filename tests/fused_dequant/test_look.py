"""What lm_head leaves on Hopper: tiles' statistics to the sampler, probabilities to the soft embedding.

What reads them runs in the interpreter too, on what torch leaves; what writes them, on sm_90 alone.
`test_every_kernel_in_the_interpreter` runs this file in a process of its own with the interpreter on.
"""

import fused_dequant as fd
import pytest
import torch
from fused_dequant import CanvasState, Draw, Probabilities, reference
from fused_dequant.sampler import sampling
from fused_dequant.sampler.canvas import uniforms
from fused_dequant.tune import cases
from fused_dequant.vocabulary import dense

from tests.support.kernels_support.device import DEVICE, HOPPER, INTERPRETED, MARKS
from tests.support.kernels_support.draws import assert_drawn, begin

pytestmark = MARKS
CAP, WIDTH = 30.0, 256
TEMPERATURES = torch.linspace(0.8, 0.4083, 48)  # the coldest and hottest of 48 steps


def left(
    logits: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Probabilities]:
    """Return, in float64, what `dense_hopper` says it leaves of logits [M, V] at T [M]."""
    M, V = logits.shape
    pad = (0, -V % WIDTH)
    sharpness = 1.4426950408889634 / temperature.double()[:, None, None]
    values = torch.nn.functional.pad(logits.double(), pad, value=-1e30).view(M, -1, WIDTH)
    top = values.amax(-1, keepdim=True)
    x = (values - top) * sharpness
    p = torch.exp2((values - CAP) * sharpness + 96).to(torch.bfloat16)
    sums = [x.exp2().sum(-1), (x.exp2() * x).nan_to_num().sum(-1) / 1.4426950408889634]
    statistics = torch.stack([top[..., 0], *sums, p.double().sum(-1)])
    p = p.flatten(1)[:, :V].contiguous()
    return statistics, statistics[3].sum(-1), Probabilities(p, p.double().sum(-1).float())


def temperatures_of(state: CanvasState, L: int) -> torch.Tensor:
    return TEMPERATURES.to(DEVICE)[state.step.long() - 1].repeat_interleave(L)


def random_logits(B: int, L: int, V: int) -> torch.Tensor:
    """Logits within +-CAP, from flat to one-hot; of one row all are at the bottom, of one at the top.

    Of the last row two are at the top.
    """
    spread = torch.linspace(0.01, 15, L, device=DEVICE)[:, None]
    logits = (torch.randn(B, L, V, device=DEVICE) * spread).clamp(-CAP, CAP)
    logits[0, 0], logits[0, 1] = -CAP, CAP
    logits[-1, -1, [7, V - 9]] = CAP
    return logits.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("B", "L", "V"), [(2, 5, 304), (1, 6, 2600)] + ([] if INTERPRETED else [(2, 256, 262144)])
)
def test_a_draw_of_what_was_left(B: int, L: int, V: int) -> None:
    state = begin(B, L, V)
    state.step.copy_(torch.tensor([48, 3][:B]))
    logits, temperature = random_logits(B, L, V), temperatures_of(state, L)
    statistics, total, _ = left(logits.flatten(0, 1), temperature)
    added = torch.empty(B * L, device=DEVICE)
    schedule = TEMPERATURES.to(DEVICE)
    draw = sampling.draw(logits, statistics.float(), WIDTH, state, schedule, added)
    assert_as_sampled(draw, logits, state)
    torch.testing.assert_close(added.double(), total, rtol=1e-6, atol=0)


def assert_as_sampled(draw: Draw, logits: torch.Tensor, state: CanvasState) -> None:
    """The draw against float64, and against `sample` where no boundary is near."""
    (B, L, V), schedule = logits.shape, TEMPERATURES.to(DEVICE)
    u = torch.cat([uniforms(state.seeds[b : b + 1], 0, int(state.step[b]), L) for b in range(B)])
    assert_drawn(logits, schedule[state.step.long() - 1], u, draw)
    assert torch.equal(draw.argmax, logits.float().argmax(-1))
    assert torch.equal(draw.replacement, (u[..., 1] * V).long())
    assert (draw.sampled == fd.sample(logits, state, schedule).sampled).float().mean() > 0.97


def test_a_soft_embedding_of_what_was_left() -> None:
    V, hidden = 2600, 80
    table = cases.random_weight("bf16", 1, V, hidden, DEVICE).data[0]
    logits = random_logits(1, 6, V)[0]
    temperature = TEMPERATURES.to(DEVICE)[[0, 9, 20, 30, 40, 47]]
    out = torch.empty(6, hidden, dtype=torch.bfloat16, device=DEVICE)
    given = left(logits, temperature)[2]
    assert fd.soft_embedding_of(given, table, out) is out
    expected = reference.soft_embedding(logits, table, 1 / temperature, torch.float64)
    error = (out.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 4e-3


def test_temperatures_that_fit() -> None:
    """The coldest step of the model fits; what would leave bf16's exponents does not."""
    from fused_dequant.vocabulary.dense_hopper import holds

    assert holds(30.0, 0.4)
    assert not holds(30.0, 0.38)
    assert not fd.look_runs(torch.device("cpu"), 30.0, 0.8)
    coldest = torch.exp2(torch.tensor(-2 * CAP / 0.4 * 1.4426950408889634 + 96))
    assert coldest.to(torch.bfloat16) >= torch.finfo(torch.bfloat16).tiny


@pytest.mark.skipif(not HOPPER, reason="needs sm_90")
@pytest.mark.parametrize(("B", "L", "V"), [(1, 1, 304), (2, 65, 32768 + 8), (4, 256, 4096)])
def test_what_lm_head_leaves(B: int, L: int, V: int) -> None:
    """All that is written, against float64 of the logits written; 10 runs are equal bit for bit."""
    from fused_dequant.vocabulary import dense_hopper

    state, schedule, M = begin(B, L, V), TEMPERATURES.cuda(), B * L
    state.step.copy_(torch.tensor([48, 1, 7, 49][:B]))
    x = cases.random_tokens(M, 2816, "cuda") * torch.linspace(0.1, 200, M, device="cuda")[:, None]
    x = x.to(torch.bfloat16)
    table = cases.random_weight("bf16", 1, V, 2816, "cuda").data[0]
    y, p = (torch.empty(M, V, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    own, first = torch.empty(0), list[torch.Tensor]()
    for _ in range(10):
        y.fill_(float("nan"))
        p.fill_(float("nan"))
        own = dense_hopper.survey(x, table, CAP, schedule, state.step, y, p, {"STAGES": 4})
        found = [y.clone(), p.clone(), own.clone()]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
    assert torch.equal(y, dense_hopper.lm_head(x, table, CAP, {"STAGES": 4}))
    temperature = schedule[state.step.clamp(max=48).long() - 1].repeat_interleave(L)
    statistics, _, expected = left(y, temperature)
    assert torch.equal(own[0].double(), statistics[0])
    torch.testing.assert_close(own[1].double(), statistics[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(own[2].double(), statistics[2], rtol=2e-5, atol=2e-5)
    tiles = torch.nn.functional.pad(p.double(), (0, -V % WIDTH)).view(M, -1, WIDTH)
    torch.testing.assert_close(own[3].double(), tiles.sum(-1), rtol=2e-6, atol=0)
    # A step of bf16; and what is 2^126 times less probable than another token of its tile may be 0.
    allowed = 2**-7 * expected.p.double() + 2.0**-100 * expected.p.double().amax(1, keepdim=True)
    wrong = (p.double() - expected.p.double()).abs() > allowed
    assert not wrong.any(), (p[wrong][:4], expected.p[wrong][:4])
    probabilities = Probabilities(p, torch.empty(M, device="cuda"))
    draw = dense.look(x, table, CAP, state, schedule, y, probabilities)
    if int(state.step.max()) <= 48:
        assert_as_sampled(draw, y.view(B, L, V), state)
    torch.testing.assert_close(probabilities.total.double(), p.double().sum(1), rtol=1e-6, atol=0)
    soft = fd.soft_embedding_of(probabilities, table)
    before = fd.soft_embedding(y, table, 1 / temperature)
    error = (soft.double() - before.double()).norm(dim=1) / before.double().norm(dim=1)
    assert error.max() < 4e-3, error.max()
