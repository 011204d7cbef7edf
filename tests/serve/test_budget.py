"""What one request's form may cost: to compile it, to find a text of it, and in each canvas."""

import json
import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from quantize.errors import InputError
from quantize.serve import budget, constraint
from quantize.serve.budget import Allowance, OverBudgetError, WorkMeter
from quantize.serve.call_grammars import call_grammar
from quantize.serve.constraint import Constraint
from quantize.serve.forms import Forms
from quantize.serve.grammars import Grammars, Matcher
from quantize.serve.guides import AnswerGuide
from quantize.serve.protocol import ChatRequest
from quantize.serve.scheduler import Job, Scheduler
from tests.support.serving import Running, ScriptedEngine, running, text_with_tools, tokenizer

L, V, EOS = 16, 1024, (1, 106, 50)
USER: Any = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def grammars() -> Generator[Grammars]:
    made = Grammars(tokenizer(), EOS)
    yield made
    made.trial.close()


def nested(wide: int, deep: int) -> dict[str, Any]:
    """A schema of optional properties, of which the last holds such a schema again."""
    inner = nested(wide, deep - 1) if deep else {"type": "integer"}
    kinds = {f"k{n}": {"type": "integer"} for n in range(wide - 1)} | {"z": inner}
    return {"type": "object", "properties": kinds}


def alternatives(count: int, prefix: str) -> dict[str, Any]:
    names = (f"{prefix}{n}" for n in range(count))
    return {"anyOf": [{"type": "object", "required": [name]} for name in names]}


def calling(schema: dict[str, Any]) -> ChatRequest:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    asked = {"model": "m", "messages": [USER], "tool_choice": "required", "tools": tools}
    return ChatRequest.model_validate(asked)


@pytest.mark.parametrize("schema", [nested(12, 8), nested(100, 1)])
def test_the_grammar_of_a_tool_is_not_much_larger_than_its_schema(schema: dict[str, Any]) -> None:
    forms, body = Forms(tokenizer(), EOS), calling(schema)
    grammar = call_grammar(body.forms[0][2], tokenizer().get_vocab(), several=True)
    assert len(grammar) < 1000 + 6 * len(json.dumps(schema))
    assert forms.matcher(body) is not None
    forms.close()


def test_lists_of_lists_are_written_once_a_level() -> None:
    schema: dict[str, Any] = {"type": "string", "enum": ["x" * 100]}
    for _ in range(7):
        schema = {"type": "array", "items": schema}
    body = calling({"type": "object", "properties": {"a": schema}})
    grammar = call_grammar(body.forms[0][2], tokenizer().get_vocab(), several=True)
    assert grammar.count("x" * 100) == 1


@pytest.mark.parametrize("needed", [(), ("a",), ("b",), ("c",), ("a", "c"), ("a", "b", "c")])
def test_calls_have_the_required_fields_and_any_of_the_others(needed: tuple[str, ...]) -> None:
    properties = {name: {"type": "integer"} for name in "abc"}
    schema = {"type": "object", "properties": properties, "required": list(needed)}
    forms = Forms(tokenizer(), EOS)
    matcher = forms.matcher(calling(schema))
    forms.close()
    for given in ("", "a", "b", "c", "ab", "ac", "bc", "abc", "ba", "aa"):
        said = ",".join(f"{name}:1" for name in given)
        ids = tokenizer().encode(
            f"<|tool_call>call:f{{{said}}}<tool_call|>", add_special_tokens=False
        )
        reader = matcher.deep_copy()
        taken = reader.consume_tokens(ids) and reader.is_accepting()
        right = set(needed) <= set(given) and "".join(sorted(set(given))) == given
        assert taken == right, (needed, given)


@pytest.mark.parametrize("several", [True, False])
def test_one_call_or_several_may_be_made(several: bool) -> None:
    forms = Forms(tokenizer(), EOS)
    body = calling({"type": "object", "properties": {}})
    matcher = forms.matcher(body.model_copy(update={"parallel_tool_calls": several}))
    forms.close()
    call = tokenizer().encode("<|tool_call>call:f{}<tool_call|>", add_special_tokens=False)
    assert matcher.consume_tokens(call)
    assert matcher.is_accepting()
    assert matcher.consume_tokens(call) == several


def test_values_have_the_types_of_the_schema() -> None:
    forms = Forms(tokenizer(), EOS)
    quote = '<|"|>'
    kinds: list[tuple[Any, list[str], list[str]]] = [
        ({"type": "integer"}, ["-3", "0"], ["1.5", "true", f"{quote}1{quote}", "[]"]),
        ({"type": "number"}, ["1.5", "-2e3"], ["true", "{}"]),
        ({"type": "boolean"}, ["true", "false"], ["1", "null"]),
        ({"type": "string"}, [f"{quote}a,b}}{quote}"], ["1", "a"]),
        ({"type": "string", "enum": ["x", 3]}, [f"{quote}x{quote}"], [f"{quote}y{quote}", "3"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1,2]"], ["1", "[true]", "[1,]"]),
        ({"type": "array"}, ["[1,true,{}]"], ["1"]),
        ({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
         ["[]", "[[],[1,2]]"], ["[1]", "[[[]]]"]),
        ({"type": "object", "properties": {"b": {"type": "integer"}}}, ["{}", "{b:1}"],
         ["{b:true}", "{c:1}"]),
        ({"type": "object", "properties": {}}, ["{}"], ["{b:1}"]),
        ({"type": "object"}, ["{}", "{b:1,c:true}"], ["1", "{b:1,}"]),
        ({}, ["1", "true", "null", f"[{quote}a{quote}]", "{b:1}"], ["x"]),
    ]  # fmt: skip
    for schema, right, wrong in kinds:
        matcher = forms.matcher(calling({"type": "object", "properties": {"a": schema}}))
        for value, fits in [*((v, True) for v in right), *((v, False) for v in wrong)]:
            text = f"<|tool_call>call:f{{a:{value}}}<tool_call|>"
            reader = matcher.deep_copy()
            taken = reader.consume_tokens(tokenizer().encode(text, add_special_tokens=False))
            assert (taken and reader.is_accepting()) == fits, (schema, value)
    forms.close()


def test_a_schema_is_enforced_at_all_levels() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(20):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    forms = Forms(tokenizer(), EOS)
    matcher = forms.matcher(calling(schema))
    forms.close()
    for levels, inner, fits in (
        (20, "7", True),
        (20, "true", False),
        (19, "7", False),
        (21, "7", False),
    ):
        value = "{a:" * levels + inner + "}" * levels
        reader = matcher.deep_copy()
        text = f"<|tool_call>call:f{value}<tool_call|>"
        taken = reader.consume_tokens(tokenizer().encode(text, add_special_tokens=False))
        assert (taken and reader.is_accepting()) == fits


def test_the_process_that_tries_forms_ends_with_them() -> None:
    forms = Forms(tokenizer(), EOS)
    forms.close()
    assert "grammars" not in forms.__dict__  # none is begun in order to be ended
    child = forms.grammars.trial.start()
    forms.close()
    assert child.poll() is not None


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("json", {"type": "integer", "multipleOf": 10_000_019}),  # minutes, gigabytes
        ("json", {"allOf": [alternatives(20, name) for name in "abc"]}),
    ],
)
def test_a_form_that_would_take_all_memory_or_time_is_refused_in_time(
    grammars: Grammars, kind: str, form: Any
) -> None:
    begun = time.thread_time()
    with pytest.raises(
        InputError, match=r"takes more than 0\.5 s of a processor or 128 MB|too large"
    ):
        grammars.matcher(kind, form)
    assert time.thread_time() - begun < 0.3  # another process has worked
    assert grammars.matcher("regex", "yes|no")  # in the next one


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"uniqueItems": True}, 'held to "uniqueItems"; leave it out$'),
        ({"type": "string", "pattern": "x" * 400 + ": (A(?!b)"}, "look-around: "),
        ({"type": "string", "pattern": r"a\b error: c"}, "look-around: "),
        ({"type": "string", "pattern": r"(a)\1"}, "a pattern's back reference to a group$"),
        ({"patternProperties": {"*a": {}}}, "a pattern cannot be read: repetition operator missing"),
        ({"allOf": [alternatives(12, name) for name in "abcd"]}, "too large|takes more than"),
        ({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnop"]},
         "cannot be compiled"),
    ],
)  # fmt: skip
def test_no_message_tells_of_the_library(
    grammars: Grammars, schema: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says) as caught:
        grammars.matcher("json", schema)
    messages = [str(caught.value)]
    if "pattern" in schema:
        with pytest.raises(InputError, match=says) as caught:
            grammars.matcher("regex", schema["pattern"])
        messages.append(str(caught.value))
    for word in (
        "panic",
        "backtrace",
        "verbose",
        "<unknown>",
        "(And",
        "SearchRegex",
        "^^",
        "parse",
    ):
        assert not any(word in message for message in messages)


def canvas(seed: int) -> torch.Tensor:
    logits = torch.randn(L, V, generator=torch.Generator().manual_seed(seed)) * 4
    logits[:, list(EOS)] -= 8
    return logits


def answered(grammars: Grammars, matcher: Matcher, room: int) -> tuple[Constraint, list[int], int]:
    """A constraint after an answer of random logits, the tokens, and the most units of a canvas."""
    held, tokens, units = Constraint(grammars, matcher, room), list[int](), 0
    most = constraint.UNITS + constraint.UNITS_A_TOKEN * L
    held.allowance = allowance = Counting()
    while len(tokens) < room and held.error is None:
        begun = held.lead(L)
        for seed in range(constraint.ROUNDS + 1):
            logits = canvas(seed)
            verdict = held.settle(logits, [*begun, *logits.argmax(-1).tolist()[len(begun) :]])
            units = max(units, most - allowance.last.units)
            if verdict.keep is None:
                break
            begun = verdict.tokens[: verdict.keep]
        tokens += verdict.tokens
        if set(EOS) & set(verdict.tokens):
            break
    return held, tokens, units


class Counting(Allowance):
    """Keeps the last meter, and limits no seconds."""

    def note(self, since: float | None) -> None:
        pass

    def meter(self, units: int) -> Any:
        self.last = WorkMeter(units, lambda: 60.0, "x")
        return nullcontext(self.last)


def test_a_tight_room_costs_a_bounded_amount_of_work(grammars: Grammars) -> None:
    """A way of hundreds of tokens was searched after each token: seconds a canvas."""
    held, tokens, units = answered(grammars, grammars.matcher("regex", "(ab{0,9}){400}"), 800)
    text = tokenizer().decode([token for token in tokens if token not in EOS])
    assert held.error is None
    assert text.count("a") == 400
    assert units < constraint.UNITS + constraint.UNITS_A_TOKEN * L + 2 * 800


def test_a_canvas_that_leaves_too_little_room_costs_a_bounded_amount_of_work(
    grammars: Grammars,
) -> None:
    """It is full of the longest parts: a way was searched after each of them."""
    matcher = grammars.matcher("regex", "(ab{0,9}){400}")
    room = len(Constraint(grammars, matcher, 4000)._way) + 20
    held = Constraint(grammars, matcher, room)
    held.allowance = allowance = Counting()
    ids = tokenizer().encode("a" + "b" * 9, add_special_tokens=False)
    wished = (ids * 64)[:64]
    logits = torch.nn.functional.one_hot(torch.tensor(wished), V).float()
    begun = time.thread_time()
    verdict = held.settle(logits, list(wished))
    assert verdict.keep is not None
    most = constraint.UNITS + constraint.UNITS_A_TOKEN * 64
    assert most - allowance.last.units < most + 2 * room
    assert time.thread_time() - begun < 1  # it took 1.6 s


def test_past_its_units_an_answer_takes_its_known_way(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint, "UNITS", 40)
    monkeypatch.setattr(constraint, "UNITS_A_TOKEN", 0)
    for form, room in (("(ab{0,9}){40}", 60), ('("[a-z]{1,40}",){9}!', 120)):
        held, tokens, _ = answered(grammars, grammars.matcher("regex", form), room)
        ids = [token for token in tokens if token not in EOS]
        reader = grammars.matcher("regex", form)
        assert held.error is None
        assert reader.consume_tokens(ids)
        assert reader.is_accepting()


def test_past_its_seconds_a_request_ends_with_the_reason(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = grammars.matcher("regex", "[a-z]{200}")
    with monkeypatch.context() as patch:
        patch.setattr(constraint, "PREPARING", 0.0)
        with pytest.raises(InputError, match="a text of the answer's form takes more than 0 s"):
            Constraint(grammars, matcher, 300)
    held = Constraint(grammars, matcher, 300)
    held.allowance.note(time.monotonic())
    monkeypatch.setattr(budget, "DELAY", 0.0)
    verdict = held.settle(canvas(0), [7] * L)
    assert verdict.tokens == [1] * L
    assert "takes more than 0 s; ask for a simpler form" in str(held.error)
    assert held.lead(L) == []


def test_an_allowance_counts_what_delays_the_oldest_canvas_of_others() -> None:
    allowance = Allowance()

    def work(seconds: float) -> None:
        with allowance.meter(10) as meter:
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                meter.step() if meter.units > 1 else None
            meter.step()

    allowance.note(None)
    work(budget.DELAY + 0.05)  # nobody waits
    begun = time.monotonic()
    allowance.note(begun)
    work(budget.DELAY * 0.6)
    with pytest.raises(OverBudgetError):
        work(budget.DELAY * 0.6)
    allowance.note(time.monotonic())  # the other's next canvas
    work(budget.DELAY * 0.6)
    allowance.note(None)
    with allowance.meter(10) as meter:
        meter.step()
        allowance.another_came()  # while it is worked on
        until = time.thread_time() + budget.DELAY
        while time.thread_time() < until:
            pass
        with pytest.raises(OverBudgetError):
            meter.step()


def test_a_scheduler_notes_the_canvases_of_other_requests() -> None:
    notes: dict[str, float | None] = {}

    class Noting(Allowance):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def note(self, since: float | None) -> None:
            notes[self.name] = since

    def job(began: float, allowance: Allowance | None) -> Job:
        made = object.__new__(Job)
        made.began, made.guide, made.request = began, None, allowance
        if allowance is not None:
            held = object.__new__(Constraint)
            held.allowance = allowance
            made.guide = AnswerGuide(L, held, None)
        return made

    scheduler = object.__new__(Scheduler)
    first, second = Noting("first"), Noting("second")
    scheduler._waiting = deque()
    scheduler._running = {0: job(1, first), 1: job(2, first)}
    scheduler._note_canvases()
    assert notes == {"first": None}  # its own choices do not count
    scheduler._running |= {2: job(5, second), 3: job(4, None)}
    scheduler._note_canvases()
    assert notes == {"first": 4, "second": 1}
    scheduler._running, scheduler._waiting = {0: job(1, first)}, deque([job(0, None)])
    scheduler._note_canvases()
    assert notes["first"] > time.monotonic() - 60  # of another that waits for a slot


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    engine = ScriptedEngine(4)
    engine.free = True
    with running(engine, text_with_tools()) as found:
        yield found


def post(server: Running, **options: Any) -> Any:
    asked = {"model": "bundled", "messages": [USER], "max_tokens": 64} | options
    return server.http.post("/v1/chat/completions", json=asked)


def test_grammars_are_built_before_any_canvas(server: Running) -> None:
    assert "grammars" in server.service.forms.__dict__


def test_other_requests_do_not_wait_for_a_form(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, go_on = threading.Event(), threading.Event()

    def fault(_: str) -> str:
        tried.set()
        assert go_on.wait(60)
        return "it takes for ever"

    monkeypatch.setattr(server.service.forms.grammars.trial, "fault", fault)
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(post(server, guided_regex="yes")))
    thread.start()
    assert tried.wait(60)
    assert post(server).status_code == 200
    go_on.set()
    thread.join()
    assert replies[0].status_code == 400
    assert replies[0].json()["error"]["message"].endswith("cannot be compiled: it takes for ever")


UNHELD = 0  # taken where a call is free; a demanded call cannot be held to it, or no value fits


@pytest.mark.parametrize(
    ("inner", "path", "status"),
    [
        ({"enum": None}, "", 200), ({"type": None, "enum": None, "required": None}, "", 200),
        ({"properties": None, "items": None}, "", 200), ({"type": "string", "enum": []}, "", UNHELD),
        ({"type": ["string", "null"]}, "", 200), ({"enum": [1, None, {}]}, "", UNHELD),
        ({"type": "array", "items": True}, "", 200), ({"default": None, "const": None}, "", 200),
        ({"enum": 5}, ".enum", 400), ({"enum": "ab"}, ".enum", 400), ({"enum": {}}, ".enum", 400),
        ({"type": "object", "properties": {"b": {}}, "required": 5}, ".required", 400),
        ({"type": "object", "properties": {"b": {}}, "required": [["b"]]}, ".required", 400),
        ({"type": "object", "properties": {"b": {}}, "required": {"b": 1}}, ".required", 400),
        ({"type": "object", "properties": [["b"]]}, ".properties", 400),
        ({"type": "object", "properties": {"b": [["b"]]}}, ".properties.b", 400),
        ({"type": 5}, ".type", 400), ({"type": [5]}, ".type", 400), ({"type": {}}, ".type", 400),
        ({"type": "array", "items": 5}, ".items", 400),
        ({"type": "array", "items": {"enum": 5}}, ".items.enum", 400),
        ([["b"]], "", 400), (5, "", 400), (None, "", 400),
    ],
)  # fmt: skip
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_odd_schemas_of_tools_are_taken_or_refused_at_their_place(
    server: Running, inner: Any, path: str, status: int, choice: str
) -> None:
    schema = {"type": "object", "properties": {"a": inner}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    reply = post(server, tools=tools, tool_choice=choice)
    if status == UNHELD:
        assert reply.status_code == (400 if choice == "required" else 200), reply.text
        assert (
            choice == "auto"
            or "function.parameters.properties.a.enum" in reply.json()["error"]["param"]
        )
        return
    assert reply.status_code == status, reply.text
    if status == 400:
        place = f"tools[0].function.parameters.properties.a{path}"
        assert reply.json()["error"]["param"] == place
