"""A server under 1, 4, 16 and 64 clients, and the same weights one token at a time.

    python tests/benchmarks/serve_load.py CHECKPOINT REPORT.json [--workers 1 --workers 2] [--slots 32]

Starts `quantize serve` as a user does. Each client sends two requests one behind the other: prompts of
about 1,020 tokens, two canvases of 16 fixed steps. For each number of clients: seconds to the first
canvas and of a whole answer (median and 95th percentile), tokens a second of all. With two workers and
more, one is killed in the middle of eight requests: how many fail, and when it serves again.
`--one-token` adds `quantize bench --autoregressive` at those batches: what the same weights write one
token a forward.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
import psutil
from streams import prompt_of

FIXED = {"num_inference_steps": 16, "confidence_threshold": 1e-30, "max_tokens": 512}
REQUESTS = 2  # of each client


@contextmanager
def served(checkpoint: str, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the address and the process of a server."""
    command = [sys.executable, "-m", "quantize", "serve", checkpoint, "--port", "0"]
    command += ["--model-name", "served", "--max-queue", "256", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        for line in server.stderr:
            print(line, end="", flush=True)
            if found := re.search(r"at (http://\S+) without", line):
                break
        else:
            raise SystemExit("the server ended")
        threading.Thread(target=server.stderr.read, daemon=True).start()
        try:
            yield found[1], psutil.Process(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def ask(client: httpx.Client, seed: int, length: int) -> tuple[float, float, int] | None:
    """Return seconds to the first canvas and to the end, and tokens; None where it failed."""
    body = {"model": "served", "prompt": prompt_of(seed, length), "seed": seed, "stream": True}
    body |= FIXED | {"stream_options": {"include_usage": True}}
    begun, first, tokens = time.perf_counter(), 0.0, 0
    try:
        with client.stream("POST", "/v1/completions", json=body) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return None
                if chunk["choices"] and chunk["choices"][0]["text"]:
                    first = first or time.perf_counter() - begun
                tokens += (chunk["usage"] or {}).get("completion_tokens", 0)
    except httpx.HTTPError as error:
        print(error, flush=True)
        return None
    return first, time.perf_counter() - begun, tokens


def loaded(url: str, clients: int, length: int) -> dict[str, Any]:
    """Return the row of so many clients."""
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(clients) as pool:

        def work(number: int) -> list[tuple[float, float, int] | None]:
            return [
                ask(client, 1000 * clients + REQUESTS * number + i, length) for i in range(REQUESTS)
            ]

        list(pool.map(lambda i: ask(client, i, length), range(clients)))  # captures graphs
        begun = time.perf_counter()
        found = [answer for answers in pool.map(work, range(clients)) for answer in answers]
        seconds = time.perf_counter() - begun
    heard = [answer for answer in found if answer]
    assert len(heard) == REQUESTS * clients
    row: dict[str, Any] = {"clients": clients, "tokens_s": sum(h[2] for h in heard) / seconds}
    for name, values in (("first_s", [h[0] for h in heard]), ("whole_s", [h[1] for h in heard])):
        row[name] = [statistics.median(values), sorted(values)[int(0.95 * (len(values) - 1))]]
    return row


def killed(url: str, server: psutil.Process, length: int) -> dict[str, Any]:
    """Kill one worker in the middle of eight requests; tell what failed, and when it was back."""
    workers = [w for w in server.children() if "spawn_main" in " ".join(w.cmdline())]
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, client, 9000 + i, length) for i in range(8)]
        time.sleep(0.5)
        os.kill(workers[0].pid, signal.SIGKILL)
        begun = time.perf_counter()
        found = [one.result() for one in asked]
        time.sleep(1)
        after = [ask(client, 9100 + i, length) for i in range(4)]
        while client.get("/health").json()["workers"] < len(workers):
            time.sleep(0.2)
        back = time.perf_counter() - begun
    lost, more = (sum(answer is None for answer in some) for some in (found, after))
    return {"of_8_lost": lost, "of_4_after_lost": more, "back_s": back}


@click.command()
@click.argument("checkpoint")
@click.argument("report", type=click.Path(path_type=Path))
@click.option("--clients", multiple=True, type=int, default=(1, 4, 16, 64))
@click.option("--workers", multiple=True, type=int, default=(1,))
@click.option("--slots", default=32)
@click.option("--length", default=1024)
@click.option("--one-token", is_flag=True)
def main(
    checkpoint: str,
    report: Path,
    clients: Sequence[int],
    workers: Sequence[int],
    slots: int,
    length: int,
    one_token: bool,
) -> None:
    """Measure, print and write."""
    facts: dict[str, Any] = {"slots": slots}
    for count in workers:
        options = ("--max-num-seqs", str(slots), "--max-context", str(length + 1024))
        options += ("--data-parallel", str(count))
        begun = time.perf_counter()
        with served(checkpoint, *options) as (url, server):
            facts[f"workers {count}: ready_s"] = time.perf_counter() - begun
            rows = facts[f"workers {count}"] = []
            for number in clients:
                rows.append(loaded(url, number, length))
                print(count, json.dumps(rows[-1]), flush=True)
                report.write_text(json.dumps(facts, indent=1))
            if count > 1:
                facts["killed"] = killed(url, server, length)
                print(json.dumps(facts["killed"]), flush=True)
    if one_token:
        batches = [word for number in clients for word in ("--batch", str(number))]
        command = [
            sys.executable,
            "-m",
            "quantize",
            "bench",
            checkpoint,
            "--autoregressive",
            "--json",
        ]
        given = [*batches, "--canvases", "2", "--context", str(length)]
        facts["one_token"] = json.loads(subprocess.check_output([*command, *given]))
    report.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
