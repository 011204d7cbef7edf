"""Loads the model and listens; on SIGTERM finishes running requests and refuses waiting ones."""

import gc
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from socket import SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo, socket
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.layout import model_config
from quantize.checkpoints.reader import Checkpoint, read_json_object
from quantize.errors import InputError, ResourceError
from quantize.host.progress import say
from quantize.runs.manifest import fingerprint
from quantize.runtime import Placement, Sampler, open
from quantize.runtime.engine.interface import Engine
from quantize.runtime.gpu.placement import free_unused
from quantize.runtime.prompt.chat import check_prompt, sound_tokenizer
from quantize.serve.app import STATIC, create_app
from quantize.serve.judged import judged_modes, mode_line, served_mode
from quantize.serve.options import KEY_VARIABLE, Options
from quantize.serve.service import Service
from quantize.serve.text import Text
from quantize.serve.unsupported import IGNORABLE

KNOWS = (
    "this is the bundled model, or made from it: it knows small word problems alone. A system prompt, "
    "a second turn, JSON and, with --chat-template tools, tools are taken, and what it says then makes "
    'no sense. A form that it can fill: "guided_regex": "#### [0-9]{1,6}", '
    '"chat_template_kwargs": {"enable_thinking": true}'
)
EVEN = 16  # requests at once from which one token at a time is as fast (H200): docs/serve.md


class Server(uvicorn.Server):
    """uvicorn's server; it prints its address, and calls `leave` when a shutdown begins."""

    def __init__(self, app: ASGIApp, options: Options, leave: Callable[[], object]) -> None:
        # The guard logs, without addresses or queries. Connections outlast requests by 5 s.
        more: Any = {"access_log": False, "log_config": None, "server_header": False}
        # Not those that happen to be installed, as beside Ray, and no WebSockets.
        more |= {"http": "h11", "loop": "asyncio", "ws": "none"}
        more["timeout_graceful_shutdown"] = int(options.shutdown_grace) + 5
        config = uvicorn.Config(app, options.host, options.port, **more)
        super().__init__(config)
        self.options, self.leave = options, leave

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen; print the address and which fields are ignored or refused."""
        await super().startup(sockets)
        say_address(self.options, *self.servers[0].sockets[0].getsockname()[:2])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin a shutdown at the first signal; a SIGINT after that ends the server at once."""
        if not self.should_exit:
            self.leave()
        super().handle_exit(sig, frame)


def say_address(options: Options, host: str, port: int) -> None:
    """Print where a model is served, and which fields of a request are ignored or refused."""
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    key = f"with the key of {KEY_VARIABLE}" if options.api_key else "without a key"
    say(f"serving {options.model_name} at {url} {key}")
    how = "refused (--strict)" if options.strict else "ignored; --strict refuses them"
    names = ", ".join(IGNORABLE)
    say(f"of a request's fields, these have no meaning here and are {how}: {names}")


def with_template(tokenizer: Any, template: str | None) -> Any:
    """Return a tokenizer with the chat template of a file, or `tools`; InputError: it is none."""
    if template is None:
        return tokenizer
    path = STATIC / "tools.jinja" if template == "tools" else Path(template)
    try:
        tokenizer.chat_template = path.read_text("utf-8")
        check_prompt(tokenizer)
    except (OSError, UnicodeDecodeError, InputError) as error:
        reason = str(error).removeprefix("messages: ")
        fix = "name a Jinja file, or `tools`, which ships"
        raise InputError(f"--chat-template {template}: {reason}; {fix}") from error
    return tokenizer


def say_what_it_knows(checkpoint: Path) -> None:
    """Print what the bundled model cannot do, if `checkpoint` is it or was made from it."""
    configs = [read_json_object(folder / "config.json") for folder in (CHECKPOINT, checkpoint)]
    if configs[0].get("text_config") == configs[1].get("text_config"):
        say(KNOWS)


def open_engine(checkpoint: Path, options: Options, place: Placement) -> Engine:
    """Load a checkpoint with the limits of `options`, warm its engine up, and return the engine."""
    place = replace(place, capacity=options.max_num_seqs, max_context=options.max_context)
    engine = open(
        checkpoint,
        place,
        prefix_bytes=options.prefix_bytes,
        batch_invariant=options.batch_invariant,
    )
    say("warming up")
    engine.warm_up(Sampler.from_checkpoint(checkpoint))
    free_unused(place.device)  # what loading took and serving does not
    say(held(engine))
    return engine


def held(engine: Engine) -> str:
    """Return a line: slots, token limit, on a GPU the load at which single tokens are as fast."""
    limits = f"prompt and answer at most {engine.max_length} tokens"
    text = f"serving {engine.capacity} samples at once, {limits}"
    if engine.device.type != "cuda":
        return text
    return f"{text}; on an H200 writing one token at a time was as fast from about {EVEN} at once"


def listening_socket(host: str, port: int) -> socket:
    """Return a socket bound to `host` and `port`; ResourceError: it cannot be bound."""
    try:
        family, kind, protocol, _, address = getaddrinfo(host, port, type=SOCK_STREAM)[0]
        listener = socket(family, kind, protocol)
        listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # a server may just have stopped there
        listener.bind(address)
    except OSError as error:
        raise ResourceError(
            f"cannot listen at {host} port {port} ({error.strerror}): give another --host or --port"
        ) from error
    return listener


def run(server: Server, sock: socket) -> None:
    """Run a server on a socket until SIGINT or SIGTERM ends it; then return normally."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # uvicorn raises the signal again at its end
    gc.collect()
    gc.freeze()  # a full collection walks every object of the libraries: 0.3 s in which all wait
    server.run([sock])


def loaded(checkpoint: Path, options: Options, place: Placement) -> Service:
    """Load a checkpoint and return what answers requests with it; errors are those of `serve`."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    text = Text(with_template(sound_tokenizer(checkpoint), options.chat_template))
    opened = Checkpoint.open(checkpoint)
    config = model_config(opened.config)
    sampler = Sampler.from_checkpoint(checkpoint)
    say(f"loading {checkpoint}")
    engine = open_engine(checkpoint, options, place)
    digest = fingerprint(opened)  # of bytes that loading has just read
    judged = judged_modes(checkpoint, digest)
    if line := mode_line(opened, place.activations, judged):
        say(line)
    options = replace(
        options, fingerprint=digest, judged_activations=judged,
        activations=served_mode(opened, place.activations),
    )  # fmt: skip
    return Service(engine, text, config, sampler, options)


def serve(checkpoint: Path, options: Options, place: Placement) -> None:
    """Serve a checkpoint until SIGINT or SIGTERM.

    InputError: the checkpoint cannot be loaded. ResourceError: the model does not fit, or the port
    is in use (checked before weights are read).
    """
    say_what_it_knows(checkpoint)
    sock = listening_socket(options.host, options.port)
    service = loaded(checkpoint, options, place)
    run(Server(create_app(service), service.options, service.leave), sock)
