"""Tokens a second over HTTP at batch 1 and 4, bundled model.

    python -m tests.benchmarks.serve_throughput

Two server processes, `--max-num-seqs 1` and `4`, get the same problems with the same seeds at eight
connections, in turns, so that a slot never waits for a client; the answers must be the same. Prints
every measurement, and the ratio of the medians of those that nothing else on the machine disturbed; it
goes on until there are enough of them, or three times as many rounds are over. The client shares the
cores.
"""

import asyncio
import json
import statistics
import time
from argparse import ArgumentParser

import httpx
import psutil

from quantize.bundled import HELDOUT
from tests.support.server_process import KEY, process

BATCHES, CONNECTIONS = (1, 4), 8
DISTURBED = 0.1  # cores that other processes use
Answers = dict[int, tuple[str, int]]  # of each problem, its text and tokens


async def ask(url: str, problems: list[str]) -> tuple[float, Answers]:
    """Return seconds, and the answers."""
    answers: Answers = {}
    waiting = iter(enumerate(problems))
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600) as client:

        async def work() -> None:
            for seed, problem in waiting:
                body = {"model": "bundled", "messages": [{"role": "user", "content": problem}]}
                reply = await client.post("/v1/chat/completions", json=body | {"seed": seed})
                found = reply.raise_for_status().json()
                text = found["choices"][0]["message"]["content"]
                answers[seed] = (text, found["usage"]["completion_tokens"])

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
        return time.perf_counter() - started, answers


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    lines = HELDOUT.read_text("utf-8").splitlines()[: given.problems]
    problems = [json.loads(line)["question"] for line in lines]
    rates: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    expected: Answers = {}
    with process("--max-num-seqs", "1") as one, process("--max-num-seqs", "4") as four:
        for url, _ in (one, four):
            asyncio.run(ask(url, problems[:CONNECTIONS]))  # warms up
        ours = (psutil.Process(), one[1], four[1])
        for number in range(3 * given.rounds):
            if min(map(len, rates.values())) >= given.rounds:
                break
            for batch, (url, server) in zip(BATCHES, (one, four), strict=True):
                cpu, all_ours, everyone = used(server), used(*ours), busy()
                seconds, answers = asyncio.run(ask(url, problems))
                others = (busy() - everyone - used(*ours) + all_ours) / seconds
                expected = expected or answers
                if answers != expected:
                    raise SystemExit("answers differ between batches")
                tokens = sum(count for _, count in answers.values())
                if others < DISTURBED:
                    rates[batch].append(tokens / seconds)
                print(
                    f"round {number + 1}, batch {batch}: {tokens} tokens, {seconds:.2f} s, "
                    f"{tokens / seconds:.0f} tokens/s, {used(server) - cpu:.2f} CPU s, others use "
                    f"{others:.2f} cores",
                    flush=True,
                )
    counts = [len(rates[batch]) for batch in BATCHES]
    if not all(counts):
        raise SystemExit("no undisturbed measurement: other processes were busy throughout")
    alone, together = (statistics.median(rates[batch]) for batch in BATCHES)
    ratio = f"{together / alone:.2f} times"
    print(f"medians of {counts}: {alone:.0f} and {together:.0f} tokens/s, {ratio}")


def used(*processes: psutil.Process) -> float:
    """CPU seconds that processes have taken so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def busy() -> float:
    """CPU seconds of everything on this machine."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait


if __name__ == "__main__":
    main()
