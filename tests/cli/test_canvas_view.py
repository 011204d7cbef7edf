"""`quantize generate`: the answer on stdout, the canvas drawn as it denoises."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image
from rich.console import Console
from rich.live import Live
from rich.text import Text

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.load import load
from quantize.cli import canvas_view as watching
from quantize.cli import cli
from quantize.cli.canvas_view import END, _Drawing, _Output, watch
from quantize.errors import InputError, ResourceError
from quantize.runtime import Sample, Sampler, generate, open
from quantize.runtime.gpu.placement import CPU
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.runtime.prompt.images import open_picture, place, prepare

SETTINGS: dict[str, Any] = {
    "thinking": False, "seed": 3, "max_new_tokens": None, "pictures": (),
    "soft_tokens": 70,
}  # fmt: skip
QUESTION = "Tom has 5 apples and buys 3 more. How many apples does Tom have?"


def test_the_answer_is_the_one_of_the_runtime() -> None:
    done = CliRunner().invoke(cli, ["generate", "bundled", QUESTION, "--seed", "3"])
    assert done.exit_code == 0, done.stderr
    engine, tokenizer = open(CHECKPOINT, device="cpu", capacity=1), load_tokenizer(CHECKPOINT)
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    ids = encode_chat(tokenizer, [{"role": "user", "content": QUESTION}], thinking=False)
    (sample,) = generate(engine, [ids], [3], max_new_tokens=sampler.max_new_tokens, sampler=sampler)
    assert done.stdout == tokenizer.decode(sample.tokens, skip_special_tokens=True) + "\n"
    assert "#### 8" in done.stdout
    assert sample.canvases == 1
    assert f"{sample.new_tokens} tokens in 1 canvas of " in done.stderr


def test_the_drawing_shows_every_token_and_marks_the_accepted() -> None:
    tokenizer, out = load_tokenizer(CHECKPOINT), io.StringIO()
    words = [tokenizer.encode(word, add_special_tokens=False) for word in (" apples", " seven")]
    tokens = [token for word in words for token in word]
    accepted = [True] * len(words[0]) + [False] * len(words[1])
    console = Console(file=out, force_terminal=True, width=400, color_system="standard")
    with Live(console=console, auto_refresh=False) as live:
        drawing = _Drawing(tokenizer, (), live)
        for step in (1, 2, 1, 4):
            drawing.draw(0, step, tokens, accepted)
    text = out.getvalue()
    assert "\x1b[1m apples" in text  # bold: accepted
    assert "\x1b[2m se" in text  # dim: not yet
    assert "apples seven\x1b" in text.rpartition("canvas 2, step 4")[0]  # canvas 1, finished


def test_the_drawing_leaves_out_the_eos_that_fill_a_canvas() -> None:
    """Also from what a finished canvas leaves behind; one before the last word is a dot."""
    tokenizer, out = load_tokenizer(CHECKPOINT), io.StringIO()
    (eos,) = tokenizer.convert_tokens_to_ids(["<eos>"])
    words = tokenizer.encode(" seven", add_special_tokens=False)
    console = Console(file=out, force_terminal=True, width=400)
    with Live(console=console, auto_refresh=False) as live:
        drawing = _Drawing(tokenizer, (eos,), live)
        for tokens in ([*words, eos, *words, eos, eos], [eos, eos]):
            drawing.draw(0, 1, tokens, [True] * len(tokens))
    assert "<eos>" not in out.getvalue()
    shown = [Text.from_ansi(frame).plain for frame in out.getvalue().split("canvas ")]
    assert shown[0].strip() == f"seven{END} seven"
    assert [frame.count("seven") for frame in shown[:2]] == [2, 1]


def test_pictures_reach_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Image.radial_gradient("L").resize((320, 200)).save(tmp_path / "picture.png")
    opened: list[Any] = []

    def fused(*args: Any, **settings: Any) -> Any:
        opened.append(open(*args, **settings))
        return opened[0]

    monkeypatch.setattr(watching, "open", fused)
    arguments = ["generate", "bundled", "What is this?", "--steps", "2", "--image"]
    done = CliRunner().invoke(cli, [*arguments, str(tmp_path / "picture.png")])
    assert done.exit_code == 0, done.stderr
    assert "_modules" in vars(opened[0].model.weights.tower)  # the tower was read
    assert done.stdout[-1] == "\n"


def test_finished_canvases_are_written_and_never_change() -> None:
    """Thoughts aside; a character in two halves, on both sides of a canvas' end; EOS."""
    tokenizer = load_tokenizer(CHECKPOINT)
    opened, closed = tokenizer.convert_tokens_to_ids(["<|channel>", "<channel|>"])
    heart = tokenizer.encode("\N{BLACK HEART SUIT}", add_special_tokens=False)
    assert len(heart) > 1
    words = partial(tokenizer.encode, add_special_tokens=False)
    canvases = [
        [opened, *words("thought\nfirst I add")],
        [*words(" then"), closed, *words("it is"), *heart[:-1]],
        [heart[-1], *words(" eight"), 1, 5, 5],
    ]
    said: list[str] = []
    sampler, sample = Sampler(eos_token_ids=(1,)), Sample()
    output = _Output(tokenizer, sampler, said.append, lambda t: said.append(f"({t})"))
    for canvas in canvases:
        sample.commit(canvas, 1, sampler)
        output.add(sample)
        said.append("|")
    output.add(sample, ended=True)
    assert "".join(said) == (
        "(thoughts: first I add)|( then)it is|\N{BLACK HEART SUIT} eight|(\n)\n"
    )


def test_plain_writes_canvas_by_canvas_and_thoughts_to_stderr() -> None:
    pieces: list[str] = []
    settings = {**SETTINGS, "thinking": True}
    watch(CHECKPOINT, QUESTION, where=CPU, plain=True, write=pieces.append, **settings)
    done = CliRunner().invoke(cli, ["generate", "bundled", QUESTION, "--seed", "3", "--thinking"])
    assert done.stdout == "".join(pieces)
    assert len(pieces) > 1
    assert "thoughts: " in done.stderr
    assert "thoughts" not in done.stdout
    assert "<|channel>" not in done.stdout + done.stderr
    assert "####" in done.stdout


def test_a_prompt_too_long_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "open", lambda *_, **__: pytest.fail("loaded"))
    limit = load(CHECKPOINT).config.text_config.max_position_embeddings
    done = CliRunner().invoke(cli, ["generate", "bundled", "seven apples " * limit])
    assert isinstance(done.exception, InputError)
    assert f"within max_new_tokens 128 and a total length of {limit}" in str(done.exception)


def test_an_empty_prompt_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was answered with nonsense."""
    monkeypatch.setattr(watching, "open", lambda *_, **__: pytest.fail("loaded"))
    for prompt in ("", " \n"):
        done = CliRunner().invoke(cli, ["generate", "bundled", prompt])
        assert isinstance(done.exception, InputError)
        assert "the prompt is empty" in str(done.exception)


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
    seen = CliRunner().invoke(cli, [*arguments, str(picture), "--image-tokens", "71"])
    assert isinstance(seen.exception, InputError)
    refused = CliRunner().invoke(cli, [*arguments, str(broken)])
    assert "not a picture" in str(refused.exception)


def test_a_model_larger_than_the_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    with pytest.raises(ResourceError, match="weights as float32, and cpu has"):
        load(tiny_checkpoint)


def test_no_such_checkpoint_is_one_line() -> None:
    done = CliRunner().invoke(cli, ["generate", "./nowhere", QUESTION])
    assert done.exception is not None
    assert "no such folder" in str(done.exception)
