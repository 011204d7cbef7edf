"""POST /v1/responses, a thin layer over chat completions: text, pictures and function calls.

A request becomes a `ChatRequest`; `response_events` turns the answer into items and events. Nothing
is stored. References to earlier answers (`previous_response_id`, `item_reference`) are therefore
refused; clients send the items of earlier answers again. This API has no fields for seed, diffusion
controls, pinned text or log-probabilities; chat completions have them.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationError, model_validator

from quantize.serve.failures import RequestError, from_validation
from quantize.serve.fields import (
    Echoed,
    Echoing,
    Items,
    Json,
    Strict,
    String,
    Unused,
    by_type,
    misplaced,
    shaped,
)
from quantize.serve.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    NAME,
    ChosenFunction,
    Detail,
    Function,
    RefusalPart,
)
from quantize.serve.protocol import Asked, ChatRequest, MostTokens

STORED = "nothing is stored here; send the items of earlier answers themselves (store: false)"
Text = Annotated[String, Tag("text")]
ByShape = by_type("text", list="items", dict="object", NamedTool="object")


class _Kept(Echoing):
    id: String | None = Unused
    status: String | None = Unused


class InputText(Echoing):
    """A part of a message that is text."""

    type: Literal["input_text", "output_text", "text"]
    text: String
    annotations: list[Any] | None = Unused
    logprobs: list[Any] | None = Unused


class InputImage(Echoing):
    """A picture as a data URL."""

    type: Literal["input_image"]
    image_url: String
    detail: Detail = None


Part = Annotated[InputText | RefusalPart | InputImage, Field(discriminator="type")]


class MessageItem(_Kept):
    """A message of a chat."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Text | Annotated[Items[Part], Tag("items")], ByShape]
    phase: String | None = Unused


class CallItem(_Kept):
    """A function call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: String
    name: String = Field(pattern=NAME)
    arguments: String


class OutputItem(_Kept):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: String
    output: Annotated[Text | Annotated[Items[InputText], Tag("items")], ByShape]


class ReasoningText(Echoing):
    """A text of the model's thoughts."""

    type: Literal["reasoning_text", "summary_text"]
    text: String


class ReasoningItem(_Kept):
    """Thoughts of an earlier answer; they are used only if they led to a call."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] = Field(default_factory=list[ReasoningText])
    content: Items[ReasoningText] = Field(default_factory=list[ReasoningText])


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Function):
    """A function that the model may call; hosted tools are refused."""

    type: Literal["function"]


class NamedTool(ChosenFunction):
    """The function that must be called."""

    type: Literal["function"]


class Format(Strict):
    """The form that the answer's text must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: String | None = None
    description: String | None = None
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """The form of the answer's text; verbosity is ignored, or refused with --strict."""

    format: Format = Format(type="text")
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Strict):
    """Whether the model thinks: `effort` is a chat request's `reasoning_effort`."""

    effort: String | None = None
    enabled: Literal[False] | None = Echoed
    summary: Literal["auto", "concise", "detailed"] | None = Unused  # thoughts come whole


class ResponseStreamOptions(Strict):
    """How a stream is written; each event has its own size here."""

    include_obfuscation: bool | None = Unused


Included = Literal[
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]  # fmt: skip


class ResponsesRequest(Asked):
    """The body of POST /v1/responses."""

    input: Annotated[
        Text | Annotated[Items[Item], Field(max_length=MAX_MESSAGES), Tag("items")], ByShape
    ]
    instructions: String | None = None
    max_output_tokens: MostTokens = None
    tools: Items[
        Annotated[
            FunctionTool,
            shaped(
                "name", "function", right='{"type": "function", "name": ..., "parameters": ...}'
            ),
        ]
    ] = Field(default_factory=list[FunctionTool], max_length=MAX_TOOLS)
    tool_choice: Annotated[
        Annotated[Literal["auto", "none", "required"], Tag("text")]
        | Annotated[
            NamedTool,
            shaped(
                "name",
                "function",
                right='"auto", "none", "required" or {"type": "function", "name": ...}',
            ),
            Tag("object"),
        ],
        ByShape,
    ] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    truncation: Literal["disabled"] | None = None
    include: Annotated[
        Items[Included] | None,
        AfterValidator(lambda names: names if "_call" in str(names) else None),
    ] = Echoed  # results of tools, which are not there
    background: Literal[False] | None = Unused
    stream_options: ResponseStreamOptions | None = Unused
    top_logprobs: Literal[0] | None = Unused

    @model_validator(mode="before")
    @classmethod
    def _nothing_stored(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for field in ("previous_response_id", "conversation", "background"):
            if value.get(field):
                raise ValueError(f"{field}: {STORED}")
        of_chats = ChatRequest.model_fields.keys() - cls.model_fields.keys()
        for field in [name for name in of_chats if value.get(name) is not None]:
            way = f"set {RENAMED[field]}" if field in RENAMED else "/v1/chat/completions has it"
            reason = f"/v1/responses has no such field; {way}"
            raise misplaced((field,), reason, "unknown_parameter")
        items = value.get("input")
        if isinstance(items, list) and "item_reference" in map(_kind, items):
            raise ValueError(f"input: {STORED}")
        return value

    @property
    def chat(self) -> ChatRequest:
        """Return the request as a chat request; RequestError 400: the chat request is not valid."""
        form = self.text.format.model_dump(by_alias=True, exclude_none=True)
        kind = form.pop("type")
        named = bool(form) or kind == "json_schema"
        choice: Any = self.tool_choice
        if isinstance(choice, NamedTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        body = {name: getattr(self, name) for name in (*Asked.model_fields, "parallel_tool_calls")}
        body |= {
            "messages": [turn for _, turn in _placed_turns(self)],
            "max_completion_tokens": self.max_output_tokens,
            "verbosity": self.text.verbosity,
            "reasoning_effort": self.reasoning.effort,
            "reasoning": None,  # the chat's fields of these names are another server's
            "background": None,
            "response_format": {"type": kind} | ({"json_schema": form} if named else {}),
            "stream_options": {"include_usage": True} if self.stream else None,
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"})}
                for tool in self.tools
            ],
            "tool_choice": choice,
        }
        try:
            return ChatRequest.model_validate(body)
        except ValidationError as error:
            raise self.as_written(from_validation(error.errors(), body)) from error

    def as_written(self, refusal: RequestError) -> RequestError:
        """Return the refusal of a chat request with the names that this API has for its parameters."""
        old = refusal.param
        new = _renamed(old, self) if old is not None else None
        if new == old:
            return refusal
        text = str(refusal).replace(f"{old}:", f"{new}:", 1)
        written = RequestError(refusal.status, text, param=new, code=refusal.code)
        written.headers = refusal.headers
        return written


RENAMED = {  # a chat request's parameter -> this API's
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "tool_choice.function": "tool_choice",
}


def _renamed(param: str, body: ResponsesRequest) -> str:
    if (turn := re.match(r"messages(?:\[(\d+)\])?", param)) is not None:
        if turn[1] is None or isinstance(body.input, str):
            return "input"
        place = [place for place, _ in _placed_turns(body)][int(turn[1])]
        if place is None:
            return "instructions"
        rest = param[turn.end() :].replace(".tool_call_id", ".call_id")
        return f"input[{place}]" + (rest if rest.startswith((".content", ".call_id")) else "")
    for old, new in RENAMED.items():
        if param == old or param.startswith((f"{old}.", f"{old}[")):
            return new + param[len(old) :]
    return re.sub(r"^(tools\[\d+\])\.function", r"\1", param)


def _placed_turns(body: ResponsesRequest) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yield (index of the first of its items, message) of a chat; None for the instructions.

    Calls, and the text and thoughts before them, are one turn.
    """
    if body.instructions:
        yield None, {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield 0, {"role": "user", "content": body.input}
        return
    turns: list[tuple[int, dict[str, Any]]] = []
    for index, piece in enumerate(map(_turn, body.input)):
        last = turns[-1][1] if turns else {}
        begun = "content" in piece and not last.keys().isdisjoint(("content", "tool_calls"))
        if piece["role"] != "assistant" or last.get("role") != "assistant" or begun:
            turns.append((index, piece))
            continue
        calls = last.get("tool_calls", []) + piece.get("tool_calls", [])
        last.update(piece, **({"tool_calls": calls} if calls else {}))
    for index, turn in turns:  # thoughts alone are no turn
        if not turn.keys().isdisjoint(("content", "tool_calls")):
            yield index, turn


def _turn(item: Item) -> dict[str, Any]:
    """Return a chat's message, or what an item adds to the assistant's."""
    match item:
        case MessageItem():
            return {"role": item.role, "content": _content(item.content)}
        case CallItem():
            called = {"name": item.name, "arguments": item.arguments}
            return {"role": "assistant", "tool_calls": [{"id": item.call_id, "function": called}]}
        case OutputItem():
            said = _content(item.output)
            return {"role": "tool", "tool_call_id": item.call_id, "content": said}
        case ReasoningItem():
            thoughts = "".join(part.text for part in item.content)
            return {"role": "assistant", "reasoning_content": thoughts or None}


def _content(content: str | Sequence[Part]) -> str | list[dict[str, Any]]:
    def of_chat(part: Part) -> dict[str, Any]:
        if isinstance(part, RefusalPart):
            return part.model_dump()
        if isinstance(part, InputText):
            return {"type": "text", "text": part.text}
        return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}

    return content if isinstance(content, str) else [of_chat(part) for part in content]
