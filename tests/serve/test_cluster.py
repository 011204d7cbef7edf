"""Several replicas behind one port: who gets a request, what a lost replica's clients hear."""

import asyncio
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import torch
from click.testing import CliRunner
from prometheus_client import generate_latest
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from quantize.cli.use import serve as serve_command
from quantize.errors import InputError, ResourceError
from quantize.runtime import Placement
from quantize.serve import metrics
from quantize.serve.options import Options
from quantize.serve.server import held
from tests.support.server_process import KEY, process
from tests.support.serving import ScriptedEngine

pytest.importorskip("ray", reason="the extra `cluster` is not installed")

from quantize.serve import cluster, relay
from quantize.serve.relay import Relay
from quantize.serve.routing import LeastLoaded, beginning

QUESTION = "Anna has 132 cards. Anna picks 94 more. How many cards does Anna have now?"
CPU = Placement("cpu")
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Id(NamedTuple):
    unique_id: str


def chat(*texts: str) -> bytes:
    roles = ("system", "user", "assistant", "user")
    turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return json.dumps({"messages": turns}).encode()


# ------------------------------------------------------------------------------------- who gets it


def test_a_chat_stays_where_its_beginning_is_kept_until_others_have_a_batch_less_to_do() -> None:
    open_requests = {Id(name): 0 for name in "abc"}
    router = object.__new__(LeastLoaded)
    router.__dict__["_replica_queue_len_cache"] = open_requests
    router.initialize_state(batch=2)
    replicas: Any = [SimpleNamespace(replica_id=Id(name)) for name in "abc"]

    def chosen(session: str | None, *, among: Any = replicas) -> Any:
        asked: Any = session and SimpleNamespace(metadata=SimpleNamespace(session_id=session))
        groups = asyncio.run(router.choose_replicas(among, asked))
        first = groups[0] and groups[0][0]
        return first if session is None else [sorted(g, key=replicas.index) for g in groups]

    assert chosen("") == [replicas]  # of a group, Serve takes the least loaded
    in_turn = [chosen(None) for _ in range(6)]  # of equal ones the first
    assert sorted(in_turn, key=replicas.index) == sorted([*replicas, *replicas], key=replicas.index)
    homes = {session: chosen(session)[0][0] for session in map(str, range(30))}
    assert all(chosen(session) == [[home], replicas] for session, home in homes.items())
    assert {home.replica_id for home in homes.values()} == {*open_requests}
    open_requests[Id("a")] = 2
    assert all(chosen(session)[0] == [home] for session, home in homes.items())
    open_requests[Id("a")] = 3
    for session, home in homes.items():
        assert chosen(session) == ([replicas] if home is replicas[0] else [[home], replicas])
    open_requests[Id("a")] = 0
    for session, home in homes.items():  # the chats of a lost replica alone move
        assert home is replicas[2] or chosen(session, among=replicas[:2])[0] == [home]
    assert chosen("0", among=[]) == [[]]


def test_a_chats_beginning_ends_with_the_users_first_message() -> None:
    begun = beginning(chat("be brief", "hello"))
    assert begun is not None
    assert beginning(chat("be brief", "hello", "hi", "go on")) == begun
    assert beginning(chat("be brief", "who are you?")) not in (None, begun)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"prompt": "x"}', b'{"messages": 3}', b"[" * 100_000]
)
def test_other_bodies_have_no_beginning(body: bytes) -> None:
    assert beginning(body) is None


# ---------------------------------------------------------------------------- what a client hears


def heard(
    monkeypatch: pytest.MonkeyPatch, proxy: ASGIApp, method: str = "POST", path: str = "/v1/x",
    states: Any = (), running: int = 2, **options: Any,
) -> httpx.Response:  # fmt: skip
    """What a client hears through a relay before `proxy`; `states`: what replicas say, or an error."""
    settings = Options("m", api_key=KEY, **options)

    async def results(**_: Any) -> Any:
        if isinstance(states, Exception):
            raise states
        return states

    async def state() -> Any:
        return settings, (0, 0), []

    handle = SimpleNamespace(
        state=SimpleNamespace(remote=state),
        broadcast=lambda _: SimpleNamespace(results_async=results),
    )
    deployment = SimpleNamespace(replica_states={"RUNNING": running} if running else {})
    status = SimpleNamespace(
        applications={relay.APP: SimpleNamespace(deployments={"r": deployment})}
    )
    ray_serve = SimpleNamespace(get_app_handle=lambda _: handle, status=lambda: status)
    monkeypatch.setattr(relay, "serve", ray_serve)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Relay(proxy))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, content=chat("a", "b"), headers=HEADERS)

    return asyncio.run(ask())


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve's proxy when a replica is lost before it answers."""


def answering(response: Response, *, whole: bool = True) -> ASGIApp:
    """Serve's proxy with an answer; unless `whole`, the replica is lost before the answer ends."""

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        async def cut(message: Any) -> None:
            if whole or message.get("body") or message["type"] == "http.response.start":
                await send(message)

        response.headers["X-Session"] = dict(scope["headers"]).get(b"x-session-id", b"").decode()
        await response(scope, receive, cut)

    return proxy


def test_a_lost_replicas_clients_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = heard(monkeypatch, silent)
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "worker_ended")
    assert lost.headers["retry-after"] == "1"

    async def parts() -> Any:
        yield "data: begun\n\n"

    begun = StreamingResponse(parts(), headers={"X-Worker": "0"}, media_type="text/event-stream")
    first, last = heard(monkeypatch, answering(begun, whole=False)).text.split("\n\n")[:2]
    assert first == "data: begun"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "worker_ended"


def test_the_proxy_hears_of_a_client_that_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    heard_of: list[str] = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        while heard_of[-1:] != ["http.disconnect"]:
            heard_of.append((await receive())["type"])

    async def story() -> None:
        relayed = Relay(proxy)
        relayed.options = Options("m")
        given = asyncio.Queue[Any]()
        given.put_nowait({"type": "http.request", "body": b"{}"})
        scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": []}
        work = asyncio.ensure_future(relayed._answer(scope, given.get, given.put))
        await asyncio.sleep(0.01)
        work.cancel()  # as the guard does
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(asyncio.wait_for(story(), 20))
    assert heard_of == ["http.request", "http.disconnect"]


def test_pages_of_serves_own_are_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    page = answering(PlainTextResponse("routes"))
    heard_of = {"/-/routes": (404, "not_found"), "/v1/models": (503, "unavailable")}
    for path, (status, code) in heard_of.items():
        reply = heard(monkeypatch, page, "GET", path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


def test_a_request_waits_for_no_replica_that_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: str) -> None:
        raise RuntimeError("no such application")

    monkeypatch.setattr(relay, "serve", SimpleNamespace(get_app_handle=none))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Relay(silent))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/health")

    reply = asyncio.run(ask())
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")


@pytest.mark.parametrize("kept", [0, 1])
def test_a_chats_beginning_reaches_the_router_if_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    answer = PlainTextResponse("x", headers={"X-Worker": "1"})
    reply = heard(monkeypatch, answering(answer), prefix_bytes=kept)
    assert reply.headers["x-session"].encode() == (beginning(chat("a", "b")) if kept else b"")
    assert (reply.text, reply.headers["x-worker"]) == ("x", "1")


@pytest.mark.parametrize("running", [2, 0])  # 0: Serve's controller was lost and begins again
@pytest.mark.parametrize("answering", [2, 0])
def test_health_adds_up_what_replicas_say(
    monkeypatch: pytest.MonkeyPatch, running: int, answering: int
) -> None:
    states = [(None, (1, 2), []), (None, (3, 5), []), RuntimeError("it has just ended")]
    reply = heard(
        monkeypatch, silent, "GET", "/health", states if answering else states[2:], running
    )
    workers = max(running, answering)
    assert reply.status_code == (200 if workers else 503)
    assert reply.json() == {
        "status": "ok" if workers else "unavailable", "workers": workers, "key_required": True,
        "running": 4 if answering else 0, "waiting": 7 if answering else 0,
    }  # fmt: skip


def test_health_is_told_while_a_replica_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = heard(monkeypatch, silent, "GET", "/health", TimeoutError())
    assert (reply.status_code, reply.json()["workers"]) == (200, 2)
    assert "running" not in reply.json()


def test_metrics_name_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = []
    for worker in range(2):
        counted = metrics.Metrics()
        counted.tokens.inc(10 + worker)
        counted.requests.labels("/health", "200").inc()
        states.append((Options("m", worker=worker), (0, 0), list(counted.registry.collect())))
    page = heard(monkeypatch, silent, "GET", "/metrics", states).text
    assert page.count("# TYPE quantize_tokens_total") == 1
    assert re.findall(r'quantize_tokens_total\{worker="(\d)"\} (\S+)', page) == [
        ("0", "10.0"),
        ("1", "11.0"),
    ]
    assert 'quantize_requests_total{path="/health",status="200",worker="1"} 1.0' in page


# ------------------------------------------------------------------------------------- what it takes


def test_each_replica_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(cluster.signal, "signal", lambda *_: None)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: None)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: ended.append(True))
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    for name in cluster.ENVIRONMENT:
        monkeypatch.setenv(name, "")
    for count, taken in ((2, {"num_cpus": 4}), (3, {"num_cpus": 2}), (16, {"num_cpus": 0.5})):
        with cluster._ray(CPU, count) as resources:
            assert resources == taken
    with cluster._ray(Placement("cuda:0"), 2) as resources:
        assert resources == {"num_gpus": 1, "num_cpus": 0}
    with (
        pytest.raises(ResourceError, match="--data-parallel 3 needs as many GPUs; Ray has 2"),
        cluster._ray(Placement("cuda:0"), 3),
    ):
        pass
    assert len(ended) == 5


def test_what_ray_keeps_is_closed_to_other_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modes: list[int] = []

    def init(_temp_dir: str, **_: Any) -> None:  # Ray opens `_temp_dir` itself to all users
        (tmp_path / "token").touch()
        kept = (Path(_temp_dir).parent, tmp_path / "token")
        modes.extend(path.stat().st_mode & 0o777 for path in kept)
        raise RuntimeError("it has no time. Try again")

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.os, "environ", {})
    with pytest.raises(ResourceError, match=r"not start: it has no time$"), cluster._ray(CPU, 2):
        pass
    assert modes == [0o700, 0o600]


def test_a_cluster_at_which_nothing_listens_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster.os, "environ", {"RAY_ADDRESS": "127.0.0.1:1"})
    says = "Ray does not start at RAY_ADDRESS=127.0.0.1:1: .* refused"
    with pytest.raises(ResourceError, match=says), cluster._ray(CPU, 2):
        pass


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        ("quantize.errors.InputError: no Jinja file: x", InputError, "no Jinja file: x"),
        ("torch.OutOfMemoryError: CUDA out of memory", ResourceError, "CUDA out of memory"),
        ("The actor died", ResourceError, "The actor died"),
    ],
)
def test_a_replica_that_does_not_start_says_why_in_one_line(
    monkeypatch: pytest.MonkeyPatch, line: str, kind: type[Exception], says: str
) -> None:
    deployment = SimpleNamespace(message=f"Traceback:\n  File x\n{line}\n")
    app = SimpleNamespace(deployments={"Replica": deployment})
    status = SimpleNamespace(applications={cluster.APP: app})
    monkeypatch.setattr(cluster.ray_serve, "status", lambda: status)
    fault = cluster._fault()
    assert type(fault) is kind
    assert str(fault) == f"a replica ended while it loaded: {says}"


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "quantize.serve.cluster")
    result = CliRunner().invoke(serve_command, ["bundled", "--data-parallel", "2"])
    assert isinstance(result.exception, ResourceError)
    assert str(result.exception) == (
        "serve needs ray: pip install 'diffusiongemma-quantize[cluster]'"
    )


def test_a_key_is_no_part_of_what_is_printed_of_options() -> None:
    assert KEY not in repr(Options("m", api_key=KEY))


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
    watched = metrics.Metrics()
    watched.watch(None, torch.device("cuda"))
    page = generate_latest(watched.registry).decode()
    shown = {k: float(v) for k, v in re.findall(r"^quantize_gpu_(\w+) (\S+)$", page, re.MULTILINE)}
    assert math.isnan(shown.pop("energy_joules"))  # it tells none
    assert shown == {"utilization": 0.5, "memory_bytes": 40, "clock_mhz": 1980}


# ------------------------------------------------------------------------------- with Ray's processes

RAY_WAITED = "Ray does not start: The current node timed out during startup"
LONG: Any = {"guided_regex": "(abc ){200,220}", "max_tokens": 900}


def body(**more: Any) -> dict[str, Any]:
    return {"model": "bundled", "messages": [{"role": "user", "content": QUESTION}], **more}


def replicas(server: psutil.Process) -> list[psutil.Process]:
    every = server.children(recursive=True)
    return [child for child in every if "ServeReplica" in "".join(child.cmdline())]


def until(client: httpx.Client, reached: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until /health says so."""
    while not reached(client.get("/health").json()):
        time.sleep(0.1)


def two_replicas(stack: ExitStack) -> tuple[str, psutil.Process]:
    """Two replicas' URL and process, ended with `stack`.

    Where other work twice keeps Ray from starting, `make test` skips and `make test-cluster` fails.
    """
    for attempt in range(2):
        try:
            return stack.enter_context(process("--data-parallel", "2", "--max-num-seqs", "1"))
        except AssertionError as error:
            if RAY_WAITED not in str(error) or (attempt and "QUANTIZE_TEST_CLUSTER" in os.environ):
                raise
    pytest.skip(f"{RAY_WAITED}, twice: other work fills this machine's cores")


def test_two_replicas_as_a_user_starts_them() -> None:
    with ExitStack() as stack:
        url, server = two_replicas(stack)
        client = stack.enter_context(httpx.Client(base_url=url, headers=HEADERS, timeout=300))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        started = server.children(recursive=True)
        assert not any(KEY in word for child in started for word in child.cmdline())

        def both(asked: dict[str, Any]) -> list[Any]:
            return [pool.submit(client.post, "/v1/chat/completions", json=asked) for _ in range(2)]

        replies = [one.result() for one in both(body(seed=3))]
        assert {reply.headers["x-worker"] for reply in replies} == {"0", "1"}
        (text,) = {reply.json()["choices"][0]["message"]["content"] for reply in replies}
        assert "226" in text
        streamed = client.post("/v1/chat/completions", json=body(stream=True))
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert client.post("/v1/chat/completions", json=body(temperature="hot")).status_code == 400
        assert httpx.get(f"{url}/v1/models").status_code == 401
        tokens = re.findall(r'tokens_total\{worker="(\d)"\} (\S+)', client.get("/metrics").text)
        assert sorted(index for index, count in tokens if float(count)) == ["0", "1"]
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body(stream=True, **LONG),
                          headers=HEADERS) as left:  # fmt: skip
            next(left.iter_lines())
        until(client, lambda state: state["running"] == 0)  # it ended with its client
        long = both(body(**LONG))
        until(client, lambda state: state["running"] == 2)
        replicas(server)[0].kill()
        statuses = sorted(one.result().status_code for one in long)
        assert statuses == [200, 503]
    assert not psutil.wait_procs(started, timeout=10)[1]
