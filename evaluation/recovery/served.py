"""Lets an OpenAI-compatible server (vLLM, SGLang, NIM) be the model that is scored.

    POST URL/v1/chat/completions {model, messages, seed, max_tokens, chat_template_kwargs}

We send prompt, seed and token limit; the server applies its own chat template and sampler. If it is
busy (429), temporarily broken (5xx) or unreachable, the request is sent again. We wait as long as
`Retry-After` says, else 0.5, 1, 2, ... s. Any other refusal ends the run with the server's words.

A block-diffusion server must encode a finished canvas as plain embeddings, or longer answers get
worse. Servers that do so send the header `COMMIT_PASS`. vLLM 0.24 to 0.33 needs our plugin for it.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.client import HTTPException
from itertools import islice
from typing import Any

from quantize.recovery.health import END_OF_THINKING, THINKING
from quantize.recovery.samples import Completion, Finished, Request

MEANING = {401: "set OPENAI_API_KEY", 404: "is the URL right, and the model's name?"}
LONGEST_WAIT = 60.0
COMMIT_PASS = "x-diffusiongemma-commit-pass"


class ServerError(RuntimeError):
    """A server refuses, sends a malformed answer, or cannot be reached."""


class AnsweringServer:
    """Answers requests with the first model that a server lists; `about` is this model's list entry.

    `url` may end in /v1. An attempt times out after `timeout` seconds. If the server is busy or
    unreachable, there are up to `attempts` attempts: the first wait is `first_wait` seconds, each
    later wait twice the one before, at most 60 s. `commit_pass` is the header `COMMIT_PASS` of the
    last response, None if that response had none.

    Raises:
        ServerError: the server cannot be reached, refuses, or sends no list of models.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 3600,
        attempts: int = 10,
        first_wait: float = 0.5,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.timeout, self.attempts, self.first_wait = timeout, attempts, first_wait
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.commit_pass: str | None = None
        self.about = self._listed()
        self.model: str = self.about["id"]

    def answer(self, request: Request) -> Completion:
        """Return the server's answer; ServerError: it refuses, sends none, or cannot be reached."""
        reply = self._ask(
            "chat/completions",
            {
                "model": self.model,
                "messages": [{"role": "user", "content": request.prompt}],
                "seed": request.seed % 2**63,
                "max_tokens": request.max_new_tokens,
                "chat_template_kwargs": {"enable_thinking": request.thinking},
            },
        )
        try:
            choice = reply["choices"][0]
            message = choice["message"]
            thoughts = message.get("reasoning_content") or message.get("reasoning")
            closed = END_OF_THINKING if message["content"] else ""  # servers do not send this mark
            opened = f"{THINKING}thought\n{thoughts}{closed}" if thoughts else ""
            return Completion(
                text=opened + (message["content"] or ""),
                tokens=int(reply["usage"]["completion_tokens"]),
                denoising_steps=[],  # the protocol has no field for them
                truncated=choice["finish_reason"] == "length",
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"{self.url}: an answer that is none of the protocol's ({error!r}): {str(reply)[:200]}"
            ) from error

    def _listed(self) -> dict[str, Any]:
        reply = self._ask("models", None)
        try:
            first = reply["data"][0]
            return dict(first) | {"id": str(first["id"])}
        except (LookupError, TypeError, ValueError) as error:
            said = str(reply)[:200]
            raise ServerError(f"{self.url}/models: no list of models: {said}") from error

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Send one request until it is answered; without a `body` it is a GET."""
        data = None if body is None else json.dumps(body).encode()
        pause, last = self.first_wait, ""
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(min(pause, LONGEST_WAIT))
            request = urllib.request.Request(f"{self.url}/{path}", data, self._headers)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    self.commit_pass = reply.headers.get(COMMIT_PASS)
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                last = f"HTTP {error.code} {error.read(200).decode(errors='replace')}".strip()
                if error.code != 429 and error.code < 500:
                    hint = MEANING.get(error.code, "the request was refused")
                    raise ServerError(f"{self.url}/{path}: {last}; {hint}") from error
                asked = error.headers.get("Retry-After", "")  # seconds; a date is ignored
                is_number = asked.isascii() and asked.replace(".", "", 1).isdigit()
                pause = (is_number and float(asked)) or self.first_wait * 2**attempt
            except (OSError, HTTPException, json.JSONDecodeError) as error:
                last, pause = f"{type(error).__name__}: {error}", self.first_wait * 2**attempt
        raise ServerError(f"{self.url}/{path}: gave up after {self.attempts} attempts; last {last}")


class Servers:
    """Servers of one model, each with `in_flight` requests at once; `settings` go to `AnsweringServer`.

    Raise ServerError as `AnsweringServer` does, for any of the servers.
    """

    def __init__(self, urls: Sequence[str], *, in_flight: int = 8, **settings: Any) -> None:
        self.all = [AnsweringServer(url, **settings) for url in urls]
        self.in_flight = in_flight

    def __call__(self, requests: Iterable[Request]) -> Iterator[Finished]:
        """Yield each request with its answer as soon as it is answered.

        A further request is sent only when the caller has stored an answer and asks for the next.
        So a killed process loses at most `in_flight` answers per server, however slow the store.
        """
        waiting = iter(requests)
        free = [server for _ in range(self.in_flight) for server in self.all]
        running: dict[Future[Completion], tuple[Request, AnsweringServer]] = {}
        with ThreadPoolExecutor(len(free)) as pool:

            def ask() -> None:
                for request in islice(waiting, len(free)):
                    server = free.pop(0)
                    running[pool.submit(server.answer, request)] = request, server

            ask()
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    request, server = running.pop(future)
                    yield request, future.result()
                    free.append(server)
                    ask()
