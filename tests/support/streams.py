"""A client that streams completions and notes when each canvas came; fit for a process of its own."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = "the shop sells seven boxes of apples and nine single ones each day of the week "
BESIDE = 0.05  # seconds: of one boundary all canvases are heard by then, and none of the next


class LostError(Exception):
    """A stream that ended with an error."""


@dataclass
class Heard:
    """An answer as it came: its text, when it was asked and each canvas came, and the usage."""

    text: str = ""
    asked: float = field(default_factory=time.perf_counter)
    canvases: list[float] = field(default_factory=list[float])
    usage: dict[str, Any] = field(default_factory=dict[str, Any])


def prompt_of(seed: int, length: int) -> str:
    """Return a prompt of its own for each seed."""
    return f"Question {seed}: " + WORDS * (length // 22)


def asked_together(
    url: str, seeds: list[int], connections: int, *, length: int, **controls: Any
) -> list[Heard]:
    """Return the answers to the prompts of all seeds."""
    # One client: its certificates alone take 30 ms to load, and connections stay open.
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(connections) as pool:
        return list(pool.map(lambda seed: heard(client, seed, length, **controls), seeds))


def heard(client: httpx.Client, seed: int, length: int, *, canvases: int, **controls: Any) -> Heard:
    """Return the answer to a prompt of about `length` tokens.

    Raises:
        LostError: it ended with an error. httpx.HTTPError: there was none, or it broke off.
    """
    body = {"model": "served", "prompt": prompt_of(seed, length), "seed": seed, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "max_tokens": 256 * canvases} | controls
    answer = Heard()
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise LostError(chunk["error"]["message"])
            answer.usage |= chunk["usage"] or {}
            for choice in chunk["choices"]:
                answer.text += choice["text"]
                answer.canvases.append(time.perf_counter())
    if answer.usage["canvases"] != len(answer.canvases):
        raise SystemExit(f"{answer.usage['canvases']} canvases, heard of {len(answer.canvases)}")
    return answer


def rate(answers: list[Heard], slots: int, least: int) -> float:
    """Tokens a second, of whole canvases, while all slots are busy: of at least `least` canvases.

    From when `slots` answers have begun to when fewer are unfinished; a sample of random weights that
    runs into an end of sequence by chance leaves no slot idle in between. Slots share their boundaries:
    the first one's canvases do not count, whenever they are heard, and the last one's all do.
    """
    begun = sorted(answer.canvases[0] for answer in answers)[slots - 1]
    ended = sorted(answer.canvases[-1] for answer in answers)[-slots]
    heard = sum(begun < at - BESIDE <= ended for answer in answers for at in answer.canvases)
    if heard < least:
        raise SystemExit(f"only {heard} canvases while {slots} slots were busy")
    return 256 * heard / (ended - begun)
