"""Reads the tasks that ship, one YAML file each in `tasks/`, without importing lm-eval.

The task NAME_thinking is NAME with the thinking channel on. `metadata.lm_eval` may name the file of
an lm-eval task, which supplies the fields that our file leaves out. Each of our files states how
many questions its task has, so that a run can be planned before any data set is loaded.
"""

import importlib.resources
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quantize.recovery.strict_yaml import read_yaml

TASKS = Path(str(importlib.resources.files("quantize.recovery").joinpath("tasks")))
THINKING = "_thinking"
MOST_INCLUDED = 10  # files of a chain of `include`s
# The folder of lm-eval's own tasks, found without importing lm-eval.
LM_EVAL = Path(next(iter(importlib.util.find_spec("lm_eval").submodule_search_locations))) / "tasks"  # type: ignore


def known_tasks() -> list[str]:
    """Return the names of the tasks that ship with this package, sorted."""
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def notes(task: str, definition: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the `metadata` of a task by its `definition`, or of one that ships; {} if unknown.

    Keys: `private`; `questions`, the size of the data set; `prompt_tokens`, the length of the
    longest prompt, if prompts are long; `margin_pp`, the loss allowed by default, in points.
    """
    if definition is None and task not in known_tasks():
        return {}
    return (shipped(task) if definition is None else definition)["metadata"]


def is_private(task: str, definition: Mapping[str, Any] | None = None) -> bool:
    """Return whether a task is private: no text of its questions and answers may be kept."""
    return bool(notes(task, definition).get("private"))


def token_limit(fields: Mapping[str, Any]) -> int:
    """Return the token limit of an answer in a task's `fields`; ValueError: they state none."""
    limit = (fields.get("generation_kwargs") or {}).get("max_gen_toks")
    if limit is None:
        raise ValueError("generation_kwargs lacks max_gen_toks, the tokens of an answer")
    return int(limit)


@cache
def shipped(task: str) -> Mapping[str, Any]:
    """Return a shipped task's fields, merged over those of the lm-eval task that it may extend."""
    fields: dict[str, Any] = {}
    for file in files_of(task):
        fields |= read_task(file)
    return fields


def files_of(task: str) -> list[Path]:
    """Return a shipped task's files: the lm-eval file that it extends, if any, then its own."""
    file = TASKS / f"{task}.yaml"
    base = read_task(file)["metadata"].get("lm_eval")
    return [LM_EVAL / base, file] if base else [file]


def read_task(file: Path, included: int = 0) -> dict[str, Any]:
    """Return a task file's keys, merged over those of its `include`; ValueError: unreadable.

    `included` says how many files led to this one.
    """
    try:
        fields = read_yaml(file.read_text("utf-8"), functions=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not readable as an lm-eval task ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file}: not an lm-eval task: a mapping was expected")
    base = fields.get("include")
    if not isinstance(base, str):
        return fields
    if included >= MOST_INCLUDED:
        raise ValueError(f"{file}: more than {MOST_INCLUDED} files include one another")
    return read_task(file.parent / base, included + 1) | fields
