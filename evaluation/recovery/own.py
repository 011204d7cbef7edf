"""Tasks that a recipe defines itself, by a local file of questions or an lm-eval task file.

Both become a `Definition`, the fields of an lm-eval task, and are checked before a model is loaded.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from quantize.recovery.catalog import files_of, read_task, shipped, token_limit

Definition = Mapping[str, Any]
FORGIVEN = [",", r"\$", r"\.$"]  # like case, ignored when answer and target are compared


@cache
def templates() -> Any:
    """Return what renders the templates of recipes and task files, as lm-eval does, but in a sandbox.

    A template reaches its question's fields and no Python: jinja2's SecurityError stops it.
    """
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment: Any = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["regex_replace"] = _regex_replace
    return environment


def _regex_replace(string: str, pattern: str, repl: str, count: int = 0) -> str:
    return re.sub(pattern, repl, string, count=count)


def from_questions(
    file: Path, *, prompt: str, target: str, extract: str, max_tokens: int, thinking: bool,
    private: bool = False,
) -> Definition:  # fmt: skip
    """Return the task of a jsonl file; each line is one question, as a JSON object.

    `prompt` and `target` are Jinja templates over a question's fields: the user's message and the
    right answer. `extract` is a regular expression; the last match of its group that is not empty is
    the model's answer.

    Raises:
        ValueError: the file cannot be read, a line is no JSON object, two lines are equal; `prompt` or
            `target` is no Jinja template, names a field that the first line lacks, or fails on a line;
            `extract` is not a regular expression with one group.
    """
    try:
        stamp = file.stat().st_mtime_ns, file.stat().st_size
    except OSError as error:
        raise ValueError(f"{file}: not a jsonl file of questions ({error})") from error
    count = _count(file, stamp, (prompt, target))
    if _compiled(extract).groups != 1:
        raise ValueError(f"extract {extract!r} must have one group, the answer")
    reading = {"function": "stated_answer", "form": "match", "regex_pattern": extract}
    return {
        "dataset_path": "json",
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": prompt,
        "doc_to_target": target,
        "generation_kwargs": {"until": [], "max_gen_toks": max_tokens, "thinking": thinking},
        "filter_list": [{"name": "answer", "filter": [reading, {"function": "take_first"}]}],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "regexes_to_ignore": FORGIVEN,
            }
        ],
        "metadata": {"version": 1.0, "questions": count, "private": private},
    }


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error


@lru_cache(16)
def _count(file: Path, stamp: tuple[int, int], texts: tuple[str, ...]) -> int:
    """Return the number of questions in a file of a `stamp`, once `texts` were rendered for each."""
    try:
        lines = [line for line in file.read_text("utf-8").split("\n") if line.strip()]
        rows = [json.loads(line, object_pairs_hook=_once) for line in lines]
        first = rows[0]
    except (OSError, ValueError, IndexError, RecursionError) as error:
        raise ValueError(f"{file}: not a jsonl file of questions ({error})") from error
    if again := [line for line, count in Counter(lines).items() if count > 1]:
        raise ValueError(
            f"{file}: {again[0][:60]!r} stands there more than once ({len(again)} such lines); it has "
            f"one answer and would count as several, so remove what is repeated"
        )
    if odd := [number for number, row in enumerate(rows, 1) if not isinstance(row, dict)]:
        raise ValueError(f"{file}: question {odd[0]} is not a JSON object")
    for text in texts:
        if unknown := _fields(text) - first.keys():
            raise ValueError(
                f"{file}: its first line has no field {min(unknown)!r}, which {text!r} names; there "
                f"are: {', '.join(first)}"
            )
        template, absent = templates().from_string(text), dict.fromkeys(first)
        for number, row in enumerate(rows, 1):
            try:  # `datasets` reads a field that a line lacks as None
                template.render(**absent | row)
            except Exception as error:  # whatever the operations of a template raise
                raise ValueError(f"{file}: {text!r} fails on question {number}: {error}") from error
    return len(lines)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"a field stands there twice, of {', '.join(fields)}")
    return fields


def _fields(template: str) -> set[str]:
    from jinja2 import TemplateError, meta

    try:
        return meta.find_undeclared_variables(templates().parse(template))
    except TemplateError as error:
        raise ValueError(f"{template!r} is not a Jinja template: {error}") from error


def from_lm_eval(file: Path, *, private: bool = False) -> Definition:
    """Return the task of an lm-eval YAML file, of type generate_until and scored by exact_match.

    The task is private if `private` is true or the file's `metadata` says so.

    Raises:
        ValueError: the file cannot be read, block diffusion cannot answer the task, or the task is
            private and `finding` refuses its filter.
    """
    fields = read_task(file)
    if (kind := fields.get("output_type")) != "generate_until":
        raise ValueError(
            f"{file}: output_type is {kind!r}, not 'generate_until': block diffusion writes answers "
            f"and has no likelihoods"
        )
    metrics = [metric.get("metric") for metric in fields.get("metric_list") or []]
    if "exact_match" not in metrics:
        raise ValueError(f"{file}: metric_list lacks exact_match, which is what is compared")
    kept = ("generation_kwargs", "dataset_path", "filter_list")
    said = {key: fields[key] for key in kept if key in fields}
    metadata = dict(fields.get("metadata") or {})
    metadata["private"] = private or bool(metadata.get("private"))
    definition = {"include": str(file), "metadata": metadata, **said}
    try:
        token_limit(fields)
        if metadata["private"]:
            finding(definition)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return definition


def at_limit(task: str, max_tokens: int) -> Definition:
    """Return a task that ships, with another limit of tokens; its metadata's `of` names that task."""
    fields = shipped(task)
    return {
        "include": [str(file) for file in files_of(task)],
        "generation_kwargs": {**fields["generation_kwargs"], "max_gen_toks": max_tokens},
        "metadata": {**fields["metadata"], "of": task},
    }


def finding(definition: Definition) -> Callable[[str], str]:
    """Return a function that reduces an answer to the match of a private task's regular expression.

    Scoring sees only this match. The returned function raises ValueError if the expression finds
    something else in the match than in the whole answer. It returns "" if nothing matches.

    Raises:
        ValueError: the task has no single filter that begins with a regular expression.
    """
    filters = definition.get("filter_list") or []
    first: dict[str, Any] = filters[0]["filter"][0] if len(filters) == 1 else {}
    which = {"regex": first.get("group_select", 0), "stated_answer": -1}.get(
        first.get("function", "")
    )
    if "regex_pattern" not in first or which not in (0, -1):
        raise ValueError(
            "a private task needs one filter that begins with `regex`, its first or last match: of an "
            "answer only that is kept"
        )
    pattern, passes_empty = _compiled(first["regex_pattern"]), first["function"] == "stated_answer"

    def found(text: str) -> str:
        matches = [m for m in pattern.finditer(text) if not passes_empty or (m[1] or "").strip()]
        if not matches:
            return ""
        kept = matches[which]
        alone = list(pattern.finditer(kept[0]))
        if len(alone) != 1 or alone[0].groups("") != kept.groups(""):
            raise ValueError(
                f"{first['regex_pattern']!r} finds an answer only with the text around it, of which "
                f"nothing is kept for a private task; let it match what it needs"
            )
        return kept[0]

    return found
