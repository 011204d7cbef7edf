"""No form of at most 64 KB delays another request's canvas by 0.5 s, or takes 256 MB: fuzzed.

pytest tests/serve/test_hostile_forms.py -m slow -s                  2,000 forms, the worst figures
pytest tests/serve/test_hostile_forms.py -m slow -s -k 'little[3]'   one of their eight shares
"""

import json
import random
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from quantize.errors import InputError
from quantize.serve.budget import Allowance
from quantize.serve.constraint import Constraint
from quantize.serve.failures import RequestError
from quantize.serve.forms import Forms
from quantize.serve.protocol import ChatRequest
from tests.support.serving import tokenizer

L, V, EOS, LARGEST = 64, 1024, (1, 106, 50), 64 << 10
DELAY, MEGABYTES = 0.5, 256
ROOMS = (64, 256, 4032)
FORMS, SHARES = 2000, 8

# ------------------------------------------------------------------ forms

SIZES = st.sampled_from([0, 1, 2, 3, 9, 50, 400, 5000, 10**6])
ATOMS = st.sampled_from(
    [
        "a",
        "b",
        ".",
        r"\w",
        r"\d",
        r"\s",
        r"\p{L}",
        "[a-z]",
        "[^x]",
        "é",
        "😀",
        "ab",
        "",
        r"\n",
        "x" * 200,
    ]
)


def copies(part: Any, count: int) -> int:
    """`count`, or as many copies of a part as a request can hold: copies of copies take all memory."""
    return max(1, min(count, LARGEST // (1 + len(json.dumps(part)))))


def _of_regex(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def bounded(part: str, low: int, high: int) -> str:
        return f"({part}){{{min(low, high)},{max(low, high)}}}"

    def repeated(part: str, count: int) -> str:
        return f"({part})" * copies(part, min(count, 50))

    small = st.sampled_from([0, 1, 2, 9, 30, 400])
    return st.one_of(
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=5).map(lambda parts: f"({'|'.join(parts)})"),
        inner.map(lambda part: f"({part})*"), inner.map(lambda part: f"({part})?"),
        inner.map(lambda part: f".*{part}"), st.builds(bounded, inner, small, small),
        st.builds(repeated, inner, small),
    )  # fmt: skip


REGEXES = st.recursive(ATOMS, _of_regex, max_leaves=8).filter(lambda text: 0 < len(text) <= 10_000)
NAMES = st.sampled_from(["a", "b", "c", "a b", "é", '"', "", "x" * 300, "$ref"])
NUMBERS = SIZES | st.sampled_from([-1, 0.1, 1e-9, 7919, 1000003, 10**15, 1.5e300, -(10**9)])
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([{}, True, False, {"type": "null"}, {"type": ["string", "null"]}]),
    st.builds(lambda n, m: {"type": "string", "minLength": min(n, m), "maxLength": max(n, m)},
              SIZES, SIZES),
    REGEXES.map(lambda text: {"type": "string", "pattern": text}),
    st.builds(lambda n: {"type": "integer", "multipleOf": n}, NUMBERS),
    st.builds(lambda n, m: {"type": "number", "minimum": n, "exclusiveMaximum": m}, NUMBERS, NUMBERS),
    st.builds(lambda n: {"enum": [f"{i}-{i * i}" for i in range(min(n, 5000))]}, SIZES),
    st.builds(lambda n: {"const": "x" * min(n, 60_000)}, SIZES),
    st.sampled_from(["email", "date-time", "uri", "uuid", "ipv6"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.sampled_from([{"$ref": "#"}, {"$ref": "#/properties/a"}, {"enum": None}, {"required": 5}]),
)  # fmt: skip


def _of_schema(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.lists(inner, min_size=1, max_size=4)

    def object_of(fields: dict[str, Any], count: int, needed: bool, closed: bool) -> dict[str, Any]:
        wide = {f"k{n}": {"type": "integer"} for n in range(min(count, 400))}
        names = sorted(fields) if needed else []
        return {
            "type": "object", "properties": wide | fields, "required": names,
            "additionalProperties": not closed,
        }  # fmt: skip

    def repeated(part: Any, count: int) -> list[Any]:
        return [part] * copies(part, min(count, 50))

    return st.one_of(
        st.builds(object_of, st.dictionaries(NAMES, inner, max_size=4), SIZES, st.booleans(),
                  st.booleans()),
        st.builds(lambda item, n, m: {"type": "array", "items": item, "minItems": n, "maxItems": m},
                  inner, SIZES, SIZES),
        st.builds(lambda key, parts: {key: parts}, st.sampled_from(["anyOf", "oneOf", "allOf"]), many),
        st.builds(lambda part, n: {"allOf": [{"anyOf": repeated(part, n)}] * 3}, inner, SIZES),
        st.builds(lambda part, n: {"anyOf": repeated(part, n)}, inner, SIZES),
        st.dictionaries(REGEXES, inner, max_size=3).map(lambda found: {"patternProperties": found}),
        st.builds(lambda parts: {"type": "array", "prefixItems": parts}, many),
    )  # fmt: skip


SCHEMAS = st.recursive(LEAVES, _of_schema, max_leaves=10)
USER = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def _calling(schema: Any, count: int) -> dict[str, Any]:
    function = {"parameters": {"type": "object", "properties": {"a": schema, "b": schema}}}
    names = [f"f{n}" for n in range(copies(function, count))]
    tools = [{"type": "function", "function": {"name": name} | function} for name in names]
    return USER | {"tools": tools, "tool_choice": "required"}


BODIES = st.one_of(
    REGEXES.map(lambda text: USER | {"guided_regex": text}),
    SCHEMAS.map(lambda schema: USER | {"guided_json": schema}),
    st.builds(_calling, SCHEMAS, st.sampled_from([1, 1, 2, 100])),
).filter(lambda body: len(json.dumps(body)) <= LARGEST)

# ------------------------------------------------------------------ what they cost


class Watched:
    """The longest time for which another thread could not run, because this process was at work.

    On a busy machine it does not run for other reasons either: then the process' own time stands still.
    """

    def __init__(self) -> None:
        self.longest, self._on = 0.0, True
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        before = time.monotonic(), time.process_time()
        while self._on:
            time.sleep(0.001)
            now = time.monotonic(), time.process_time()
            gap = min(after - start for start, after in zip(before, now, strict=True))
            self.longest, before = max(self.longest, gap), now

    def stop(self) -> float:
        self._on = False
        self._thread.join()
        return self.longest


def megabytes() -> float:
    line = next(
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS")
    )
    return int(line.split()[1]) / 1000


def cost(forms: Forms, body: dict[str, Any], room: int) -> dict[str, float]:
    """What a request costs others: seconds of one canvas of theirs, the longest stall, and memory."""
    before, watched, taken, outcome = megabytes(), Watched(), 0.0, 0
    try:
        matcher = forms.matcher(ChatRequest.model_validate(body))
        allowance = Allowance()
        answers = [Constraint(forms.grammars, matcher, room, None, allowance) for _ in range(2)]
        allowance.note(time.monotonic())  # another's canvas, which lasts throughout
        begun = time.thread_time()
        outcome = _settled(answers, room)
        taken = time.thread_time() - begun
    except (RequestError, InputError, ValidationError):
        pass
    stalled = watched.stop()
    return {"seconds": taken, "stalled": stalled, "MB": megabytes() - before, "answered": outcome}


def _settled(answers: list[Constraint], room: int) -> int:
    noise, tokens = torch.Generator().manual_seed(0), 0
    while tokens < min(room, 6 * L) and all(held.error is None for held in answers):
        logits = torch.randn(L, V, generator=noise) * 4
        for held in answers:
            begun = held.lead(L)
            verdict = held.settle(logits, [*begun, *logits.argmax(-1).tolist()[len(begun) :]])
            if verdict.keep is None and set(EOS) & set(verdict.tokens):
                return held.error is None
        tokens += L
    return all(held.error is None for held in answers)


@pytest.fixture(scope="module")
def forms() -> Generator[Forms]:
    made = Forms(tokenizer(), EOS)
    assert made.grammars.trial.start()
    torch.set_num_threads(1)
    yield made
    made.close()


def fuzz(count: int, first: int) -> Callable[[Forms], list[dict[str, float]]]:
    def run(forms: Forms) -> list[dict[str, float]]:
        costs: list[dict[str, float]] = []

        @seed(first)
        @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(BODIES)
        def each(body: dict[str, Any]) -> None:
            found = cost(forms, body, random.Random(len(costs)).choice(ROOMS))
            costs.append(found)
            told = json.dumps(body)[len(json.dumps(USER)) - 1 :][:300]
            assert found["seconds"] < DELAY, (found, told)
            assert found["MB"] < MEGABYTES, (found, told)

        each()
        return costs

    return run


def test_forms_cost_others_little(forms: Forms) -> None:
    costs = fuzz(25, 0)(forms)
    assert len(costs) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_two_thousand_forms_cost_others_little(forms: Forms, share: int) -> None:
    begun, start = time.monotonic(), megabytes()
    costs = fuzz(FORMS // SHARES, 1 + share)(forms)
    worst = {name: max(found[name] for found in costs) for name in ("seconds", "stalled", "MB")}
    answered = sum(found["answered"] for found in costs)
    slow = sum(found["stalled"] > DELAY for found in costs)
    print(
        f"\nshare {share}: {len(costs)} forms, {answered:.0f} answered, in "
        f"{time.monotonic() - begun:.0f} s; worst: {worst}; {slow} stalls above {DELAY} s; the process "
        f"grew by {megabytes() - start:.0f} MB to {megabytes():.0f} MB"
    )
    assert len(costs) >= FORMS // SHARES
    assert slow == 0
