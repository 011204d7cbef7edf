"""A server in this process for tests, on the bundled model or on an engine that waits to be told."""

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import torch
from fused_dequant.sampler.canvas import random_tokens
from openai import DefaultHttpxClient, OpenAI
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.layout import model_config
from quantize.checkpoints.load import load
from quantize.checkpoints.reader import Checkpoint
from quantize.runtime import Sample, Sampler, generate
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import Canvas, Engine, Meanwhile, OnDraft
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.runtime.prompt.images import Images
from quantize.runtime.sampler.known_tokens import Given
from quantize.runtime.weights.load import TextWeights, load_packed
from quantize.serve.app import create_app
from quantize.serve.constraint import Constraint
from quantize.serve.grammars import Grammars, Matcher
from quantize.serve.options import Options
from quantize.serve.server import Server, with_template
from quantize.serve.service import Service
from quantize.serve.text import Text

SAMPLER = Sampler.from_checkpoint(CHECKPOINT)
# For tests that look at no sense of an answer: what it takes a model to make one costs most of them.
FEW: Any = {"num_inference_steps": 3}
HASTY = replace(SAMPLER, max_denoising_steps=3)
L, V, EOS, CLOSES = 16, 1024, (1, 106, 50), 101  # a canvas, the vocabulary, and what ends thoughts
QUESTION = "Tom has 5 apples and buys 3 more. How many apples does Tom have?"


@cache
def model() -> DiffusionGemmaForBlockDiffusion:
    """The oracle in float32."""
    return load(CHECKPOINT)


def engine_of(capacity: int, **settings: Any) -> FusedEngine:
    """An engine over weights that are loaded once."""
    return FusedEngine(_weights(), capacity=capacity, **settings)


@cache
def _weights() -> TextWeights:
    return load_packed(CHECKPOINT, "cpu")


@cache
def tokenizer() -> Any:
    return load_tokenizer(CHECKPOINT)


@cache
def in_process(
    question: str, seed: int, *, thinking: bool = False, max_tokens: int = 128,
    sampler: Sampler = SAMPLER,
) -> Sample:  # fmt: skip
    """What the runtime answers without any server."""
    ids = encode_chat(tokenizer(), [{"role": "user", "content": question}], thinking=thinking)
    (sample,) = generate(engine_of(1), [ids], [seed], max_new_tokens=max_tokens, sampler=sampler)
    return sample


def chances_after_one_step(question: str, seed: int) -> Tensor:
    """Log-probabilities [L, V] of the first canvas' first step, in float64 from the engine's logits.

    No sampler, guide or server has a part in them.
    """
    ids = encode_chat(tokenizer(), [{"role": "user", "content": question}], thinking=False)
    passes = engine_of(1).passes([ids])
    canvas = random_tokens(torch.tensor([seed]), 0, passes.canvas_length, passes.vocabulary)
    decoded = passes.decode([0], canvas, None)
    (piece,) = decoded.pieces()
    return decoded.logits(piece)[0].double().log_softmax(-1)


def written(
    grammars: Grammars, matcher: Matcher, room: int, seed: int, *, thinking: bool = False,
    texts: Sequence[list[int]] = (),
) -> list[int]:  # fmt: skip
    """What a model of random logits commits, with no more sense than a form gives it."""
    noise = torch.Generator().manual_seed(seed)
    constraint = Constraint(grammars, matcher, room, CLOSES if thinking else None, None, texts)
    tokens: list[int] = []
    while len(tokens) < room:
        begun = constraint.lead(L)
        for _ in range(100):
            logits = torch.randn(L, V, generator=noise) * 4
            logits[:, list(EOS)] -= 8
            canvas = [*begun, *logits.argmax(-1).tolist()[len(begun) :]]
            verdict = constraint.settle(logits, canvas)
            assert len(verdict.tokens) == L
            if verdict.keep is None:
                break
            assert len(begun) < verdict.keep < L
            begun = verdict.tokens[: verdict.keep]
        else:
            raise AssertionError("it is denoised again for ever")
        tokens += verdict.tokens
        if set(EOS) & set(verdict.tokens):
            break
    assert constraint.error is None
    end = next((n for n, token in enumerate(tokens) if token in EOS), len(tokens))
    assert end <= room
    return tokens[:end]


def text_of(sample: Sample) -> str:
    return tokenizer().decode(sample.tokens, skip_special_tokens=True)


class ScriptedEngine:
    """Denoises a canvas only when it is allowed to; sample s of a prompt says "s1 ", "s2 ", ..."""

    canvas_length = 8
    max_length = 4096
    prefixes = None
    device = torch.device("cpu")

    def __init__(self, capacity: int = 2) -> None:
        self.capacity = self.slots = capacity
        self.allowed = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.said: dict[int, int] = {}  # canvases, by slot that is taken
        self.batches: list[list[int]] = []
        self.fault: Exception | None = None
        self.free = False  # whether it waits for no one
        self.lends = True  # whether its caller may use the time of a canvas

    def admit(
        self, slot: int, prompt: Sequence[int], seed: int, sampler: Sampler,
        images: Images | None = None, given: Given | None = None,
    ) -> None:  # fmt: skip
        assert slot not in self.said
        self.said[slot] = 0

    def denoise(
        self, slots: Sequence[int], on_draft: OnDraft | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[Canvas]:  # fmt: skip
        self.batches.append(list(slots))
        if meanwhile is not None and self.lends:
            meanwhile()
        if not self.free:
            self.entered.release()
            assert self.allowed.acquire(timeout=60)
        if self.fault is not None:
            raise self.fault
        return [Canvas(self._say(slot), 2) for slot in slots]

    def release(self, slot: int) -> None:
        self.said.pop(slot, None)

    def _say(self, slot: int) -> list[int]:
        self.said[slot] += 1
        ids = tokenizer().encode(f"c{self.said[slot]} ", add_special_tokens=False)
        return (ids + tokenizer().encode(" go" * 8, add_special_tokens=False))[:8]


class TellingEngine(ScriptedEngine):
    """Answers prompt after prompt with the texts that it was given; remembers the prompts."""

    canvas_length = 16

    def __init__(self, *texts: str, capacity: int = 1) -> None:
        super().__init__(capacity)
        self.free = True
        self.texts = list(texts)
        self.prompts: list[list[int]] = []
        self.givens: list[Any] = []
        self.saying: dict[int, list[int]] = {}

    def admit(
        self, slot: int, prompt: Sequence[int], seed: int, sampler: Sampler,
        images: Images | None = None, given: Given | None = None,
    ) -> None:  # fmt: skip
        super().admit(slot, prompt, seed, sampler, images, given)
        self.givens.append(given)
        self.prompts.append(list(prompt))
        self.saying[slot] = tokenizer().encode(self.texts.pop(0), add_special_tokens=False)

    def _say(self, slot: int) -> list[int]:
        canvas = self.saying[slot][: self.canvas_length]
        self.saying[slot] = self.saying[slot][self.canvas_length :]
        return canvas + [1] * (self.canvas_length - len(canvas))


@cache
def text_with_tools() -> Text:
    """The bundled tokenizer, with a chat template that declares tools as Gemma 4's does."""
    found = load_tokenizer(CHECKPOINT)
    return Text(with_template(found, "tools"))


class Running:
    """A server that runs, and clients for it."""

    def __init__(self, server: Server, service: Service) -> None:
        self.server, self.service, options = server, service, service.options
        port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.key = options.api_key or "unused"
        headers = {"Authorization": f"Bearer {self.key}"} if options.api_key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=120, verify=False)
        self.openai = OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.key,
            max_retries=0,
            http_client=DefaultHttpxClient(verify=False),  # else it reads all authorities, twice
        )

    def ask(self, question: str = QUESTION, **options: Any) -> Any:
        """One chat through the official client."""
        return self.openai.chat.completions.create(
            model="bundled", messages=[{"role": "user", "content": question}], **options
        )

    def settle(self) -> None:
        """Wait until nothing runs or waits."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            state = self.http.get("/health").json()
            if state["running"] == state["waiting"] == 0:
                return
            time.sleep(0.01)
        raise AssertionError(f"still busy: {state}")


@contextmanager
def running(
    engine: Engine | None = None, text: Text | None = None, **settings: Any
) -> Generator[Running]:
    """A server on a free port until the block ends."""
    options = Options("bundled", port=0, **settings)
    engine = engine or engine_of(options.max_num_seqs)
    config = model_config(Checkpoint.open(CHECKPOINT).config)
    service = Service(engine, text or Text(tokenizer()), config, SAMPLER, options)
    server = Server(create_app(service), options, service.leave)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        found = Running(server, service)
        with found.http, found.openai:
            yield found
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
