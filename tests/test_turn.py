"""The slow tests by turn: every test has one share, and a commit draws the same one each time."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import turn


def test_every_test_runs_in_one_share_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    every: list[Any] = [SimpleNamespace(nodeid=f"tests/test_a.py::test_b[{i}]") for i in range(40)]

    def kept(share: str) -> list[Any]:
        monkeypatch.setenv(turn.SHARE, share)
        items = list(every)
        turn.pytest_collection_modifyitems(items)
        return items

    shares = [kept(str(share)) for share in range(turn.SHARES)]
    joined = [item for share in shares for item in share]
    assert sorted(joined, key=every.index) == every == kept("all")
    assert all(shares)


def test_a_commit_draws_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[Any], str]] = []

    def run(command: list[Any], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        asked.append(([str(word) for word in command], env[turn.SHARE]))
        return SimpleNamespace(returncode=1)

    drawn = [turn.drawn("01234", 1) for _ in range(2)]
    monkeypatch.setattr(turn, "drawn", lambda choices, count: drawn[0])
    monkeypatch.setattr(turn.subprocess, "run", run)
    assert [turn.main(), turn.main("all")] == [1, 1]
    assert [share for _, share in asked] == [*drawn[1], "all"]
    files = {word for word in asked[0][0] if word.startswith("tests/")}
    assert {"tests/test_walks.py", "tests/recovery/test_health.py"} < files
    assert "tests/serve/test_cluster.py" not in files  # it has no slow test
