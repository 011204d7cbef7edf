"""The tasks of an evaluation: their data, their planned size, what their samples depend on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantize.bundled import HELDOUT
from quantize.errors import InputError, ResourceError
from quantize.recipe.sections import LEAST, Evaluation, Gate
from quantize.recovery.catalog import is_private, notes, shipped
from quantize.recovery.extraction import VERSION
from quantize.recovery.own import Definition
from quantize.recovery.scoring import local_data, size
from quantize.recovery.sequential import Plan
from quantize.runs.digests import sha256_of

BUNDLED_TASKS = ("word_problems", "word_problems_thinking")


@dataclass(frozen=True, eq=False)
class Task:
    """One task of an evaluation, as planned before any model is loaded."""

    name: str
    data: Path | None  # its local data file, None if it has none
    plan: Plan  # how many questions and answers are planned
    token_limit: int  # the most tokens of an answer
    definition: Definition | None = None  # of a recipe's own task; None for a shipped task
    digest: str | None = None  # a hash over `own`
    prompt_tokens: int = 0  # tokens of the longest prompt, if prompts are long
    family: str = ""  # equal for tasks that differ only in their limit of tokens
    shorter: tuple["Task", ...] = ()  # tasks of its family with lower limits

    @property
    def samples(self) -> int:
        """Number of answers that are planned from each model."""
        return self.plan.questions * self.plan.repeats

    @property
    def cost(self) -> int:
        """The most tokens that all planned answers of one model may take."""
        return self.samples * self.token_limit


def open_tasks(settings: Evaluation, gate: Gate, data_dir: Path | None) -> list[Task]:
    """Load every task's data set, but no model; return the tasks, the cheapest first.

    Of a family the task with the highest limit comes first: its answers hold those to the others.

    Raises:
        InputError: a task's own file cannot be read, or a task has only one question.
        ResourceError: a data set cannot be read.
    """
    tasks: list[Task] = []
    for name in settings.tasks:
        own_task = settings.own_tasks.get(name)
        file = data_file(name, data_dir, settings)
        definition = own_task.definition() if own_task else None
        try:
            documents, token_limit = size(name, file, definition)
        except ValueError as error:
            raise ResourceError(str(error)) from error
        questions = min(documents, settings.limit.get(name, documents))
        if questions < LEAST:
            raise InputError(
                f"task {name}: {questions} question to score, in {file or 'its data set'}; {LEAST} are "
                f"the least that two models can be compared on"
            )
        plan = Plan(gate.estimand, questions, settings.repeats.get(name, 1), settings.seed)
        digest, family = own_task.digest() if own_task else None, settings.family(name)
        room = notes(family).get("prompt_tokens", 0)
        tasks.append(Task(name, file, plan, token_limit, definition, digest, room, family))
    return _by_cost(tasks)


def _by_cost(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks, families of the least cost first, each with its `shorter` ones."""

    def shorter(task: Task) -> tuple[Task, ...]:
        of_family = (other for other in tasks if other.family == task.family)
        return tuple(other for other in of_family if other.token_limit < task.token_limit)

    def order(task: Task) -> tuple[int, str, int]:
        costs = [other.cost for other in tasks if other.family == task.family]
        return (
            (costs[0], "", 0) if len(costs) == 1 else (max(costs), task.family, -task.token_limit)
        )

    return [replace(task, shorter=shorter(task)) for task in sorted(tasks, key=order)]


def data_file(task: str, data_dir: Path | None, settings: Evaluation) -> Path | None:
    """Return a task's local data file, None if the data is on the Hub or generated.

    Raises:
        ResourceError: `data_dir` lacks the file of a shipped task.
    """
    own_task = settings.own_tasks.get(task)
    if own_task is not None and own_task.of is not None:
        return data_file(own_task.of, data_dir, settings)
    if own_task is not None and own_task.data is not None:
        return Path(own_task.data)
    if own_task is None and "custom_dataset" in shipped(task):
        return None  # its data is generated
    if data_dir is None:
        return HELDOUT if task in BUNDLED_TASKS else None
    local = local_data(task, data_dir)
    if local is None and own_task is None:
        raise ResourceError(f"{data_dir}: no .jsonl or .csv of task {task!r}; put it there")
    return local


def questions_digest(file: Path) -> str:
    """Return the digest by which scores know a task's local file of questions."""
    return sha256_of(file)[:16]


def conditions(backend: Mapping[str, Any], seed: int, task: Task) -> dict[str, Any]:
    """Return what a task's samples depend on: `backend`'s conditions, the seed, and the task's own."""
    stated = dict(backend) | {
        "task": task.name,
        "data": questions_digest(task.data) if task.data else None,
        "planned": asdict(task.plan),
        "seed": seed,
    }
    if task.digest is not None:
        stated["definition"] = task.digest
    if is_private(task.name, task.definition):  # of its answers only what was extracted is kept
        stated["extraction"] = VERSION
    return json.loads(json.dumps(stated))  # equal to what is read back
