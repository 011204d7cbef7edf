"""The shapes of the server's answers, for its OpenAPI schema; tests check every answer by them.

Answers are made as plain dictionaries (`answers`): nothing is validated on the way out.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length", "tool_calls"]


class _Closed(BaseModel):
    """An object whose fields are all present, without others."""

    model_config = ConfigDict(extra="forbid")


class Usage(_Closed):
    """Tokens and steps of a request; `denoising_steps` are decoder forwards of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    canvases: int
    denoising_steps: int
    tokens_per_forward: float


class CalledFunction(_Closed):
    """The function to call, and its arguments, a JSON object as text."""

    name: str
    arguments: str


class ToolCall(_Closed):
    """A call for the client to make; its result goes back with this id."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(_Closed):
    """The model's turn; `reasoning_content` is what it wrote in its thinking channel."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None
    tool_calls: list[ToolCall] | None


class Candidate(_Closed):
    """A token and its log-probability at a position; `bytes` is null for half a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ScoredToken(Candidate):
    """A committed token, and the most probable ones at its position."""

    top_logprobs: list[Candidate]


class ChatLogprobs(_Closed):
    """Log-probabilities at the step at which each canvas was committed, thoughts left out."""

    content: list[ScoredToken]
    refusal: None


class TextLogprobs(_Closed):
    """Log-probabilities of a plain completion; offsets count characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatChoice(_Closed):
    """One answer to a chat, and the seed that makes it again."""

    index: int
    finish_reason: Finish
    logprobs: ChatLogprobs | None
    message: AnswerMessage
    seed: int


class ChatCompletion(_Closed):
    """Answer to POST /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(_Closed):
    """One continuation of a prompt, and the seed that makes it again."""

    index: int
    finish_reason: Finish
    logprobs: TextLogprobs | None
    text: str
    seed: int


class TextCompletion(_Closed):
    """Answer to POST /v1/completions without `stream`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Model(_Closed):
    """The one model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    fingerprint: str | None
    activations: str


class Models(_Closed):
    """Answer to GET /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Version(_Closed):
    """Answer to GET /version."""

    version: str


class Health(_Closed):
    """Answer to GET /health; 503 with the same fields when new requests would fail."""

    status: Literal["ok", "unavailable"]
    running: int
    waiting: int
    key_required: bool


class Fault(_Closed):
    """Why a request was refused; `param` names the parameter at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(_Closed):
    """Every answer other than 200, as OpenAI's clients read it."""

    error: Fault


REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"model": Refusal, "description": "A parameter cannot be honoured, or is not valid."},
    401: {"model": Refusal, "description": "No API key, or a wrong one."},
    403: {"model": Refusal, "description": "Asked under a name that is not this server's."},
    404: {"model": Refusal, "description": "No such model."},
    408: {"model": Refusal, "description": "The body did not arrive in time."},
    413: {"model": Refusal, "description": "The body is too large."},
    429: {"model": Refusal, "description": "The queue is full; see Retry-After."},
    500: {"model": Refusal, "description": "The engine failed."},
    503: {"model": Refusal, "description": "The server is shutting down; see Retry-After."},
    504: {"model": Refusal, "description": "Not finished within the time a request may take."},
    "default": {"model": Refusal, "description": "Refused for another reason."},  # and never 422
}


def streamed(chunk: str) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route that may also stream; `chunk` says what its events hold."""
    whole = f"The answer; with `stream` server-sent events: {chunk}, a canvas each, then [DONE]."
    return REFUSED | {200: {"description": whole, "content": {"text/event-stream": {}}}}


ASKED: dict[int | str, dict[str, Any]] = {code: REFUSED[code] for code in (401, 403, "default")}
