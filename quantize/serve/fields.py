"""The base of all request bodies' models, and checks that they share."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, model_validator

MAX_DEPTH = 64


def _utf8(text: str) -> str:
    if not text.isascii():
        text.encode()  # half a surrogate pair is valid JSON and no text; the error is a ValueError
    return text


def _check(value: Any) -> Any:
    """Return JSON of any shape whose strings are text, not nested too deeply, or raise a ValueError."""
    waiting = [(value, 0)]
    while waiting:
        found, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(found, str):
            _utf8(found)
        elif isinstance(found, dict):
            waiting += [(part, depth + 1) for pair in found.items() for part in pair]
        elif isinstance(found, list):
            waiting += [(part, depth + 1) for part in found]
    return value


String = Annotated[str, AfterValidator(_utf8)]
Json = Annotated[dict[str, Any], AfterValidator(_check)]


def by_type(otherwise: str, **tags: str) -> Discriminator:
    """Return what chooses a member of a union by a value's type, so that its faults alone are told."""

    def its_type(value: Any) -> str:
        return tags.get(type(value).__name__, otherwise)

    return Discriminator(its_type)


class Strict(BaseModel):
    """A body in which unknown fields are errors and nulls are absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if v is not None}
