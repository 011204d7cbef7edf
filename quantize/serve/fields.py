"""The base of all request bodies' models, and checks that they share."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator


def _utf8(text: str) -> str:
    if not text.isascii():
        text.encode()  # half a surrogate pair is valid JSON and no text; the error is a ValueError
    return text


String = Annotated[str, AfterValidator(_utf8)]


class Strict(BaseModel):
    """A body in which unknown fields are errors and nulls are absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return (
            {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        )


def check_utf8(value: Any) -> Any:
    """Return JSON of any shape unchanged, once it is checked.

    Raises:
        ValueError: one of its strings is no text, or it is nested too deeply.
    """
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


MAX_DEPTH = 64
Json = Annotated[dict[str, Any], AfterValidator(check_utf8)]
