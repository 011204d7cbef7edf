"""A chat's messages and tools, as requests hold them and as the chat template reads them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from quantize.serve.fields import Json, Strict, String, check_utf8

MAX_TOOLS = 128
NAME = r"^[A-Za-z0-9_.\-]{1,64}$"


class TextPart(Strict):
    """A text part of a message."""

    type: Literal["text"]
    text: String


class ImageUrl(Strict):
    """A picture as a data URL; the request's `image_tokens` limits its tokens."""

    url: String
    detail: Literal["auto"] | None = None


class ImagePart(Strict):
    """A picture part of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _kind(content: Any) -> str:
    return "parts" if isinstance(content, list) else "text"


Parts = list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]
# A fault is then reported for the kind that was meant.
Content = Annotated[
    Annotated[String, Tag("text")] | Annotated[Parts, Tag("parts")], Discriminator(_kind)
]
TextContent = Annotated[
    Annotated[String, Tag("text")] | Annotated[list[TextPart], Tag("parts")], Discriminator(_kind)
]


class CalledFunction(Strict):
    """The function that an earlier answer called, its arguments a JSON object as text."""

    name: String = Field(pattern=NAME)
    arguments: String

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        try:
            found = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"must be a JSON object ({error})") from error
        if not isinstance(found, dict):
            raise ValueError("must be a JSON object")
        check_utf8(found)
        return value or "{}"


class ToolCall(Strict):
    """A call that an earlier answer made."""

    id: String = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def turn(self) -> dict[str, Any]:
        """Return what the chat template reads; it writes the arguments in its own way."""
        called = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": called}


def _text(content: str | Sequence[TextPart | ImagePart]) -> str:
    """Return content without pictures as one text."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, TextPart))


class Instruction(Strict):
    """An instruction for the whole chat; OpenAI's role developer is this model's system."""

    role: Literal["system", "developer"]
    content: TextContent

    @property
    def turn(self) -> dict[str, Any]:
        """Return what the chat template reads."""
        return {"role": "system", "content": _text(self.content)}


class Question(Strict):
    """A turn of the user, the only one that may hold pictures."""

    role: Literal["user"]
    content: Content

    @property
    def pictures(self) -> list[tuple[int, str]]:
        """Return each picture's part of the message, and its data URL."""
        parts = self.content if isinstance(self.content, list) else []
        return [(n, p.image_url.url) for n, p in enumerate(parts) if isinstance(p, ImagePart)]

    @property
    def turn(self) -> dict[str, Any]:
        """Return what the chat template reads."""
        if self.pictures:
            return {"role": "user", "content": [_template_part(part) for part in self.content]}
        return {"role": "user", "content": _text(self.content)}


def _template_part(part: Any) -> dict[str, str]:
    text = isinstance(part, TextPart)
    return {"type": "text", "text": part.text} if text else {"type": "image"}


class Reply(Strict):
    """A turn of the model, with the calls that it made.

    The template gets thoughts that a client sends back, and keeps only those that led to calls.
    """

    role: Literal["assistant"]
    content: TextContent | None = None
    reasoning_content: String | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list[ToolCall], max_length=MAX_TOOLS)

    @model_validator(mode="after")
    def _says_something(self) -> "Reply":
        if self.content is None and not self.tool_calls:
            raise ValueError("content: missing, and there are no tool_calls")
        return self

    @property
    def turn(self) -> dict[str, Any]:
        """Return what the chat template reads."""
        turn = {"role": "assistant", "content": _text(self.content or "")}
        calls = {"tool_calls": [call.turn for call in self.tool_calls]}
        calls |= {"reasoning_content": self.reasoning_content}
        return turn | calls if self.tool_calls else turn


class Result(Strict):
    """What a tool returned for a call of the reply before it."""

    role: Literal["tool"]
    content: TextContent
    tool_call_id: String
    name: String | None = Field(None, pattern=NAME, description="The template finds it itself.")

    @property
    def turn(self) -> dict[str, Any]:
        """Return what the chat template reads."""
        turn = {"role": "tool", "content": _text(self.content), "tool_call_id": self.tool_call_id}
        return turn if self.name is None else turn | {"name": self.name}


Message = Annotated[Instruction | Question | Reply | Result, Field(discriminator="role")]


def check_results(messages: Sequence[Message]) -> None:
    """Refuse results of calls that the assistant's turn before them did not make.

    Raises:
        ValueError: it names the first of them.
    """
    called: set[str] = set()
    for index, message in enumerate(messages):
        if not isinstance(message, Result):
            calls = message.tool_calls if isinstance(message, Reply) else []
            called = {call.id for call in calls}
        elif message.tool_call_id not in called:
            raise ValueError(
                f"messages.{index}.tool_call_id: the assistant's message before it has no such call"
            )


class Function(Strict):
    """A function that the model may call; `strict` holds its arguments to `parameters`."""

    name: String = Field(pattern=NAME)
    description: String = ""
    parameters: Json = Field(default_factory=dict[str, Any])
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def _are_an_objects(cls, value: dict[str, Any]) -> dict[str, Any]:
        properties, required = value.get("properties", {}), value.get("required", [])
        if value.get("type", "object") != "object" or not isinstance(properties, dict):
            raise ValueError("must be the schema of an object")
        if not all(isinstance(found, dict) for found in properties.values()):
            raise ValueError("properties: each must be a schema")
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise ValueError("required: must be a list of names")
        return value


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    @property
    def declaration(self) -> dict[str, Any]:
        """Return what the chat template reads."""
        told = self.function.model_dump(include={"name", "description", "parameters"})
        return {"type": "function", "function": told}


class ChosenFunction(Strict):
    """The name of a function of `tools`."""

    name: String


class Choice(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


def _choice_kind(choice: Any) -> str:
    return "word" if isinstance(choice, str) else "function"


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("word")]
    | Annotated[Choice, Tag("function")],
    Discriminator(_choice_kind),
]
