"""Scores baseline and candidate alike (harness, prompts, seeds, sampler) until a verdict is certain.

Tasks come one after the other, the cheapest first. Each is asked in at most five parts, and after each
part the two are compared (`recovery.sequential`): a task that passes is asked no further, a run that
fails ends. What was planned is a condition of every score, noted before the first answer. Models that
are not judged answer the same questions.

A part is done when a model's rows have its answers and its conditions file names the model and the
settings of this run. A finished evaluation stays as it is until what is scored beside it is whole, and
scores that other conditions replace are kept in evaluation-earlier/. Finished samples are kept beside
the rows until all that was planned is there. The baseline's scores do not depend on the recipe, so runs
share its samples in `.bf16/` beside the runs, under a hash of everything they depend on. A model is
loaded when it is first asked, and released when the other one's turn comes; the one that is there goes
first.

Under `torchrun --nproc-per-node N` the processes share each part's batches, one GPU each where there
are GPUs (recovery.samples.Share); every batch is what one process would have made of it, so the scores
are the same. The first process writes what they have found, and decides for all.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from recovery.gate import judge, judge_task, out_of_reach
from recovery.health import least_limit
from recovery.own import Definition
from recovery.pairing import in_common, paired
from recovery.samples import Finished, SampleStore, Share
from recovery.scoring import Scoring, local_data, score, size
from recovery.sequential import Part, Plan, until_decided
from recovery.served import ServerError
from recovery.statistics import Comparison

from quantize.bundled import HELDOUT
from quantize.errors import InputError, ResourceError
from quantize.host.files import TEMPORARY_SUFFIX, read_json, write_json
from quantize.host.processes import Processes, joined
from quantize.host.progress import metered, say
from quantize.host.units import duration
from quantize.recipe.sections import LEAST, Evaluation, Gate
from quantize.reports.scores import read_scoring, write_scoring
from quantize.runs.folder import EARLIER, RunDir
from quantize.runs.models import AT_POINT, BASELINE
from quantize.stages.evaluate.baseline_pack import (
    ImportedBaseline,
    find_pack,
    flat,
    held,
    imports,
    key_of,
    store_path,
)
from quantize.stages.evaluate.compared_models import (
    Backend,
    ComparedModel,
    ModelOptions,
    open_models,
    warn_of_servers,
)
from quantize.stages.evaluate.local_model import Answerer
from quantize.stages.evaluate.recording import leave_questions, record_differing
from quantize.stages.memory_needs import scored_positions

BUNDLED_TASKS = ("word_problems", "word_problems_thinking")
DONE = "done.json"


@dataclass(frozen=True, eq=False)
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
        """Number of answers planned of each model."""
        return self.plan.questions * self.plan.repeats

    @property
    def cost(self) -> int:
        """Most tokens that all planned answers of a model take."""
        return self.samples * self.token_limit


def evaluate(
    run: RunDir,
    source: Path,
    digest: str,
    settings: Evaluation,
    *,
    gate: Gate | None = None,
    options: ModelOptions | None = None,
    data_dir: Path | None = None,
    go_on: bool = False,
) -> dict[str, Any]:
    """Score the recipe's tasks on every model; write evaluation/<model>/<task>.jsonl.

    Args:
        run: folder with the quantized checkpoint, to which the scores go.
        source: folder of the BF16 checkpoint.
        digest: its fingerprint.
        settings: tasks, limits, repeats, seed.
        gate: margins that will judge the scores; without a gate everything is asked at once.
        options: the models that are asked for, and where they run.
        data_dir: folder with <task>.jsonl or .csv files in place of data sets on the Hub.
        go_on: whether to ask everything that is planned, although the verdict is certain.

    Returns:
        Model -> samples, tokens and seconds of this process, loading excluded.

    Raises:
        InputError: a task's own file cannot be read, only one server is given, or the GGUF file is of
            another checkpoint.
        ResourceError: a data set or a server cannot be reached.
    """
    options = options or ModelOptions()
    options.check()
    tasks = open_tasks(settings, gate, data_dir)
    longest = max(task.token_limit for task in tasks)
    config = read_json(run.checkpoint / "config.json", "canvas_length", "text_config")
    canvas = int(config["canvas_length"])
    with joined() as processes:
        try:
            context = scored_positions(config, longest)
            imported = partial(_imported, imports(run.path.parent), digest, settings.seed, tasks)
            models = open_models(
                source, digest, run.checkpoint, settings, options, context, imported
            )
            warn_of_servers(models, longest, canvas)
            rates = Rates()
            answers = Answers(run, processes, rates)
            _announce(tasks, models, gate)
            answers.tell_what_differs(models, tasks)
            points = [model for model in models[2:] if model.name.startswith(AT_POINT)]
            taken = _ask_until_decided(answers, models[:2], tasks, gate, go_on=go_on)
            done = {task: taken[task.name] for task in tasks if task.name in taken}
            answers.ask([model for model in models[2:] if model not in points], done)
            _ask_points(answers, models[0], points, tasks, gate, go_on=go_on)
        except ServerError as error:
            raise ResourceError(str(error)) from error
        if processes.rank == 0:
            _leave_for_the_report(answers, models[:2], list(done))
            _finish(answers.folder, tasks, done)
            answers.finish()
        answers.release()
    return rates.by_model


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


def _imported(
    folder: Path, weights: str, seed: int, tasks: Sequence[Task], candidate: Backend
) -> ImportedBaseline | None:
    """Return the baseline whose answers came in a pack, where one of this model was imported."""
    made = candidate.made_with | {"model": {"weights": weights, "activations": "none"}}
    here = {task.name: conditions(made, seed, task) for task in tasks}
    if (pack := find_pack(folder, weights, here)) is None:
        return None
    say(f"{BASELINE}: {pack} ({pack.path})")
    for task in tasks:
        if (found := len(pack.answers[task.name])) < task.samples:
            say(
                f"warning: {task.name}: it has {found} of {task.samples} answers; evaluate ends where "
                f"the verdict needs more"
            )
    return ImportedBaseline(pack, made, candidate.sampler_settings)


def _announce(tasks: Sequence[Task], models: Sequence[ComparedModel], gate: Gate | None) -> None:
    """Print the most samples and tokens to do, and the tasks that cannot PASS."""
    for task in tasks:
        shares = ", ".join(f"{look.fraction:.0%}" for look in task.plan.looks)
        say(
            f"{task.name}: {task.samples} samples a model of at most {task.token_limit} tokens; judged "
            f"after {shares} of them, until the verdict is certain"
        )
        sentence = gate and out_of_reach(
            task.name,
            gate.estimand,
            questions=task.plan.questions,
            repeats=task.plan.repeats,
            margin_pp=least_limit(gate.health_pp, gate.margin_pp[task.name]),
            confidence=gate.confidence,
        )
        if sentence:
            say(sentence)
    tokens = len(models) * sum(task.cost for task in tasks)
    say(
        f"at most {tokens:,} tokens over {len(models)} models, were no answer to end before its limit"
    )


def _ask_until_decided(
    answers: "Answers",
    judged: Sequence[ComparedModel],
    tasks: Sequence[Task],
    gate: Gate | None,
    *,
    go_on: bool,
) -> dict[str, int]:
    """Ask baseline and candidate, look by look; return the number of looks taken by task."""
    if go_on or gate is None:  # no look decides, so each model is loaded once
        answers.ask(judged, {task: len(task.plan.looks) for task in tasks})
    if gate is None:
        return {task.name: len(task.plan.looks) for task in tasks}
    by_name = {task.name: task for task in tasks}

    def ask(name: str, looks: int) -> tuple[int, Comparison | None]:
        task = by_name[name]
        answers.ask(judged, {task: looks}, f"look {looks} of {len(task.plan.looks)}")
        taken, found = answers.compared(judged, task, gate)
        if looks and found is not None:
            answers.tell_look(tasks, task, taken, found)
        return taken, found

    taken, seen = until_decided({task.name: task.plan for task in tasks}, ask)
    answers.tell(tasks, taken, judge(seen).outcome)
    return {name: looks for name, looks in taken.items() if looks}


def _ask_points(
    answers: "Answers",
    baseline: ComparedModel,
    points: Sequence[ComparedModel],
    tasks: Sequence[Task],
    gate: Gate | None,
    *,
    go_on: bool,
) -> None:
    """Ask baseline and each operating point, look by look, until it is certain what Holm will say."""
    for point in points:
        update = {"max_step_inflation": None, "confidence": 1.0}
        if gate is not None:
            update["confidence"] = 1 - (1 - gate.confidence) / len(points)
        say(f"operating point {point.name.removeprefix(AT_POINT)}")
        stricter = gate and gate.model_copy(update=update)
        _ask_until_decided(answers, [baseline, point], tasks, stricter, go_on=go_on)


def _leave_for_the_report(
    answers: "Answers", judged: Sequence[ComparedModel], tasks: Sequence[Task]
) -> None:
    """Write the questions of every task, and record canvases of those that differ."""
    folder = answers.folder
    requests = {
        task.name: leave_questions(folder, task.name, task.data, task.own) for task in tasks
    }
    if not all(isinstance(model.backend, Answerer) for model in judged):
        return
    for model in answers.there_first(judged):
        assert isinstance(model.backend, Answerer)
        for task, own in requests.items():
            if own:
                record_differing(folder, task, own, {model.name: model.backend})
        model.backend.release()


def _finish(folder: Path, tasks: Sequence[Task], done: Mapping[Task, int]) -> None:
    """Write what was asked, for the report, and for later runs, which see what is left."""
    looks = {task.name: {"taken": n, "of": len(task.plan.looks)} for task, n in done.items()}
    names = [task.name for task in done]
    left = [task.name for task in tasks if task not in done]
    write_json(folder / DONE, {"tasks": names, "not_asked": left, "looks": looks})


class Answers:
    """The scores so far, by model and task; it asks for more.

    Args:
        run: folder that scores go to.
        processes: processes that share the work.
        rates: counter of samples, tokens and seconds.

    Attributes:
        folder: where scores go: beside those of a finished evaluation, until `finish`.
    """

    def __init__(self, run: RunDir, processes: Processes, rates: "Rates") -> None:
        self._run, self._processes, self._rates = run, processes, rates
        self._there: Backend | None = None
        self._whole: list[SampleStore] = []
        self.folder = run.evaluation
        if processes.rank == 0 and (run.evaluation / DONE).exists():
            self.folder = run.path / f"evaluation{TEMPORARY_SUFFIX}"
            shutil.rmtree(self.folder, ignore_errors=True)
            unfinished = shutil.ignore_patterns(f"*{TEMPORARY_SUFFIX}*")
            shutil.copytree(run.evaluation, self.folder, ignore=unfinished)

    def finish(self) -> None:
        """Put the scores where they stand, and remove the samples that they are made of."""
        if self.folder != self._run.evaluation:
            for path in sorted(self.folder.rglob("*"), key=lambda path: path.name == DONE):
                place = self._run.evaluation / path.relative_to(self.folder)
                if path.is_file():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    path.replace(place)
            shutil.rmtree(self.folder)
        for store in self._whole:
            store.remove()

    def tell_what_differs(self, models: Sequence[ComparedModel], tasks: Sequence[Task]) -> None:
        """Say which scores that stand will be made again, and why."""
        for model in models if self._processes.rank == 0 else ():
            for task in tasks:
                standing = self._standing(model, task)
                now = flat(made_with(model, task))
                before = flat(standing.made_with) if standing else now
                differ = (key for key in sorted(now | before) if before.get(key) != now.get(key))
                if key := next(differ, None):
                    say(
                        f"{task.name}, {model.name}: scored with {key} {before.get(key)}, now "
                        f"{now.get(key)}, so it is asked again; what stands stays until the new scores "
                        f"are whole, and then in {self._run.path / EARLIER}"
                    )

    def there_first(self, models: Sequence[ComparedModel]) -> list[ComparedModel]:
        """Return models, those that are loaded before the others."""
        return sorted(models, key=lambda model: model.backend is not self._there)

    def release(self) -> None:
        """Free the memory of the model that was asked last."""
        if self._there is not None:
            self._there.release()
        self._there = None

    def scored(self, model: ComparedModel, task: Task) -> Scoring | None:
        """Return the scores of a task under this run's conditions, in the first process alone."""
        found = None if self._processes.rank else self._standing(model, task)
        return found if found and found.made_with == made_with(model, task) else None

    def _standing(self, model: ComparedModel, task: Task) -> Scoring | None:
        try:
            return read_scoring(self.folder / model.name, task.name)
        except InputError:  # nothing is there, or it was changed
            return None

    def compared(
        self, judged: Sequence[ComparedModel], task: Task, gate: Gate
    ) -> tuple[int, Comparison | None]:
        """Return how many looks baseline and candidate both have, and what these show."""
        ours, theirs = (self.scored(model, task) for model in judged)
        looks, found = 0, None
        if ours and theirs:
            looks = len(in_common(ours, theirs)[2])
            found = paired(
                ours, theirs, estimand=gate.estimand, margin_pp=gate.margin_pp[task.name],
                confidence=gate.confidence, max_step_inflation=gate.max_step_inflation,
                health_pp=gate.health_pp, other_settings=judged[1].name.startswith(AT_POINT),
            )  # fmt: skip
        comparison = found if isinstance(found, Comparison) else None
        return self._processes.of_first((looks, comparison))

    def ask(
        self, models: Sequence[ComparedModel], looks: Mapping[Task, int], title: str = ""
    ) -> None:
        """Let models answer all that the first so many looks at each task cover; `title` names them.

        What is done already is not asked again. A first question takes all parts at once, where
        samples do not depend on their batch: so fewer slots wait for the last of a part.
        """
        for model in self.there_first(models):
            for task, number in looks.items():
                parts = task.plan.parts[:number]
                alone = number and model.backend.batch_size == 1
                if alone and self._processes.of_first(self.scored(model, task) is None):
                    parts = [task.plan.first(number)]
                for part in parts:
                    self._extend(model, task, part, title)

    def _extend(self, model: ComparedModel, task: Task, part: Part, title: str) -> None:
        """Let a model answer one part of a task, and score it, unless that is done."""
        scored = self.scored(model, task)
        if self._processes.of_first(scored is not None and part.answers <= scored.answered):
            return
        if self._there is not model.backend:
            self.release()
        self._there = model.backend
        with self._store(model, task) as store:
            more = score(
                task.name,
                store,
                model.backend,
                part,
                data_file=task.data,
                definition=task.own,
                seed=model.seed,
                batch_size=model.backend.batch_size,
                sampler=model.backend.sampler_settings,
                progress=lambda finished, total: self._rates.counted(
                    finished, total, model, task, title
                ),
            )
            if more is None:
                return
            whole = more if scored is None else scored.and_more(more)
            if scored is None and (before := self._standing(model, task)):
                write_scoring(
                    self._run.path / EARLIER / key_of(before.made_with) / model.name, before
                )
            write_scoring(self.folder / model.name, whole)
            if model.name != BASELINE and len(whole.rows) == task.samples:
                self._whole.append(store)

    def tell_look(self, tasks: Sequence[Task], task: Task, looks: int, found: Comparison) -> None:
        """Print what a look at a task shows, and the time that the rest takes at most."""
        if self._processes.rank:
            return
        outcome = judge_task(task.name, found).outcome.replace("INCONCLUSIVE", "undecided")
        low, high = found.difference_bounds.low, found.difference_bounds.high
        later = tasks[tasks.index(task) + 1 :]
        rest = task.samples - found.questions * found.repeats if outcome == "undecided" else 0
        seconds = 3600 * self._rates.hours(2 * (rest + sum(each.samples for each in later)))
        say(
            f"{task.name}: look {looks} of {len(task.plan.looks)}: {found.questions * found.repeats} "
            f"of {task.samples} a model; {found.difference_pp:+.1f} points [{low:+.1f}, {high:+.1f}], "
            f"margin {found.margin_pp:g}: {outcome}"
            + (f"; at most about {duration(seconds)} left" if seconds else "")
        )

    def tell(
        self,
        tasks: Sequence[Task],
        taken: Mapping[str, int],
        outcome: str,
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
            f"{outcome} after {asked} of {planned} samples"
            + (f": about {saved:.1f} hours saved at the rate of this run" if saved else "")
        )

    @contextmanager
    def _store(self, model: ComparedModel, task: Task) -> Generator[SampleStore]:
        """Hold the store of a task's finished samples: in the run, or shared for a local BF16."""
        made, backend = made_with(model, task), model.backend
        path = self._run.evaluation / model.name / f"{task.name}-{key_of(made)}.partial.jsonl"
        if model.name == BASELINE and isinstance(backend, Answerer):
            path = store_path(self._run, task.name, made)
        share = Share(self._processes.rank, self._processes.count, self._processes.wait)
        with held(path, made, share) as store:
            if isinstance(backend, ImportedBaseline):
                store.done |= backend.pack.answers[task.name]
            yield store


def made_with(model: ComparedModel, task: Task) -> dict[str, Any]:
    """Return everything that a model's samples of a task depend on besides their requests."""
    return conditions(model.backend.made_with, model.seed, task)


def conditions(backend: Mapping[str, Any], seed: int, task: Task) -> dict[str, Any]:
    """Return what samples of a task depend on, given what those of all tasks do."""
    found = dict(backend) | {
        "task": task.name,
        "data": hashlib.sha256(task.data.read_bytes()).hexdigest()[:16] if task.data else None,
        "planned": asdict(task.plan),
        "seed": seed,
    }
    if task.digest is not None:
        found["definition"] = task.digest
    return json.loads(json.dumps(found))  # equal to what is read back


class Rates:
    """Counts samples, tokens and seconds by model, and shows them while they come."""

    def __init__(self) -> None:
        self.by_model: dict[str, Any] = {}

    def hours(self, samples: int) -> float:
        """Return the hours that so many samples would take, 0 before the first one."""
        counted = sum(each["samples"] for each in self.by_model.values())
        seconds = sum(each["seconds"] for each in self.by_model.values())
        return samples * seconds / counted / 3600 if counted else 0.0

    def counted(
        self,
        finished: Iterator[Finished],
        samples: int,
        model: ComparedModel,
        task: Task,
        look: str,
    ) -> Iterator[Finished]:
        """Pass on finished batches, and show how many samples and tokens are done."""
        facts = self.by_model.setdefault(model.name, {"samples": 0, "tokens": 0, "seconds": 0.0})
        began, before = time.monotonic() - model.backend.loading_seconds, facts["seconds"]
        title = ", ".join(filter(None, (task.name, look, model.name)))
        with metered(title, samples, "samples", brief=bool(look)) as meter:
            if isinstance(model.backend, Answerer):
                model.backend.announce = meter.announce
            for batch, completions in finished:
                tokens = sum(completion.tokens for completion in completions)
                meter.add(len(batch), tokens)
                facts["samples"] += len(batch)
                facts["tokens"] += tokens
                seconds = time.monotonic() - began - model.backend.loading_seconds
                facts["seconds"] = round(before + seconds, 3)
                yield batch, completions
