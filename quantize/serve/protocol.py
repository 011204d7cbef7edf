"""The bodies of requests: OpenAI's fields that block diffusion can honour, and fields of our own.

Other fields are refused by name, or ignored (`unsupported`). An ignored value out of OpenAI's range
is refused. A field that is null counts as absent: clients send whole messages back with nulls.

Our own fields (`extra_body` in OpenAI's client) include the sampler's controls (`recipe.controls`);
known text of an answer (`infill`); `guided_json` and `guided_regex`; and, in chats, `image_tokens`,
the most tokens that one picture may take.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, create_model, field_validator, model_validator

from quantize.errors import InputError
from quantize.recipe.controls import CONTROLS, optional
from quantize.runtime import Sampler
from quantize.serve.failures import invalid, written
from quantize.serve.fields import (
    IGNORED,
    Echoed,
    Items,
    Json,
    JsonOrText,
    Strict,
    String,
    Unused,
    values_of,
    whole,
)
from quantize.serve.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    NAME,
    Choice,
    ImagePart,
    Message,
    Tool,
    ToolChoice,
    echoed,
    faults_of_results,
)
from quantize.serve.unsupported import FOREIGN

MAX_STOPS, MAX_CHOICES = 16, 16
MAX_PINNED, MAX_POSITION = 64, 1 << 20
MAX_LOGPROBS, MAX_PATTERN = 20, 10_000
MOST_NAMES = 128  # of ignored fields of one request, in a header
INT64 = 2**63
FIXED_SEED = 0  # for temperature 0: clients that send it want the same answer each time

BY_DEFAULT = "generation_config.json's max_new_tokens by default: default_max_tokens of /v1/models."
MostTokens = Annotated[int | None, Field(ge=1, le=INT64 - 1, description=BY_DEFAULT)]
Ignored = Field(None, description=IGNORED)
Refused = Field(None, description="Refused, except for the value that changes nothing.")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Form = tuple[str, str, Any]  # parameter, kind of form, definition


class StreamOptions(Strict):
    """What a stream holds besides text; `include_drafts` adds the canvas after every step."""

    include_usage: bool = False
    include_drafts: bool = False
    include_obfuscation: bool | None = Unused
    continuous_usage_stats: Literal[False] | None = Echoed


class PinnedText(Strict):
    """Text that the answer must hold: its tokens are committed unchanged from `position` on."""

    position: int = Field(ge=0, le=MAX_POSITION, description="In tokens of the answer, from 0.")
    text: String = Field(min_length=1)


_FOREIGN: Any = dict.fromkeys(FOREIGN, (Any, Refused))
_CONTROLS: Any = optional(CONTROLS, "asked")


# pyrefly: ignore[invalid-inheritance]
class Asked(create_model("Foreign", __base__=Strict, **_FOREIGN)):
    """The fields that all requests for an answer share: chats, plain completions, responses."""

    model: String
    stream: bool = False
    temperature: float | None = Field(
        None, ge=0, le=2, description=f"{IGNORED} 0 without a seed sets the seed {FIXED_SEED}."
    )
    top_p: float | None = Field(None, ge=0, le=1, description=IGNORED)
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Ignored
    store: bool | None = Ignored
    user: str | None = Unused
    metadata: Annotated[dict[String, String], values_of((str,), "must be a string")] | None = Unused
    safety_identifier: str | None = Unused
    prompt_cache_key: str | None = Unused
    prompt_cache_retention: str | None = Unused

    @property
    def echoes(self) -> dict[str, str]:
        """Return name -> path of the first place of each field that nothing reads.

        RequestError 400: their names are too many for a header.
        """
        places: dict[str, str] = {}
        for name, path in echoed(self):
            places.setdefault(name, written(path))
            if len(places) > MOST_NAMES:
                reason = f"over {MOST_NAMES} names are unknown here; leave this out"
                raise invalid(written(path), reason)
        return places


# pyrefly: ignore[invalid-inheritance]
class _Generation(create_model("Controlled", __base__=Asked, **_CONTROLS)):
    """The fields that chats and plain completions share."""

    max_tokens: MostTokens = None
    stop: String | Items[String] = Field(default_factory=list[str])
    seed: int | None = Field(None, ge=-INT64, le=INT64 - 1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None

    initial_text: String | None = Field(
        None, description="Fills the canvas before the first step, in place of noise."
    )
    pinned: Items[PinnedText] = Field(default_factory=list[PinnedText], max_length=MAX_PINNED)

    guided_json: JsonOrText | None = Field(
        None, description="JSON schema of the answer, or its text."
    )
    guided_regex: String | None = Field(
        None, min_length=1, max_length=MAX_PATTERN, description="Must match the whole answer."
    )

    top_k: int | None = Field(None, ge=-1, le=INT64 - 1, description=IGNORED)
    min_p: float | None = Field(None, ge=0, le=1, description=IGNORED)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description=IGNORED)
    presence_penalty: float | None = Field(None, ge=-2, le=2, description=IGNORED)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False, description=IGNORED)
    length_penalty: float | None = Field(None, allow_inf_nan=False, description=IGNORED)
    verbosity: Literal["low", "medium", "high"] | None = Ignored
    logit_bias: Annotated[dict[str, float], values_of((int, float), "must be a number")] | None = (
        Refused
    )
    best_of: int | None = Refused
    echo: bool | None = Refused
    modalities: Items[str] | None = Refused

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str]) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        if len(stops) > MAX_STOPS or "" in stops:
            raise ValueError(f"at most {MAX_STOPS} strings, none of them empty")
        return stops

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            self.stream_options = None
            self._unread += ("stream_options",)
        if fault := next(self.faults(), None):
            raise ValueError(fault)
        return self

    def faults(self) -> Iterator[str]:
        """Yield contradictions between fields, each as a line `field: reason`."""
        forms = [param for param, _, _ in self.forms]
        if len(forms) > 1:
            yield f"{forms[1]}: an answer has one form; give it or {forms[0]}"
        if self.stop and self.top is not None:
            yield "stop: not with logprobs, which are told of whole tokens"
        for field in ("stop", "pinned", "suffix") if forms else ():
            # a call has no text that a stop string could end
            if getattr(self, field, None) and (field, forms[0]) != ("stop", "tool_choice"):
                yield f"{field}: not with {forms[0]}, which says how the answer ends"

    @property
    def forms(self) -> list[Form]:
        """Return (parameter, kind, definition) of each form asked for; kind: "json" or "regex"."""
        guides = ("guided_json", "json"), ("guided_regex", "regex")
        given = ((name, kind, getattr(self, name)) for name, kind in guides)
        return [form for form in given if form[2] is not None]

    @property
    def top(self) -> int | None:
        """Return how many most probable tokens to list per position; None: no log-probabilities."""
        return None

    @property
    def fixed_seed(self) -> int | None:
        """Return the seed that the request fixes; None: the server chooses a random seed."""
        return FIXED_SEED if self.seed is None and self.temperature == 0 else self.seed

    @property
    def token_limit(self) -> int | None:
        """Return the most tokens of one choice, thoughts included; None: no limit is given."""
        return self.max_tokens

    def sampler(self, base: Sampler) -> Sampler:
        """Return `base` with the request's controls; RequestError 400: they contradict each other."""
        given = self.model_dump(include={*CONTROLS}, exclude_none=True)
        try:
            return replace(base, **given)
        except InputError as error:
            reason = str(error).removeprefix("generation config: ")
            raise invalid(next(iter(given), "sampler"), reason) from error


class TemplateOptions(Strict):
    """Settings of the chat template."""

    enable_thinking: bool | None = None
    thinking: Literal[False] | None = Echoed  # another model's name for it


class PlainFormat(Strict):
    """A `response_format` that asks for free text, or for a JSON object without a schema."""

    type: Literal["text", "json_object"]


class JsonSchema(Strict):
    """A JSON schema and its name; answers always fit the schema, even if `strict` is false."""

    name: String = Field(pattern=NAME)
    description: String | None = None
    schema_: Json = Field(alias="schema")
    strict: bool = True


class SchemaFormat(Strict):
    """A `response_format` that asks for JSON text that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class ChatRequest(_Generation):
    """The body of POST /v1/chat/completions."""

    messages: Items[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: MostTokens = None
    chat_template_kwargs: TemplateOptions = Field(default_factory=TemplateOptions)
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = Field(
        None,
        description="none turns thinking off; every other value turns it on, in the same way. "
        "If chat_template_kwargs.enable_thinking is also given, that decides.",
    )
    image_tokens: Literal[70, 140, 280, 560, 1120] = 280
    tools: Items[Tool] = Field(default_factory=list[Tool], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    def faults(self) -> Iterator[str]:
        """Yield contradictions between fields, each as a line `field: reason`."""
        yield from super().faults()
        yield from faults_of_results(self.messages)
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            yield "tools: two have the same name"
        if isinstance(self.tool_choice, Choice) and self.tool_choice.function.name not in names:
            name = self.tool_choice.function.name
            yield f"tool_choice: no tool of the request is named {name[:100]!r}"
        if self.tool_choice == "required" and not names:
            yield "tool_choice: required, and the request has no tools"
        if self.top_logprobs and not self.logprobs:
            yield "top_logprobs: only with logprobs true"
        if self.max_tokens and self.max_completion_tokens not in (None, self.max_tokens):
            yield "max_tokens: give it or max_completion_tokens, not both"

    @property
    def forms(self) -> list[Form]:
        """Return (parameter, kind, definition) of each form; kind is "json", "regex" or "calls"."""
        given = super().forms
        if isinstance(self.response_format, SchemaFormat):
            given.append(("response_format", "json", self.response_format.json_schema.schema_))
        elif self.response_format is not None and self.response_format.type == "json_object":
            given.append(("response_format", "json", {"type": "object"}))
        if self.tool_choice not in ("auto", "none"):
            chosen = [tool.function for tool in self.tools if tool.function.name in self.callable]
            given.append(("tool_choice", "calls", chosen))
        return given

    @property
    def top(self) -> int | None:
        """Return how many most probable tokens to list per position; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @property
    def thinks(self) -> bool:
        """Return whether the model thinks before it answers."""
        if (said := self.chat_template_kwargs.enable_thinking) is not None:
            return said
        return self.reasoning_effort not in (None, "none")

    @property
    def callable(self) -> frozenset[str]:
        """Return the names of the tools that the answer may call."""
        if isinstance(self.tool_choice, Choice):
            return frozenset({self.tool_choice.function.name})
        named = () if self.tool_choice == "none" else self.tools
        return frozenset(tool.function.name for tool in named)

    @property
    def pictures(self) -> list[tuple[str, str]]:
        """Return (parameter's path, data URL) of each picture, in the messages' order."""
        return [
            (f"messages[{turn}].content[{n}].image_url", part.image_url.url)
            for turn, message in enumerate(self.messages)
            for n, part in enumerate(message.content if isinstance(message.content, list) else ())
            if isinstance(part, ImagePart)
        ]

    @property
    def token_limit(self) -> int | None:
        """Return the most tokens of one choice, thoughts included; None: no limit is given."""
        return self.max_tokens or self.max_completion_tokens


class CompletionRequest(_Generation):
    """The body of POST /v1/completions; no chat template is used, and thoughts stay in the text."""

    prompt: String | Items[String] | Items[int] | Items[Items[int]]
    suffix: String | None = Field(
        None, description="Text after the answer's max_tokens positions, in the same canvas."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def top(self) -> int | None:
        """Return how many most probable tokens to list per position; None: no log-probabilities."""
        return self.logprobs

    @field_validator("prompt", mode="before")
    @classmethod
    def _whole_tokens(cls, value: Any) -> Any:
        return [whole(token) for token in value] if isinstance(value, list) else value

    @field_validator("prompt")
    @classmethod
    def _several(cls, value: Any) -> list[str | list[int]]:
        several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
        prompts = list(value) if several else [value]
        if len(prompts) > MAX_CHOICES or not all(prompts):
            raise ValueError(f"must hold text or tokens, and at most {MAX_CHOICES} prompts")
        return prompts
