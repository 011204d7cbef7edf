"""GSM8K through a scripted OpenAI-compatible server: delays, 429, 500, dropped lines, SIGKILL."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from quantize.recovery.samples import Request, SampleStore
from quantize.recovery.scoring import score, size
from quantize.recovery.sequential import Part
from quantize.recovery.served import AnsweringServer, ServerError, Servers
from tests.support.two_processes import forked

SAMPLE = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"
FULL = os.environ.get("GSM8K_TEST")  # path of the whole test set, for the slow test


def scored(url: str, data: Path, out: Path, repeats: int) -> None:
    """Ask a server everything, and write the rows; in a process that may be killed."""
    os.environ |= {"no_proxy": "*", "TQDM_DISABLE": "1"}
    part = Part(range(size("gsm8k", data)[0]), range(repeats))
    scoring = score(
        "gsm8k", SampleStore(out / "samples.jsonl", {"model": "scripted"}),
        Servers([url], first_wait=0.01), part, data_file=data, seed=0, sampler={},
        progress=lambda finished, total: finished,
    )  # fmt: skip
    (out / "rows.json").write_text(json.dumps([asdict(row) for row in scoring.rows]))


class ScriptedServer(ThreadingHTTPServer):
    """Knows GSM8K's answers; every answer depends on prompt and seed alone, every fault on luck."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, data: Path, faults: float, delay: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        rows = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
        self.truth = {row["question"]: row["answer"].split("#### ")[1] for row in rows}
        self.faults, self.delay = faults, delay
        self.luck = random.Random(0)
        self.lock = threading.Lock()
        self.asked: list[tuple[str, int]] = []  # in order of arrival, refused ones included
        self.answered: list[tuple[str, int]] = []
        self.refused: Counter[int] = Counter()
        self.in_flight = self.most_in_flight = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, question: str, seed: int) -> str:
        wrong = random.Random(f"{question}{seed}").random() < 0.3
        return f"Some steps.\n#### {'0.5' if wrong else self.truth[question]}"


class Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"].split("\n\nThink step")[0]
        key, server = (question, body["seed"]), self.server
        with server.lock:
            server.asked.append(key)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            fault = server.luck.choice([429, 500, 0]) if server.luck.random() < server.faults else 1
        time.sleep(server.delay * (hash(key) % 5))
        with server.lock:
            server.in_flight -= 1
            server.refused[fault] += 1
            if fault == 1:
                server.answered.append(key)
        if fault == 0:  # the line drops
            self.close_connection = True
            return
        if fault > 1:
            self.reply(fault, {"error": "busy"}, {"Retry-After": "0.02"} if fault == 429 else {})
            return
        message = {"content": server.answer(question, body["seed"])}
        choice = {"message": message, "finish_reason": "stop"}
        self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 7}})

    def reply(self, code: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def scripted(request: pytest.FixtureRequest) -> Generator[ScriptedServer]:
    data, faults, delay = request.param
    server = ScriptedServer(data, faults, delay)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def start(server: ScriptedServer, data: Path, out: Path, repeats: int) -> BaseProcess:
    out.mkdir(exist_ok=True)
    return forked(scored, server.url, data, out, repeats)


def ended(process: BaseProcess) -> int | None:
    process.join(500)
    return process.exitcode


def rows(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "rows.json").read_text())


def stored(out: Path) -> int:
    path = out / "samples.jsonl"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


def check_two_kills(server: ScriptedServer, data: Path, folder: Path, repeats: int) -> None:
    """Score in one go; then again with a SIGKILL after a third and after two thirds."""
    whole, broken = folder / "whole", folder / "broken"
    assert ended(start(server, data, whole, repeats)) == 0
    samples = len(server.truth) * repeats
    assert len(rows(whole)) == samples
    assert sorted(server.answered) == sorted(set(server.answered))
    server.answered.clear()
    server.asked.clear()
    for share in (1 / 3, 2 / 3):
        process = start(server, data, broken, repeats)
        while stored(broken) < samples * share:
            assert process.is_alive(), "it ended before it could be killed"
            time.sleep(0.005)
        process.kill()
        assert ended(process) == -signal.SIGKILL
    assert ended(start(server, data, broken, repeats)) == 0
    assert rows(broken) == rows(whole)
    assert stored(broken) == samples
    # What was answered twice had been in flight at a kill: eight requests at most, each time. An
    # answer that was killed on its way into the store counts as in flight.
    assert len(set(server.answered)) == samples
    assert len(server.answered) - samples <= 2 * 8


@pytest.mark.parametrize("scripted", [(SAMPLE, 0.15, 0.002)], indirect=True)
def test_killed_twice_and_resumed_gives_the_scores_of_an_unbroken_run(
    scripted: ScriptedServer, tmp_path: Path
) -> None:
    check_two_kills(scripted, SAMPLE, tmp_path, repeats=5)
    assert 4 <= scripted.most_in_flight <= 8  # asked for 8; a busy machine may not get there
    assert all(scripted.refused[fault] > 2 for fault in (429, 500, 0))


@pytest.mark.slow
@pytest.mark.skipif(FULL is None, reason="set GSM8K_TEST to the path of GSM8K's test.jsonl")
@pytest.mark.parametrize("scripted", [(Path(FULL or ""), 0.05, 0.004)], indirect=True)
def test_the_whole_gsm8k_test_set_killed_twice(scripted: ScriptedServer, tmp_path: Path) -> None:
    assert len(scripted.truth) == 1319
    check_two_kills(scripted, Path(FULL or ""), tmp_path, repeats=1)
    assert 4 <= scripted.most_in_flight <= 8  # asked for 8; a busy machine may not get there
    assert all(scripted.refused[fault] > 5 for fault in (429, 500, 0))


@pytest.mark.parametrize("scripted", [(SAMPLE, 1.0, 0.0)], indirect=True)
def test_a_server_that_stays_broken_is_given_up(scripted: ScriptedServer) -> None:
    servers = Servers([scripted.url], attempts=3, first_wait=0.01, timeout=20)
    with pytest.raises(ServerError, match=r"gave up after 3 attempts"):
        list(servers([Request(next(iter(scripted.truth)), 1, 64)]))
    assert len(scripted.asked) == 3


@pytest.mark.parametrize("scripted", [(SAMPLE, 0.0, 0.0)], indirect=True)
def test_one_answer_word_for_word(scripted: ScriptedServer) -> None:
    question = next(iter(scripted.truth))
    request = Request(question, 2**63 - 1, 64)
    ((asked, completion),) = Servers([scripted.url + "/v1/"])([request])
    assert asked == request
    expected = {"text": scripted.answer(question, 2**63 - 1), "tokens": 7}
    assert asdict(completion) == expected | {
        "denoising_steps": [],
        "truncated": False,
        "signs": None,
    }


@pytest.mark.parametrize("scripted", [(SAMPLE, 0.1, 0.002)], indirect=True)
def test_several_servers_share_the_requests(scripted: ScriptedServer) -> None:
    """Each request is answered once, and no server waits for another."""
    second = ScriptedServer(SAMPLE, 0.1, 0.0)
    threading.Thread(target=second.serve_forever, args=(0.01,), daemon=True).start()
    servers = Servers([scripted.url, second.url], in_flight=2, first_wait=0.01)
    asked = [Request(q, seed, 64) for q in scripted.truth for seed in range(5)]
    found = {request: done.text for request, done in servers(asked)}
    second.shutdown()
    second.server_close()
    assert found == {each: scripted.answer(each.prompt, each.seed) for each in asked}
    shares = [sorted(server.answered) for server in (scripted, second)]
    assert all(shares)
    assert sorted(shares[0] + shares[1]) == sorted((each.prompt, each.seed) for each in asked)
    assert max(scripted.most_in_flight, second.most_in_flight) <= 2


def test_nobody_there_is_one_line() -> None:
    with pytest.raises(ServerError, match=r"gave up after 2 attempts; .*refused"):
        AnsweringServer("http://127.0.0.1:9", attempts=2, first_wait=0.01)


class Refusing(Handler):
    def do_GET(self) -> None:
        self.reply(401, {"error": "no key"})


def test_a_refusal_is_not_repeated_and_says_what_to_do() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with pytest.raises(ServerError, match=r"HTTP 401 .*set OPENAI_API_KEY"):
        AnsweringServer(f"http://127.0.0.1:{server.server_address[1]}", attempts=50)
    server.shutdown()
    server.server_close()


ANSWER = {
    "choices": [{"message": {"content": "7"}, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 1},
}


class Confused(Handler):
    def do_GET(self) -> None:
        self.reply(200, self.server.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(200, self.server.answer)


@pytest.mark.parametrize("models", [[], {"data": None}, {"data": ["a"]}, {"data": [{"name": "a"}]}])
@pytest.mark.parametrize("key", ["models", "answer"])
def test_what_is_none_of_the_protocols_is_one_line(key: str, models: Any) -> None:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Confused)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    server.models = {"data": [{"id": "a"}]} if key == "answer" else models
    try:
        if key == "models":
            with pytest.raises(ServerError, match="/models: no list of models"):
                AnsweringServer(url)
            return
        found = AnsweringServer(url)
        usage = {"usage": {"completion_tokens": "many"}}
        for server.answer in (models, ANSWER | {"choices": [{"message": "7"}]}, ANSWER | usage):
            with pytest.raises(ServerError, match="none of the protocol's"):
                found.answer(Request("q", 0, 8))
    finally:
        server.shutdown()
        server.server_close()
