"""Refusals have the shape that OpenAI's clients read: {"error": {message, type, param, code}}."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from quantize.serve.unsupported import PARTS, REFUSED, message

NO_PATH = "no such path; GET /docs lists them, and a client's base URL ends in /v1"
KINDS = {401: "authentication", 403: "permission", 404: "not_found", 429: "rate_limit"}


class RequestError(Exception):
    """A refusal or failure of a request: an HTTP status, and a message of one line.

    `param` is the faulty parameter. `code` names the fault for programs. `retry_after`: in seconds.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(" ".join(message.splitlines()))  # a field may be called anything
        self.status, self.param, self.code = status, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that the client reads."""
        kind = KINDS.get(self.status, "server" if self.status >= 500 else "invalid_request")
        error = {"message": str(self), "type": f"{kind}_error"}
        return {"error": error | {"param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        """The HTTP response, in ASCII, since a message may quote text that UTF-8 cannot encode."""
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


def invalid(param: str, reason: object, code: str = "invalid_value") -> RequestError:
    """Return the refusal (400) of parameter `param`'s value; `reason` says why it is refused."""
    return RequestError(400, f"{param}: {reason}", param=param, code=code)


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> RequestError:
    """Return the refusal (400) of a `body` that pydantic rejected, with its most telling error."""
    first, where = _most_telling(errors, body)
    reason = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid" and first["loc"][:1] == ("body",) and len(first["loc"]) == 2:
        reason = _broken_json(first["ctx"]["error"], first["loc"][1], body)
        return RequestError(400, reason, code="invalid_body")
    if first["type"] in ("misplaced", "unknown_parameter"):
        where += first["ctx"]["path"]
    if first["type"].startswith("union_tag"):
        where, reason = _unknown_kind(first, where)
    if first["type"] == "string_type" and first["loc"][-1] == "text" and where[-1:] != ["text"]:
        reason = "must be a string or a list"  # "text" is here the name of a union's member
    param = written(where) or None
    if first["type"] == "extra_forbidden":
        if known := REFUSED.get(str(where[-1])) if where else None:
            text = message(str(param), known)
            return RequestError(400, text, param=param, code="unsupported_parameter")
        reason = "this server knows no such parameter; GET /docs lists those it takes"
        if where[-2:] == ["response_format", "schema"]:
            reason = "only of the type json_schema, as json_schema.schema beside json_schema.name"
        return invalid(str(param), reason, "unknown_parameter")
    if first["type"] == "union_tag_invalid" and (part := PARTS.get(tag := first["ctx"]["tag"])):
        return invalid(str(param), f"{tag}: not supported: {part}", "unsupported_content")
    if first["type"] == "value_error" and param is None:  # the message itself names the field
        return RequestError(400, reason, param=reason.partition(":")[0], code="invalid_value")
    if param is None:
        reason = f"the body must be JSON, sent as Content-Type: application/json ({reason})"
        return RequestError(400, reason, code="invalid_body")
    known = first["type"] != "unknown_parameter"
    return invalid(param, reason, "invalid_value" if known else "unknown_parameter")


def _unknown_kind(error: Mapping[str, Any], where: list[str | int]) -> tuple[list[str | int], str]:
    """Return the place and the reason of an object whose role or type no member of a union has."""
    key = "role" if "role" in error["ctx"]["discriminator"] else "type"
    if error["type"] == "union_tag_not_found":
        return [*where, key] if key == "role" else where, f"needs a {key}, which is a text"
    reason = f"{key} {error['ctx']['tag'][:100]!r} is not one of {error['ctx']['expected_tags']}"
    return [*where, key] if key == "role" else where, reason


def written(path: Sequence[str | int]) -> str:
    """Return a path in a body as clients write it: messages[0].content[1].text."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def _most_telling(
    errors: Sequence[Mapping[str, Any]], body: Any
) -> tuple[Mapping[str, Any], list[str | int]]:
    """Return the error that says most, and its path; of the members of a union, the deepest."""
    order = ["extra_forbidden", "literal_error"]  # unknown fields say more than missing ones
    first = min(errors, key=lambda error: [*order, error["type"]].index(error["type"]))
    where = _path_in(body, first)
    for error in errors:
        path = _path_in(body, error)
        if len(path) > len(where) and path[: len(where)] == where:
            first, where = error, path
    return first, where


def _path_in(body: Any, error: Mapping[str, Any]) -> list[str | int]:
    """Return the path in `body` of one of pydantic's errors, whose place names members of unions."""
    parts = [part for part in error["loc"] if part != "body"]
    missing = error["type"] == "missing"  # a field that `body` lacks
    path: list[str | int] = []
    value, tagged = body, False  # whether the member that describes `value` was named
    for n, part in enumerate(parts):
        last = n == len(parts) - 1
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            value, tagged = value[part], path[-1:] in (["tools"], ["tool_calls"])
        elif (
            isinstance(value, dict)
            and not tagged
            and part in _kinds(value)
            and not (last and part in value)
        ):
            tagged = True
            continue
        elif isinstance(value, dict) and part in value:
            value, tagged = value[str(part)], False
        elif not (missing and last):
            continue
        path.append(part)
    return path


def _kinds(value: Mapping[str, Any]) -> list[Any]:
    return [value[name] for name in ("type", "role") if name in value]


def _broken_json(reason: str, at: Any, body: Any) -> str:
    """Return the message about a body that is no JSON, with line and column if they are known."""
    if not isinstance(body, str) or not isinstance(at, int):
        return f"the body is not JSON: {reason}"
    before = body[:at]
    line, column = before.count("\n") + 1, at - before.rfind("\n")
    return f"the body is not JSON at line {line}, column {column}: {reason}"
