"""The shapes of the server's answers, for its OpenAPI schema; tests check answers against them.

Answers are made as plain dictionaries (`answers`): nothing is validated on the way out.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

Finish = Literal["stop", "length", "tool_calls"]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _shape(name: str, says: str, base: type[BaseModel] = _Closed, /, **fields: Any) -> Any:
    """Return the model of an object that has all of `fields` and no others."""
    required: Any = {field: (kind, ...) for field, kind in fields.items()}
    return create_model(name, __base__=base, __doc__=says, **required)


CompletionDetails = _shape(
    "CompletionDetails",
    "`reasoning_tokens` are a chat's tokens in the thinking channel, its markers among them.",
    reasoning_tokens=int,
)  # fmt: skip
Usage = _shape(
    "Usage",
    "Tokens and steps of a request; `denoising_steps` are decoder forwards of all choices. "
    "`ignored_parameters` are those of the request that have no effect here.",
    prompt_tokens=int, completion_tokens=int, total_tokens=int, canvases=int, denoising_steps=int,
    completion_tokens_details=CompletionDetails, tokens_per_forward=float, ignored_parameters=list[str],
)  # fmt: skip
CalledFunction = _shape(
    "CalledFunction", "The function to call, and its arguments, a JSON object as text.",
    name=str, arguments=str,
)  # fmt: skip
ToolCall = _shape(
    "ToolCall", "A call for the client to make; its result goes back with this id.",
    id=str, type=Literal["function"], function=CalledFunction,
)  # fmt: skip
AnswerMessage = _shape(
    "AnswerMessage",
    "The model's turn; `reasoning_content` is what it wrote in its thinking channel.",
    role=Literal["assistant"], content=str | None, refusal=None, reasoning_content=str | None,
    tool_calls=list[ToolCall] | None,
)  # fmt: skip
Candidate = _shape(
    "Candidate",
    "A token and its log-probability at a position; `bytes` is null for half a character.",
    token=str, logprob=float, bytes=list[int] | None,
)  # fmt: skip
ScoredToken = _shape(
    "ScoredToken", "A committed token, and the most probable ones at its position.", Candidate,
    top_logprobs=list[Candidate],
)  # fmt: skip
ChatLogprobs = _shape(
    "ChatLogprobs",
    "Log-probabilities at the step at which each canvas was committed, thoughts left out.",
    content=list[ScoredToken], refusal=None,
)  # fmt: skip
TextLogprobs = _shape(
    "TextLogprobs", "Log-probabilities of a plain completion; offsets count characters.",
    tokens=list[str], token_logprobs=list[float], top_logprobs=list[dict[str, float]],
    text_offset=list[int],
)  # fmt: skip
ChatChoice = _shape(
    "ChatChoice", "One answer to a chat, and the seed that makes it again.",
    index=int, finish_reason=Finish, logprobs=ChatLogprobs | None, message=AnswerMessage, seed=int,
)  # fmt: skip
ChatCompletion = _shape(
    "ChatCompletion", "Answer to POST /v1/chat/completions without `stream`.",
    id=str, object=Literal["chat.completion"], created=int, model=str, choices=list[ChatChoice],
    usage=Usage,
)  # fmt: skip
TextChoice = _shape(
    "TextChoice", "One continuation of a prompt, and the seed that makes it again.",
    index=int, finish_reason=Finish, logprobs=TextLogprobs | None, text=str, seed=int,
)  # fmt: skip
TextCompletion = _shape(
    "TextCompletion", "Answer to POST /v1/completions without `stream`.",
    id=str, object=Literal["text_completion"], created=int, model=str, choices=list[TextChoice],
    usage=Usage,
)  # fmt: skip
Model = _shape(
    "Model", "The one model that is served.",
    id=str, object=Literal["model"], created=int, owned_by=str, max_model_len=int,
    default_max_tokens=int,
    fingerprint=str | None, activations=str, judged_activations=list[str] | None,
)  # fmt: skip
Models = _shape("Models", "Answer to GET /v1/models.", object=Literal["list"], data=list[Model])
Version = _shape("Version", "Answer to GET /version.", version=str)
Health = _shape(
    "Health", "Answer to GET /health; 503 with the same fields when new requests would fail.",
    status=Literal["ok", "unavailable"], running=int, waiting=int, key_required=bool,
)  # fmt: skip
Fault = _shape(
    "Fault", "Why a request was refused; `param` names the parameter at fault.",
    message=str, type=str, param=str | None, code=str | None,
)  # fmt: skip
Refusal = _shape(
    "Refusal", "Every answer other than 200, as OpenAI's clients read it.", error=Fault
)

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
    """Return the OpenAPI responses of a route that can stream; `chunk` describes a streamed event."""
    whole = f"The answer; with `stream` server-sent events: {chunk}."
    return REFUSED | {200: {"description": whole, "content": {"text/event-stream": {}}}}


ASKED: dict[int | str, dict[str, Any]] = {code: REFUSED[code] for code in (401, 403, "default")}
