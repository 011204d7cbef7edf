"""A server's settings, from its command line, the environment (API key) and the checkpoint."""

import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import click

from quantize.errors import InputError

KEY_VARIABLE = "QUANTIZE_API_KEY"


COUNT = click.IntRange(min=1)


def _setting(
    default: Any, says: str | None = None, kind: "click.ParamType[Any] | None" = None
) -> Any:
    flag = {"is_flag": True} if default is False else {}
    return field(default=default, metadata={"help": says, "type": kind} | flag)


@dataclass(frozen=True)
class Options:
    """Settings of one server; the help of `quantize serve` describes most of them.

    InputError: other machines can reach the server and there is no key; the key is empty or not
    ASCII; or an origin is not written as browsers send it.
    """

    model_name: str
    host: str = _setting(
        "127.0.0.1", "Address to listen on; one that is not local needs an API key."
    )
    port: int = _setting(8000, "Port to listen on; 0 takes a free port.", click.IntRange(0, 65535))
    max_num_seqs: int = _setting(4, "Most samples denoised at once.", click.IntRange(1, 64))
    max_queue: int = _setting(64, "Most samples that wait; others get 429 and Retry-After.", COUNT)
    max_context: int | None = _setting(
        None,
        "Most tokens of prompt and answer; by default the model's limit, on a GPU at most 8192.",
        COUNT,
    )
    batch_invariant: bool = _setting(
        False,
        "On a GPU: seeded text does not depend on the batch; a step takes a full batch's time.",
    )
    max_body_bytes: int = _setting(8 << 20, "Most bytes of a request body.", COUNT)
    request_timeout: float = _setting(
        600.0, "Seconds a request may take, waiting included.", click.FloatRange(0, min_open=True)
    )
    shutdown_grace: float = _setting(
        30.0, "Seconds that running requests have to finish after SIGTERM.", click.FloatRange(0)
    )
    strict: bool = _setting(
        False,
        "Refuse temperature, top_p, penalties and the like, which are ignored by default.",
    )
    chat_template: str | None = _setting(
        None,
        "Jinja file to use in place of the model's chat template; `tools` is one that ships, to try "
        "tools on a model whose own template has no place for them.",
    )
    api_key: str | None = field(default=None, repr=False)  # the bearer token that clients send
    worker: int | None = None  # which of several replicas this is
    prefix_bytes: int = 0  # memory for beginnings of prompts that are kept encoded
    origins: Sequence[str] = ()  # of web pages that may send requests
    fingerprint: str | None = None  # of the checkpoint, for /v1/models
    activations: str = "none"  # how activations are rounded, for /v1/models
    judged_activations: Sequence[str] | None = None  # in which modes a gate judged; None if unknown

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise InputError(f"{KEY_VARIABLE} is set, but is empty or not ASCII; set or unset it")
        if self.api_key is None and not self.is_local:
            raise InputError(
                f"--host {self.host} can be reached from other machines: put an API key into the "
                f"environment variable {KEY_VARIABLE}, or bind 127.0.0.1"
            )
        for origin in self.origins:
            if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
                raise InputError(f"--allow-origin {origin}: write it as https://chat.example, or *")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"
