"""Whatever its OpenAPI schema allows, and what it does not, ends without a server error."""

from collections import Counter
from collections.abc import Generator

import pytest

from tests.support.serving import Running, ScriptedEngine, running


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    engine = ScriptedEngine(4)
    engine.free = True
    with running(engine) as found:
        yield found
        found.settle()
        assert engine.said == {}


def test_what_it_answers_with_is_in_the_schema(server: Running) -> None:
    """Answers of 200, which arbitrary requests hardly get: no field is missing, none is unnamed."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    chat = {"model": "bundled", "messages": [{"role": "user", "content": "x"}], "max_tokens": 16}
    text = {"model": "bundled", "prompt": "x", "n": 2, "max_tokens": 8}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        for asked in (body, body | {"stream": True}):
            reply = server.http.post(path, json=asked)
            assert reply.status_code == 200
            schema[path]["POST"].validate_response(reply)
    for path in ("/v1/models", "/v1/models/bundled", "/version", "/health"):
        schema[path.replace("/bundled", "/{name}")]["GET"].validate_response(server.http.get(path))


def test_no_answer_of_422_is_promised(server: Running) -> None:
    for methods in server.http.get("/openapi.json").json()["paths"].values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
    assert server.http.post("/v1/completions", json={}).status_code == 400


@pytest.mark.parametrize("examples", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_server_error(server: Running, examples: int) -> None:
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 8
    answers: Counter[tuple[str, str, int]] = Counter()
    for operation in operations:
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and operation.method != "post":
                continue  # without parameters or a body there is nothing to get wrong

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
                case.validate_response(
                    reply,
                    checks=[
                        response_schema_conformance,
                        status_code_conformance,
                        content_type_conformance,
                    ],
                )

            ask()
    for path in ("chat/completions", "completions"):
        assert answers[f"POST /v1/{path}", "negative", 400] > examples / 2
        assert answers[f"POST /v1/{path}", "positive", 404] > 0  # valid, but for the model's name
