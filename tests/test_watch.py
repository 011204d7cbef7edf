"""`quantize generate`: the answer on stdout, the canvas drawn as it denoises."""

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.live import Live

from quantize import load as loading
from quantize.bundled import CHECKPOINT
from quantize.cli import cli
from quantize.errors import ResourceError
from quantize.load import load
from quantize.runtime import Sampler, StepRecord, generate
from quantize.runtime.chat import encode_chat, load_tokenizer
from quantize.watch import _Drawing

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


def test_the_drawing_shows_every_token_and_marks_the_accepted(tiny_step: StepRecord) -> None:
    tokenizer, out = load_tokenizer(CHECKPOINT), io.StringIO()
    console = Console(file=out, force_terminal=True, width=400, color_system="standard")
    with Live(console=console, auto_refresh=False) as live:
        _Drawing(tokenizer, live).draw(tiny_step)
    text = out.getvalue()
    assert "\x1b[1m apples" in text  # bold: accepted
    assert "\x1b[2m se" in text  # dim: not yet
    assert "canvas 1, step 4" in text


@pytest.fixture
def tiny_step() -> StepRecord:
    """A step of a canvas of two words, the first accepted."""
    import torch

    tokenizer = load_tokenizer(CHECKPOINT)
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in (" apples", " seven")]
    row = torch.tensor([[i for word in ids for i in word]])
    accepted = torch.tensor([[True] * len(ids[0]) + [False] * len(ids[1])])
    done = torch.tensor([False])
    return StepRecord(0, 4, torch.tensor([0]), row, row, accepted, row.float(), done)


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
