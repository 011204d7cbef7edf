"""The server on a GPU at the real size: `python tests/full_size_serve.py CHECKPOINT REPORT.json`.

Starts `quantize serve CHECKPOINT` and measures, with 16 fixed steps a canvas and prompts of about 1,024
tokens:

    seconds from the start of the process to /health, and to the first canvas of an answer
    tokens a second over HTTP: one connection, and eight, so that no slot waits for a client
    the same of `quantize bench` on the same checkpoint, once the server has stopped
    of the samples of equal prompt and seed, how many have the same text alone and among others

and then, with the bundled model and `--batch-invariant`, that all of them have. Exits 1 when that fails
or HTTP is more than 5 % slower than the engine alone.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PORT, STEPS, CANVASES, CONTEXT = 8123, 16, 8, 1024
FIXED = {"num_inference_steps": STEPS, "confidence_threshold": 1e-30}
WORDS = "the shop sells seven boxes of apples and nine single ones each day of the week "


@contextmanager
def server(checkpoint: str, *options: str) -> Iterator[float]:
    """Yield the seconds until it answers, with the server running."""
    command = [sys.executable, "-m", "quantize", "serve", checkpoint, "--port", str(PORT), *options]
    started = time.monotonic()
    process = subprocess.Popen([*command, "--model-name", "served"], env=os.environ)
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}")
            try:
                httpx.get(f"http://127.0.0.1:{PORT}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield time.monotonic() - started
    finally:
        process.terminate()
        process.wait(60)


def ask(seed: int, canvases: int, length: int, **controls: Any) -> dict[str, Any]:
    """Complete a prompt of its own for each seed."""
    prompt = f"Question {seed}: " + WORDS * (length // 22)
    body = {"model": "served", "prompt": prompt, "seed": seed, "max_tokens": 256 * canvases}
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    return httpx.post(url, json=body | controls, timeout=600).raise_for_status().json()


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


def at_full_size(checkpoint: str, length: int) -> dict[str, Any]:
    """Measure everything but the bench."""
    with server(checkpoint) as ready:
        started = time.monotonic()
        first = ask(0, 1, length, **FIXED)
        facts: dict[str, Any] = {
            "ready_s": ready,
            "first_canvas_s": ready + time.monotonic() - started,
        }
        facts["prompt_tokens"] = first["usage"]["prompt_tokens"]
        given = {"canvases": CANVASES, "length": length, **FIXED}
        asked_together([100, 101, 102, 103], 4, **given | {"canvases": 2})  # captures the graphs
        asked_together([104], 1, **given | {"canvases": 2})
        seeds = list(range(16))
        facts["http_tokens_s"] = {}
        facts["http_tokens_s"]["1"], alone = asked_together(seeds[:2], 1, **given)
        facts["http_tokens_s"]["4"], beside = asked_together(seeds, 8, **given)
        same = [a == b for a, b in zip(texts(alone), texts(beside), strict=False)]
        facts["same_text_alone_and_beside"] = f"{sum(same)} of {len(same)}"
        return facts


def benched(checkpoint: str, context: int) -> dict[str, Any]:
    """Return what `quantize bench` says of the same work."""
    command = [
        sys.executable,
        "-m",
        "quantize",
        "bench",
        checkpoint,
        "--json",
        "--steps",
        str(STEPS),
    ]
    command += ["--batch", "1", "--batch", "4", "--context", str(context)]
    done = subprocess.run(
        [*command, "--canvases", str(CANVASES)], stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout)


def invariant() -> bool:
    """Whether the bundled model answers alike alone and among seven others."""
    with server("bundled", "--batch-invariant"):
        given = {"canvases": 2, "length": 48}
        alone = texts(asked_together(list(range(8)), 1, **given)[1])
        beside = texts(asked_together(list(range(8)), 8, **given)[1])
    return alone == beside and len(set(alone)) > 1


def main() -> int:
    """Measure, print and write."""
    checkpoint, report = sys.argv[1], Path(sys.argv[2])
    facts = at_full_size(checkpoint, CONTEXT)
    report.write_text(json.dumps(facts, indent=1))
    print(json.dumps(facts), flush=True)
    facts["invariant"] = invariant()
    facts["bench"] = benched(checkpoint, facts["prompt_tokens"])
    for row in facts["bench"]["rows"]:
        http = facts["http_tokens_s"][str(row["batch"])]
        row["http_share"] = http / row["tokens_a_second"]
        print(
            f"batch {row['batch']}: bench {row['tokens_a_second']:.0f} tokens/s, HTTP {http:.0f}, "
            f"{row['http_share']:.3f}",
            flush=True,
        )
    report.write_text(json.dumps(facts, indent=1))
    print(json.dumps({key: value for key, value in facts.items() if key != "bench"}))
    slow = [row for row in facts["bench"]["rows"] if row["http_share"] < 0.95]
    return 0 if facts["invariant"] and not slow else 1


if __name__ == "__main__":
    sys.exit(main())
