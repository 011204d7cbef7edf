"""By how much hostile requests delay another client's canvases, and how much memory they keep.

    python -m tests.benchmarks.hostile_delay [--within 200]

`quantize serve bundled` runs as a user starts it. A victim streams the same answer again and again, and
the time between two of its canvases is measured; a newcomer asks for answers of one canvas, and the
time until each comes is: alone, beside another good client, beside good clients in all slots that one
request may have (all but one), and beside each hostile request in turn. `serve` has no option for the
device: it takes a GPU if it sees one (CUDA_VISIBLE_DEVICES= hides it). On
a busy machine the server waits for a core, so what counts is the smaller of two times: by the clock,
and of the server's own work. Hostile are the tools and the regular expression that stalled a server,
forms drawn as `test_hostile_forms` draws them, and `hostile_requests.bodies`. What a canvas waits
longer than it ever does beside these good clients is that request's delay; what it waits longer than
beside one of them is printed too, since canvases in several slots share the device. The load is
printed. Of the victim the first canvas of an answer is left out: until a slot takes the answer, it
waits for the end of a canvas of others. The newcomer has nothing else: on a full server it waits for
a canvas' end. After `--within` seconds the summary of what was measured is printed, and the rest is
left out.
"""

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import httpx
import psutil
from hypothesis import HealthCheck, Phase, given, seed, settings

from quantize.host.processes import best_device
from tests.serve.test_hostile_forms import BODIES
from tests.support.hostile_requests import CHAT, CHATS, bodies, nested, tool
from tests.support.server_process import KEY, process

STEPS = {"num_inference_steps": 8}
# Words that no model ends after one canvas.
VICTIM = CHAT | {"max_tokens": 512, "seed": 1, "stream": True, **STEPS}
VICTIM |= {"guided_regex": "([a-z]{3,9} ){40}"}
NEWCOMER = CHAT | {"max_tokens": 64, "seed": 2, "stream": True, **STEPS}
SMALL = 64 << 10
DELAY, LEAST = 0.5, 5e-3  # seconds
SLOTS = 4
ONE, FULL = "beside a good client", f"beside {SLOTS - 1} good clients"


def drawn(count: int) -> list[dict[str, Any]]:
    """Forms as the fuzz draws them."""
    found: list[dict[str, Any]] = []

    @seed(7)
    @settings(max_examples=count, database=None, phases=[Phase.generate], deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(BODIES)
    def each(body: dict[str, Any]) -> None:
        found.append(body | {"model": "bundled", "max_tokens": 256, **STEPS})

    each()
    return found


class Victim:
    """A client that streams one answer after another, and notes when each canvas arrives."""

    def __init__(
        self,
        client: httpx.Client,
        server: psutil.Process,
        body: dict[str, Any],
        first: bool = False,
    ) -> None:
        self.client, self.server, self.body, self.first = client, server, body, first
        self.on, self.gaps = True, list[tuple[float, float]]()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), sum(self.server.cpu_times()[:2])

    def _run(self) -> None:
        while self.on:
            before, under_way = self._now(), False
            with self.client.stream("POST", CHATS, json=self.body) as reply:
                assert reply.status_code == 200
                for line in reply.iter_lines():
                    if line:
                        now = self._now()
                        gap = min(now[0] - before[0], now[1] - before[1])
                        self.gaps.append((now[0], gap if under_way or self.first else 0))
                        under_way |= gap > LEAST
                        before = now

    def longest(self, since: float) -> float:
        """Seconds of the longest wait that ended after `since`, once one more canvas has come."""
        last = time.monotonic()
        while not (self.gaps and self.gaps[-1][0] > last):
            time.sleep(0.01)
        return max(gap for at, gap in self.gaps if at >= since)

    def row(self, name: str, since: float) -> str:
        """A line: how long canvases took since then."""
        waits = [gap for at, gap in self.gaps if at >= since and gap > LEAST]
        if not waits:
            return f"{name}: no canvas ended"
        return (
            f"{name}: {len(waits)} canvases, p50 {statistics.median(waits):.3f} s, longest "
            f"{max(waits):.3f} s (load {os.getloadavg()[0]:.1f})"
        )


@contextmanager
def beside(works: list[Callable[[], object]]) -> Any:
    """Do each work again and again on a thread of its own."""
    on = True

    def run(work: Callable[[], object]) -> None:
        while on:
            work()

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    yield
    on = False
    for thread in threads:
        thread.join()


def _hostile(largest: int) -> list[tuple[str, str, bytes]]:
    """(What, path, body) of each hostile request of at most `largest` bytes."""
    stalled = (
        tool(parameters=nested(12, 8)),
        {"guided_regex": "(ab{0,9}){400}", "max_tokens": 1024, **STEPS},
    )
    forms = [*(CHAT | fields for fields in stalled), *drawn(40)]
    requests = [(json.dumps(form)[68:128], CHATS, json.dumps(form).encode()) for form in forms]
    return [request for request in requests + bodies() if len(request[2]) <= largest]


class Delays:
    """What canvases waited longer than beside good clients, for small and for large requests."""

    def __init__(self, clients: dict[str, Victim]) -> None:
        self.clients = clients
        self.usual: dict[
            str, dict[str, float]
        ] = {}  # of each yardstick, each client's longest wait
        self.sizes = {True: list[dict[str, float]](), False: list[dict[str, float]]()}

    def rows(self, name: str, since: float) -> None:
        """Print a line for each client."""
        for who, client in self.clients.items():
            print(client.row(f"{who} {name}", since), flush=True)

    def measure(self, name: str, works: list[Callable[[], object]], quiet: float) -> None:
        """Take the longest waits beside `works`, for `quiet` seconds, as a yardstick."""
        begun = time.monotonic()
        with beside(works):
            time.sleep(quiet)
            self.usual[name] = {who: client.longest(begun) for who, client in self.clients.items()}
        self.rows(name, begun)

    def note(self, size: int, begun: float) -> dict[str, float]:
        """Return the largest delay since `begun`, by each yardstick."""
        waits = {who: client.longest(begun) for who, client in self.clients.items()}
        delays = {
            name: max(max(waits[who] - usual[who], 0) for who in waits)
            for name, usual in self.usual.items()
        }
        self.sizes[size <= SMALL].append(delays)
        return delays

    def summary(self) -> None:
        """Print the largest delay of small and of large requests, by each yardstick."""
        for small, noted in self.sizes.items():
            for name in (ONE, FULL) if noted else ():
                delays = [delay[name] for delay in noted if name in delay]
                print(
                    f"{len(delays)} requests {'of at most' if small else 'above'} {SMALL >> 10} KB: "
                    f"largest delay {max(delays):.2f} s longer than {name}, "
                    f"{sum(delay > DELAY for delay in delays)} above {DELAY} s", flush=True,
                )  # fmt: skip


def main() -> None:
    """Measure, and print a line for each kind and for each request that delayed others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=1, help="how often each request is sent")
    parser.add_argument("--largest", type=int, default=1 << 30, help="most bytes of a request")
    parser.add_argument("--quiet", type=float, default=20, help="seconds without hostile requests")
    parser.add_argument("--within", type=float, default=1e9, help="seconds until the summary")
    asked = parser.parse_args()
    ends = time.monotonic() + asked.within
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with process("--max-num-seqs", str(SLOTS)) as (url, server), ExitStack() as stack:
        made = [httpx.Client(base_url=url, headers=headers, timeout=None) for _ in range(SLOTS + 2)]
        client, third, other, *more = [stack.enter_context(one) for one in made]
        print(f"the server runs on {best_device()}", flush=True)
        clients = {
            "victim": Victim(client, server, VICTIM),
            "newcomer": Victim(third, server, NEWCOMER, True),
        }
        delays = Delays(clients)
        good = json.dumps(CHAT | {"max_tokens": 256, **STEPS})
        works = [partial(one.post, CHATS, content=good) for one in (other, *more)]
        for one in clients.values():
            one.longest(0)
        delays.measure("alone", [], asked.quiet)
        delays.measure(ONE, works[:1], asked.quiet)
        delays.measure(FULL, works[: SLOTS - 1], asked.quiet)
        before, first = server.memory_info().rss / 1e6, time.monotonic()
        requests = _hostile(asked.largest) * asked.each
        for count, (name, path, body) in enumerate(requests):
            if time.monotonic() > ends:
                print(
                    f"{asked.within:.0f} s are over: {len(requests) - count} requests are left out"
                )
                break
            begun, memory = time.monotonic(), server.memory_info().rss / 1e6
            reply = other.post(path, content=body)
            assert reply.status_code < 500, (name, reply.text)
            took = time.monotonic() - begun
            delay = delays.note(len(body), begun)
            grown = server.memory_info().rss / 1e6 - memory
            if delay[ONE] > DELAY / 4 or took > 5 or grown > 64:
                print(
                    f"  {reply.status_code} {len(body):,} bytes, {took:.1f} s, delay {delay[FULL]:.2f}"
                    f" s ({delay[ONE]:.2f} s {ONE}), {grown:+.0f} MB: {name}", flush=True,
                )  # fmt: skip
        delays.rows("beside hostile requests", first)
        delays.summary()
        after = server.memory_info().rss / 1e6
        print(f"memory before {before:.0f} MB, after {after:.0f} MB", flush=True)
        for one in clients.values():
            one.on = False
            one.thread.join()


if __name__ == "__main__":
    main()
