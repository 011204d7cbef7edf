"""Requests as tutorials print them and as clients send them, recorded: answered by default.

`tests/data/clients.json` says which version of which client sent each body; the six of tutorials name
other models, for which the server's name stands here.
"""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from quantize.cli import cli
from quantize.errors import InputError
from quantize.serve.unsupported import IGNORABLE
from tests.support.serving import Running, TellingEngine, running, text_with_tools

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "clients.json").read_text("utf-8"))
NEUTRAL: dict[str, Any] = {"temperature": 1, "top_p": 1, "store": False}


class Repeating(TellingEngine):
    """Answers every prompt with one text."""

    def admit(self, *args: Any, **kwargs: Any) -> None:
        self.texts.append("[5]")
        super().admit(*args, **kwargs)


@pytest.fixture(scope="module", params=["default", "strict"])
def server(request: Any) -> Generator[Running]:
    with running(Repeating(), text_with_tools(), strict=request.param == "strict") as found:
        yield found


def counted(server: Running) -> dict[str, float]:
    """How often each parameter was ignored, as /metrics says."""
    lines = server.http.get("/metrics").text.splitlines()
    found = [
        line.split('name="')[1].split('"} ')
        for line in lines
        if "ignored_parameters_total{" in line
    ]
    return {name: float(count) for name, count in found}


@pytest.mark.parametrize("found", RECORDED, ids=lambda found: found["client"])
def test_what_clients_send(server: Running, found: dict[str, Any]) -> None:
    """200, the header and the counter by default; with --strict 400 and the parameter's name."""
    body = found["body"] | {"model": "bundled"}
    said = {"name": any("name" in turn for turn in body.get("messages", ())) or None} | body
    names = [name for name in IGNORABLE if said.get(name, NEUTRAL.get(name)) != NEUTRAL.get(name)]
    before = counted(server)
    reply = server.http.post(found["path"], json=body)
    if server.service.options.strict and names:
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, names[0])
        assert "without it, the default" in error["message"]
        assert counted(server) == before
        return
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("X-Ignored-Parameters", "") == ", ".join(names)
    assert counted(server) == before | {name: before.get(name, 0) + 1 for name in names}


SAID = {"role": "user", "content": "How many?"}


@pytest.mark.parametrize(
    ("asked", "ignored"),
    [
        ({"messages": [SAID | {"name": "ann"}]}, "name"),
        ({"messages": [{"role": "system", "name": "x", "content": "y"}, SAID]}, "name"),
        ({"messages": [SAID, {"role": "assistant", "content": "5", "annotations": []}, SAID]}, ""),
        ({"modalities": ["text"]}, ""),
        ({"echo": False}, ""),
        ({"max_tokens": 20, "max_completion_tokens": 20}, ""),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, ""),
        ({"prompt_cache_retention": "24h"}, ""),
        ({"max_tokens": 32.0, "seed": 5.0, "top_k": 40.0}, "top_k"),
        ({"input": "How many?", "reasoning": {"effort": "low", "summary": "auto"}}, ""),
        ({"input": "How many?", "background": False}, ""),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1.0, "max_tokens": 5}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [""], "logprobs": True}, "stop"),
        ({"stop": []}, ""),
        ({"stream_options": {"include_usage": True, "include_drafts": True}}, "stream_options"),
        ({"stream_options": {"include_usage": False}, "stream": False}, ""),
        ({"input": "How many?", "max_output_tokens": -1}, "max_output_tokens"),
        ({"input": "How many?", "truncation": "auto"}, "truncation"),
        ({"input": "How many?", "truncation": "disabled", "include": []}, ""),
        ({"input": "How many?", "include": ["reasoning.encrypted_content"]}, ""),
        ({"input": "How many?",
          "include": ["reasoning.encrypted_content", "file_search_call.results"]}, "include"),
    ],
)  # fmt: skip
def test_what_no_recording_holds_and_people_send(
    server: Running, asked: dict[str, Any], ignored: str
) -> None:
    """It is answered; what is ignored of it is named, and refused with --strict."""
    chat = {} if "input" in asked else {"messages": [SAID]}
    path = "/v1/responses" if "input" in asked else "/v1/chat/completions"
    reply = server.http.post(path, json={"model": "bundled"} | chat | asked)
    if server.service.options.strict and ignored:
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, ignored)
        return
    assert (reply.status_code, reply.headers.get("X-Ignored-Parameters", "")) == (200, ignored)


def test_a_speakers_name_does_not_reach_the_template() -> None:
    engine = Repeating()
    with running(engine, text_with_tools()) as server:
        for message in (SAID, SAID | {"name": "ann"}):
            server.openai.chat.completions.create(model="bundled", messages=[message])  # type: ignore
    assert engine.prompts[0] == engine.prompts[1]


def test_temperature_0_is_the_same_answer_each_time() -> None:
    with running(Repeating(), text_with_tools()) as server:
        seeds = [server.ask(temperature=0).choices[0].seed for _ in range(2)]
        assert seeds == [0, 0]
        assert server.ask(temperature=0, seed=5).choices[0].seed == 5
        assert server.ask(temperature=0.1).choices[0].seed != 0
        assert [choice.seed for choice in server.ask(temperature=0, n=2).choices] == [0, 1]


@pytest.mark.parametrize(
    ("effort", "enable", "thinks"),
    [("none", None, False), ("minimal", None, True), ("high", None, True), ("high", False, False),
     ("none", True, True)],
)  # fmt: skip
def test_effort_turns_thinking_on_or_off(effort: str, enable: bool | None, thinks: bool) -> None:
    engine = Repeating()
    with running(engine, text_with_tools(), strict=True) as server:
        given = {} if enable is None else {"enable_thinking": enable}
        server.ask(reasoning_effort=effort, extra_body={"chat_template_kwargs": given})
        server.ask(extra_body={"chat_template_kwargs": {"enable_thinking": thinks}})
    assert engine.prompts[0] == engine.prompts[1]


def test_what_is_ignored_is_told_at_the_start_and_logged_once(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(Repeating(), text_with_tools()) as server:
        for stream in (False, True):
            server.ask(temperature=0.2, presence_penalty=1, stream=stream)
        for refused in ({"echo": True}, {"logit_bias": {"1": 5}}, {"temperature": "hot"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(refused))):
                server.ask(extra_body={"top_p": 0.5} | refused)
    assert caplog.text.count("ignored: temperature: not supported by block diffusion") == 1
    assert caplog.text.count("ignored: presence_penalty") == 1
    told = " ".join(capfd.readouterr().err.split())
    assert "are ignored; --strict refuses them: temperature, top_p" in told


def test_the_flag_that_was_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUANTIZE_API_KEY", raising=False)
    asked = ["serve", "bundled", "--ignore-unsupported", "--strict", "--host", "0.0.0.0"]
    done = CliRunner().invoke(cli, asked)
    assert isinstance(done.exception, InputError)  # of the key that 0.0.0.0 needs
    assert "QUANTIZE_API_KEY" in str(done.exception)
