"""Several replicas behind one port, by Ray Serve: `quantize serve --data-parallel N`.

    client -> Serve's proxy, `relay` in it -> N replicas of the app, each with a GPU

Serve starts the replicas, checks their health and starts a lost one again. Ray runs on this machine
alone and ends with this process, or on the machines of the cluster that RAY_ADDRESS names.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from prometheus_client import Metric
from ray import serve as ray_serve
from starlette.types import ASGIApp

from quantize.errors import InputError, QuantizeError, ResourceError
from quantize.host.progress import say
from quantize.runtime import Placement
from quantize.serve.app import create_app
from quantize.serve.options import Options
from quantize.serve.relay import APP
from quantize.serve.server import listening_socket, loaded, say_address, say_what_it_knows

ENVIRONMENT = {  # of Ray's processes: those of a Ray of our own inherit it
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "quantize.serve.relay.middlewares",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # one that hangs would not end by itself
    "RAY_USAGE_STATS_ENABLED": "0",
    # of open requests; Serve prefers a busy replica to one whose count is older, which may be idle
    "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "1e9",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # what is left ends soon after this process
    "RAY_worker_niceness": "0",  # by default Ray's processes give way to all others (15)
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",  # a lost proxy is missed after three of them
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
}
SHARED_MEMORY = 80 << 20  # bytes; Ray takes 30 % of the memory by default, and requests need little
QUIET = {"enable_access_log": False, "log_level": "CRITICAL"}  # Ray itself says what is lost
HANGS = 5.0  # seconds without an answer after which a replica is replaced


@ray_serve.ingress()
class Replica:
    """A process of Ray's that serves a checkpoint."""

    def __init__(self, checkpoint: Path, options: Options, place: Placement) -> None:
        rank = ray_serve.get_replica_context().rank.rank
        self.service = loaded(checkpoint, replace(options, worker=rank), place)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self.service)

    def check_health(self) -> None:
        """Raise RuntimeError if Serve is to replace this replica."""
        if not self.service.scheduler.healthy:
            raise RuntimeError("the engine failed again and again")

    def state(self) -> tuple[Options, tuple[int, int], list[Metric]]:
        """Return the options, how many samples run and wait, and all metrics."""
        scheduler = self.service.scheduler
        return self.service.options, scheduler.load, list(scheduler.metrics.registry.collect())

    def leave(self) -> None:
        """Refuse waiting requests; end running ones after `shutdown_grace` seconds."""
        self.service.leave()


@contextmanager
def _ray(place: Placement, count: int) -> Generator[dict[str, float]]:
    """Yield what each of `count` replicas takes of a Ray; ResourceError: there are too few GPUs."""
    os.environ.update(ENVIRONMENT | os.environ)
    mask = os.umask(0o077)  # Ray's token, with which one runs code, is a file that all may read
    with TemporaryDirectory(prefix="quantize-") as folder:
        settings: dict[str, Any] = {"address": "local", "include_dashboard": False}
        # below a folder that is closed to other users, as Ray opens its own to all
        settings |= {"object_store_memory": SHARED_MEMORY, "_temp_dir": f"{folder}/ray"}
        host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
        try:
            try:
                if port.isdigit():  # Ray itself would try for minutes to reach it
                    socket.create_connection((host, int(port)), HANGS).close()
                ray.init(logging_level="ERROR", **({} if "RAY_ADDRESS" in os.environ else settings))
            except Exception as error:  # Ray's, of many kinds
                reason = str(error).partition(". ")[0]
                at = f" at RAY_ADDRESS={host}:{port}" if host else ""
                raise ResourceError(f"Ray does not start{at}: {reason}") from error
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own says nothing
            held = ray.cluster_resources()
            gpus, share = int(held.get("GPU", 0)), held["CPU"] / count
            if place.device != "cpu" and gpus < count:
                raise ResourceError(f"--data-parallel {count} needs as many GPUs; Ray has {gpus}")
            on_cpu = {"num_cpus": share // 1 or share}  # Ray takes whole cores, or a part of one
            yield on_cpu if place.device == "cpu" else {"num_gpus": 1, "num_cpus": 0}
        finally:
            ray.shutdown()
            os.umask(mask)


def _fault() -> QuantizeError:
    """Return why the replicas did not start: what the last line of their traceback says."""
    (deployment,) = ray_serve.status().applications[APP].deployments.values()
    name, _, reason = deployment.message.strip().splitlines()[-1].partition("Error: ")
    kind = InputError if name.endswith(".Input") else ResourceError
    return kind(f"a replica ended while it loaded: {reason or name}")


def serve(checkpoint: Path, options: Options, place: Placement, count: int) -> None:
    """Serve a checkpoint with `count` replicas until SIGINT or SIGTERM.

    ResourceError: there are too few GPUs, the port is in use, or a replica ended while it loaded.
    """
    say_what_it_knows(checkpoint)
    with listening_socket(options.host, options.port) as sock:
        host, port = sock.getsockname()[:2]
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    http = {"host": host, "port": port, "request_timeout_s": options.request_timeout + 60}
    router: Any = {"request_router_class": "quantize.serve.routing.LeastLoaded"}
    router["request_router_kwargs"] = {"batch": options.max_num_seqs}
    with _ray(place, count) as resources:
        ray_serve.start(proxy_location="HeadOnly", http_options=http, logging_config=QUIET)
        deployment = ray_serve.deployment(
            Replica,
            num_replicas=count,
            ray_actor_options=resources,
            max_ongoing_requests=100_000,  # a replica itself refuses those that it has no room for
            max_constructor_retry_count=1,
            health_check_period_s=HANGS / 2,
            health_check_timeout_s=HANGS,
            graceful_shutdown_timeout_s=options.shutdown_grace + 5,
            request_router_config=router,
            logging_config=QUIET,
        )
        try:
            handle = ray_serve.run(deployment.bind(checkpoint, options, place), name=APP)
        except RuntimeError as error:
            raise _fault() from error
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        say(f"{count} replicas are ready")
        say_address(options, host, port)
        ended.wait()
        handle.broadcast("leave").results(timeout_s=HANGS, return_exceptions=True)
        ray_serve.delete(APP)
        if "RAY_ADDRESS" in os.environ:  # else all of Serve ends with Ray
            ray_serve.shutdown()
