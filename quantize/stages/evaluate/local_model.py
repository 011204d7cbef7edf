"""Lets a checkpoint answer evaluation's requests in this process.

The engine is batch-invariant: a sample does not depend on other samples in its batch, and slots are
refilled as samples end. Activations are rounded in the requested mode, so the accuracy of W4A4 can
be scored without a Blackwell GPU.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantize.checkpoints.reader import read_config
from quantize.errors import InputError, ResourceError
from quantize.host.progress import say
from quantize.recipe.sections import AT_ONCE
from quantize.recovery.samples import Completion, Finished, Request, Waiting
from quantize.runs.digests import sha256_of
from quantize.runs.manifest import package_versions, tokenizer_digest
from quantize.runtime import Placement, Sample, Sampler, StepRecord, generate, open, sized
from quantize.runtime.engine.interface import Engine, each_completed
from quantize.runtime.engine.llama_cpp import LlamaCpp, made_from
from quantize.runtime.gpu.gpus import launches_digest
from quantize.runtime.gpu.memory import MANY
from quantize.runtime.gpu.placement import free_unused
from quantize.runtime.gpu.trust import condition
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer

RECORDED_CANVASES = 2


class Answerer:
    """A `Backend` that runs the checkpoint in `folder`, whose fingerprint is `digest`.

    `place` says where it runs and how activations are rounded. `place.max_context` is the number of
    positions of the longest prompt with its answer, None if unknown. `capacity` is the most samples
    of a pass; None means AT_ONCE (16). If weights are streamed, a loaded layer serves several
    passes. For each committed canvas `announce(0, tokens)` is called; padding is not counted.

    Raises:
        ResourceError: not one sample fits the GPU.
    """

    def __init__(
        self,
        folder: Path,
        digest: str,
        sampler: Sampler,
        place: Placement,
        capacity: int | None = None,
    ) -> None:
        device, self.folder = place.device, folder
        self._asked = replace(place, capacity=capacity or AT_ONCE, batches=MANY)
        self._place = sized(folder, self._asked)
        model: dict[str, Any] = {"weights": digest, "activations": place.activations}
        model |= condition(folder, place.activations, torch.device(device))
        if device != "cpu":
            model["capacity"] = self.capacity  # passes have the shape of a full engine
        self.sampler = sampler
        self.tokenizer = load_tokenizer(folder)
        self.sampler_settings: dict[str, Any] = sampler.noted() | {
            "dtype": "torch.bfloat16",
            "engine": "fused",
            "batch_invariant": True,
        }
        # Everything that can change an answer; baseline and candidate differ only in `model`.
        self.made_with: dict[str, Any] = {
            "model": model,
            "batch_size": 1,  # a sample does not depend on its batch
            "tokenizer": tokenizer_digest(folder),
            "sampler": self.sampler_settings,
            "dtype": "torch.bfloat16",
            "engine": "fused",
            "device": device if device == "cpu" else torch.cuda.get_device_name(device),
            "threads": None,  # cores never share a product, so their number changes no answer
            "launches": launches_digest(torch.device(device)),
            "versions": package_versions(),
        }
        self.also_at: Sequence[int] = ()  # lower limits of tokens, at which answers are yielded too
        self.announce: Callable[[int, int], None] = lambda samples, tokens: None
        self.loading_seconds = 0.0
        self._engine: Engine | None = None
        self._loaded: float | None = None  # when, until its first canvas is finished

    @property
    def capacity(self) -> int:
        """The most samples of a pass: as many as were asked for, or fewer if so many do not fit."""
        return self._place.capacity

    def engine(self, context: int) -> Engine:
        """Return an engine with room for `context` positions; load one if none with room is loaded.

        Raises:
            ResourceError: the GPU has no room for the planned number of samples with this context.
        """
        if self._engine is None or self._engine.max_length < context:
            self.release()
            began, planned = time.monotonic(), self.capacity
            if context > (self._place.max_context or 0):
                asked = replace(self._asked, capacity=planned, max_context=context)
                self._place = sized(self.folder, asked)
            if self.capacity < planned:
                raise ResourceError(
                    f"{self.folder}: {context:,} positions leave room for {self.capacity} samples at "
                    f"once, {planned} were planned; --batch-size {self.capacity} plans for so many"
                )
            self._engine = open(self.folder, self._place, batch_invariant=True)
            self._loaded = time.monotonic()
            self.loading_seconds += self._loaded - began
            say(f"{self.folder}: loaded in {self._loaded - began:.1f} s")
        return self._engine

    def release(self) -> None:
        """Free the model's memory; the next requests load it again."""
        if self._engine is None:
            return
        self._engine.close()
        self._engine = None
        free_unused(self._place.device)

    def __call__(self, requests: Waiting) -> Iterator[Finished]:
        """Yield each request that it takes as soon as it is answered, in any order.

        Before it, the same request at each limit of `also_at` is yielded, with the answer's beginning.
        """
        missing = requests.missing
        prompts, engine, _ = self._ready(missing)
        places = {request: index for index, request in enumerate(missing)}

        def announce(_: int, sample: Sample) -> None:
            if self._loaded is not None:
                seconds, self._loaded = time.monotonic() - self._loaded, None
                kernels = "" if self._place.device == "cpu" else ", kernels compiled and captured"
                say(f"{self.folder}: the first canvas {seconds:.1f} s later{kernels}")
            new = sum(token != self.sampler.pad_token_id for token in sample.committed[-1])
            self.announce(0, new)

        done = each_completed(
            engine, prompts, [request.seed for request in missing],
            max_new_tokens=[request.max_new_tokens for request in missing], sampler=self.sampler,
            on_canvas=announce, order=(places[request] for request in requests),
        )  # fmt: skip
        for index, sample in done:
            request = missing[index]
            for limit in self.also_at:
                shorter = sample.within(limit, self.sampler)
                yield replace(request, max_new_tokens=limit), _completion(self.tokenizer, shorter)
            yield request, _completion(self.tokenizer, sample)

    def _ready(self, requests: Sequence[Request]) -> tuple[list[list[int]], Engine, int]:
        prompts = [_encode(self.tokenizer, request) for request in requests]
        budget = max(request.max_new_tokens for request in requests)
        config = read_config(self.folder)  # the headers of all tensors would take half a second
        canvas: int = config["canvas_length"]
        room = max(map(len, prompts)) + -(-budget // canvas) * canvas
        limit: int = config["text_config"]["max_position_embeddings"]
        return prompts, self.engine(min(room, limit)), budget

    def record(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Answer the first `capacity` requests; return how their first two canvases were denoised.

        Returns:
            A mapping for the report's viewer. `vocabulary` maps each token id that occurs to text.
            `samples` has each request's `prompt`, final `text` and `steps`. A step has its `canvas`
            (index) and, per position, the likeliest id (`ids` "7 105 9") and `accepted` ("101").
        """
        requests = requests[: self.capacity]
        samples: list[dict[str, Any]] = [{"prompt": r.prompt, "steps": []} for r in requests]

        def note(record: StepRecord) -> None:
            columns = (record.argmax.tolist(), record.accepted.int().tolist())
            for row, ids, accepted in zip(record.rows, *columns, strict=True):
                step = {"canvas": record.canvas, "ids": " ".join(map(str, ids))}
                samples[row]["steps"].append(step | {"accepted": "".join(map(str, accepted))})

        prompts, engine, budget = self._ready(requests)
        made = generate(
            engine,
            prompts,
            [request.seed for request in requests],
            max_new_tokens=min(budget, RECORDED_CANVASES * engine.canvas_length),
            sampler=self.sampler,
            on_step=note,
        )
        for sample, end in zip(samples, made, strict=True):
            sample["text"] = _completion(self.tokenizer, end).text
        used = {i for sample in samples for step in sample["steps"] for i in step["ids"].split()}
        words = {i: self.tokenizer.decode([int(i)]) for i in sorted(used, key=int)}
        return {"vocabulary": words, "samples": samples}


class ExportedAnswerer:
    """A `Backend` that runs a GGUF file in llama.cpp, with the sampler of the baseline `base`.

    `quantize export` made `file` from the checkpoint in `folder`, whose fingerprint is `digest`.
    `program` is llama.cpp's `llama-diffusion-gemma-server`.

    Raises:
        InputError: the file was made from another checkpoint, or there is no such program.
    """

    loading_seconds = 0.0

    def __init__(
        self, folder: Path, digest: str, file: Path, program: Path, base: Answerer
    ) -> None:
        if (stated := made_from(file)) != digest:
            raise InputError(
                f"{file}: made from {stated or 'something that it does not name'}, not from {folder} "
                f"({digest}); export that again"
            )
        if not program.is_file():
            raise InputError(f"{program}: no such program; name llama-diffusion-gemma-server")
        self.folder, self.file, self.program, self.sampler = folder, file, program, base.sampler
        self.tokenizer = load_tokenizer(folder)
        self.sampler_settings = base.sampler_settings
        model = {"weights": digest, "runtime": "llama.cpp"}
        model |= {"program": sha256_of(program), "file": sha256_of(file)}
        self.made_with: dict[str, Any] = base.made_with | {"model": model}
        self._running: LlamaCpp | None = None

    def __call__(self, requests: Waiting) -> Iterator[Finished]:
        """Yield each request with its answer, one after the other."""
        if self._running is None:
            canvas: int = read_config(self.folder)["canvas_length"]
            self._running = LlamaCpp(self.program, self.file, canvas)
        for request in requests:
            sample = self._running.answer(
                _encode(self.tokenizer, request),
                request.seed,
                max_new_tokens=request.max_new_tokens,
                sampler=self.sampler,
            )
            yield request, _completion(self.tokenizer, sample)

    def release(self) -> None:
        """End llama.cpp's process; the next requests start another."""
        if self._running is not None:
            self._running.close()
        self._running = None


def _encode(tokenizer: Any, request: Request) -> list[int]:
    messages = [{"role": "user", "content": request.prompt}]
    return encode_chat(tokenizer, messages, thinking=request.thinking)


def _completion(tokenizer: Any, sample: Sample) -> Completion:
    return Completion(
        text=tokenizer.decode(sample.tokens, skip_special_tokens=False),
        tokens=sample.new_tokens,
        denoising_steps=sample.steps_per_canvas,
        truncated=sample.finish == "length",
    )
