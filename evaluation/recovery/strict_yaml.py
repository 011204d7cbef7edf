"""Reads YAML that a stranger may have written: no key twice, and nothing that expands without bound.

An alias (`*name`) stands for all that its anchor holds, so a few hundred bytes of aliases of aliases
can stand for 10^9 values. A text's values are counted before any is made.
"""

from typing import Any

import yaml

MOST_VALUES = 100_000  # of a text, aliases counted as what they stand for


class Loader(yaml.SafeLoader):
    """Refuses a repeated key, of which YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping's keys and values, as YAML's own loader; an error if one repeats."""
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} stands twice", node.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _WithFunctions(Loader):
    """Reads lm-eval's `!function` tags as their text."""


_WithFunctions.add_constructor(
    "!function", lambda loader, node: loader.construct_scalar(node)  # type: ignore[arg-type]
)  # fmt: skip


def read_yaml(text: str, *, functions: bool = False) -> Any:
    """Return the value of a YAML text; `functions` reads lm-eval's `!function NAME` as the text NAME.

    Raise ValueError, in one line, if it is not YAML, names a key twice, holds a date that does not
    exist, is nested too deeply, or stands for more than MOST_VALUES values.
    """
    loader = None
    try:
        loader = (_WithFunctions if functions else Loader)(text)  # which looks at all characters
        node: Any = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > MOST_VALUES:
            raise ValueError(f"with its aliases it stands for more than {MOST_VALUES:,} values")
        return loader.construct_document(node)
    except RecursionError as error:
        raise ValueError("nested deeper than any recipe or task is") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    finally:
        if loader is not None:
            loader.dispose()


def _values(node: Any, known: dict[int, int]) -> int:
    """Return how many values a node stands for; `known` is id -> number of each node seen before."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES  # until it is known: an alias within what it names has no end
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = (
            part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))
        )
        known[id(node)] = min(1 + sum(_values(part, known) for part in flat), MOST_VALUES + 1)
    return known[id(node)]
