"""Requests that try to stop a server: each ends in one line of refusal or an answer, none in a 500."""

import gc
import gzip
import json
import socket
import time
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from quantize.runtime.prompt.chat import _without_thoughts
from quantize.serve import guard
from quantize.serve import server as module
from quantize.serve.protocol import ChatRequest
from quantize.serve.service import MAX_ENTRIES
from quantize.serve.text import held_back
from tests.support.hostile_requests import CHAT, CHATS, OPENS, RESPONSES, bodies, large_bodies
from tests.support.serving import Running, ScriptedEngine, running, text_with_tools

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    engine = ScriptedEngine(4)
    engine.free = True
    engine.max_length = 512
    with running(engine, text_with_tools()) as found:
        yield found
        found.settle()
        assert engine.said == {}
        metrics = found.http.get("/metrics").text
        assert "quantize_failures_total 0.0" in metrics
        assert 'status="5' not in metrics


def said(reply: Any) -> str | None:
    """The one line of a refusal, None if the request was answered."""
    if reply.status_code == 200:
        return None
    assert 400 <= reply.status_code < 500, reply.text[:300]
    message = reply.json()["error"]["message"]
    assert message
    assert "\n" not in message
    assert len(message) < 1000
    return message


@pytest.mark.parametrize(
    ("path", "body"), [pytest.param(path, body, id=name) for name, path, body in bodies()]
)
def test_each_is_answered_or_refused(server: Running, path: str, body: bytes) -> None:
    said(server.http.post(path, content=body, headers=JSON))


@pytest.mark.slow
def test_each_large_one_too(server: Running) -> None:
    """One test, since to build them for their names would take every collection seconds."""
    for name, path, body in large_bodies():
        print(name)  # the last one is it
        assert len(body) > 128 << 10
        said(server.http.post(path, content=body, headers=JSON))


def test_brackets_of_a_text_open_no_lists(server: Running) -> None:
    many = guard.MAX_BRACKETS + 1
    text = "[{" * many + '\\" [ \\\\'
    assert guard._brackets(json.dumps({text: [text, "\\", '"[']}).encode()) == 2
    assert guard._brackets(json.dumps([[]] * many + [text]).encode()) == many + 1
    chat = CHAT | {"messages": [{"role": "user", "content": text}]}
    reply = server.http.post(CHATS, content=json.dumps(chat).encode(), headers=JSON)
    assert reply.status_code == 400  # as any prompt that is too long
    assert "tokens" in reply.json()["error"]["message"]
    deep = json.dumps(CHAT | {"metadata": [[]] * many}).encode()
    assert server.http.post(CHATS, content=deep, headers=JSON).status_code == 413


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": kind}
        for kind in (
            "text/plain", "multipart/form-data", "multipart/form-data; boundary=x", "application/xml",
            "application/x-www-form-urlencoded", "application/json;;;=", "", "a" * 9000,
        )
    ]
    + [JSON | more for more in ({"Content-Encoding": "gzip"}, {"Accept": "x" * 9000}, {"Range": "x"})],
)  # fmt: skip
def test_headers_of_all_kinds(server: Running, headers: dict[str, str]) -> None:
    body = json.dumps(CHAT).encode()
    if "Content-Encoding" in headers:
        body = gzip.compress(body)
    said(server.http.post(CHATS, content=body, headers=headers))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("//x", "/%00", "/..%2f..%2fetc", "/v1/models/%ff", "/docs/../x",
                                     "/v1/models/" + "a" * 9000, CHATS, "/?" + "a=b&" * 2000)),
        *((method, CHATS) for method in ("PUT", "DELETE", "TRACE", "OPTIONS", "BREW", "HEAD")),
    ],
)  # fmt: skip
def test_paths_and_methods_of_all_kinds(server: Running, method: str, path: str) -> None:
    reply = server.http.request(method, server.url + path)
    assert reply.status_code < 500


def raw(server: Running, *pieces: bytes, half: bool = False) -> bytes:
    """What the server says to bytes on one connection; `half`: the client then sends no more."""
    address = server.server.servers[0].sockets[0].getsockname()
    with socket.create_connection(address, timeout=10) as line:
        for piece in pieces:
            line.sendall(piece)
        if half:
            line.shutdown(socket.SHUT_WR)
        reply = b""
        while b"\r\n\r\n" not in reply and (part := line.recv(1 << 16)):
            reply += part
        return reply


HEAD = f"POST {CHATS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
BODY = json.dumps(CHAT).encode()


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD, b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        (HEAD, b"Content-Length: -5\r\n\r\n"), (HEAD, b"Content-Length: x\r\n\r\n"),
        (HEAD, b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n"),
        (HEAD, b"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n{}"),
        (HEAD, b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}"),
        (HEAD + b"X: " + b"y" * 200_000 + b"\r\n\r\n",), (b"\x16\x03\x01 no HTTP\r\n\r\n",),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: example.org\r\n\r\n",),
        (HEAD, b"Transfer-Encoding: chunked\r\n\r\n",
         *(b"1\r\n" + BODY[n : n + 1] + b"\r\n" for n in range(len(BODY))), b"0\r\n\r\n"),
    ],
)  # fmt: skip
def test_broken_http(server: Running, pieces: tuple[bytes, ...]) -> None:
    try:
        reply = raw(server, *pieces)
    except (ConnectionResetError, BrokenPipeError):
        reply = b""
    assert not reply.startswith(b"HTTP/1.1 5"), reply
    said(server.http.post(CHATS, json=CHAT))


def test_bodies_that_stop_and_clients_that_send_no_more(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    length = f"Content-Length: {len(BODY)}\r\n\r\n".encode()
    assert raw(server, HEAD, length, BODY[:-1]).startswith(b"HTTP/1.1 408")
    assert raw(server, HEAD, length, BODY[:-1], half=True)[:10] in (b"", b"HTTP/1.1 4")
    assert raw(server, HEAD, length, BODY, half=True)[:10] in (b"", b"HTTP/1.1 2")
    server.settle()


# ------------------------------------------------------------------ what would hold the interpreter


def seconds(of: Any, *arguments: Any) -> float:
    begun = time.thread_time()
    of(*arguments)
    return time.thread_time() - begun


def test_thoughts_without_an_end_are_read_once() -> None:
    """A pattern read to the end from each beginning: 64 KB held all threads for 1.4 s."""
    text = OPENS * 100_000
    turn = {"role": "assistant", "content": text}
    assert seconds(_without_thoughts, turn) < 0.5
    assert _without_thoughts(turn)["content"] == text
    mixed = f"a{OPENS}b<channel|> \n c{OPENS}{OPENS}d<channel|>e<channel|>{OPENS}f"
    assert _without_thoughts(turn | {"content": mixed})["content"] == f"ace<channel|>{OPENS}f"


def test_long_stop_strings_are_compared_once() -> None:
    """The engine's thread compared each beginning: 1 MB took minutes a canvas."""
    stops = ["a" * 500_000, "ab" * 250_000]
    text = "ab" * 20_000 + "a"
    assert seconds(held_back, text, stops) < 0.5
    assert held_back(text, stops) == len(text)
    assert held_back(text[:-1] + "c", stops) == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [1] * 500_000}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [1] * 500_000}]}, "messages[0].content[0]"),
        ({"stop": [1] * 500_000}, "stop[0]"),
        ({"metadata": {f"k{n}": 1 for n in range(200_000)}}, "metadata.k0"),
        ({"logit_bias": {f"k{n}": True for n in range(200_000)}}, "logit_bias.k0"),
        ({f"k{n}": 1 for n in range(200_000)}, "k0"),
    ],
)
def test_one_fault_of_many_is_noted(server: Running, fields: dict[str, Any], param: str) -> None:
    """To note each took 22 s and 3 GB for 8 MB, in which no other answer was sent."""
    with pytest.raises(ValidationError) as error:
        ChatRequest.model_validate(CHAT | fields)
    assert error.value.error_count() < 10
    small = {name: _few(value) for name, value in list(fields.items())[:9]}
    reply = server.http.post(CHATS, json=CHAT | small)
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [True, False])
def test_the_log_probabilities_of_a_request_are_limited(server: Running, stream: bool) -> None:
    """1.3 million of them, for 130 bytes of a request, held all threads for 1.5 s and took 500 MB."""
    asked = CHAT | {"logprobs": True, "top_logprobs": 20, "n": 16, "stream": stream}
    room = MAX_ENTRIES // (16 * 21)
    reply = server.http.post(CHATS, json=asked | {"max_tokens": room + 1})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "logprobs")
    assert f"{16 * 21 * (room + 1)} of all tokens and choices" in error["message"]
    body = ChatRequest.model_validate(asked | {"max_tokens": room})
    assert server.service._asked(body, None, ()).limit == room


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_echoed_can_be_written_as_json(server: Running, number: str, stream: bool) -> None:
    """Python reads NaN, and halves of surrogate pairs; a response that echoed one ended in a 500."""
    function = {"name": "f", "parameters": {"properties": {"a": {"default": ["?"]}}}}
    body = {"model": "bundled", "input": "x", "stream": stream, "max_output_tokens": 8}
    form = {"type": "json_schema", "name": "x", "schema": {"default": ["?"]}}
    for fields in ({"metadata": {"a": "\ud800"}}, {"metadata": {"\ud800": "a"}}):
        reply = server.http.post(
            RESPONSES, content=json.dumps(body | fields).encode(), headers=JSON
        )
        assert "metadata" in (message := said(reply) or "")
        assert message.endswith("holds half of a surrogate pair, which is no text")
    for fields in ({"tools": [function | {"type": "function"}]}, {"text": {"format": form}}):
        data = json.dumps(body | fields).replace('"?"', number).encode()
        reply = server.http.post(RESPONSES, content=data, headers=JSON)
        assert reply.status_code == 400
        assert "no number of JSON" in (said(reply) or "")


def _few(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(list(value.items())[:9])
    if isinstance(value, list):
        return [_few(part) for part in value[:9]]
    return value


def test_no_collection_walks_the_libraries_while_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists in a body bring full collections about, of 0.3 s each."""
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    frozen: list[int] = []
    serving: Any = SimpleNamespace(run=lambda _: frozen.append(gc.get_freeze_count()))
    gc.unfreeze()  # what the process of the tests has frozen itself
    module.run(serving, Any)  # type: ignore[arg-type]
    gc.unfreeze()
    assert frozen[0] > 100_000
