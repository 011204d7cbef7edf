"""Answer one prompt and show its canvas denoise: what `quantize generate` does.

In a terminal every denoising step is drawn over the last one: accepted tokens bright, the others as
the decoder's best guess so far, dim. The answer goes to stdout, everything else to stderr.
"""

import time
from pathlib import Path
from typing import Any

import torch
from rich.live import Live
from rich.text import Text

from quantize.load import load
from quantize.progress import console, say
from quantize.recipe import ActivationMode
from quantize.runtime import Sample, Sampler, StepRecord, generate
from quantize.runtime.chat import encode_chat, load_tokenizer


def watch(
    checkpoint: Path,
    prompt: str,
    *,
    thinking: bool,
    seed: int,
    max_new_tokens: int | None,
    activations: ActivationMode,
    plain: bool,
    device: str,
) -> str:
    """Generate the answer to a prompt.

    Args:
        checkpoint: folder of a BF16 or quantized checkpoint.
        prompt: the user's message.
        thinking: whether the model gets a thinking channel.
        seed: of the sampling noise; the same seed gives the same answer.
        max_new_tokens: budget, rounded up to whole canvases; None for the checkpoint's own.
        activations: how a quantized model's activations are rounded.
        plain: draw nothing while it denoises.
        device: where the model runs.

    Returns:
        The answer as the tokenizer writes it, with its thinking channel and without its end.

    Raises:
        InputError: a checkpoint that cannot be loaded, or a prompt too long for the model.
    """
    tokenizer = load_tokenizer(checkpoint)
    sampler = Sampler.from_checkpoint(checkpoint)
    say(f"loading {checkpoint}")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = load(checkpoint, activations=activations, dtype=dtype, device=device)
    ids = encode_chat(tokenizer, [{"role": "user", "content": prompt}], thinking=thinking)
    budget = max_new_tokens or sampler.max_new_tokens
    started = time.monotonic()
    if plain:
        (sample,) = generate(model, [ids], [seed], max_new_tokens=budget, sampler=sampler)
    else:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            drawing = _Drawing(tokenizer, live)
            (sample,) = generate(
                model, [ids], [seed], max_new_tokens=budget, sampler=sampler, on_step=drawing.draw
            )
    say(_summary(sample, time.monotonic() - started))
    return tokenizer.decode(sample.tokens, skip_special_tokens=False)


class _Drawing:
    """Draws finished canvases and, below them, the one that is being denoised."""

    def __init__(self, tokenizer: Any, live: Live) -> None:
        self.tokenizer, self.live = tokenizer, live
        self.finished, self.last = "", ""
        self.canvas = 0

    def draw(self, record: StepRecord) -> None:
        """Draw one denoising step of a batch of one."""
        if record.canvas > self.canvas:
            self.canvas, self.finished = record.canvas, self.finished + self.last
        tokens, accepted = record.argmax[0].tolist(), record.accepted[0].tolist()
        self.last = self.tokenizer.decode(tokens)
        text = Text(self.finished)
        for token, is_accepted in zip(tokens, accepted, strict=True):
            text.append(self.tokenizer.decode([token]), style="bold" if is_accepted else "dim")
        text.append(f"\ncanvas {record.canvas + 1}, step {record.step}", style="cyan")
        self.live.update(text, refresh=True)


def _summary(sample: Sample, seconds: float) -> str:
    steps = ", ".join(map(str, sample.steps_per_canvas))
    return (
        f"{sample.new_tokens} tokens in {sample.canvases} canvases of {steps} steps: "
        f"{sample.tokens_per_forward:.1f} tokens a forward, {seconds:.1f} s, ended by "
        f"{'EOS' if sample.finish == 'eos' else 'its budget'}"
    )
