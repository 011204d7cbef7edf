"""The server on a GPU at the real size: `python tests/full_size_serve.py CHECKPOINT REPORT.json`.

Serves CHECKPOINT from this process, asks it over HTTP and then takes its engine for the same work
without a server: 16 fixed steps a canvas, twelve canvases, prompts of 1,020 tokens. It tells

    seconds from the start of the process to readiness, and to the first canvas of an answer
    tokens a second over HTTP: one connection, and eight, so that no slot waits for a client
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
from dataclasses import replace
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


def ask(seed: int, canvases: int, length: int, **controls: Any) -> dict[str, Any]:
    """Complete the prompt of a seed."""
    body = {"model": "served", "prompt": prompt_of(seed, length), "seed": seed}
    body |= {"max_tokens": 256 * canvases} | controls
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    return httpx.post(url, json=body, timeout=600).raise_for_status().json()


def asked_together(seeds: list[int], connections: int, **arguments: Any) -> tuple[float, list[Any]]:
    """Return tokens a second, and the answers."""
    started = time.perf_counter()
    with ThreadPoolExecutor(connections) as pool:
        answers = list(pool.map(lambda seed: ask(seed, **arguments), seeds))
    seconds = time.perf_counter() - started
    return sum(answer["usage"]["completion_tokens"] for answer in answers) / seconds, answers


def texts(answers: list[Any]) -> list[str]:
    """Return what was said."""
    return [answer["choices"][0]["text"] for answer in answers]


def same(alone: list[Any], beside: list[Any]) -> str:
    """Say how many answers of the first have the same text in the second."""
    pairs = list(zip(texts(alone), texts(beside), strict=False))
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def at_full_size(checkpoint: Path, length: int) -> dict[str, Any]:
    """Measure a checkpoint over HTTP and without."""
    begun = psutil.Process().create_time()
    with serving(checkpoint) as engine:
        facts: dict[str, Any] = {"ready_s": time.time() - begun}
        first = ask(0, 1, length)
        facts |= {"first_canvas_s": time.time() - begun}
        facts["prompt_tokens"] = first["usage"]["prompt_tokens"]
        given = {"canvases": CANVASES, "length": length, **FIXED}
        for count in (4, 2, 1):  # captures the graphs of these settings
            asked_together(list(range(count)), count, **given | {"canvases": 2})
        http, alone = asked_together([0, 1], 1, **given)
        facts["http_tokens_s"] = {"1": http}
        facts["http_tokens_s"]["4"], beside = asked_together(list(range(8)), 8, **given)
        facts["same_text_alone_and_beside"] = same(alone, beside)
        print(json.dumps(facts), flush=True)
        if not isinstance(engine, FusedEngine):
            raise SystemExit("needs a GPU")
        facts["engine_tokens_s"] = engine_rates(engine, checkpoint, length)
    padded = FusedEngine(engine.model.weights, batch_invariant=True)
    with serving(checkpoint, padded, batch_invariant=True):
        given |= {"canvases": 2}
        alone = asked_together([0, 1, 2], 1, **given)[1]
        facts["same_text_batch_invariant"] = same(
            alone, asked_together(list(range(8)), 8, **given)[1]
        )
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
        alone = texts(asked_together(list(range(8)), 1, **given)[1])
        beside = texts(asked_together(list(range(8)), 8, **given)[1])
    return alone == beside and len(set(alone)) > 1


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
