"""The base class of all request bodies, and the field types that they share."""

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_DEPTH = 64
Unused = Field(None, description="Accepted, but neither used nor logged.")
IGNORED = "Ignored, and named in the header X-Ignored-Parameters; refused with --strict."


ECHOED = f"What another server sent, echoed. {IGNORED}"
Echoed = Field(None, exclude=True, description=ECHOED)


def _utf8(text: str) -> str:
    if not text.isascii():
        text.encode()  # half a surrogate pair is valid JSON and no text; the error is a ValueError
    return text


def _check(value: Any, depth: int) -> Any:
    """Return JSON of any shape whose strings are text, not nested too deeply, or raise a ValueError."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        _utf8(value)
    elif isinstance(value, (dict, list)):
        for part in chain.from_iterable(value.items()) if isinstance(value, dict) else value:
            _check(part, depth + 1)
    return value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


String = Annotated[str, AfterValidator(_utf8)]
Json = Annotated[dict[str, Any], AfterValidator(lambda value: _check(value, 0))]


def misplaced(path: Sequence[str | int], reason: str) -> PydanticCustomError:
    """Return the error of a value at `path` within the field whose validator raises it."""
    return PydanticCustomError("misplaced", "{reason}", {"path": list(path), "reason": reason})


def by_type(otherwise: str, **tags: str) -> Discriminator:
    """Return a discriminator that picks a union's member by the type of the value.

    `tags` maps names of types to tags of members; `otherwise` is the tag for all other types. If a
    value is invalid, only the errors of the picked member are shown.
    """

    def its_type(value: Any) -> str:
        return tags.get(type(value).__name__, otherwise)

    return Discriminator(its_type)


class Strict(BaseModel):
    """A body in which unknown fields are errors, null means absent, and 5.0 is the integer 5."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _as_in_json(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: _whole(v) for k, v in value.items() if v is not None}
