"""The server on a GPU at the real size: `python tests/full_size_serve.py CHECKPOINT REPORT.json`.

Serves CHECKPOINT from this process, asks it over HTTP and then takes its engine for the same work
without a server: 16 fixed steps a canvas, twelve canvases, prompts of 1,020 tokens. It tells

    seconds from the start of the process to readiness, and to the first canvas of an answer
    tokens a second over HTTP while all slots are busy: one connection, and eight for four slots
    tokens a second of the engine alone, as `quantize bench` measures them: prompts not counted
    how many samples of equal prompt and seed have the same text alone and among others, as served by
    default and with `--batch-invariant`; then the latter with the bundled model

Exits 1 when a batch-invariant answer differs or HTTP is more than 5 % slower than the engine.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from quantize.bench import NEVER, _measure
from quantize.bundled import CHECKPOINT
from quantize.checkpoint import Checkpoint
from quantize.pipeline import best_device
from quantize.runtime import Sampler
from quantize.runtime.chat import load_tokenizer
from quantize.runtime.engine import Engine
from quantize.runtime.fused_engine import FusedEngine
from quantize.runtime.packed import model_config
from quantize.serve.options import Options
from quantize.serve.pictures import Pictures
from quantize.serve.server import make_server, open_engine
from quantize.serve.text import Text

PORT, STEPS, CANVASES, CONTEXT = 8123, 16, 12, 1024
FIXED = {"num_inference_steps": STEPS, "confidence_threshold": NEVER}
WORDS = "the shop sells seven boxes of apples and nine single ones each day of the week "


@contextmanager
def serving(checkpoint: Path, engine: Engine | None = None, **settings: Any) -> Iterator[Engine]:
    """Serve as `quantize serve` does, from a thread; yield the engine once it answers."""
    options = Options("served", port=PORT, **settings)
    engine = engine or open_engine(checkpoint, options, "none", best_device())
    pictures = Pictures(model_config(Checkpoint.open(checkpoint).config))
    sampler = Sampler.from_checkpoint(checkpoint)
    server = make_server(engine, Text(load_tokenizer(checkpoint)), pictures, sampler, options)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield engine
    finally:
        server.should_exit = True
        thread.join()


def prompt_of(seed: int, length: int) -> str:
    """Return a prompt of its own for each seed."""
    return f"Question {seed}: " + WORDS * (length // 22)


@dataclass
class Heard:
    """An answer as it came: its text, when each canvas did (seconds), and the usage."""

    text: str = ""
    canvases: list[float] = field(default_factory=list[float])
    usage: dict[str, Any] = field(default_factory=dict[str, Any])


def ask(seed: int, canvases: int, length: int, **controls: Any) -> Heard:
    """Stream a completion of a seed's prompt."""
    body = {"model": "served", "prompt": prompt_of(seed, length), "seed": seed, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "max_tokens": 256 * canvases} | controls
    heard = Heard()
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            heard.usage |= chunk["usage"] or {}
            for choice in chunk["choices"]:
                heard.text += choice["text"]
                heard.canvases.append(time.perf_counter())
    if heard.usage["canvases"] != len(heard.canvases):
        raise SystemExit(f"{heard.usage['canvases']} canvases, heard of {len(heard.canvases)}")
    return heard


def asked_together(seeds: list[int], connections: int, **arguments: Any) -> list[Heard]:
    """Return the answers to the prompts of all seeds."""
    with ThreadPoolExecutor(connections) as pool:
        return list(pool.map(lambda seed: ask(seed, **arguments), seeds))


def rate(answers: list[Heard], slots: int) -> float:
    """Tokens a second, of whole canvases, while all slots are busy.

    From when `slots` answers have begun to when fewer are unfinished; a sample of random weights that
    runs into an end of sequence by chance leaves no slot idle in between.
    """
    begun = sorted(answer.canvases[0] for answer in answers)[slots - 1]
    ended = sorted(answer.canvases[-1] for answer in answers)[-slots]
    heard = sum(begun < at <= ended for answer in answers for at in answer.canvases)
    if heard < slots * CANVASES:
        raise SystemExit(f"only {heard} canvases while {slots} slots were busy")
    return 256 * heard / (ended - begun)


def same(alone: list[Heard], beside: list[Heard]) -> str:
    """Say how many answers of the first have the same text in the second."""
    pairs = list(zip(alone, beside, strict=False))
    return f"{sum(a.text == b.text for a, b in pairs)} of {len(pairs)}"


def at_full_size(checkpoint: Path, length: int) -> dict[str, Any]:
    """Measure a checkpoint over HTTP and without."""
    begun = psutil.Process().create_time()
    with serving(checkpoint) as engine:
        facts: dict[str, Any] = {"ready_s": time.time() - begun}
        first = ask(0, 1, length)
        facts |= {"first_canvas_s": time.time() - begun}
        facts["prompt_tokens"] = first.usage["prompt_tokens"]
        given = {"canvases": CANVASES, "length": length, **FIXED}
        for count in (4, 2, 1):  # captures the graphs of these settings
            asked_together(list(range(count)), count, **given | {"canvases": 2})
        alone = asked_together([0, 1], 1, **given)
        beside = asked_together(list(range(12)), 8, **given)
        facts["http_tokens_s"] = {"1": rate(alone, 1), "4": rate(beside, 4)}
        facts["same_text_alone_and_beside"] = same(alone, beside)
        print(json.dumps(facts), flush=True)
        if not isinstance(engine, FusedEngine):
            raise SystemExit("needs a GPU")
        facts["engine_tokens_s"] = engine_rates(engine, checkpoint, length)
    padded = FusedEngine(engine.model.weights, batch_invariant=True)
    with serving(checkpoint, padded, batch_invariant=True):
        given |= {"canvases": 2}
        alone = asked_together([0, 1, 2], 1, **given)
        facts["same_text_batch_invariant"] = same(alone, asked_together(list(range(8)), 8, **given))
    return facts


def engine_rates(engine: FusedEngine, checkpoint: Path, length: int) -> dict[str, float]:
    """Tokens a second of the engine alone, by batch, as `quantize bench` measures them."""
    tokenizer = load_tokenizer(checkpoint)
    prompts = [tokenizer.encode(prompt_of(seed, length)) for seed in range(4)]
    own = Sampler.from_checkpoint(checkpoint)
    sampler = replace(own, max_denoising_steps=STEPS, confidence_threshold=NEVER)
    rates: dict[str, float] = {}
    for batch in (1, 4):
        times = _measure(engine, prompts[:batch], sampler, CANVASES)
        rates[str(batch)] = batch * engine.canvas_length / times.canvas * 1e3
        for slot in range(batch):
            engine.release(slot)
    return rates


def invariant() -> bool:
    """Whether the bundled model answers alike alone and among seven others."""
    with serving(CHECKPOINT, batch_invariant=True):
        given = {"canvases": 2, "length": 66}
        alone = asked_together(list(range(8)), 1, **given)
        beside = asked_together(list(range(8)), 8, **given)
    return same(alone, beside) == "8 of 8" and len({answer.text for answer in alone}) > 1


def main() -> int:
    """Measure, print and write."""
    checkpoint, report = Path(sys.argv[1]), Path(sys.argv[2])
    facts = at_full_size(checkpoint, CONTEXT)
    shares = {
        batch: facts["http_tokens_s"][batch] / rate
        for batch, rate in facts["engine_tokens_s"].items()
    }
    facts |= {"http_share": shares}
    print(json.dumps(facts), flush=True)
    facts["batch_invariant"] = invariant()
    print(f"bundled model, --batch-invariant: {facts['batch_invariant']}")
    report.write_text(json.dumps(facts, indent=1))
    alike = facts["batch_invariant"] and facts["same_text_batch_invariant"] == "3 of 3"
    return 0 if alike and min(shares.values()) >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
