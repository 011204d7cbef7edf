"""Answer one prompt and show its canvas denoise: what `quantize generate` does.

In a terminal every denoising step is drawn over the last one: accepted tokens bright, the others as
the decoder's best guess so far, dim. The answer goes to stdout, everything else to stderr.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from rich.live import Live
from rich.text import Text
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.load import load
from quantize.progress import console, say, track
from quantize.recipe import ActivationMode
from quantize.runtime import Sample, Sampler, StepRecord, generate
from quantize.runtime.chat import encode_chat, load_tokenizer
from quantize.runtime.engine import complete
from quantize.runtime.fused_engine import FusedEngine
from quantize.runtime.images import open_picture, place, prepare
from quantize.runtime.packed import load_packed


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
    pictures: Sequence[Path] = (),
    soft_tokens: int = 280,
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
        pictures: files that the prompt shows before its text.
        soft_tokens: most tokens a picture takes.

    Returns:
        The answer as the tokenizer writes it, with its thinking channel and without its end.

    Raises:
        InputError: a checkpoint or picture that cannot be loaded, or a prompt too long for the model.
    """
    opened = [open_picture(path) for path in pictures]
    tokenizer = load_tokenizer(checkpoint)
    sampler = Sampler.from_checkpoint(checkpoint)
    parts = [{"type": "image"}] * len(opened) + [{"type": "text", "text": prompt}]
    content = parts if opened else prompt
    ids = encode_chat(tokenizer, [{"role": "user", "content": content}], thinking=thinking)
    budget = max_new_tokens or sampler.max_new_tokens
    say(f"loading {checkpoint}")
    if device != "cpu" and activations == "none" and not opened:
        answer = _on_kernels(checkpoint, device, ids, seed, budget, sampler)
    else:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = load(checkpoint, activations=activations, dtype=dtype, device=device)
        answer = _on_modules(model, ids, opened, soft_tokens, seed, budget, sampler)
    started = time.monotonic()
    if plain:
        sample = answer(None)
    else:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            sample = answer(_Drawing(tokenizer, live).draw)
    say(_summary(sample, time.monotonic() - started))
    return tokenizer.decode(sample.tokens, skip_special_tokens=False)


Draw = Callable[
    [int, list[int], list[bool]], None
]  # step, most probable tokens, which are accepted
Answer = Callable[[Draw | None], Sample]


def _on_kernels(
    checkpoint: Path, device: str, ids: list[int], seed: int, budget: int, sampler: Sampler
) -> Answer:
    """Load into the fused kernels, with room for this one answer."""
    weights = load_packed(checkpoint, device, on_layer=lambda rows: track(rows, "layers loaded"))
    length = weights.config.canvas_length
    room = len(ids) + -(-budget // length) * length
    limit = weights.config.text_config.max_position_embeddings
    engine = FusedEngine(weights, capacity=1, max_context=min(room, limit))

    def answer(draw: Draw | None) -> Sample:
        show = None if draw is None else lambda _slot, step, best, kept: draw(step, best, kept)
        return complete(
            engine, [ids], [seed], max_new_tokens=budget, sampler=sampler, on_draft=show
        )[0]

    return answer


def _on_modules(
    model: DiffusionGemmaForBlockDiffusion,
    ids: list[int],
    pictures: Sequence[Image],
    soft_tokens: int,
    seed: int,
    budget: int,
    sampler: Sampler,
) -> Answer:
    """Answer on transformers' modules, which take pictures and round activations."""
    images = None
    if pictures:
        images, counts = prepare(pictures, model.config, soft_tokens)
        ids = place(ids, counts, model.config)

    def answer(draw: Draw | None) -> Sample:
        def show(record: StepRecord) -> None:
            if draw is not None:
                draw(record.step, record.argmax[0].tolist(), record.accepted[0].tolist())

        return generate(
            model, [ids], [seed], max_new_tokens=budget, sampler=sampler,
            on_step=show, images=[images],
        )[0]  # fmt: skip

    return answer


class _Drawing:
    """Draws finished canvases and, below them, the one that is being denoised."""

    def __init__(self, tokenizer: Any, live: Live) -> None:
        self.tokenizer, self.live = tokenizer, live
        self.finished, self.last = "", ""
        self.canvas = 0

    def draw(self, step: int, tokens: list[int], accepted: list[bool]) -> None:
        """Draw one denoising step; step 1 begins a canvas."""
        if step == 1:
            self.canvas, self.finished = self.canvas + 1, self.finished + self.last
        self.last = self.tokenizer.decode(tokens)
        text = Text(self.finished)
        for token, is_accepted in zip(tokens, accepted, strict=True):
            text.append(self.tokenizer.decode([token]), style="bold" if is_accepted else "dim")
        text.append(f"\ncanvas {self.canvas}, step {step}", style="cyan")
        self.live.update(text, refresh=True)


def _summary(sample: Sample, seconds: float) -> str:
    steps = ", ".join(map(str, sample.steps_per_canvas))
    return (
        f"{sample.new_tokens} tokens in {sample.canvases} canvases of {steps} steps: "
        f"{sample.tokens_per_forward:.1f} tokens a forward, {seconds:.1f} s, ended by "
        f"{'EOS' if sample.finish == 'eos' else 'its budget'}"
    )
