"""The lint of names finds what it refuses, and the product has none of it."""

import ast
from pathlib import Path

import pytest

from tests.support import names


def test_the_product_stores_no_refused_name_and_no_class_twice() -> None:
    assert names.faults() == []


@pytest.mark.parametrize(
    "code",
    [
        "own = 1", "for each in x: pass", "def f(found): pass", "left, b = x", "self._told = 1",
        "[own for own in x]", "with x as found: pass", "if (stand := x): pass", "lambda own: 1",
        "def f(*, told=1): pass", "own: int = 1",
    ],
)  # fmt: skip
def test_each_way_to_store_a_name_is_seen(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(code)
    (place,) = names.refused(tmp_path)
    assert place.startswith("a.py:1: ")


def test_names_that_are_only_read_or_called_are_not_refused() -> None:
    tree = ast.parse("x = own.left + engine.each(found)\ndef each(): pass\nf(told=1)")
    assert [name for name, _ in names.stored(tree)] == ["x"]


def test_a_second_class_of_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "ROOT", tmp_path)
    monkeypatch.setattr(names, "PRODUCT", ("p",))
    (tmp_path / "p/clean").mkdir(parents=True)
    (tmp_path / "p/a.py").write_text("class Plan: pass")
    (tmp_path / "p/clean/b.py").write_text("class _Plan: pass")
    assert names.faults() == [
        "p/a.py:1, p/clean/b.py:1: several classes are called Plan",
    ]
