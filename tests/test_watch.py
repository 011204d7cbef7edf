"""`quantize generate`: the answer on stdout, the canvas drawn as it denoises."""

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image
from rich.console import Console
from rich.live import Live

from quantize import load as loading
from quantize.bundled import CHECKPOINT
from quantize.cli import cli
from quantize.errors import InputError, ResourceError
from quantize.load import load
from quantize.runtime import Sampler, generate
from quantize.runtime.chat import encode_chat, load_tokenizer
from quantize.runtime.images import open_picture, place, prepare
from quantize.watch import _Drawing, _on_kernels

QUESTION = "Tom has 5 apples and buys 3 more. How many apples does Tom have?"


def test_the_answer_is_the_one_of_the_runtime() -> None:
    done = CliRunner().invoke(cli, ["generate", "bundled", QUESTION, "--seed", "3"])
    assert done.exit_code == 0, done.stderr
    model, tokenizer = load(CHECKPOINT), load_tokenizer(CHECKPOINT)
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    ids = encode_chat(tokenizer, [{"role": "user", "content": QUESTION}], thinking=False)
    (sample,) = generate(model, [ids], [3], max_new_tokens=sampler.max_new_tokens, sampler=sampler)
    assert done.stdout == tokenizer.decode(sample.tokens) + "\n"
    assert "####" in done.stdout
    assert f"{sample.new_tokens} tokens in {sample.canvases} canvases" in done.stderr


def test_the_drawing_shows_every_token_and_marks_the_accepted() -> None:
    tokenizer, out = load_tokenizer(CHECKPOINT), io.StringIO()
    words = [tokenizer.encode(word, add_special_tokens=False) for word in (" apples", " seven")]
    tokens = [token for word in words for token in word]
    accepted = [True] * len(words[0]) + [False] * len(words[1])
    console = Console(file=out, force_terminal=True, width=400, color_system="standard")
    with Live(console=console, auto_refresh=False) as live:
        drawing = _Drawing(tokenizer, live)
        for step in (1, 2, 1, 4):
            drawing.draw(step, tokens, accepted)
    text = out.getvalue()
    assert "\x1b[1m apples" in text  # bold: accepted
    assert "\x1b[2m se" in text  # dim: not yet
    assert "apples seven\x1b" in text.rpartition("canvas 2, step 4")[0]  # canvas 1, finished


def test_the_fused_kernels_answer_too() -> None:
    """What runs on a GPU, here on the kernels' references: the same question, the right answer."""
    tokenizer, sampler = load_tokenizer(CHECKPOINT), Sampler.from_checkpoint(CHECKPOINT)
    ids = encode_chat(tokenizer, [{"role": "user", "content": QUESTION}], thinking=False)
    drawn: list[int] = []
    answer = _on_kernels(CHECKPOINT, "cpu", ids, 3, sampler.max_new_tokens, sampler)
    sample = answer(lambda step, tokens, accepted: drawn.append(step))
    assert "#### 8" in tokenizer.decode(sample.tokens)
    assert len(drawn) == sample.denoising_steps > 0


def test_pictures(tmp_path: Path) -> None:
    picture, broken = tmp_path / "picture.png", tmp_path / "broken.png"
    Image.radial_gradient("L").resize((320, 200)).save(picture)
    broken.write_text("not a picture")
    config = load(CHECKPOINT).config
    images, counts = prepare([open_picture(picture)] * 2, config, 70)
    assert counts[0] == counts[1] > 30
    assert int((images.positions[0, :, 0] >= 0).sum()) == counts[0] * 4  # pooled 2 x 2
    ids = place([5, config.image_token_id, 6, config.image_token_id], counts, config)
    assert ids.count(config.image_token_id) == sum(counts)
    assert ids[1] == config.boi_token_id
    assert ids[counts[0] + 2] == config.eoi_token_id
    with pytest.raises(InputError, match="2 pictures"):
        place([5, config.image_token_id], counts, config)
    arguments = ["generate", "bundled", "What is this?", "--plain", "--image"]
    seen = [
        CliRunner().invoke(cli, [*arguments, str(picture), "--image-tokens", tokens])
        for tokens in ("70", "71")
    ]
    assert seen[0].exit_code == 0, seen[0].stderr
    assert isinstance(seen[1].exception, InputError)
    refused = CliRunner().invoke(cli, [*arguments, str(broken)])
    assert "not a picture" in str(refused.exception)


def test_a_model_larger_than_the_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(loading.psutil, "virtual_memory", Memory)
    with pytest.raises(ResourceError, match="weights as float32, and cpu has"):
        load(tiny_checkpoint)


def test_no_such_checkpoint_is_one_line() -> None:
    done = CliRunner().invoke(cli, ["generate", "./nowhere", QUESTION])
    assert done.exception is not None
    assert "no such folder" in str(done.exception)
