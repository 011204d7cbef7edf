"""By how much hostile requests delay another client's canvases, and how much memory they keep.

    PYTHONPATH=tests/support:tests/serve python tests/benchmarks/hostile_delay.py [--each 2]

`quantize serve bundled` runs as a user starts it. A victim streams the same answer again and again, and
the time between two of its canvases is measured; a newcomer asks for answers of one canvas, and the
time until each comes is: alone, beside another good client, and beside each hostile request in turn. On
a busy machine the server waits for a core, so what counts is the smaller of two times: by the clock,
and of the server's own work. Hostile are the tools and the regular expression that stalled a server,
forms drawn as `test_hostile_forms` draws them, and `hostile_requests.bodies`. What a canvas waits
longer than it ever does beside a good client is that request's delay. The load is printed. Of the
victim the first canvas of an answer is left out: until a slot takes the answer, it waits for the end of
a canvas of others. The newcomer has nothing else.
"""

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
from hostile_requests import CHAT, CHATS, bodies, nested, tool
from hypothesis import HealthCheck, Phase, given, seed, settings
from server_process import KEY, process
from test_hostile_forms import BODIES

STEPS = {"num_inference_steps": 8}
# Words that no model ends after one canvas.
VICTIM = CHAT | {"max_tokens": 512, "seed": 1, "stream": True, **STEPS}
VICTIM |= {"guided_regex": "([a-z]{3,9} ){40}"}
NEWCOMER = CHAT | {"max_tokens": 64, "seed": 2, "stream": True, **STEPS}
SMALL = 64 << 10
DELAY, LEAST = 0.5, 5e-3  # seconds


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
        return (
            f"{name}: {len(waits)} canvases, p50 {statistics.median(waits):.3f} s, longest "
            f"{max(waits):.3f} s (load {os.getloadavg()[0]:.1f})"
        )


@contextmanager
def beside(work: Callable[[], object]) -> Any:
    """Do `work` again and again on another thread."""
    on = True

    def run() -> None:
        while on:
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    on = False
    thread.join()


def main() -> None:
    """Measure, and print a line for each kind and for each request that delayed others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=1, help="how often each request is sent")
    parser.add_argument("--largest", type=int, default=1 << 30, help="most bytes of a request")
    parser.add_argument("--quiet", type=float, default=20, help="seconds without hostile requests")
    asked = parser.parse_args()
    stalled = (
        tool(parameters=nested(12, 8)),
        {"guided_regex": "(ab{0,9}){400}", "max_tokens": 1024, **STEPS},
    )
    forms = [*(CHAT | fields for fields in stalled), *drawn(40)]
    requests = [(json.dumps(b)[68:128], CHATS, json.dumps(b).encode()) for b in forms]
    requests += bodies()
    requests = [found for found in requests if len(found[2]) <= asked.largest]
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with (
        process() as (url, server),
        httpx.Client(base_url=url, headers=headers, timeout=None) as client,
        httpx.Client(base_url=url, headers=headers, timeout=None) as third,
        httpx.Client(base_url=url, headers=headers, timeout=None) as other,
    ):
        victim, newcomer = Victim(client, server, VICTIM), Victim(third, server, NEWCOMER, True)
        victims = {"victim": victim, "newcomer": newcomer}

        def rows(name: str, since: float) -> None:
            for who, client in victims.items():
                print(client.row(f"{who} {name}", since), flush=True)

        victim.longest(0)
        newcomer.longest(0)
        begun = time.monotonic()
        time.sleep(asked.quiet)
        rows("alone", begun)
        good = json.dumps(CHAT | {"max_tokens": 256, **STEPS})
        begun = time.monotonic()
        with beside(lambda: other.post(CHATS, content=good)):
            time.sleep(asked.quiet)
        usual = {who: client.longest(begun) for who, client in victims.items()}
        rows("beside a good client", begun)
        before, first = server.memory_info().rss / 1e6, time.monotonic()
        sizes = {True: list[float](), False: list[float]()}
        for name, path, body in requests * asked.each:
            begun, memory = time.monotonic(), server.memory_info().rss / 1e6
            reply = other.post(path, content=body)
            assert reply.status_code < 500, (name, reply.text)
            took = time.monotonic() - begun
            delays = {who: max(c.longest(begun) - usual[who], 0) for who, c in victims.items()}
            delay = max(delays.values())
            sizes[len(body) <= SMALL].append(delay)
            if sum(map(len, sizes.values())) % 20 == 0:
                rows("so far", first)
            grown = server.memory_info().rss / 1e6 - memory
            if delay > DELAY / 4 or took > 5 or grown > 64:
                print(
                    f"  {reply.status_code} {len(body):,} bytes, {took:.1f} s, delay "
                    f"{delays['victim']:.2f} and {delays['newcomer']:.2f} s, "
                    f"{grown:+.0f} MB: {name}", flush=True,
                )  # fmt: skip
        rows("beside hostile requests", first)
        for small, largest in sizes.items():
            if not largest:
                continue
            print(
                f"{len(largest)} requests {'of at most' if small else 'above'} {SMALL >> 10} KB: "
                f"largest delay {max(largest):.2f} s, {sum(d > DELAY for d in largest)} above {DELAY} s"
            )
        time.sleep(5)
        after = server.memory_info().rss / 1e6
        print(f"memory before {before:.0f} MB, after {after:.0f} MB")
        for client in victims.values():
            client.on = False
            client.thread.join()


if __name__ == "__main__":
    main()
