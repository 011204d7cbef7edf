"""A chat's messages and tools, as requests hold them and as the chat template reads them."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from quantize.serve.fields import (
    ECHOED,
    IGNORED,
    Echoed,
    Echoing,
    Items,
    Json,
    JsonOrText,
    Strict,
    String,
    T,
    Unused,
    by_type,
    misplaced,
    shaped,
)
from quantize.serve.tool_schemas import faults, without_nulls
from quantize.serve.unsupported import MEDIA, TO_BE_READ

MAX_TOOLS, MAX_MESSAGES = 128, 10_000
NAME = r"^[A-Za-z0-9_.\-]{1,64}$"
Detail = Annotated[Literal["auto", "low", "high"] | None, Field(description=IGNORED)]


class TextPart(Echoing):
    """A part of a message that is text, by any of its names."""

    type: Annotated[Literal["text", "input_text", "output_text"], AfterValidator(lambda _: "text")]
    text: String


class ImageUrl(Strict):
    """A picture as a data URL; the request's `image_tokens` limits how many tokens it takes."""

    url: String
    detail: Detail = None


class ImagePart(Echoing):
    """A part of a message that is a picture."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @model_serializer
    def _placeholder(self) -> dict[str, str]:
        return {"type": "image"}


class RefusalPart(Echoing):
    """A part of an earlier answer that says why the model refused; it is read as text."""

    type: Literal["refusal"]
    refusal: String

    @model_serializer
    def _text(self) -> dict[str, str]:
        return {"type": "text", "text": self.refusal}


class ThoughtPart(Echoing):
    """A part of an earlier answer that is a thought; it is ignored, unless it led to a call."""

    to_be_read = ()
    type: Literal["thinking", "redacted_thinking", "reasoning", "reasoning_content"]

    @model_serializer
    def _no_text(self) -> dict[str, str]:
        return {"type": "text", "text": ""}


def _joined(content: Any) -> Any:  # content without pictures becomes one text
    if not isinstance(content, list) or any(part["type"] == "image" for part in content):
        return content
    return "".join(part["text"] for part in content)


def _thought(part: Any) -> str:
    """Return the text of a part of content that is a thought, or "" of another part."""
    if not isinstance(part, dict) or part.get("type") not in ("thinking", "reasoning"):
        return ""
    said = part.get("thinking") or part.get("text") or part.get("reasoning")
    if isinstance(said, list):  # as Mistral writes thoughts
        said = "".join(
            map(str, (piece.get("text", "") for piece in said if isinstance(piece, dict)))
        )
    return said if isinstance(said, str) else ""


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with its thoughts in `reasoning_content`, wherever they were."""
    for name in ("reasoning", "reasoning_text", "thinking"):
        if isinstance(text := message.get(name), str) and text:
            kept = {key: value for key, value in message.items() if key != name}
            return kept | {"reasoning_content": text}
    content = message.get("content")
    parts: list[Any] = content if isinstance(content, list) else []
    thoughts = [_thought(part) for part in parts]
    if not any(thoughts):
        return message
    none = {"type": "text", "text": ""}
    rest = [none if thought else part for part, thought in zip(parts, thoughts, strict=True)]
    return message | {"content": rest, "reasoning_content": "".join(thoughts)}


TextOr = Annotated[
    Annotated[String, Tag("text")] | Annotated[Items[T], Tag("parts")],
    by_type("text", list="parts"),
]
Content = TextOr[Annotated[TextPart | ImagePart, Field(discriminator="type")]]
AnswerPart = Annotated[TextPart | RefusalPart | ThoughtPart, Field(discriminator="type")]


class CalledFunction(Echoing):
    """The function that an earlier answer called; `arguments` is a JSON object, or its text."""

    name: String = Field(pattern=NAME)
    arguments: Annotated[
        JsonOrText, BeforeValidator(lambda value: {} if value in ("", "null") else value)
    ] = Field(default_factory=dict[str, Any])


class ToolCall(Echoing):
    """A function call that an earlier answer made."""

    id: String = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class _Turn(Echoing):
    name: String | None = Field(None, exclude=True, description=IGNORED)
    prefix: Literal[False] | None = Echoed  # true: the answer begins with this message
    partial: Literal[False] | None = Echoed

    @property
    def turn(self) -> dict[str, Any]:
        """Return the message for the chat template; arguments of calls are objects, not text."""
        fields = self.model_dump(exclude_none=True)
        return fields | {"content": _joined(fields.get("content"))}


class Instruction(_Turn):
    """An instruction for the whole chat; the role `developer` becomes `system`."""

    role: Annotated[Literal["system", "developer"], AfterValidator(lambda _: "system")]
    content: TextOr[TextPart]


class Question(_Turn):
    """A message of the user; only the user's messages may hold pictures."""

    role: Literal["user"]
    content: Content


class Reply(_Turn):
    """A message of the model, with its calls; thoughts of a message without calls are dropped."""

    to_be_read = tuple(name for name in TO_BE_READ if name not in MEDIA)

    role: Literal["assistant"]
    content: TextOr[AnswerPart] | None = None
    reasoning_content: String | None = None
    annotations: list[Any] | None = Unused
    reasoning: Any = Echoed  # these four are ignored unless `_takes_what_was_said` reads them
    reasoning_text: Any = Echoed
    thinking: Any = Echoed
    refusal: Any = Echoed
    tool_calls: Items[ToolCall] = Field(default_factory=list[ToolCall], max_length=MAX_TOOLS)

    @model_validator(mode="before")
    @classmethod
    def _takes_what_was_said(cls, value: Any) -> Any:
        """Take thoughts that led to calls, and a refusal, from where another server put them."""
        if not isinstance(value, dict):
            return value
        if value.get("tool_calls"):
            return value if value.get("reasoning_content") else _with_thoughts(value)
        if not value.get("content") and isinstance(text := value.get("refusal"), str) and text:
            kept = {name: field for name, field in value.items() if name != "refusal"}
            return kept | {"content": text}
        return value

    @model_validator(mode="after")
    def _says_something(self) -> "Reply":
        if self.content is None and not self.tool_calls:
            raise misplaced(("content",), "missing, and there are no tool_calls")
        return self

    @property
    def turn(self) -> dict[str, Any]:
        """Return the message for the chat template, with its thoughts only if it has calls."""
        kept = None if self.tool_calls else {"role", "content"}
        fields = self.model_dump(include=kept)
        return fields | {"content": _joined(fields["content"]) or ""}


class Result(_Turn):
    """A tool's result for a call in the assistant's message before it."""

    role: Literal["tool"]
    content: TextOr[TextPart]
    tool_call_id: String
    name: String | None = Field(None, pattern=NAME, description="Not read: the call has it.")


Message = Annotated[Instruction | Question | Reply | Result, Field(discriminator="role")]


def hints(messages: Sequence[Message]) -> dict[str, str | None]:
    """Return a chat's ignored fields: its first `name`, its first `detail` but auto; else None."""
    names = (message.name for message in messages if not isinstance(message, Result))
    parts = (part for turn in messages if isinstance(turn.content, list) for part in turn.content)
    details = (part.image_url.detail for part in parts if isinstance(part, ImagePart))
    detail = next((stated for stated in details if stated not in (None, "auto")), None)
    return {"name": next(filter(None, names), None), "detail": detail}


def echoed(
    value: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yield (name, path) of each field within a body that nothing reads."""
    if isinstance(value, list):
        for index, part in enumerate(value):
            if isinstance(part, Strict):
                yield from echoed(part, (*path, index))
    elif isinstance(value, ThoughtPart):
        yield value.type, path
    elif isinstance(value, Strict):
        yield from ((name, (*path, name)) for name in value.unread)
        for name, field in type(value).model_fields.items():
            inner = getattr(value, name)
            if field.description != ECHOED:
                yield from echoed(inner, (*path, name))
            elif inner is not None:
                yield name, (*path, name)


def faults_of_results(messages: Sequence[Message]) -> Iterator[str]:
    """Yield faults of tool results: each call has one, right behind the assistant's message."""
    turn, called, answered = 0, list[str](), set[str]()
    for index, message in enumerate([*messages, None]):
        if isinstance(message, Result):
            place = f"messages[{index}].tool_call_id"
            if message.tool_call_id not in called:
                yield f"{place}: the assistant's message before it has no such call"
            elif message.tool_call_id in answered:
                yield f"{place}: this call has a result already"
            answered.add(message.tool_call_id)
            continue
        if missing := [n for n, call in enumerate(called) if call not in answered]:
            reason = "no message of the role tool right behind it has this call's result"
            yield f"messages[{turn}].tool_calls[{missing[0]}].id: {reason}"
        calls = message.tool_calls if isinstance(message, Reply) else []
        turn, called, answered = index, [call.id for call in calls], set()
        for n, call in enumerate(called):
            if call in called[:n]:
                yield f"messages[{index}].tool_calls[{n}].id: another call of this message has it"


def in_order(messages: Sequence[Message]) -> list[Message]:
    """Return a chat with results in their calls' order, by name: a template may show no ids."""
    of_calls = dict[str, tuple[tuple[int, int], str]]()
    placed = list[tuple[tuple[int, int], Message]]()
    for index, message in enumerate(messages):
        place = (index, -1)
        if isinstance(message, Reply):
            calls = enumerate(message.tool_calls)
            of_calls |= {call.id: ((index, n), call.function.name) for n, call in calls}
        elif isinstance(message, Result):
            place, name = of_calls[message.tool_call_id]
            message = message.model_copy(update={"name": name})
        placed.append((place, message))
    return [message for _, message in sorted(placed, key=lambda pair: pair[0])]


class Function(Echoing):
    """A function that the model may call; `strict` is accepted and has no effect."""

    to_be_read = (*TO_BE_READ, "response")

    name: String = Field(pattern=NAME)
    description: String = ""
    parameters: Json = Field(default_factory=dict[str, Any])
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def _are_an_objects(cls, value: dict[str, Any]) -> dict[str, Any]:
        schema: dict[str, Any] = without_nulls(value)
        if schema.get("type", "object") != "object":
            raise misplaced(("type",), "must be the schema of an object")
        if fault := next(faults(schema), None):
            raise misplaced(*fault)
        return schema


class OneTool(Echoing):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


SHAPE = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
Tool = Annotated[OneTool, shaped("function", "name", right=SHAPE)]


class ChosenFunction(Strict):
    """The function to call, by its name in `tools`."""

    name: String


class Choice(Strict):
    """A `tool_choice` that names the one tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("word")]
    | Annotated[
        Choice,
        shaped(
            "function",
            "name",
            right='"auto", "none", "required" or {"type": "function", "function": {"name": ...}}',
        ),
        Tag("function"),
    ],
    by_type("function", str="word"),
]
