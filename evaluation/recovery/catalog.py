"""The tasks that ship, one YAML file each in `tasks/`: what can be asked without loading lm-eval.

A task NAME_thinking is NAME with the thinking channel on. The number of questions is noted in each file
so that a plan can be judged before any data set is loaded.
"""

import importlib.resources
from pathlib import Path
from typing import Any

import yaml

TASKS = Path(str(importlib.resources.files("recovery").joinpath("tasks")))
THINKING = "_thinking"


def known_tasks() -> list[str]:
    """Return the names of the tasks that ship."""
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def is_private(task: str) -> bool:
    """Return whether a task's questions and answers must not be written anywhere."""
    return bool(_metadata(task).get("private"))


def questions(task: str) -> int | None:
    """Return how many questions the published data set of a task has, None where it is not noted."""
    return _metadata(task).get("questions")


def _metadata(task: str) -> dict[str, Any]:
    text = (TASKS / f"{task.removesuffix(THINKING)}.yaml").read_text("utf-8")
    return yaml.load(text, _Loader)["metadata"]


class _Loader(yaml.SafeLoader):
    """Reads lm-eval's `!function` tags as their text."""


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]
