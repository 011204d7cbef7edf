"""A server under 1, 4, 16 and 64 clients, and two behind one port, on a machine of two GPUs.

    python -m tests.support.synthetic /dev/shm/bf16
    python -m quantize run --recipe nvfp4a16 --model /dev/shm/bf16 --until convert --out /dev/shm/run
    python -m tests.benchmarks.serve_load /dev/shm/run/*/checkpoint \\
        REPORT.json --one-token --plan-check /dev/shm/bf16

Needs no network. Starts `quantize serve` as a user does, its generation config set to 16 fixed steps,
so that its warm-up captures what the load replays. Each client sends two requests one behind the other:
prompts of about 1,020 tokens, two canvases. For each number of clients: seconds to the first canvas
and of a whole answer (median and 95th percentile), tokens a second of all. Meanwhile the other GPU has

    --one-token         `quantize bench --autoregressive`: the same weights, one token a forward
    --plan-check MODEL  a server at 22 GB: its slots and memory, beside what `plan --serve` says of
                        MODEL; the same is asked of the loaded server, held to 141 GB

Then two workers get the same clients. In the middle of eight requests one is killed, then one is
stopped (SIGSTOP): how many fail, and when there are two again. At last the server itself is killed:
when the GPUs are free. With --gpus 1 there are no two workers, and one part follows the other.
"""

import json
import math
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import httpx
import psutil

from tests.support.streams import Heard, LostError, heard

FIXED = {"max_denoising_steps": 16, "confidence_threshold": 1e-30}
REQUESTS = 2  # of each client
BUDGETS = {"0": 141, "1": 22}  # GB, of the server on each GPU
QUANTIZE = [sys.executable, "-m", "quantize"]


@dataclass
class Served:
    """A server: its address, its process, and each line that it said, behind seconds from its start."""

    process: psutil.Process
    url: str = ""
    said: list[str] = field(default_factory=list[str])

    def client(self) -> httpx.Client:
        """Return a client that knows no proxy."""
        return httpx.Client(base_url=self.url, timeout=600, trust_env=False)

    def held(self) -> dict[str, float]:
        """Return slots and GB that it holds."""
        slots = re.search(r"serving (\d+) samples", "\n".join(self.said))
        with self.client() as client:
            found = re.search(
                r"^quantize_gpu_memory_bytes (\S+)", client.get("/metrics").text, re.M
            )
        assert slots
        assert found
        return {"slots": int(slots[1]), "GB": float(found[1]) / 1e9}


@contextmanager
def served(checkpoint: Path, gpus: str, *options: str) -> Iterator[Served]:
    """Yield a server on some GPUs once it listens."""
    command = [*QUANTIZE, "serve", str(checkpoint), "--port", "0", "--model-name", "served"]
    command += ["--max-queue", "256", *options]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus}
    begun = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        found = Served(psutil.Process(server.pid))
        for line in server.stderr:
            found.said.append(f"{time.perf_counter() - begun:.1f} {line.rstrip()}")
            print(f"GPU {gpus}: {found.said[-1]}", flush=True)
            if at := re.search(r"at (http://\S+) without", line):
                found.url = at[1]
                break
        else:
            raise SystemExit("the server ended")
        threading.Thread(target=server.stderr.read, daemon=True).start()
        try:
            yield found
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def ask(client: httpx.Client, seed: int, length: int) -> Heard | None:
    """Return an answer of two canvases; None where it failed."""
    try:
        return heard(client, seed, length, canvases=2)
    except (httpx.HTTPError, LostError) as error:
        print(repr(error), flush=True)
        return None


def loaded(server: Served, clients: int, length: int) -> dict[str, Any]:
    """Return the row of so many clients."""
    with server.client() as client, ThreadPoolExecutor(clients) as pool:

        def work(number: int) -> list[tuple[float, float, int]]:
            rows: list[tuple[float, float, int]] = []
            for i in range(REQUESTS):
                found = heard(client, 1000 * clients + REQUESTS * number + i, length, canvases=2)
                first, last = (at - found.asked for at in (found.canvases[0], time.perf_counter()))
                rows.append((first, last, found.usage["completion_tokens"]))
            return rows

        ask(client, clients, length)  # connects
        begun = time.perf_counter()
        found = [row for rows in pool.map(work, range(clients)) for row in rows]
        seconds = time.perf_counter() - begun
    firsts, wholes, tokens = zip(*found, strict=True)
    row: dict[str, Any] = {"clients": clients, "tokens_s": sum(tokens) / seconds}
    for name, values in (("first_s", firsts), ("whole_s", wholes)):
        row[name] = [statistics.median(values), sorted(values)[math.ceil(0.95 * len(values)) - 1]]
    print(json.dumps(row), flush=True)
    return row


def replicas(server: Served) -> set[int]:
    """Return the ids of the processes that serve."""
    ids: set[int] = set()
    for child in server.process.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "ServeReplica" in "".join(child.cmdline()):
                ids.add(child.pid)
    return ids


def lost(server: Served, length: int, cause: signal.Signals) -> dict[str, Any]:
    """Signal one worker in the middle of eight requests; tell what failed, and when it was back."""
    workers = replicas(server)
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, client, 9000 + i, length) for i in range(8)]
        time.sleep(0.5)
        os.kill(min(workers), cause)
        begun = time.perf_counter()
        answers = [one.result() for one in asked]
        time.sleep(1)
        after = [ask(client, 9100 + i, length) for i in range(4)]
        while not (
            replicas(server) - workers and client.get("/health").json()["workers"] == len(workers)
        ):
            time.sleep(0.2)
        back = time.perf_counter() - begun
    at_once, more = (sum(answer is None for answer in some) for some in (answers, after))
    return {"of_8_lost": at_once, "of_4_after_lost": more, "back_s": back}


def seconds_to_free_gpus(server: Served) -> float:
    """Kill the server itself; return when no GPU has 2 GB or more in use."""
    used = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    server.process.kill()
    begun = time.perf_counter()
    while max(map(int, subprocess.check_output(used, text=True).split())) >= 2048:
        time.sleep(0.2)
    return time.perf_counter() - begun


def one_token(checkpoint: Path, gpu: str, batches: Sequence[int], length: int) -> list[Any]:
    """Return tokens a second, one token a forward, for each batch."""
    given = [word for number in batches for word in ("--batch", str(number))]
    given += ["--autoregressive", "--steps", "1", "--canvases", "2", "--context", str(length)]
    command = [*QUANTIZE, "bench", str(checkpoint), "--json", *given]
    told = subprocess.check_output(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu})
    rows = [row for row in json.loads(told)["rows"] if row["steps"] == "one token"]
    keep = ("batch", "tokens_a_second", "ms_a_forward")
    return [{name: row[name] for name in keep} for row in rows]


def planned(model: str, gigabytes: int, slots: int, context: int) -> dict[str, float]:
    """Return slots and GB as `quantize plan --serve` says them."""
    given = ["--gpu", "h200", "--gpu-memory", str(gigabytes), "--model", model]
    given += ["--clients", str(slots), "--context", str(context)]
    told = subprocess.check_output([*QUANTIZE, "plan", "--serve", *given], text=True)
    row = re.search(r"nvfp4a16 +\w+ +(\d+) +([\d.]+) GB", told)
    if row is None:
        raise SystemExit(told)
    return {"slots": int(row[1]), "GB": float(row[2])}


def checked(server: Served, gpu: str, model: str, slots: int, context: int) -> dict[str, Any]:
    """Return what the plan says of a server, what it holds, and their ratio."""
    plan, held = planned(model, BUDGETS[gpu], slots, context), server.held()
    found = {"budget": BUDGETS[gpu], "plan": plan, "held": held, "ratio": held["GB"] / plan["GB"]}
    print(json.dumps(found), flush=True)
    return found


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.argument("report", type=click.Path(path_type=Path))
@click.option("--clients", multiple=True, type=int, default=(1, 4, 16, 64))
@click.option("--gpus", default=2, type=click.IntRange(1, 2))
@click.option("--slots", default=32)
@click.option("--length", default=1024)
@click.option("--one-token", "also_one_token", is_flag=True)
@click.option("--plan-check")
def main(
    checkpoint: Path,
    report: Path,
    clients: Sequence[int],
    gpus: int,
    slots: int,
    length: int,
    also_one_token: bool,
    plan_check: str | None,
) -> None:
    """Measure, print and write."""
    facts: dict[str, Any] = {"slots": slots}
    writing = threading.Lock()

    def keep(name: str, found: Any) -> None:
        with writing:
            facts[name] = found
            report.write_text(json.dumps(facts, indent=1))

    def beside(folder: Path, gpu: str) -> None:
        if plan_check:
            options = ("--gpu-memory", str(BUDGETS["1"]))  # else as by default
            with served(folder, gpu, *options) as server, server.client() as client:
                ask(client, 1, length)
                keep("at_22", checked(server, "1", plan_check, 4, 8192) | {"start": server.said})
        if also_one_token:
            keep("one_token", one_token(folder, gpu, clients, length))

    def alone(folder: Path) -> None:
        options = ("--max-num-seqs", str(slots), "--max-context", str(length + 1024))
        options += ("--gpu-memory", str(BUDGETS["0"])) if plan_check else ()
        with served(folder, "0", *options) as server:
            keep("one_worker_start", server.said)
            for number in clients:
                rows = facts.get("one_worker", [])
                keep("one_worker", [*rows, loaded(server, number, length)])
            if plan_check:
                keep("at_141", checked(server, "0", plan_check, slots, length + 1024))

    with TemporaryDirectory(dir=checkpoint.parent) as scratch, ThreadPoolExecutor(1) as pool:
        folder = fixed(checkpoint, Path(scratch))
        also = pool.submit(beside, folder, str(gpus - 1))
        if gpus == 1:
            also.result()
        alone(folder)
        also.exception()  # waits; what went wrong there spoils nothing here
        if gpus == 2:
            options = ("--max-num-seqs", str(slots), "--max-context", str(length + 1024))
            with served(folder, "0,1", *options, "--data-parallel", "2") as server:
                keep("two_workers_start", server.said)
                for number in clients:
                    rows = facts.get("two_workers", [])
                    keep("two_workers", [*rows, loaded(server, number, length)])
                keep("killed", lost(server, length, signal.SIGKILL))
                keep("stopped", lost(server, length, signal.SIGSTOP))
                keep("gpus_free_s", seconds_to_free_gpus(server))
    also.result()
    print(json.dumps(facts))


def fixed(checkpoint: Path, scratch: Path) -> Path:
    """Return a folder of hard links to a checkpoint, its generation config set to fixed steps."""
    for path in checkpoint.iterdir():
        (scratch / path.name).hardlink_to(path)
    own = scratch / "generation_config.json"
    settings = json.loads(own.read_text())
    own.unlink()
    own.write_text(json.dumps(settings | FIXED))
    return scratch


if __name__ == "__main__":
    main()
