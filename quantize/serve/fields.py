"""The base class of all request bodies, and the field types that they share."""

from collections.abc import Sequence
from functools import cache
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import pydantic
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quantize.serve import unsupported

MAX_DEPTH = 64
MAX_BRACKETS = 1 << 16  # lists and objects of a JSON text: a million would stall all that is sent
Unused = Field(None, description="Accepted, but neither used nor logged.")
IGNORED = "Ignored, and named in the header X-Ignored-Parameters; refused with --strict."
ECHOED = f"Nothing here reads it. {IGNORED}"
Echoed = Field(None, exclude=True, description=ECHOED)


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # it is valid JSON
        raise ValueError("holds half of a surrogate pair, which is no text") from None
    return text


def _few_brackets(text: Any) -> Any:
    """Return a JSON text that opens few lists and objects, as a body does; else raise a ValueError."""
    if isinstance(text, str) and (n := text.count("[") + text.count("{")) > MAX_BRACKETS:
        raise ValueError(f"the text has {n} brackets; at most {MAX_BRACKETS} are read")
    return text


def _check(value: Any, depth: int, path: tuple[str | int, ...] = ()) -> Any:
    """Return JSON of any shape whose strings are text, not nested too deeply, or raise a ValueError.

    NaN and infinities are refused too, by their place: what a response echoes must be JSON.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        _utf8(value)
    elif isinstance(value, float) and not isfinite(value):
        raise misplaced(path, f"{value} is no number of JSON")
    elif isinstance(value, (dict, list)):
        for step, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check(step, depth + 1)
            _check(part, depth + 1, (*path, step))
    return value


def whole(value: Any) -> Any:
    """Return a number such as 128.0 as the integer that it is, and other values as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


T = TypeVar("T")
# A refusal names one fault; to note each of a million takes minutes and gigabytes.
Items = Annotated[list[T], Field(fail_fast=True)]
String = Annotated[str, AfterValidator(_utf8)]
Json = Annotated[dict[str, Any], AfterValidator(lambda value: _check(value, 0))]


def misplaced(
    path: Sequence[str | int],
    reason: str,
    kind: Literal["misplaced", "unknown_parameter"] = "misplaced",
) -> PydanticCustomError:
    """Return the error of a value at `path` within the field whose validator raises it."""
    return PydanticCustomError(kind, "{reason}", {"path": list(path), "reason": reason})


def values_of(kinds: tuple[type, ...], reason: str) -> BeforeValidator:
    """Return a validator that refuses an object at its first value that is of none of `kinds`.

    An empty list is taken as an empty object: some languages write both alike.
    """

    def check(value: Any) -> Any:
        for name, part in value.items() if isinstance(value, dict) else ():
            if type(part) not in kinds:  # True is no number
                raise misplaced((name,), reason)
        return {} if value == [] else value

    return BeforeValidator(check)


def shaped(key: str, *others: str, right: str) -> BeforeValidator:
    """Return a validator that refuses objects without `key` but with one of `others`."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and key not in value and not value.keys().isdisjoint(others):
            raise misplaced((), f"this is the shape of another API; send {right}")
        return value

    return BeforeValidator(check)


def by_type(otherwise: str, **tags: str) -> Discriminator:
    """Return a discriminator that picks a union's member by the type of the value.

    `tags` maps names of types to tags of members; `otherwise` is the tag for all other types. If a
    value is invalid, only the errors of the picked member are shown.
    """
    return Discriminator(lambda value: tags.get(type(value).__name__, otherwise))


JsonOrText = Annotated[
    Annotated[pydantic.Json[Json], BeforeValidator(_few_brackets), Tag("text of an object")]
    | Annotated[Json, Tag("an object")],
    by_type("an object", str="text of an object"),
]


class Strict(BaseModel):
    """A body in which unknown fields are errors, null means absent, and 5.0 is the integer 5.

    Of unknown fields, those that change no answer are no errors; `unread` has their names.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    to_be_read: ClassVar[tuple[str, ...] | None] = None  # see `unsupported.unread`
    _unread: tuple[str, ...] = PrivateAttr(())

    @property
    def unread(self) -> tuple[str, ...]:
        """The names of fields that were left out because they change no answer."""
        return self._unread

    @model_validator(mode="wrap")
    @classmethod
    def _as_in_json(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, dict):
            return handler(value)
        given = {k: whole(v) for k, v in value.items() if v is not None}
        names = _names(cls)
        unread = unsupported.unread(given, names, cls.to_be_read)
        unknown = [name for name in given if name not in names and name not in unread]
        for name in [*unread, *unknown[1:]]:  # a refusal names one
            del given[name]
        meant = unsupported.near_miss(unknown[0], names) if unknown else None
        if meant and unknown[0] not in unsupported.REFUSED:
            reason = f"this server knows no such parameter; did you mean {meant}?"
            raise misplaced(unknown[:1], reason, "unknown_parameter")
        body = handler(given)
        body._unread += tuple(unread)  # noqa: SLF001
        return body


class Echoing(Strict):
    """A part of a chat that clients send back with fields of other servers, which are ignored."""

    to_be_read = unsupported.TO_BE_READ


@cache
def _names(body: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())
