"""The settings that a server takes from its command line."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from quantize.errors import InputError

KEY_VARIABLE = "QUANTIZE_API_KEY"


@dataclass(frozen=True)
class Options:
    """Settings of one server, as `quantize serve --help` says of its options; times are in seconds.

    Attributes:
        port: 0 takes a free one.
        api_key: what clients must send as a bearer token; None for no key.
        max_context, max_prompt_tokens: None for the engine's own limit.
        prefix_bytes: memory for beginnings of prompts that are kept encoded.
        fingerprint, activations: checkpoint and rounding that /v1/models reports.

    Raises:
        InputError: other machines could reach it and there is no key, or the key is empty.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_num_seqs: int = 4
    max_queue: int = 64
    max_context: int | None = None
    prefix_bytes: int = 0
    batch_invariant: bool = False
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 8 << 20
    request_timeout: float = 600.0
    shutdown_grace: float = 30.0
    strict: bool = False
    log_prompts: bool = False
    origins: Sequence[str] = ()
    fingerprint: str | None = None
    activations: str = "none"

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise InputError(f"{KEY_VARIABLE} is set, but is empty or not ASCII; set or unset it")
        if self.api_key is None and not self.is_local:
            raise InputError(
                f"--host {self.host} can be reached from other machines: put an API key into the "
                f"environment variable {KEY_VARIABLE}, or bind 127.0.0.1"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
