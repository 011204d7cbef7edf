"""The server on a GPU at the real size.

    python -m tests.benchmarks.full_size_serve CHECKPOINT REPORT.json

Serves CHECKPOINT from this process, asks it over HTTP from another, and then takes its engine for the
same work without a server: 16 fixed steps a canvas, twelve canvases, prompts of 1,020 tokens. It tells

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
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from quantize.bench.speed import NEVER, _measure
from quantize.bundled import CHECKPOINT
from quantize.checkpoints.layout import model_config
from quantize.checkpoints.reader import Checkpoint
from quantize.host.processes import best_device
from quantize.runtime import Placement, Sampler
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import Engine
from quantize.runtime.prompt.chat import load_tokenizer
from quantize.serve.app import create_app
from quantize.serve.options import Options
from quantize.serve.server import Server, open_engine
from quantize.serve.service import Service
from quantize.serve.text import Text
from tests.support.streams import Heard, asked_together, prompt_of, rate

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"
STEPS, CANVASES, CONTEXT = 16, 12, 1024
FIXED = {"num_inference_steps": STEPS, "confidence_threshold": NEVER}


@contextmanager
def serving(checkpoint: Path, engine: Engine | None = None, **settings: Any) -> Iterator[Engine]:
    """Serve as `quantize serve` does, from a thread; yield the engine once it answers."""
    options = Options("served", port=PORT, **settings)
    engine = engine or open_engine(
        checkpoint, options, Placement(best_device(), activations="none")
    )
    config = model_config(Checkpoint.open(checkpoint).config)
    sampler = Sampler.from_checkpoint(checkpoint)
    text = Text(load_tokenizer(checkpoint))
    service = Service(engine, text, config, sampler, options)
    server = Server(create_app(service), options, service.leave)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield engine
    finally:
        server.should_exit = True
        thread.join()


def asked(client: Executor, seeds: list[int], connections: int, **arguments: Any) -> list[Heard]:
    """Return the answers to the prompts of all seeds, heard in the client's process."""
    return client.submit(asked_together, URL, seeds, connections, **arguments).result()


def same(alone: list[Heard], beside: list[Heard]) -> str:
    """Say how many answers of the first have the same text in the second."""
    pairs = list(zip(alone, beside, strict=False))
    return f"{sum(a.text == b.text for a, b in pairs)} of {len(pairs)}"


def at_full_size(client: Executor, checkpoint: Path, length: int) -> dict[str, Any]:
    """Measure a checkpoint over HTTP and without."""
    begun = psutil.Process().create_time()
    with serving(checkpoint) as engine:
        facts: dict[str, Any] = {"ready_s": time.time() - begun}
        (first,) = asked(client, [0], 1, canvases=1, length=length)
        facts |= {"first_canvas_s": time.time() - begun}
        facts["prompt_tokens"] = first.usage["prompt_tokens"]
        given = {"canvases": CANVASES, "length": length, **FIXED}
        for count in (4, 2, 1):  # captures the graphs of these settings
            asked(client, list(range(count)), count, **given | {"canvases": 2})
        alone = asked(client, [0, 1], 1, **given)
        beside = asked(client, list(range(12)), 8, **given)
        facts["http_tokens_s"] = {
            str(slots): rate(answers, slots, slots * CANVASES)
            for slots, answers in ((1, alone), (4, beside))
        }
        facts["same_text_alone_and_beside"] = same(alone, beside)
        print(json.dumps(facts), flush=True)
        if not isinstance(engine, FusedEngine):
            raise SystemExit("needs a GPU")
        facts["engine_tokens_s"] = engine_rates(engine, checkpoint, length)
    padded = FusedEngine(engine.model.weights, batch_invariant=True)
    with serving(checkpoint, padded, batch_invariant=True):
        given |= {"canvases": 2}
        alone = asked(client, [0, 1, 2], 1, **given)
        beside = asked(client, list(range(8)), 8, **given)
        facts["same_text_batch_invariant"] = same(alone, beside)
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
        rates[str(batch)] = times["tokens_a_second"]
        for slot in range(batch):
            engine.release(slot)
    return rates


def invariant(client: Executor) -> bool:
    """Whether the bundled model answers alike alone and among seven others."""
    with serving(CHECKPOINT, batch_invariant=True):
        given = {"canvases": 2, "length": 66}
        alone = asked(client, list(range(8)), 1, **given)
        beside = asked(client, list(range(8)), 8, **given)
    return same(alone, beside) == "8 of 8" and len({answer.text for answer in alone}) > 1


def main() -> int:
    """Measure, print and write."""
    checkpoint, report = Path(sys.argv[1]), Path(sys.argv[2])
    with ProcessPoolExecutor(1, get_context("spawn")) as client:
        client.submit(prompt_of, 0, 1)  # it starts while the model is loaded
        facts = at_full_size(client, checkpoint, CONTEXT)
        shares = {
            batch: facts["http_tokens_s"][batch] / alone
            for batch, alone in facts["engine_tokens_s"].items()
        }
        facts |= {"http_share": shares}
        print(json.dumps(facts), flush=True)
        facts["batch_invariant"] = invariant(client)
    print(f"bundled model, --batch-invariant: {facts['batch_invariant']}")
    report.write_text(json.dumps(facts, indent=1))
    alike = facts["batch_invariant"] and facts["same_text_batch_invariant"] == "3 of 3"
    return 0 if alike and min(shares.values()) >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
