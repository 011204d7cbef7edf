"""`quantize serve` through the official OpenAI client and plain HTTP."""

import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from quantize import __version__
from quantize.cli import cli
from quantize.cli.options import served_name
from quantize.errors import InputError, ResourceError
from quantize.recovery.served import AnsweringServer
from quantize.serve import guard
from quantize.serve.options import Options
from tests.support.pictures import part
from tests.support.serving import (
    FEW,
    HASTY,
    QUESTION,
    SAMPLER,
    Running,
    ScriptedEngine,
    engine_of,
    in_process,
    running,
    text_of,
    tokenizer,
)  # fmt: skip

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    with running(max_body_bytes=1 << 20) as found:
        yield found


# ------------------------------------------------------------------ the official client


def test_a_chat_is_what_the_runtime_answers(server: Running) -> None:
    reply = server.ask(seed=3, max_tokens=128)
    sample = in_process(QUESTION, 3)
    (choice,) = reply.choices
    assert choice.message.content == text_of(sample)
    assert "####" in choice.message.content
    assert (choice.message.role, choice.finish_reason, choice.seed) == ("assistant", "stop", 3)
    assert reply.usage.completion_tokens == sample.new_tokens
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + sample.new_tokens
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0
    assert reply.usage.denoising_steps == sample.denoising_steps
    assert reply.usage.canvases == sample.canvases
    assert reply.usage.tokens_per_forward == pytest.approx(sample.tokens_per_forward, abs=1e-3)


def test_a_stream_is_the_same_text_in_finished_canvases(server: Running) -> None:
    options: dict[str, Any] = {"seed": 11, "max_tokens": 192}
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}
    whole = server.ask(**options)
    stream = server.ask(**options, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    for field in ("content", "reasoning_content"):
        text = "".join(getattr(delta, field, None) or "" for delta in deltas)
        assert text == getattr(whole.choices[0].message, field)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage == whole.usage
    tokens = in_process(QUESTION, 11, thinking=True, max_tokens=192).tokens
    thoughts = tokens.index(tokenizer().convert_tokens_to_ids("<channel|>")) + 1
    assert whole.usage.completion_tokens_details.reasoning_tokens == thoughts > 1


def test_every_canvas_is_sent_when_it_is_finished() -> None:
    engine = ScriptedEngine(1)
    with running(engine, max_num_seqs=1) as server:
        engine.allowed.release()
        stream = iter(server.ask(max_tokens=24, stream=True))
        assert next(stream).choices[0].delta.role == "assistant"
        for number in (1, 2, 3):  # the next canvas is not even allowed yet
            assert next(stream).choices[0].delta.content.startswith(f"c{number} ")
            engine.allowed.release()
        assert list(stream) == []


def test_thoughts_come_apart(server: Running) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = server.ask(seed=5, extra_body=thinking).choices[0].message
    raw = in_process(QUESTION, 5, thinking=True)
    thoughts, _, answer = text_of(raw).partition("#### ")
    assert message.reasoning_content.strip()
    assert "thought" not in message.reasoning_content
    assert message.content == f"#### {answer}"
    assert thoughts == f"thought\n{message.reasoning_content}"
    plain = server.ask(seed=5).choices[0].message
    assert plain.reasoning_content is None


def test_choices_have_seeds_of_their_own(server: Running) -> None:
    reply = server.ask(seed=2**63 - 2, n=3, extra_body=FEW)
    assert [choice.seed for choice in reply.choices] == [2**63 - 2, 2**63 - 1, -(2**63)]
    alone = [in_process(QUESTION, choice.seed, sampler=HASTY) for choice in reply.choices]
    assert [choice.message.content for choice in reply.choices] == list(map(text_of, alone))
    assert reply.usage.completion_tokens == sum(sample.new_tokens for sample in alone)


def test_without_a_seed_the_one_that_was_taken_is_told(server: Running) -> None:
    first, second = (server.ask().choices[0] for _ in range(2))
    assert first.seed != second.seed
    assert server.ask(seed=first.seed).choices[0].message == first.message


def test_a_sample_with_a_seed_is_the_same_alone_and_under_load(server: Running) -> None:
    questions = [f"Ann has {i} pens and buys {i + 2} more. How many pens?" for i in range(4)]

    def ask(i: int) -> str:
        time.sleep(0.01 * (i % 5))  # they come and go at different canvases
        extra = FEW | {"chat_template_kwargs": {"enable_thinking": bool(i % 2)}}
        message = server.ask(questions[i], seed=i, extra_body=extra).choices[0].message
        return (message.reasoning_content or "") + message.content

    alone = [ask(i) for i in range(4)]
    before = batch_sizes(server)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, range(4)))
    assert together == alone
    assert len(set(alone)) == 4
    assert batch_sizes(server)[1] > before[1]  # they did denoise together


def batch_sizes(server: Running) -> tuple[float, float]:
    """Batches of one sample, and of several."""
    lines = dict(
        line.rsplit(" ", 1)
        for line in server.http.get("/metrics").text.splitlines()
        if line.startswith("quantize_batch_size")
    )
    one = float(lines['quantize_batch_size_bucket{le="1.0"}'])
    return one, float(lines["quantize_batch_size_count"]) - one


@pytest.mark.parametrize(
    ("control", "value", "others"),  # with `others` the control decides, whatever a CPU's roundings
    [
        ("num_inference_steps", 1, {}),
        ("entropy_bound", 1e-6, {}),
        ("t_max", 10.0, {}),
        ("t_min", 9.0, {"t_max": 10.0}),
        ("confidence_threshold", 2.0, {"stability_threshold": 0}),
        ("stability_threshold", 4, {}),
    ],
)
def test_diffusion_controls_reach_the_sampler(
    server: Running, control: str, value: float, others: dict[str, float]
) -> None:
    few = replace(SAMPLER, max_denoising_steps=12, **others)  # the temperature falls fast
    setting = "max_denoising_steps" if control == "num_inference_steps" else control
    reply = server.ask(
        seed=7, max_tokens=64, extra_body={"num_inference_steps": 12, **others, control: value}
    )
    sample, without = (
        in_process(QUESTION, 7, max_tokens=64, sampler=each)
        for each in (replace(few, **{setting: value}), few)
    )
    answer = (reply.choices[0].message.content, reply.usage.denoising_steps)
    assert answer == (text_of(sample), sample.denoising_steps)
    assert answer != (text_of(without), without.denoising_steps)


def test_a_stop_string_ends_the_answer_before_it(server: Running) -> None:
    whole = server.ask(seed=3).choices[0].message.content
    choice = server.ask(seed=3, stop=["nowhere", "####"]).choices[0]
    assert choice.message.content == whole.partition("####")[0] != whole
    assert choice.finish_reason == "stop"


def test_a_token_limit_holds_to_the_token(server: Running) -> None:
    reply = server.ask(seed=3, max_completion_tokens=5)
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (5, "length")
    assert text_of(in_process(QUESTION, 3)).startswith(reply.choices[0].message.content)


def test_drafts_are_shown_to_whoever_asks(server: Running) -> None:
    options = {"include_drafts": True, "include_usage": True}
    chunks = list(server.ask(seed=3, stream=True, stream_options=options))
    drafts = [chunk.draft for chunk in chunks if getattr(chunk, "draft", None)]
    assert len(drafts) == chunks[-1].usage.denoising_steps
    assert [draft["step"] for draft in drafts] == list(range(1, len(drafts) + 1))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "".join(drafts[-1]["tokens"]).startswith(text)
    assert len(drafts[0]["accepted"]) == len(drafts[0]["tokens"]) == 64


def test_plain_completions_take_text_and_tokens(server: Running) -> None:
    prompt = f"<|turn>user\n{QUESTION}<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    ids = [2, *server_tokens(prompt)]
    asked: Any = {"model": "bundled", "seed": 3, "max_tokens": 64, "extra_body": FEW}
    create = server.openai.completions.create
    reply = create(**asked, prompt=[ids, ids], n=2)
    expected = [
        text_of(in_process(QUESTION, seed, max_tokens=64, sampler=HASTY)) for seed in (3, 4)
    ]
    assert [choice.text for choice in reply.choices] == expected * 2
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 2 * len(ids)
    stream = create(**asked, prompt=ids, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0]
    assert create(**asked, prompt="1 + 1 =").choices[0].finish_reason


def server_tokens(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def test_a_model_is_described_by_its_name(server: Running) -> None:
    (listed,) = server.openai.models.list().data
    assert server.openai.models.retrieve("bundled") == listed
    with pytest.raises(openai.NotFoundError, match="model 'org/other' is not served here"):
        server.openai.models.retrieve("org/other")
    assert server.http.get("/v1/models/org/other").status_code == 404


def test_version_and_documentation(server: Running) -> None:
    assert server.http.get("/version").json() == {"version": __version__}
    page = server.http.get("/docs").text
    assert "://" not in page
    for said in (
        "POST /v1/chat/completions",
        "entropy_bound",
        'id="Question"',
        "reasoning_content",
    ):
        assert said in page


def test_a_port_that_is_taken_is_noticed_before_weights_are_read(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUANTIZE_API_KEY", raising=False)
    monkeypatch.setattr("quantize.serve.server.sound_tokenizer", pytest.fail)
    port = server.url.rpartition(":")[2]
    done = CliRunner().invoke(cli, ["serve", "bundled", "--port", port])
    assert isinstance(done.exception, ResourceError)
    assert f"cannot listen at 127.0.0.1 port {port} (Address already in use)" in str(done.exception)


def test_the_example_of_the_help_is_solved(server: Running) -> None:
    """Whatever its seed: a user's first answer should be right."""
    text = CliRunner().invoke(cli, ["serve", "--help"], terminal_width=200).output
    found = re.search(r"-d '(\{.*?\})'\s+answers? (\d+)", text, re.DOTALL)
    assert found is not None, text
    for seed in range(4):
        body = json.loads(found[1]) | {"seed": seed}
        reply = server.http.post("/v1/chat/completions", json=body).json()
        assert reply["choices"][0]["message"]["content"].endswith(f"#### {found[2]}")


def test_the_server_says_how_it_encodes_canvases(server: Running) -> None:
    assert AnsweringServer(server.url).commit_pass == "plain"


@pytest.mark.parametrize(
    ("path", "status"), [("/", 200), ("/health", 200), ("/v1/models", 200), ("/v1/responses", 405)]
)
def test_head_is_get_without_a_body(server: Running, path: str, status: int) -> None:
    reply = server.http.head(path)
    assert (reply.status_code, reply.content) == (status, b"")
    assert server.http.get(path).status_code == status  # on the same connection


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}


@pytest.mark.parametrize(
    ("origin", "allowed"), [("https://chat.example", True), ("https://evil.example", False)]
)
def test_pages_of_an_origin_that_is_allowed_may_ask(origin: str, allowed: bool) -> None:
    settings: dict[str, Any] = {"api_key": "k", "origins": ["https://chat.example"]}
    with running(ScriptedEngine(), **settings) as server:
        asked = {"Origin": origin} | PREFLIGHT
        before = httpx.options(f"{server.url}/v1/chat/completions", headers=asked)
        reply = server.http.get("/v1/models", headers={"Origin": origin})
        keyless = httpx.get(f"{server.url}/v1/models", headers={"Origin": origin})
    assert (before.status_code, reply.status_code, keyless.status_code) == (
        200 if allowed else 400, 200, 401,
    )  # fmt: skip
    for found in (before, reply, keyless):
        told = found.headers.get("Access-Control-Allow-Origin")
        assert told == (origin if allowed else None)


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "", "file:///x"])
def test_an_origin_is_what_a_browser_sends(origin: str) -> None:
    with pytest.raises(InputError, match=r"--allow-origin .*: write it as https://chat.example"):
        Options("x", origins=[origin])


def test_without_origins_other_pages_get_nothing(server: Running) -> None:
    asked = {"Origin": "https://chat.example"} | PREFLIGHT
    reply = server.http.options("/v1/chat/completions", headers=asked)
    assert (reply.status_code, "Access-Control-Allow-Origin" in reply.headers) == (405, False)


def test_the_model_is_listed(server: Running) -> None:
    (model,) = server.openai.models.list().data
    assert (model.id, model.max_model_len) == ("bundled", 4096)  # type: ignore[attr-defined]


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"extra_body": {"temperature": "hot"}}, "temperature", "valid number"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"frequency_penalty": 3}, "frequency_penalty", "less than or equal to 2"),
        ({"extra_body": {"top_k": 1.5}}, "top_k", "valid integer"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty", "greater than 0"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "chosen at once; hold the answer to a form"),
        ({"extra_body": {"best_of": 2}}, "best_of", "no likelihood"),
        ({"top_logprobs": 3}, "top_logprobs", "only with logprobs"),
        ({"extra_body": {"functions": [{}]}}, "functions", "the older form; set tools"),
        ({"tools": [TOOL]}, "tools", "tools: this model's chat template has no place for them"),
        ({"extra_body": {"reasoning_effort": "much"}}, "reasoning_effort", "'none', 'minimal'"),
        ({"extra_body": {"colour": 1}}, "colour", "no such parameter; GET /docs"),
        ({"extra_body": {"chat_template_kwargs": {"x": 1}}}, "chat_template_kwargs.x", "no such"),
        ({"extra_body": {"top_p": "high"}}, "top_p", "valid number"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_object'"),
        ({"n": 0}, "n", "greater"),
        ({"n": 100}, "n", "16"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "not both"),
        ({"seed": 2**63}, "seed", "less"),
        ({"max_tokens": -2}, "max_tokens", "greater"),
        ({"stop": ["", "x"]}, "stop", "none of them empty"),
        ({"extra_body": {"t_min": 0.9}}, "t_min", "t_max > t_min"),
        ({"extra_body": {"num_inference_steps": 10**9}}, "num_inference_steps", "256"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "system"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]", "input_audio: not supported: the model takes no audio",
        ),
        ({"messages": [{"role": "system", "content": [part("x")]}]},
         "messages[0].content[0].image_url", "of the user"),
        ({"extra_body": {"image_tokens": 100}}, "image_tokens", "70, 140, 280, 560 or 1120"),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "messages", "at most 4032"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Running, options: dict[str, Any], param: str | None, says: str
) -> None:
    asked = {"model": "bundled", "messages": [{"role": "user", "content": "hi"}]} | options
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        server.openai.chat.completions.create(**asked)
    assert caught.value.param == param
    asked["stream"] = True  # the same, and not a stream that breaks
    with pytest.raises(openai.BadRequestError, match=says):
        server.openai.chat.completions.create(**asked)


def test_beginnings_of_prompts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantize.runtime.gpu.memory.CHUNK", 256)
    with running(engine_of(1, prefix_bytes=1 << 26), max_num_seqs=1) as server:
        question = "Tom has 5 apples and buys 3 more. " * 30 + QUESTION
        asked: Any = {"seed": 1, "max_tokens": 8, "extra_body": FEW}
        first, second = (server.ask(question, **asked) for _ in range(2))
        assert first.choices == second.choices
        page = dict(
            line.rsplit(" ", 1)
            for line in server.http.get("/metrics").text.splitlines()
            if line.startswith("quantize_prefix")
        )
    tokens = first.usage.prompt_tokens
    assert tokens > 256
    assert float(page["quantize_prefix_asked_tokens"]) == 2 * tokens
    assert float(page["quantize_prefix_reused_tokens"]) == tokens // 256 * 256
    assert float(page["quantize_prefix_bytes"]) > 0


def test_another_model_is_not_found(server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'gpt-4o' is not served here"):
        server.openai.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "hi"}]
        )


def test_messages_that_clients_send_back_are_taken(server: Running) -> None:
    first = server.ask(seed=3).choices[0].message
    reply = server.openai.chat.completions.create(
        model="bundled",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": QUESTION},
            {k: v for k, v in first.model_dump().items() if k != "reasoning_content"}
            | {"reasoning_content": "5+3"},
            {"role": "user", "content": [{"type": "text", "text": "And 2 more?"}]},
        ],
        temperature=1,
        top_p=1,
        presence_penalty=0,
    )
    assert reply.choices[0].finish_reason in ("stop", "length")


HEADERS = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", HEADERS, 400),
        (b"[]", HEADERS, 400),
        (b"", HEADERS, 400),
        (b"{}", {"Content-Type": "text/plain"}, 400),
        (b"\xff\xfe", HEADERS, 400),
        (b"[" * 200_000, HEADERS, 413),
        (b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}', HEADERS, 400),
        (b'{"model": "bundled", "messages": [{"role": "user", "content": "\\ud800"}]}', HEADERS, 400),
        (b'{"\\ud800": 1}', HEADERS, 400),
        (b'{"model": "bundled", "messages": [], "t_max": NaN}', HEADERS, 400),
        (b'{"pad": "' + b"x" * (1 << 20) + b'"}', HEADERS, 413),
    ],
)  # fmt: skip
def test_malformed_bodies(
    server: Running, body: bytes, headers: dict[str, str], status: int
) -> None:
    reply = server.http.post("/v1/chat/completions", content=body, headers=headers)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]
    assert reply.json()["error"]["code"]


def test_a_body_without_a_length_is_limited_too(server: Running) -> None:
    def parts() -> Generator[bytes]:
        for _ in range(40):
            yield b"x" * 100_000

    reply = server.http.post("/v1/chat/completions", content=parts(), headers=HEADERS)
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "body_too_large"


def test_no_route_and_wrong_method_have_openais_shape(server: Running) -> None:
    assert server.http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    lost = server.http.post("/chat/completions", json={}).json()["error"]["message"]
    assert "a client's base URL ends in /v1" in lost
    wrong = server.http.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "POST")
    said = wrong.json()["error"]
    assert said["message"] == "GET is not answered at this path; use POST"
    assert said["code"] == "method_not_allowed"


# ------------------------------------------------------------------ who may ask


def test_another_name_of_this_machine_gets_nothing(server: Running) -> None:
    reply = server.http.get("/v1/models", headers={"Host": "rebound.example:80"})
    assert (reply.status_code, "bundled" in reply.text) == (403, False)
    port = server.url.rsplit(":", 1)[1]
    for name in (f"localhost:{port}", f"[::1]:{port}", "127.0.0.1", "LocalHost"):
        assert server.http.get("/v1/models", headers={"Host": name}).status_code == 200


def test_the_key_is_asked_for(capfd: pytest.CaptureFixture[str], caplog: Any) -> None:
    caplog.set_level("DEBUG")
    with running(ScriptedEngine(), api_key="sesame-1234") as server:
        assert server.openai.models.list().data
        wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame-123", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/v1/nothing"):
            reply = httpx.get(server.url + path)
            assert (reply.status_code, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
        said = (Path(__file__).parents[2] / "docs" / "serve.md").read_text("utf-8")
        assert "`/v1/...`, `/metrics`, `/version` and `/openapi.json` ask for it" in said
        assert "The page `/`, `/docs` and `/health`\nstay open" in said
        for path in ("/", "/page.js", "/page.css", "/icon.svg", "/docs", "/health"):
            assert httpx.get(server.url + path).status_code == 200
        basic = {"Authorization": "Basic sesame-1234"}
        assert httpx.get(f"{server.url}/v1/models", headers=basic).status_code == 401
    assert "sesame" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(InputError, match="QUANTIZE_API_KEY"):
        Options("bundled", host=host)
    assert not Options("bundled", host=host, api_key="x").is_local
    with pytest.raises(InputError, match="empty"):
        Options("bundled", api_key=" ")


def test_requests_are_logged_without_their_prompts(caplog: Any) -> None:
    caplog.set_level("DEBUG", "quantize.serve")
    engine = ScriptedEngine()
    engine.allowed.release(2)
    with running(engine) as server:
        server.ask("Which secret word?", max_tokens=8)
        list(server.ask("Which secret word?", max_tokens=8, stream=True))
    assert "secret word" not in caplog.text
    assert caplog.text.count("POST /v1/chat/completions 200") == 2


# ------------------------------------------------------------------ queue, time, hanging up


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = ScriptedEngine(1)
    with running(engine, max_num_seqs=1, max_queue=1) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.ask, max_tokens=8)
        assert engine.entered.acquire(timeout=20)
        second = pool.submit(server.ask, max_tokens=8)
        while server.service.scheduler.load != (1, 1):
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
            server.ask()
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        engine.allowed.release(2)
        assert first.result(20).choices[0].message.content.startswith("c1 ")
        assert second.result(20).choices[0].message.content.startswith("c1 ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slot(stream: bool) -> None:
    engine = ScriptedEngine(1)
    with running(engine, max_num_seqs=1) as server:
        impatient = httpx.Client(base_url=server.url, timeout=httpx.Timeout(20, read=0.5))
        body = {"model": "bundled", "messages": [{"role": "user", "content": "x"}]}
        body |= {"max_tokens": 800, "stream": stream}
        if stream:
            engine.allowed.release()  # one canvas, so that the stream begins
            with impatient.stream("POST", "/v1/chat/completions", json=body) as reply:
                assert reply.status_code == 200
                next(reply.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                impatient.post("/v1/chat/completions", json=body)
        impatient.close()
        time.sleep(0.3)  # the server hears of it
        ask = threading.Thread(target=server.ask, kwargs={"max_tokens": 8})
        ask.start()
        engine.allowed.release(4)  # 100 canvases would need 100
        ask.join(20)
        assert not ask.is_alive()
        server.settle()
        assert len(engine.batches) <= 4
        assert engine.said == {}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_not_take_for_ever(stream: bool) -> None:
    engine = ScriptedEngine(1)
    with running(engine, max_num_seqs=1, request_timeout=0.3) as server:
        with pytest.raises(
            openai.InternalServerError, match=r"not finished within 0.3 s"
        ) as caught:
            server.ask(stream=stream)
        assert caught.value.status_code == 504
        engine.allowed.release(2)
        server.settle()


def test_time_that_runs_out_inside_a_stream_is_told_there() -> None:
    engine = ScriptedEngine(1)
    engine.allowed.release()
    with running(engine, max_num_seqs=1, request_timeout=1) as server:
        stream = server.ask(stream=True, max_tokens=800)
        with pytest.raises(openai.APIError, match="not finished within 1 s"):
            list(stream)
        engine.allowed.release()
        server.settle()


class Preparing:
    """Holds the one thread that prepares prompts until it is told to go on."""

    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.prepared = 0
        encode = server.service.text.encode_chat

        def held(*arguments: Any, **options: Any) -> list[int]:
            self.entered.release()
            assert self.go.acquire(timeout=20)
            self.prepared += 1
            return encode(*arguments, **options)

        monkeypatch.setattr(server.service.text, "encode_chat", held)


def test_who_is_being_prepared_takes_a_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(2)
    engine.free = True
    with running(engine, max_queue=2) as server, ThreadPoolExecutor(2) as pool:
        preparing = Preparing(server, monkeypatch)
        first = pool.submit(server.ask, max_tokens=8)
        assert preparing.entered.acquire(timeout=20)
        second = pool.submit(server.ask, max_tokens=8)
        while server.http.get("/health").json()["waiting"] != 2:
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="the queue is full: 2 of 2 are waiting"):
            server.ask(max_tokens=8)
        preparing.go.release(2)
        assert first.result(20).usage.canvases == second.result(20).usage.canvases == 1
        server.settle()  # no place was lost


def test_preparing_counts_as_time_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(ScriptedEngine(1), request_timeout=0.3) as server:
        preparing = Preparing(server, monkeypatch)
        for _ in range(2):  # the first is being prepared, the second waits for its turn
            with pytest.raises(openai.InternalServerError, match=r"not finished within 0.3 s"):
                server.ask()
        preparing.go.release()
        server.settle()
        assert preparing.prepared <= 1


def test_who_hangs_up_before_its_turn_is_never_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(1)
    engine.free = True
    body = {"model": "bundled", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    with running(engine) as server, ThreadPoolExecutor(1) as pool:
        preparing = Preparing(server, monkeypatch)
        first = pool.submit(server.ask, max_tokens=8)
        assert preparing.entered.acquire(timeout=20)
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + "/v1/chat/completions", json=body, timeout=0.2)
        while server.http.get("/health").json()["waiting"] != 1:
            time.sleep(0.01)
        preparing.go.release(4)
        assert first.result(20).choices
        server.settle()
        assert preparing.prepared == 1


def test_a_body_must_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 5 <= guard.BODY_SECONDS <= 60
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    with running(ScriptedEngine(1)) as server:
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=30) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            reply = slow.makefile("rb").read()
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"no whole body within 0.2 s" in reply


def test_a_failing_engine_is_a_500_and_no_more() -> None:
    engine = ScriptedEngine(2)
    engine.fault = RuntimeError("/secret/path: out of memory")
    engine.allowed.release(3)
    with running(engine, max_num_seqs=2) as server:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="the engine failed") as caught:
                server.ask(stream=stream)
            assert "secret" not in caught.value.response.text
        assert server.http.get("/health").status_code == 200
        with pytest.raises(openai.InternalServerError):
            server.ask()
        assert server.http.get("/health").status_code == 503


def test_shutdown_finishes_what_runs_and_refuses_what_waits() -> None:
    engine = ScriptedEngine(1)
    with (
        running(engine, max_num_seqs=1, shutdown_grace=20) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        runs = pool.submit(server.ask, max_tokens=16)
        assert engine.entered.acquire(timeout=20)
        waits = pool.submit(server.ask, max_tokens=16)
        while server.service.scheduler.load != (1, 1):
            time.sleep(0.01)
        server.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            waits.result(20)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["Retry-After"]
        engine.allowed.release(2)
        assert runs.result(20).choices[0].finish_reason == "length"


def test_after_the_grace_of_a_shutdown_what_runs_ends_with_an_error() -> None:
    engine = ScriptedEngine(1)
    engine.allowed.release()
    with running(engine, max_num_seqs=1, shutdown_grace=0.2) as server:
        stream = iter(server.ask(max_tokens=800, stream=True))
        next(stream)
        server.server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.5)
        engine.allowed.release()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


def test_metrics_add_up(server: Running) -> None:
    def value(name: str) -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    asked = 'quantize_requests_total{path="/v1/chat/completions",status="200"}'
    names = (
        asked,
        "quantize_denoising_steps_total",
        "quantize_tokens_total",
        "quantize_canvases_total",
    )
    before = [value(name) for name in names]
    usage = server.ask(seed=9, n=2).usage
    end = time.monotonic() + 10  # a request is counted once its answer has gone
    while value(asked) == before[0] and time.monotonic() < end:
        time.sleep(0.01)
    after = [value(name) for name in names]
    expected = [1, usage.denoising_steps, usage.completion_tokens, usage.canvases]
    assert [b - a for a, b in zip(before, after, strict=True)] == expected
    assert value("quantize_running") == value("quantize_waiting") == 0


def test_the_page_names_nothing_elsewhere(server: Running) -> None:
    page = server.http.get("/")
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    for path in ("/", "/page.js", "/page.css"):
        text = server.http.get(path).text
        assert len(text) > 1000
        assert "://" not in text
    assert json.dumps(server.http.get("/openapi.json").json()["paths"]).count('"post"') == 3


def test_an_answer_ends_where_the_context_does() -> None:
    engine = ScriptedEngine()
    engine.free = True
    with running(engine, max_context=100) as server:
        reply = server.ask("word " * 10, max_tokens=10**6)
        room = 100 - reply.usage.prompt_tokens
        assert (reply.usage.canvases, reply.choices[0].finish_reason) == (room // 8, "length")
        with pytest.raises(openai.BadRequestError, match="at most 92 are taken"):
            server.ask("word " * 100)


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for name in ("quantize.serve.app", "quantize.serve.server"):
        monkeypatch.delitem(sys.modules, name)
    done = CliRunner().invoke(cli, ["serve", "bundled"])
    assert isinstance(done.exception, ResourceError)
    assert (
        str(done.exception) == "serve needs fastapi: pip install 'diffusiongemma-quantize[serve]'"
    )


def test_a_command_line_that_would_be_unsafe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUANTIZE_API_KEY", raising=False)
    done = CliRunner().invoke(cli, ["serve", "bundled", "--host", "0.0.0.0"])
    assert isinstance(done.exception, InputError)
    assert "QUANTIZE_API_KEY" in str(done.exception)


def test_a_served_model_is_named_after_its_run_or_id(tmp_path: Path) -> None:
    for folder, name in (("nvfp4-0123/checkpoint", "nvfp4-0123"), ("gemma", "gemma")):
        (tmp_path / folder).mkdir(parents=True)
        assert served_name(str(tmp_path / folder), tmp_path / folder) == name
    assert served_name("org/model@main", tmp_path / "snapshots" / "abc") == "org/model@main"
