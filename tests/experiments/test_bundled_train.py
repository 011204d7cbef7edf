"""The trainer's forward against transformers' own, and that a step learns and a state resumes."""

from pathlib import Path

import pytest
import torch
from experiments.bundled.architecture import CANVAS, HIDDEN, new_model
from experiments.bundled.forward import (
    TrainingBatch,
    TrainingForward,
    corrupt,
    draw_batch,
    rms_norm,
)
from experiments.bundled.problems import WIDE
from experiments.bundled.tokenizer import VOCABULARY
from experiments.bundled.train import Bank, Trainer, load_state, pack_shard, save_state
from transformers import DynamicCache

from tests.support.modules_oracle.passes import CACHE

ROWS, LENGTH = 3, 96


def batch() -> TrainingBatch:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    lengths, start = torch.tensor([96, 70, 80]), torch.tensor([32, 6, 16])
    tokens[torch.arange(LENGTH) >= lengths[:, None]] = 0
    canvas = tokens.gather(1, start[:, None] + torch.arange(CANVAS))
    torch.manual_seed(4)
    conditioned = torch.tensor([True, False, True])
    return TrainingBatch(tokens, lengths, start, canvas, corrupt(canvas, VOCABULARY), conditioned)


@torch.no_grad()
def test_forward_is_transformers_forward() -> None:
    model, b = new_model(0).eval(), batch()
    ours = TrainingForward(model, torch.float32, positions=LENGTH + CANVAS)
    weights, layers = ours.weights()
    norm, embedding = weights["norm.weight"], weights["embed_tokens.weight"]
    hidden, cache, balance = ours.encode(b.tokens, weights, layers)

    theirs = DynamicCache(config=model.config.text_config)
    real = torch.arange(LENGTH) < b.lengths[:, None]
    encoder = model.model.encoder(input_ids=b.tokens, attention_mask=real.long(), **{CACHE: theirs})
    torch.testing.assert_close(
        rms_norm(hidden, norm)[real], encoder.last_hidden_state[real], atol=2e-4, rtol=1e-3
    )
    assert 0.5 < balance < 2

    seen = torch.arange(LENGTH) < b.start[:, None]
    common = {
        CACHE: theirs,
        "decoder_input_ids": b.noisy,
        "decoder_attention_mask": torch.cat((seen, torch.ones(ROWS, CANVAS, dtype=torch.bool)), 1),
        "decoder_position_ids": b.start[:, None] + torch.arange(CANVAS),
    }
    first = model(**common).logits
    second = model(
        **common, self_conditioning_logits=first, self_conditioning_mask=b.conditioned
    ).logits
    nothing = torch.zeros(ROWS, CANVAS, HIDDEN)
    canvas, _ = ours.decode(b, nothing, cache, weights, layers)
    logits = ours.head(canvas, norm, embedding)
    torch.testing.assert_close(logits, first, atol=2e-3, rtol=1e-3)
    soft = ours.soft_embeddings(first, embedding) * b.conditioned[:, None, None]
    canvas, _ = ours.decode(b, soft, cache, weights, layers)
    torch.testing.assert_close(ours.head(canvas, norm, embedding), second, atol=2e-3, rtol=1e-3)
    assert (second - first).abs().max() > 0.1  # the conditioning reached the logits


def test_corruption_replaces_about_half_and_only_within_the_vocabulary() -> None:
    torch.manual_seed(0)
    clean = torch.zeros(400, CANVAS, dtype=torch.long)
    noisy = corrupt(clean, 50)
    assert 0.44 < (noisy != clean).float().mean() < 0.54
    assert 0 <= noisy.min() <= noisy.max() < 50


@pytest.fixture(scope="module")
def bank() -> Bank:
    tokens, prompts, canvases = (torch.from_numpy(a) for a in pack_shard((0, [], WIDE, 200)))
    return Bank(tokens, prompts, canvases)


def test_shard_holds_prompts_and_filled_answers(bank: Bank) -> None:
    assert len(bank.tokens) == len(bank.prompts) == len(bank.canvases) == 200
    ends = bank.prompts + bank.canvases * CANVAS
    for row, prompt, end in zip(bank.tokens, bank.prompts, ends, strict=True):
        assert row[0] == 2
        assert row[prompt - 1] in (101, 107)  # an empty thought channel, or "model\n"
        assert 106 in row[prompt:end]
        assert row[end - 1] == 1
        assert not row[end:].any()
    thinking = (bank.tokens == 98).any(1).float().mean()
    assert 0.2 < thinking < 0.4


def test_drawn_canvas_is_the_clean_block_after_its_prefix(bank: Bank) -> None:
    torch.manual_seed(0)
    two = Bank(bank.tokens, bank.prompts, torch.full_like(bank.canvases, 2))
    b = draw_batch(two.tokens, two.prompts, two.canvases, 8, 176, VOCABULARY)
    offsets = b.start[:, None] - bank.prompts
    assert ((offsets == 0) | (offsets == CANVAS)).any(1).all()
    assert set((b.lengths - b.start).tolist()) == {CANVAS, 2 * CANVAS}
    for i in range(8):
        if b.start[i] + CANVAS <= 176:
            block = b.tokens[i, b.start[i] : b.start[i] + CANVAS]
            assert torch.equal(block, b.canvas[i])
    assert b.noisy.shape == b.canvas.shape == (8, CANVAS)


def test_steps_learn_and_state_resumes(bank: Bank, tmp_path: Path) -> None:
    model = new_model(0)
    trainer = Trainer(model, bank, batch_size=4, lr=2e-3)
    logged: list[dict] = []
    torch.manual_seed(0)
    trainer.rate.fill_(2e-3)
    trainer.step()
    before = trainer.losses.clone()
    trainer.train(0, 3, 0, lambda entry: logged.append(dict(entry)))
    assert logged[-1]["step"] == 3
    assert trainer.losses[0] < before[0]
    assert trainer.losses[1] < before[1]
    save_state(model, tmp_path, 3)
    resumed = new_model(1)
    assert load_state(resumed, tmp_path) == 3
    ours = dict(model.model.decoder.named_parameters())
    for name, parameter in resumed.model.decoder.named_parameters():
        assert torch.equal(parameter, ours[name])
    (tmp_path / "state-1.safetensors").unlink()
    with pytest.raises(KeyError, match="no state of"):
        load_state(new_model(1), tmp_path)
