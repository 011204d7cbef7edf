"""`quantize serve` as a process of its own under load: good requests among all that goes wrong.

Every answer is compared with what the runtime answers in this process; the server's memory must stay
where it was, no slot may stay taken, and nothing may end in a server error.
"""

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import httpx
import psutil
import pytest

from quantize.bundled import HELDOUT
from quantize.serve.text import Text
from tests.support.server_process import KEY, process
from tests.support.serving import FEW, HASTY, in_process, tokenizer

SEED, TOKENS = 0, 64
KINDS = {"whole": 40, "stream": 20, "gone": 16, "oversized": 8, "malformed": 8, "unauthorised": 8}
MALFORMED = (b"{", b"[]", b'{"model": "bundled"}', b'{"model": "bundled", "messages": 3}')


@dataclass(frozen=True)
class Known:
    """A request and what the runtime answers to it."""

    body: dict[str, object]
    thoughts: str
    answer: str


def known(count: int) -> list[Known]:
    """Requests of different questions, seeds and lengths, half of them with thinking."""
    rows = [json.loads(line) for line in HELDOUT.read_text("utf-8").splitlines()[:count]]
    split = Text(tokenizer()).split
    found: list[Known] = []
    for seed, row in enumerate(rows):
        thinking = bool(seed % 2)
        body = {"model": "bundled", "messages": [{"role": "user", "content": row["question"]}]}
        body |= {"seed": seed, "max_tokens": TOKENS} | FEW
        body["chat_template_kwargs"] = {"enable_thinking": thinking}
        sample = in_process(
            row["question"], seed, thinking=thinking, max_tokens=TOKENS, sampler=HASTY
        )
        found.append(Known(body, *split(sample.tokens)))
    return found


class Load:
    """Requests of all kinds, `connections` at once."""

    def __init__(self, url: str, server: psutil.Process, requests: list[Known]) -> None:
        self.url, self.server, self.requests = url, server, requests
        self.random = random.Random(SEED)
        self.counts: Counter[tuple[str, int]] = Counter()
        self.memory: list[int] = []

    async def run(self, count: int, connections: int) -> None:
        kinds = self.random.choices(list(KINDS), list(KINDS.values()), k=count)
        waiting = iter(kinds)
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=300) as client:

            async def work() -> None:
                for kind in waiting:
                    status = await getattr(self, f"_{kind}")(
                        client, self.random.choice(self.requests)
                    )
                    self.counts[kind, status] += 1
                    self.memory.append(self.server.memory_info().rss)

            await asyncio.gather(*(work() for _ in range(connections)))
            for _ in range(200):
                state = (await client.get("/health")).json()
                if state["running"] == state["waiting"] == 0:
                    break
                await asyncio.sleep(0.05)
            assert (state["running"], state["waiting"], state["status"]) == (0, 0, "ok")
            self.metrics = (await client.get("/metrics")).text

    async def _whole(self, client: httpx.AsyncClient, asked: Known) -> int:
        reply = await client.post("/v1/chat/completions", json=asked.body)
        message = reply.json()["choices"][0]["message"]
        assert (message["reasoning_content"] or "", message["content"]) == (
            asked.thoughts,
            asked.answer,
        )
        return reply.status_code

    async def _stream(self, client: httpx.AsyncClient, asked: Known) -> int:
        thoughts = answer = ""
        body = asked.body | {"stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = [line async for line in reply.aiter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
            thoughts += delta.get("reasoning_content", "")
            answer += delta.get("content", "")
        assert (thoughts, answer) == (asked.thoughts, asked.answer)
        return reply.status_code

    async def _gone(self, client: httpx.AsyncClient, asked: Known) -> int:
        """Hang up while waiting, or in the middle of a stream."""
        body = asked.body | {"stream": self.random.random() < 0.5, "n": 2}
        limit = httpx.Timeout(300, read=self.random.uniform(0.01, 0.5))
        with suppress(httpx.ReadTimeout):
            async with client.stream(
                "POST", "/v1/chat/completions", json=body, timeout=limit
            ) as reply:
                async for _ in reply.aiter_raw():
                    return 0
        return 0

    async def _oversized(self, client: httpx.AsyncClient, asked: Known) -> int:
        body = asked.body | {"user": "x" * (2 << 20)}
        return (await client.post("/v1/chat/completions", json=body)).status_code

    async def _malformed(self, client: httpx.AsyncClient, asked: Known) -> int:
        headers = {"Content-Type": "application/json"}
        content = self.random.choice(MALFORMED)
        reply = await client.post("/v1/chat/completions", content=content, headers=headers)
        assert reply.json()["error"]["message"]
        return reply.status_code

    async def _unauthorised(self, client: httpx.AsyncClient, asked: Known) -> int:
        headers = {"Authorization": f"Bearer {KEY[:-1]}"}
        reply = await client.post("/v1/chat/completions", json=asked.body, headers=headers)
        return reply.status_code


@pytest.mark.parametrize(
    ("count", "connections", "questions"),
    [(24, 8, 4), pytest.param(2000, 16, 60, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])],
)
def test_load(count: int, connections: int, questions: int) -> None:
    requests = known(questions)
    assert len({asked.answer for asked in requests}) > questions / 2
    started = time.monotonic()
    with process("--max-body-bytes", str(1 << 20)) as (url, server):
        load = Load(url, server, requests)
        asyncio.run(load.run(count, connections))
    print(f"{count} requests in {time.monotonic() - started:.0f} s: {dict(load.counts)}")
    statuses = {"whole": 200, "stream": 200, "gone": 0}
    statuses |= {"oversized": 413, "malformed": 400, "unauthorised": 401}
    assert set(load.counts) == set(statuses.items())
    assert sum(load.counts.values()) == count
    assert "quantize_failures_total 0.0" in load.metrics
    assert 'status="5' not in load.metrics
    quarter = count // 4
    early, late = max(load.memory[quarter : 2 * quarter]), max(load.memory[-quarter:])
    print(f"memory, second quarter and last: {early / 1e6:.1f} and {late / 1e6:.1f} MB")
    assert late < early * 1.02 + 10e6
