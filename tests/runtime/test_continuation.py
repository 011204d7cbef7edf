"""One token a pass on the kernels' torch references, beside transformers' encoder in float32."""

from pathlib import Path

import pytest
import torch

from quantize.bench.one_token import Continuation
from quantize.checkpoints.load import load
from quantize.runtime import Sampler
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.weights.load import load_packed
from tests.support.layers import telling_checkpoint

SAMPLER = Sampler(max_denoising_steps=1)
COUNT = 12


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return telling_checkpoint(tmp_path_factory.mktemp("telling") / "bf16")


@pytest.fixture
def engine(telling: Path) -> FusedEngine:
    return FusedEngine(load_packed(telling, "cpu"), capacity=3, max_context=512)


def test_passes_read_what_transformers_encoder_says(
    telling: Path, engine: FusedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of every pass, the token that wins, and the next pass behind it.

    Drawn bonuses make the tokens that win vary. The prompts are shorter, just longer and much longer
    than the window of 32.
    """
    model = load(telling, dtype=torch.float32)
    noise = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 500, (n,), generator=noise).tolist() for n in (9, 35, 300)]
    seen: list[torch.Tensor] = []
    plain = engine.model.logits

    def logits(h: torch.Tensor) -> torch.Tensor:
        seen.append(plain(h).double())
        return seen[-1] + bonus[(len(seen) - 1) % COUNT]

    bonus = 9 * torch.rand(COUNT, 3, len(engine.model.weights.embedding), generator=noise)
    monkeypatch.setattr(engine.model, "logits", logits)
    for slot, prompt in enumerate(prompts):
        engine.admit(slot, prompt[:-1], 0, SAMPLER)
    order = [2, 0, 1]
    texts = Continuation(engine, order, [prompts[slot][-1] for slot in order])
    found = texts.run(COUNT)
    texts.rewind()
    assert texts.run(COUNT) == found
    for row, slot in enumerate(order):
        ids = torch.tensor([prompts[slot] + found[row]])
        with torch.no_grad():
            hidden = model.model.encoder(input_ids=ids).last_hidden_state
            cap = model.final_logit_softcapping
            exact = cap * torch.tanh(model.lm_head(hidden)[0, -COUNT - 1 : -1] / cap)
        own = torch.stack([each[row] for each in seen[:COUNT]])
        apart = (own - exact).norm(dim=1) / exact.norm(dim=1)
        assert apart.median() < 0.1, apart  # routers choose others in bf16; a wrong window: 0.29
        assert (own + bonus[:, row]).argmax(1).tolist() == found[row]
        assert len(set(found[row])) > COUNT // 2


def test_experts_hit_are_those_of_a_pass(engine: FusedEngine) -> None:
    """One token takes exactly its best experts; three take at most three times as many."""
    topk = engine.model.topk
    for slot in range(3):
        engine.admit(slot, [200 + slot] * 20, 0, SAMPLER)
    alone = Continuation(engine, [0], [300]).experts_hit()
    together = Continuation(engine, [0, 1, 2], [300, 400, 500]).experts_hit()
    for slot in range(3):
        engine.release(slot)
    assert set(alone) == {topk}
    assert len(alone) == len(together) == len(engine.model.weights.layers)
    assert all(topk <= hit <= 3 * topk for hit in together)
    assert max(together) > topk
