"""Scores BF16 and quantized alike (harness, prompts, seeds, sampler) until a verdict is certain.

Tasks come one after the other, the cheapest first. Each is asked in at most five parts, and after each
part both sides are compared (`recovery.sequential`): a task that passes is asked no further, a run that
fails ends. What was planned is a condition of every score, noted before the first answer. Sides that
are not judged (`sides`) are asked as much as the judged ones were.

A part is done on a side when the side's rows have its answers and its conditions file names the model
and settings of this run. Finished samples are kept beside the rows until all that was planned is there.
BF16 scores do not depend on the recipe, so runs share their samples in `.bf16/` beside the runs, under
a hash of everything they depend on. A model is loaded when it is first asked, and released when the
other one's turn comes; the one that is there goes first.

Under `torchrun --nproc-per-node N` the processes share each part's batches, one GPU each where there
are GPUs (recovery.samples.Share); every batch is what one process would have made of it, so the scores
are the same. The first process writes what they have found, and decides for all.
"""

import hashlib
import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recovery.gate import judge, out_of_reach
from recovery.own import Definition
from recovery.samples import Finished, SampleStore, Share
from recovery.scoring import Scoring, local_data, score, size
from recovery.sequential import Part, Plan, still_open
from recovery.served import ServerError
from recovery.statistics import Comparison

from quantize.bundled import HELDOUT
from quantize.errors import InputError, ResourceError
from quantize.host.files import read_json, write_json
from quantize.host.locks import locked
from quantize.host.processes import Processes, joined
from quantize.host.progress import metered, say
from quantize.recipe.sections import LEAST, Evaluation, Gate
from quantize.reports.scores import pair, read_scoring, write_scoring
from quantize.runs.folder import RunDir
from quantize.stages.evaluate.compared_models import (
    BF16,
    Asked,
    Backend,
    Side,
    open_sides,
    warn_of_servers,
)
from quantize.stages.evaluate.local_model import Answerer
from quantize.stages.evaluate.recording import leave_questions, record_differing

BUNDLED_TASKS = ("word_problems", "word_problems_thinking")
QUESTION_TOKENS = 1024  # room for a prompt; a longer one gets room when it comes


@dataclass(frozen=True)
class Task:
    """One task: its local data, how much of it is planned, and the longest answer in tokens.

    `own` defines a task of the recipe's own, and `digest` is a hash over that definition.
    """

    name: str
    data: Path | None
    plan: Plan
    token_limit: int
    own: Definition | None = None
    digest: str | None = None

    @property
    def samples(self) -> int:
        """Number of answers planned on one side."""
        return self.plan.questions * self.plan.repeats

    @property
    def cost(self) -> int:
        """Most tokens that all planned answers take on one side."""
        return self.samples * self.token_limit


def evaluate(
    run: RunDir,
    source: Path,
    digest: str,
    settings: Evaluation,
    *,
    gate: Gate | None = None,
    asked: Asked | None = None,
    data_dir: Path | None = None,
    go_on: bool = False,
) -> dict[str, Any]:
    """Score the recipe's tasks on every side; write evaluation/<side>/<task>.jsonl.

    Args:
        run: folder with the quantized checkpoint, to which the scores go.
        source: folder of the BF16 checkpoint.
        digest: its fingerprint.
        settings: tasks, limits, repeats, seed.
        gate: margins that will judge the scores; without a gate everything is asked at once.
        asked: the sides that are asked for, and where they run.
        data_dir: folder with <task>.jsonl or .csv files in place of data sets on the Hub.
        go_on: whether to ask everything that is planned, although the verdict is certain.

    Returns:
        Side -> samples, tokens and seconds of this process, loading excluded.

    Raises:
        InputError: a task's own file cannot be read, only one server is given, or the GGUF file is of
            another checkpoint.
        ResourceError: a data set or a server cannot be reached.
    """
    asked = asked or Asked()
    asked.check()
    tasks = open_tasks(settings, gate, data_dir)
    longest = max(task.token_limit for task in tasks)
    config = read_json(run.checkpoint / "config.json", "canvas_length", "text_config")
    canvas = int(config["canvas_length"])
    with joined() as processes:
        try:
            context = QUESTION_TOKENS + -(-longest // canvas) * canvas
            context = min(context, int(config["text_config"]["max_position_embeddings"]))
            sides = open_sides(source, digest, run.checkpoint, settings, asked, context)
            warn_of_servers(sides, longest, canvas)
            rates = Rates()
            answers = Answers(run, processes, rates)
            _announce(tasks, sides, gate)
            done = _until_decided(answers, sides, tasks, gate, go_on=go_on)
            _as_much(answers, sides[2:], done)
        except ServerError as error:
            raise ResourceError(str(error)) from error
        if processes.rank == 0:
            _leave_for_the_report(answers, run, sides, [task for task, _ in done.values()])
            _finish(run, tasks, done)
        answers.release()
    return rates.by_side


def open_tasks(settings: Evaluation, gate: Gate | None, data_dir: Path | None) -> list[Task]:
    """Load every data set before any model; return the tasks, the cheapest first.

    Raises:
        InputError: a task's own file cannot be read, or a task has one question alone.
        ResourceError: a data set cannot be read.
    """
    estimand = None if gate is None else gate.estimand
    found: list[Task] = []
    for name in settings.tasks:
        own = settings.own_tasks.get(name)
        file, definition = data_file(name, data_dir, settings), own and own.definition()
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
        plan = Plan(estimand, questions, settings.repeats.get(name, 1), settings.seed)
        found.append(Task(name, file, plan, token_limit, definition, own and own.digest()))
    return sorted(found, key=lambda task: task.cost)


def data_file(task: str, data_dir: Path | None, settings: Evaluation) -> Path | None:
    """Return the local file of a task, or None when its data set comes from the Hub.

    Raises:
        ResourceError: `data_dir` has no such file.
    """
    own = settings.own_tasks.get(task)
    if own is not None and own.data is not None:
        return Path(own.data)
    if data_dir is None:
        return HELDOUT if task in BUNDLED_TASKS else None
    found = local_data(task, data_dir)
    if found is None and own is None:
        raise ResourceError(f"{data_dir}: no .jsonl or .csv of task {task!r}; put it there")
    return found


def _announce(tasks: Sequence[Task], sides: Sequence[Side], gate: Gate | None) -> None:
    """Print the most samples and tokens to do, and the tasks that cannot PASS."""
    for task in tasks:
        shares = ", ".join(f"{look.fraction:.0%}" for look in task.plan.looks)
        say(
            f"{task.name}: {task.samples} samples a side of at most {task.token_limit} tokens; judged "
            f"after {shares} of them, until the verdict is certain"
        )
        sentence = gate and out_of_reach(
            task.name,
            gate.estimand,
            questions=task.plan.questions,
            repeats=task.plan.repeats,
            margin_pp=gate.margin_pp[task.name],
            confidence=gate.confidence,
        )
        if sentence:
            say(sentence)
    tokens = len(sides) * sum(task.cost for task in tasks)
    say(
        f"at most {tokens:,} tokens over {len(sides)} sides, were no answer to end before its limit"
    )


def _until_decided(
    answers: "Answers",
    sides: Sequence[Side],
    tasks: Sequence[Task],
    gate: Gate | None,
    *,
    go_on: bool,
) -> dict[str, tuple[Task, int]]:
    """Ask the base and the gated side, look by look; return the number of looks taken by task.

    Looks that an earlier run of this command took count as taken: their answers are there.
    """
    if go_on or gate is None:  # no look decides, so each model is loaded once
        for side in answers.there_first(sides[:2]):
            for task in tasks:
                answers.ask(side, task, len(task.plan.looks))
    taken = {task.name: answers.taken(sides, task) for task in tasks}
    if gate is not None:
        seen = {task.name: answers.compared(sides, task, gate) for task in tasks}
        for task in tasks:
            while answers.of_first(
                taken[task.name] < len(task.plan.looks) and task.name in still_open(seen)
            ):
                for side in answers.there_first(sides[:2]):
                    answers.ask(side, task, taken[task.name] + 1)
                taken[task.name] = answers.taken(sides, task)
                seen[task.name] = answers.compared(sides, task, gate)
        answers.tell(tasks, taken, seen)
    return {task.name: (task, taken[task.name]) for task in tasks if taken[task.name]}


def _as_much(
    answers: "Answers", sides: Sequence[Side], done: Mapping[str, tuple[Task, int]]
) -> None:
    """Ask sides that are not judged the questions that the judged ones were asked."""
    for side in answers.there_first(sides):
        for task, looks in done.values():
            answers.ask(side, task, looks)


def _leave_for_the_report(
    answers: "Answers", run: RunDir, sides: Sequence[Side], tasks: Sequence[Task]
) -> None:
    """Write the questions of every task, and record canvases of those that differ."""
    requests = {task.name: leave_questions(run, task.name, task.data, task.own) for task in tasks}
    compared = [side for side in sides[:2] if isinstance(side.backend, Answerer)]
    if len(compared) < 2:
        return
    for side in answers.there_first(compared):
        assert isinstance(side.backend, Answerer)
        for task, own in requests.items():
            if own:
                record_differing(run, task, own, {side.name: side.backend})
        side.backend.release()


def _finish(run: RunDir, tasks: Sequence[Task], done: Mapping[str, tuple[Task, int]]) -> None:
    """Write what was asked, for the report, and for later runs, which see what is left."""
    looks = {name: {"taken": n, "of": len(task.plan.looks)} for name, (task, n) in done.items()}
    write_json(
        run.evaluation / "done.json",
        {
            "tasks": list(done),
            "not_asked": [task.name for task in tasks if task.name not in done],
            "looks": looks,
        },
    )


class Answers:
    """The scores so far, by side and task; it asks a model for more.

    Args:
        run: folder that scores go to.
        processes: processes that share the work.
        rates: counter of samples, tokens and seconds.
    """

    def __init__(self, run: RunDir, processes: Processes, rates: "Rates") -> None:
        self._run, self._processes, self._rates = run, processes, rates
        self._there: Backend | None = None

    def of_first(self, found: bool) -> bool:
        """Return the first process' `found`, since it alone has the scores."""
        return self._processes.of_first(found)

    def there_first(self, sides: Sequence[Side]) -> list[Side]:
        """Return sides, those whose model is loaded before the others."""
        return sorted(sides, key=lambda side: side.backend is not self._there)

    def release(self) -> None:
        """Free the memory of the model that was asked last."""
        if self._there is not None:
            self._there.release()
        self._there = None

    def scored(self, side: Side, task: Task) -> Scoring | None:
        """Return the scores of a task on a side under this run's conditions."""
        try:
            found = read_scoring(self._run.evaluation / side.name, task.name)
        except InputError:  # nothing is there, or it was changed
            return None
        return found if found.made_with == made_with(side, task) else None

    def taken(self, sides: Sequence[Side], task: Task) -> int:
        """Return the number of looks whose answers the base and the gated side both have."""
        base, gated = (self.scored(side, task) for side in sides[:2])
        looks = task.plan.taken(base.answered, gated.answered) if base and gated else []
        return self._processes.of_first(len(looks))

    def compared(self, sides: Sequence[Side], task: Task, gate: Gate) -> Comparison | None:
        """Compare the base and the gated side; None in all processes but the first."""
        base, gated = (self.scored(side, task) for side in sides[:2])
        if self._processes.rank or base is None or gated is None:
            return None
        _, comparison = pair(
            base,
            gated,
            estimand=gate.estimand,
            margin_pp=gate.margin_pp[task.name],
            confidence=gate.confidence,
            max_step_inflation=gate.max_step_inflation,
        )
        return comparison

    def ask(self, side: Side, task: Task, looks: int) -> None:
        """Answer and score all that the first `looks` looks at a task cover, on one side.

        What is done already is not asked again. A first question takes all parts at once, where
        samples do not depend on their batch: so fewer slots wait for the last of a part.
        """
        scored = None if self._processes.rank else self.scored(side, task)
        alone = side.backend.batch_size == 1
        if alone and self.of_first(scored is None):
            self._extend(side, task, task.plan.first(looks))
            return
        for part in task.plan.parts[:looks]:
            self._extend(side, task, part)

    def _extend(self, side: Side, task: Task, part: Part) -> None:
        """Answer and score one part of a task on a side, unless that is done."""
        scored = None if self._processes.rank else self.scored(side, task)
        if self.of_first(scored is not None and part.answers <= scored.answered):
            return
        if self._there is not side.backend:
            self.release()
        self._there = side.backend
        with self._store(side, task) as store:
            more = score(
                task.name,
                store,
                side.backend,
                part,
                data_file=task.data,
                definition=task.own,
                seed=side.seed,
                batch_size=side.backend.batch_size,
                sampler=side.backend.sampler_settings,
                progress=lambda finished, total: self._rates.counted(finished, total, side, task),
            )
            if more is None:
                return
            whole = more if scored is None else scored.and_more(more)
            write_scoring(self._run.evaluation / side.name, whole)
            if side.name != BF16 and len(whole.rows) == task.samples:
                store.remove()

    def tell(
        self,
        tasks: Sequence[Task],
        taken: Mapping[str, int],
        seen: Mapping[str, Comparison | None],
    ) -> None:
        """Print how the evaluation ended, and the time that an early end saved."""
        if self._processes.rank:
            return
        planned = 2 * sum(task.samples for task in tasks)
        asked = 2 * sum(
            look.questions * look.repeats
            for task in tasks
            for look in task.plan.looks[: taken[task.name]][-1:]
        )
        saved = self._rates.hours(planned - asked)
        say(
            f"{judge(seen).outcome} after {asked} of {planned} samples"
            + (f": about {saved:.1f} hours saved at the rate of this run" if saved else "")
        )

    @contextmanager
    def _store(self, side: Side, task: Task) -> Generator[SampleStore]:
        """Hold the store of a task's finished samples: in the run, or shared for a local BF16."""
        made = made_with(side, task)
        key = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:12]
        path = self._run.evaluation / side.name / f"{task.name}-{key}.partial.jsonl"
        if side.name == BF16 and isinstance(side.backend, Answerer):
            path = self._run.path.parent / ".bf16" / f"{task.name}-{key}.jsonl"
        share = Share(self._processes.rank, self._processes.count, self._processes.wait)
        with locked(path.with_name(f".{path.stem}.lock"), str(path)):
            try:
                yield SampleStore(path, made, share)
            except ValueError as error:
                raise InputError(str(error)) from error


def made_with(side: Side, task: Task) -> dict[str, Any]:
    """Return everything that a side's samples of a task depend on besides their requests."""
    found = side.backend.made_with | {
        "task": task.name,
        "data": hashlib.sha256(task.data.read_bytes()).hexdigest()[:16] if task.data else None,
        "planned": asdict(task.plan),
        "seed": side.seed,
    }
    if task.digest is not None:
        found["definition"] = task.digest
    return json.loads(json.dumps(found))  # equal to what is read back


class Rates:
    """Counts samples, tokens and seconds by side, and shows them while they come."""

    def __init__(self) -> None:
        self.by_side: dict[str, Any] = {}

    def hours(self, samples: int) -> float:
        """Return the hours that so many samples would take, 0 before the first one."""
        counted = sum(each["samples"] for each in self.by_side.values())
        seconds = sum(each["seconds"] for each in self.by_side.values())
        return samples * seconds / counted / 3600 if counted else 0.0

    def counted(
        self, finished: Iterator[Finished], samples: int, side: Side, task: Task
    ) -> Iterator[Finished]:
        """Pass on finished batches, and show how many samples and tokens are done."""
        facts = self.by_side.setdefault(side.name, {"samples": 0, "tokens": 0, "seconds": 0.0})
        began, before = time.monotonic() - side.backend.loading_seconds, facts["seconds"]
        with metered(f"{task.name}, {side.name}", samples, "samples") as meter:
            if isinstance(side.backend, Answerer):
                side.backend.announce = meter.announce
            for batch, completions in finished:
                tokens = sum(completion.tokens for completion in completions)
                meter.add(len(batch), tokens)
                facts["samples"] += len(batch)
                facts["tokens"] += tokens
                seconds = time.monotonic() - began - side.backend.loading_seconds
                facts["seconds"] = round(before + seconds, 3)
                yield batch, completions
