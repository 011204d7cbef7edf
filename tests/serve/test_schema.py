"""Whatever its OpenAPI schema allows, and what it does not, ends without a server error."""

from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from serving import Running, ScriptedEngine, running


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    engine = ScriptedEngine(4)
    engine.free = True
    with running(engine) as found:
        yield found
        found.settle()
        assert engine.slots == {}


def modes(operation: Any) -> list[GenerationMode]:
    """Without parameters or a body there is nothing to get wrong."""
    return [*GenerationMode] if operation.method == "post" else [GenerationMode.POSITIVE]


@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_server_error(server: Running, examples: int) -> None:
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 5
    answers: Counter[tuple[str, str, int]] = Counter()
    for operation in operations:
        for mode in modes(operation):

            @given(operation.as_strategy(generation_mode=mode))
            @settings(max_examples=examples, deadline=None, suppress_health_check=[*HealthCheck])
            def ask(case: schemathesis.Case) -> None:
                reply = case.call(base_url=server.url)
                answers[
                    case.operation.label, case.meta.generation.mode.value, reply.status_code
                ] += 1
                assert reply.status_code < 500, reply.text
                if reply.status_code >= 400:
                    assert reply.json()["error"]["message"]

            ask()
    for path in ("chat/completions", "completions"):
        assert answers[f"POST /v1/{path}", "negative", 400] > examples / 2
        assert answers[f"POST /v1/{path}", "positive", 404] > 0  # valid, but for the model's name
