"""Several workers behind one port: who gets a request, what a dead worker's clients hear."""

import asyncio
import json
import math
import multiprocessing
import os
import re
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from prometheus_client import generate_latest
from starlette.types import Message

from quantize.errors import ResourceError
from quantize.runtime import Placement
from quantize.serve import fleet, metrics, workers
from quantize.serve.failures import RequestError
from quantize.serve.fleet import Fleet, beginning
from quantize.serve.options import Options
from quantize.serve.server import held
from quantize.serve.workers import Worker, target
from tests.support import scripted_server
from tests.support.server_process import KEY, process
from tests.support.serving import ScriptedEngine

QUESTION = "Anna has 132 cards. Anna picks 94 more. How many cards does Anna have now?"


def fake(**state: Any) -> Worker:
    found = object.__new__(Worker)
    found.open = found.taken = 0
    found.ready = True
    found.__dict__.update(state)
    return found


def chat(*texts: str) -> bytes:
    roles = ("system", "user", "assistant", "user")
    turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return json.dumps({"messages": turns}).encode()


def test_the_freest_worker_that_is_ready_is_chosen() -> None:
    busy, dead, free = fake(open=3), fake(ready=False), fake(open=1)
    assert Fleet([busy, dead, free], Options("m")).choose(chat("a", "b")) is free
    with pytest.raises(RequestError, match="no worker is ready"):
        Fleet([dead], Options("m")).choose(b"")


def test_equally_free_workers_take_turns() -> None:
    pair = [fake(), fake()]
    found = Fleet(pair, Options("m"))
    assert [found.choose(b"") for _ in range(4)] == pair * 2


def test_a_chat_stays_where_its_beginning_is_kept_until_others_have_a_batch_less_to_do() -> None:
    home, other = fake(), fake(open=1)
    found = Fleet([home, other], Options("m", prefix_bytes=1, max_num_seqs=2))
    assert found.choose(chat("be brief", "hello")) is home
    home.open, other.open = 2, 0
    assert found.choose(chat("be brief", "hello", "hi", "go on")) is home
    assert found.choose(chat("be brief", "who are you?")) is other  # another chat
    home.open = 3
    assert found.choose(chat("be brief", "hello", "hi", "go on")) is other
    home.open = 0
    assert found.choose(chat("be brief", "hello", "hi", "go on")) is other  # it moved


def test_the_oldest_chats_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "CHATS", 2)
    found = Fleet([fake()], Options("m", prefix_bytes=1))
    for text in "abc":
        found.choose(chat("", text))
    assert list(found.homes) == [beginning(chat("", text)) for text in "bc"]


@pytest.mark.parametrize(("key", "status"), [(None, "ok"), ("secret", "unavailable")])
def test_health_adds_up_what_workers_that_are_ready_say(key: str | None, status: str) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    def saying(index: int, state: dict[str, Any] | None, *, ready: bool = True) -> Worker:
        async def get(path: str, headers: dict[str, str]) -> httpx.Response:
            asked.append((path, headers))
            if state is None:
                raise httpx.ConnectError("it has just ended")
            return httpx.Response(200, json=state)

        return fake(index=index, ready=ready, client=SimpleNamespace(get=get))

    pair = [
        saying(0, {"status": status, "running": 1, "waiting": 2}),
        saying(1, {"status": "unavailable", "running": 3, "waiting": 5}),
        saying(2, None),
        saying(3, {"status": "ok", "running": 100, "waiting": 100}, ready=False),
    ]
    found: Any = asyncio.run(Fleet(pair, Options("m", api_key=key)).health(SimpleNamespace()))  # type: ignore[arg-type]
    healthy = status == "ok"
    assert json.loads(found.body) == {
        "status": status, "running": 4, "waiting": 7, "key_required": key is not None,
        "workers": int(healthy),
    }  # fmt: skip
    assert found.status_code == (200 if healthy else 503)
    assert asked == [("/health", {})] * 3


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"prompt": "x"}', b'{"messages": 3}', b"[" * 100_000]
)
def test_other_bodies_have_no_beginning(body: bytes) -> None:
    assert beginning(body) is None


def test_every_worker_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    for device in ("cuda", "cuda:0"):  # the second is what the command line says
        assert workers.visible_gpus(Placement(device), 2) == ["3", "5"]
    assert workers.visible_gpus(Placement("cpu"), 2) == []
    with pytest.raises(
        ResourceError, match="--data-parallel 3 needs as many GPUs; this machine shows 2"
    ):
        workers.visible_gpus(Placement("cuda:0"), 3)


def test_a_server_says_what_it_holds_and_from_where_on_canvases_did_not_pay_on_an_h200() -> None:
    engine = ScriptedEngine(3)
    assert held(engine) == "serving 3 samples at once, prompt and answer at most 4096 tokens"
    engine.device = torch.device("cuda")
    assert held(engine).endswith(
        "tokens; on an H200 writing one token at a time was as fast from about 16 at once"
    )


def test_metrics_show_what_the_driver_says_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(
        busy=lambda: 0.5, clock=lambda: SimpleNamespace(mhz=1980), joules=lambda: None
    )
    monkeypatch.setattr(metrics.Driver, "of", lambda _: driver)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60, 100))
    found = metrics.Metrics()
    found.watch(None, torch.device("cuda"))
    page = generate_latest(found.registry).decode()
    shown = {k: float(v) for k, v in re.findall(r"^quantize_gpu_(\w+) (\S+)$", page, re.MULTILINE)}
    assert math.isnan(shown.pop("energy_joules"))  # it tells none
    assert shown == {"utilization": 0.5, "memory_bytes": 40, "clock_mhz": 1980}


# ------------------------------------------------------------------ processes, with a scripted server


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers serve without a model; one process imports what they need, and they are forks of it."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["quantize.serve.workers", "tests.support.scripted_server"])

    def process(target: Callable[..., None], args: tuple[object, ...], name: str) -> object:
        return forking.Process(target=target, args=(dict(os.environ), *args), name=name)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a worker's replaces it
    monkeypatch.setattr(workers, "spawning", SimpleNamespace(Process=process))
    monkeypatch.setattr(workers, "serve_at", scripted_server.serve_at)


@asynccontextmanager
async def front(folder: Path) -> AsyncGenerator[httpx.AsyncClient]:
    """A front of two scripted workers, which answer with their process' id."""
    options = Options("m", api_key=KEY)
    pair = [Worker(i, folder, folder, options, Placement(), ("3", "5")) for i in range(2)]
    for worker in pair:
        assert worker.wait()
    guard = fleet.application(Fleet(pair, options))
    transport = httpx.ASGITransport(guard)
    headers = {"Authorization": f"Bearer {KEY}"}
    try:
        async with (
            guard.app.router.lifespan_context(guard.app),
            httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client,
        ):
            yield client
    finally:
        for worker in pair:
            worker.process.kill()


@pytest.mark.usefixtures("scripted")
def test_a_dead_workers_clients_hear_of_it_and_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LONGEST_PAUSE", 1.0)

    async def story() -> None:
        async with front(tmp_path) as client:
            replies = [await client.post("/v1/x", json={}) for _ in range(2)]
            assert not any("date" in reply.headers for reply in replies)  # the front writes its own
            both = [reply.json()["pid"] for reply in replies]
            assert len(set(both)) == 2
            assert {reply.json()["gpu"] for reply in replies} == {"3", "5"}
            assert (await client.get("/health")).json()["workers"] == 2
            page = (await client.get("/metrics")).text
            assert re.findall(r'asked_total\{worker="(\d)"\} ([\d.]+)', page) == [
                ("0", "1.0"),
                ("1", "1.0"),
            ]
            asked = [client.post(path, json={}) for path in ("/dies", "/streams")]
            whole, streamed = await asyncio.gather(*asked)
            assert (whole.status_code, whole.json()["error"]["code"]) == (503, "worker_ended")
            assert whole.headers["retry-after"] == "1"
            first, last = (line for line in streamed.text.splitlines() if line)
            assert first == "data: begun"
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "worker_ended"
            assert (await client.post("/v1/x", json={})).status_code == 503
            while (state := await client.get("/health")).status_code != 200 or (
                state.json()["workers"] < 2
            ):
                await asyncio.sleep(0.1)
            again = [(await client.post("/v1/x", json={})).json()["pid"] for _ in range(2)]
            assert not {*both} & {*again}

    asyncio.run(asyncio.wait_for(story(), 120))


@pytest.mark.usefixtures("scripted")
def test_a_worker_that_was_stopped_is_not_started_again(tmp_path: Path) -> None:
    worker = Worker(0, tmp_path, tmp_path, Options("m"), Placement(), ())
    assert worker.wait()

    async def story() -> bool:
        kept = asyncio.create_task(worker.keep_alive())
        await asyncio.sleep(0)
        worker.stop()
        done, _ = await asyncio.wait([kept], timeout=20)
        worker.process.kill()  # which was started again, where this fails
        kept.cancel()
        return bool(done)

    assert asyncio.run(story())
    assert not worker.ready


@pytest.mark.parametrize(
    "path",
    ["//x", "//", "///[", "//[::1", "//x:y/z", "/v1/models/a%2Fb", "/%00", "/a b", "/é", "*"],
)
def test_any_path_reaches_a_worker_as_it_was_sent_or_ends_with_404(path: str) -> None:
    scope = {"path": path, "query_string": b"a=1"}
    if path == "*":
        with pytest.raises(RequestError, match="no such path"):
            target({**scope, "raw_path": b"*"})
        return
    sent = path.replace(" ", "%20").replace("é", "%C3%A9").encode()
    assert target({**scope, "raw_path": sent}).raw_path == sent + b"?a=1"
    if "%" not in path:
        assert target({**scope, "query_string": b""}).path == path


def test_headers_of_one_connection_are_not_passed_on() -> None:
    passed = [(b"Authorization", b"Bearer x"), (b"content-type", b"application/json")]
    held = [(b"Connection", b"close"), (b"Transfer-Encoding", b"chunked"), (b"date", b"today")]
    assert workers._end_to_end([*held, *passed, (b"expect", b"100-continue")]) == passed


@pytest.mark.usefixtures("scripted")
def test_a_client_that_hangs_up_ends_its_request_at_the_worker(tmp_path: Path) -> None:
    async def story() -> None:
        async with front(tmp_path) as client:
            gone = asyncio.Event()

            async def receive() -> Message:
                if not heard:
                    heard.append(True)
                    return {"type": "http.request", "body": b"{}"}
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Message) -> None:
                if message["type"] == "http.response.body":
                    gone.set()

            heard: list[bool] = []
            scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/waits"}
            scope |= {"headers": [(b"authorization", f"Bearer {KEY}".encode())]}
            await client._transport.app(
                scope | {"query_string": b"", "root_path": ""}, receive, send
            )
            while "left_total" not in (page := (await client.get("/metrics")).text) or (
                not re.search(r"left_total\S* 1.0", page)
            ):
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(story(), 120))


@pytest.mark.slow
def test_two_workers_as_a_user_starts_them() -> None:
    body = {"model": "bundled", "messages": [{"role": "user", "content": QUESTION}], "seed": 3}
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        process("--data-parallel", "2", "--max-num-seqs", "1") as (url, _),
        httpx.Client(base_url=url, headers=headers, timeout=300) as client,
    ):
        with ThreadPoolExecutor(2) as pool:
            found = list(
                pool.map(lambda _: client.post("/v1/chat/completions", json=body), range(2))
            )
        assert {reply.headers["x-worker"] for reply in found} == {"0", "1"}
        texts = {reply.json()["choices"][0]["message"]["content"] for reply in found}
        (text,) = texts
        assert "226" in text
        streamed = client.post("/v1/chat/completions", json=body | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        refused = client.post("/v1/chat/completions", json=body | {"temperature": "hot"})
        assert refused.status_code == 400
        assert httpx.get(f"{url}/v1/models").status_code == 401
        tokens = re.findall(
            r'quantize_tokens_total\{worker="(\d)"\} ([\d.]+)', client.get("/metrics").text
        )
        assert [index for index, _ in tokens] == ["0", "1"]
        assert all(float(count) > 0 for _, count in tokens)
