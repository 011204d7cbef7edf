"""A checkpoint that answers evaluation's requests in this process.

Weights are dequantized and activations rounded as asked, so the accuracy of W4A4 can be scored
without a Blackwell GPU. The recipe says in which dtype both models compute; else float32 on a CPU (the
BF16 model too: its weights are BF16 values) and BF16 on a GPU.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from recovery.samples import Batch, Completion, Finished, Request
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.recipe import ActivationMode
from quantize.runtime import Sampler, StepRecord, generate, open
from quantize.runtime.chat import encode_chat, load_tokenizer
from quantize.runtime.modules.engine import ModelEngine
from quantize.runtime.modules.passes import canvas_length, decode_canvas, encode_prompts

RECORDED_CANVASES = 2


class Answerer:
    """A model, its tokenizer and sampler.

    Args:
        folder: the checkpoint.
        digest: its fingerprint.
        activations: how activations are rounded.
        sampler: of both models that are compared.
        device: where the model runs.
        dtype: name of the dtype it computes in, None for the device's own.
    """

    def __init__(
        self,
        folder: Path,
        digest: str,
        activations: ActivationMode,
        sampler: Sampler,
        device: str,
        dtype: str | None = None,
    ) -> None:
        self.dtype: torch.dtype = getattr(
            torch, dtype or ("float32" if device == "cpu" else "bfloat16")
        )
        self.folder = folder
        self.activations: ActivationMode = activations
        self.device = device
        self.sampler = sampler
        self.tokenizer = load_tokenizer(folder)
        self.sampler_settings: dict[str, Any] = asdict(sampler) | {"dtype": str(self.dtype)}
        self.made_with: dict[str, Any] = {
            "model": digest,
            "activations": activations,
            "device": device if device == "cpu" else torch.cuda.get_device_name(device),
            # Sums of another order are other float32 numbers; a GPU's do not depend on the CPU.
            "threads": torch.get_num_threads() if device == "cpu" else None,
            "torch": torch.__version__,
        }
        self._model: DiffusionGemmaForBlockDiffusion | None = None

    @property
    def model(self) -> DiffusionGemmaForBlockDiffusion:
        """The model, loaded when it is first needed: a finished task needs none."""
        if self._model is None:
            engine = open(
                self.folder, device=self.device, activations=self.activations, dtype=self.dtype,
                kind="modules",
            )  # fmt: skip
            assert isinstance(engine, ModelEngine)  # as asked
            self._model = engine.model
        return self._model

    @property
    def canvas_length(self) -> int:
        """Tokens of one canvas."""
        return canvas_length(self.model)

    def seconds_per_step(self, batch_size: int) -> float:
        """Time one denoising step of a batch of canvases, the second of two."""
        prefix = encode_prompts(self.model, [self.tokenizer.encode("0")] * batch_size)
        canvas = torch.zeros(batch_size, self.canvas_length, dtype=torch.long, device=self.device)
        seconds = 0.0
        for _ in range(2):
            started = time.perf_counter()
            decode_canvas(self.model, prefix, canvas, None).sum().item()  # waits for a GPU
            seconds = time.perf_counter() - started
        return seconds

    def __call__(self, batches: Sequence[Batch]) -> Iterator[Finished]:
        """Answer batches, one after the other."""
        for batch in batches:
            yield batch, self.answer(batch)

    def answer(self, batch: Batch) -> list[Completion]:
        """Answer the requests of one task as one batch of the model."""
        samples = generate(
            self.model,
            [self._encode(request) for request in batch],
            [request.seed for request in batch],
            max_new_tokens=max(request.max_new_tokens for request in batch),
            sampler=self.sampler,
        )
        return [
            Completion(
                text=self.tokenizer.decode(sample.tokens, skip_special_tokens=False),
                tokens=sample.new_tokens,
                denoising_steps=sample.steps_per_canvas,
                truncated=sample.finish == "length",
            )
            for sample in samples
        ]

    def record(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return how the first canvases of some samples came about, to look at.

        Returns:
            `vocabulary`, id -> text of every token that occurs; `samples`, one entry a request: its
            prompt and its steps, each with the canvas' index, the most probable `ids` at every
            position ("7 105 9") and which of them were `accepted` ("101").
        """
        samples: list[dict[str, Any]] = [{"prompt": r.prompt, "steps": []} for r in requests]

        def note(record: StepRecord) -> None:
            columns = (record.rows, record.argmax, record.accepted.int())
            for row, ids, accepted in zip(*(c.tolist() for c in columns), strict=True):
                step = {"canvas": record.canvas, "ids": _joined(ids, " ")}
                samples[row]["steps"].append(step | {"accepted": _joined(accepted, "")})

        longest = max(request.max_new_tokens for request in requests)
        generate(
            self.model,
            [self._encode(request) for request in requests],
            [request.seed for request in requests],
            max_new_tokens=min(longest, RECORDED_CANVASES * canvas_length(self.model)),
            sampler=self.sampler,
            on_step=note,
        )
        used = {i for sample in samples for step in sample["steps"] for i in step["ids"].split()}
        words = {i: self.tokenizer.decode([int(i)]) for i in sorted(used, key=int)}
        return {"vocabulary": words, "samples": samples}

    def _encode(self, request: Request) -> list[int]:
        messages = [{"role": "user", "content": request.prompt}]
        return encode_chat(self.tokenizer, messages, thinking=request.thinking)


def _joined(values: Iterable[int], separator: str) -> str:
    return separator.join(map(str, values))
