"""The soft embedding of few tokens: which are chosen, the bound, and rows that know no neighbours.

`test_every_kernel_in_the_interpreter` runs this file in a process of its own with the interpreter on.
"""

import fused_dequant as fd
import pytest
import torch
from fused_dequant import Probabilities, reference
from fused_dequant.reference import LEFT_OUT, MOST
from fused_dequant.sampler import sampling
from fused_dequant.tune import cases
from fused_dequant.weights import tuning
from kernels_support.device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
V, HIDDEN = (776, 72) if INTERPRETED else (262144, 2816)
# Tokens of each row that share nearly all mass alike, 0 for all of the vocabulary.
ALIKE = (1, 2, 5, 64, 65, 0, 3, 200)
TILES = {"SPLITS": 2, "BM": 16, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows fill more than one tile of a listed product."""
    if INTERPRETED:
        monkeypatch.setattr(tuning, "choose", lambda *_: {**TILES, "BM": 4})


def peaked(alike: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Logits [rows, V] of distinct rows; of each, `alike` tokens anywhere are at 20, or near it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(alike), V, generator=generator)
    for row, count in zip(logits, alike, strict=True):
        tokens = torch.randperm(V, generator=generator)[: count or 1]
        row[tokens] = 28.0 if count else 1.0
        row[tokens[: count // 2]] = 28.25  # two levels, each of tokens alike
    return logits.to(torch.bfloat16).to(DEVICE)


def ordered(logits: torch.Tensor) -> torch.Tensor:
    """Tokens by logit, of two alike the lower first."""
    return logits.float().sort(dim=-1, descending=True, stable=True).indices


def embedding() -> torch.Tensor:
    return cases.random_weight("bf16", 1, V, HIDDEN, DEVICE).data[0]


def sharpness(rows: int) -> torch.Tensor:
    return torch.linspace(1.25, 2.0, rows, device=DEVICE)


def left(logits: torch.Tensor, inverse: torch.Tensor) -> Probabilities:
    """What `look` leaves: statistics of tiles, and room for p."""
    step = torch.arange(1, len(logits) + 1, dtype=torch.int32, device=DEVICE)
    own = sampling.statistics(logits, 1 / inverse, step, 1, 256)
    room = Probabilities.room(logits, sparse=True)
    assert room.statistics is not None
    room.statistics.view(own.shape).copy_(own)
    room.p.fill_(float("nan"))
    room.total.fill_(float("nan"))
    return room


def test_the_most_probable_tokens_are_chosen_in_order() -> None:
    """As few as hold the mass; none of a row that needs more than 64, whose rows are listed."""
    from fused_dequant.vocabulary import sparse

    logits, inverse = peaked(ALIKE), sharpness(len(ALIKE))
    given = left(logits, inverse).first(len(ALIKE)).statistics
    assert given is not None
    counts, rows, tokens, weights = sparse.choose(logits, given.view(3, len(logits), -1), inverse)
    needed = reference.tokens_needed(logits, inverse).cpu()
    assert needed.tolist()[:4] == [1, 2, 5, 64]
    assert counts.cpu().tolist() == [n if n <= MOST else 0 for n in needed.tolist()]
    whole = [row for row, count in enumerate(counts.tolist()) if not count]
    assert whole == [4, 5, 7]
    assert rows[: len(whole)].tolist() == whole
    assert int(rows[-1]) == len(whole)
    p = torch.softmax(logits.double() * inverse.double()[:, None], -1)
    for row, count in enumerate(counts.tolist()):
        expected = ordered(logits)[row, :count]
        assert torch.equal(tokens[row, :count].long(), expected)
        ours = weights[row, :count].double()
        torch.testing.assert_close(ours, p[row, expected], rtol=1e-5, atol=0)


@pytest.mark.parametrize("looked", [False, True])
def test_the_error_is_within_the_bound(looked: bool) -> None:
    """|sparse - exact| <= left out * largest norm, beside what bf16 rounds; rows whole as before."""
    logits, inverse, table = peaked(ALIKE), sharpness(len(ALIKE)), embedding()
    given = left(logits, inverse) if looked else None
    out = torch.empty(len(logits), HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    assert fd.sparse_soft_embedding(logits, table, inverse, out, given) is out
    exact = reference.soft_embedding(logits, table, inverse, torch.float64)
    expected = reference.sparse_soft_embedding(logits, table, inverse, torch.float64)
    largest = table.double().norm(dim=1).max()
    left_out = (expected - exact).norm(dim=1)
    assert left_out.max() > 0
    assert (left_out <= LEFT_OUT * largest).all()
    error = (out.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 4e-3
    before = fd.soft_embedding(logits, table, inverse)
    whole = reference.tokens_needed(logits, inverse) > MOST
    assert torch.equal(out[whole], before[whole])
    assert not torch.equal(out[~whole], before[~whole])
    if given is not None:
        assert torch.equal(given.p.isnan().all(1), ~whole)  # no p is computed of the others
        assert torch.equal(out, fd.sparse_soft_embedding(logits, table, inverse))


def test_a_row_knows_no_neighbours() -> None:
    """Bits of each row alone, in another order, and where other rows are multiplied whole."""
    logits, inverse, table = peaked(ALIKE), sharpness(len(ALIKE)), embedding()
    found = fd.sparse_soft_embedding(logits, table, inverse)
    turned = torch.randperm(len(ALIKE), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    again = fd.sparse_soft_embedding(logits[turned], table, inverse[turned])
    assert torch.equal(again, found[turned])
    others = peaked((0,) * len(ALIKE), seed=1)
    others[[2, 4, 6]] = logits[[2, 4, 6]]
    beside = fd.sparse_soft_embedding(others, table, inverse)
    assert torch.equal(beside[[2, 4, 6]], found[[2, 4, 6]])
    for row in (0, 4):
        alone = fd.sparse_soft_embedding(logits[row : row + 1], table, inverse[row : row + 1])
        assert torch.equal(alone[0], found[row])


def test_damage_is_multiplied_whole() -> None:
    """A row with a NaN is no more than that; the others stand."""
    logits, inverse, table = peaked((1, 2, 3)), sharpness(3), embedding()
    expected = fd.sparse_soft_embedding(logits, table, inverse)
    logits[1, 77] = float("nan")
    found = fd.sparse_soft_embedding(logits, table, inverse)
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert found[1].isnan().any()


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("M", [256, 2048])
def test_a_graph_takes_any_number_of_whole_rows(M: int) -> None:
    """One graph at the tables' tiles: none, some and all rows whole, as bits of the dense product."""
    table, inverse = embedding(), torch.full((M,), 1.25, device=DEVICE)
    logits = torch.empty(M, V, dtype=torch.bfloat16, device=DEVICE)
    kinds = [peaked((3,) * 4), peaked((0,) * 4)]

    def fill(share: float) -> torch.Tensor:
        whole = torch.rand(M, device=DEVICE) < share
        for row in range(M):
            logits[row] = kinds[int(whole[row])][row % 4]
        return whole

    fill(0.5)
    out = fd.sparse_soft_embedding(logits, table, inverse).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fd.sparse_soft_embedding(logits, table, inverse, out)
    for share in (0.0, 0.05, 1.0, 0.5):
        whole = fill(share)
        graph.replay()
        before = fd.soft_embedding(logits, table, inverse)
        assert torch.equal(out[whole], before[whole]), share
        error = (out.double() - before.double()).norm(dim=1) / before.double().norm(dim=1)
        assert error.max() < 6e-3, (share, error.max())
