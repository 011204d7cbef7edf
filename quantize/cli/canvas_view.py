"""Answers one prompt and shows its canvas denoise, for `quantize generate`.

In a terminal every denoising step is drawn over the previous step: accepted tokens are bright, and
the decoder's best guesses at other positions are dim. With --plain, the text of a canvas is written
when the canvas is finished, and never changes. If it ends in half a character, this half waits for
the next canvas. The answer goes to stdout, thoughts and everything else to stderr.
"""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.text import Text

from quantize.checkpoints.layout import model_config
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.host.progress import console, say
from quantize.runtime import Placement, Sample, Sampler, open
from quantize.runtime.engine.interface import complete
from quantize.runtime.prompt.chat import encode_chat, sound_tokenizer, split_thoughts
from quantize.runtime.prompt.images import open_picture, place, prepare
from quantize.runtime.sampler.sample import canvas_budgets
from quantize.serve.text import Answer

Write = Callable[[str], object]
ASIDE = partial(console.print, end="", style="dim", highlight=False, markup=False, soft_wrap=True)
END = "\N{MIDDLE DOT}"  # drawn for an EOS before the canvas' last word


def watch(
    checkpoint: Path, prompt: str, *, thinking: bool, steps: int | None = None, seed: int,
    max_new_tokens: int | None, where: Placement, plain: bool, pictures: Sequence[Path],
    soft_tokens: int, write: Write,
) -> None:  # fmt: skip
    """Generate and show the answer to a prompt; the arguments are options of `quantize generate`.

    `write` gets the answer without thoughts: whole or, with `plain`, canvas by canvas. InputError:
    a checkpoint or picture cannot be loaded, or the prompt is empty or too long. ResourceError: no
    memory.
    """
    if not (prompt.strip() or pictures):
        raise InputError("the prompt is empty; write what the model shall answer, in quotes")
    tokenizer, sampler = sound_tokenizer(checkpoint), Sampler.from_checkpoint(checkpoint)
    sampler = sampler if steps is None else replace(sampler, max_denoising_steps=steps)
    config = model_config(Checkpoint.open(checkpoint).config)
    opened, images = [open_picture(path) for path in pictures], None
    parts = [{"type": "image"}] * len(opened) + [{"type": "text", "text": prompt}]
    chat = [{"role": "user", "content": parts if opened else prompt}]
    ids = encode_chat(tokenizer, chat, thinking=thinking)
    if opened:
        images, counts = prepare(opened, config, soft_tokens)
        ids = place(ids, counts, config)
    budget = max_new_tokens or sampler.max_new_tokens
    limit = config.text_config.max_position_embeddings
    (canvases,) = canvas_budgets([ids], budget, sampler, limit, config.canvas_length)
    say(f"loading {checkpoint}")
    room = min(len(ids) + canvases * config.canvas_length, limit)
    engine = open(checkpoint, replace(where, capacity=1, max_context=room))
    output = _Output(tokenizer, sampler, write, ASIDE)

    def answer(drawing: "_Drawing | None") -> Sample:
        return complete(
            engine, [ids], [seed], max_new_tokens=budget, sampler=sampler, images=[images],
            on_draft=None if drawing is None else drawing.draw,
            on_canvas=None if drawing else lambda _, sample: output.add(sample),
        )[0]  # fmt: skip

    started = time.monotonic()
    if plain:
        sample = answer(None)
    else:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            sample = answer(_Drawing(tokenizer, sampler.eos_token_ids, live))
    output.add(sample, ended=True)
    taken, seconds = ", ".join(map(str, sample.steps_per_canvas)), time.monotonic() - started
    of = "canvas" if sample.canvases == 1 else "canvases"
    say(
        f"{sample.new_tokens} tokens in {sample.canvases} {of} of {taken} steps: "
        f"{sample.tokens_per_forward:.1f} tokens a forward, {seconds:.1f} s, ended by "
        f"{'EOS' if sample.finish == 'eos' else 'its budget'}"
    )


class _Output:
    """Writes the part of an answer that no later canvas can change; thoughts go to `aside`."""

    def __init__(self, tokenizer: Any, sampler: Sampler, write: Write, aside: Write) -> None:
        split = partial(split_thoughts, tokenizer)
        self.answer = Answer(split, sampler, max_tokens=sys.maxsize, max_canvases=sys.maxsize)
        self.write, self.aside = write, aside

    def add(self, sample: Sample, *, ended: bool = False) -> None:
        begun, self.answer.sample = bool(self.answer.reasoning), sample
        self.answer.finish = "stop" if ended else None
        delta = self.answer.delta()
        if delta.reasoning:
            self.aside(delta.reasoning if begun else f"thoughts: {delta.reasoning}")
        if delta.content:
            self.write(delta.content)
        if ended:
            if self.answer.reasoning and not self.answer.reasoning.endswith("\n"):
                self.aside("\n")
            self.write("\n")


class _Drawing:
    """Draws finished canvases and the one being denoised, without the EOS that fill its end."""

    def __init__(self, tokenizer: Any, eos: Collection[int], live: Live) -> None:
        self.tokenizer, self.eos, self.live = tokenizer, eos, live
        self.finished, self.last = "", ""
        self.canvas = 0

    def draw(self, _slot: int, step: int, tokens: list[int], accepted: list[bool]) -> None:
        if step == 1:  # a canvas begins
            self.canvas, self.finished = self.canvas + 1, self.finished + self.last
        self.last = self.tokenizer.decode(list(takewhile(lambda t: t not in self.eos, tokens)))
        text = Text(self.finished)
        length = max((i + 1 for i, token in enumerate(tokens) if token not in self.eos), default=0)
        for token, is_accepted in list(zip(tokens, accepted, strict=True))[:length]:
            word = END if token in self.eos else self.tokenizer.decode([token])
            text.append(word, style="bold" if is_accepted else "dim")
        text.append(f"\ncanvas {self.canvas}, step {step}", style="cyan")
        self.live.update(text, refresh=True)
