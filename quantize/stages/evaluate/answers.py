"""Asks models for answers to an evaluation's tasks; scores, stores and counts the answers."""

import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import islice, product
from typing import Any

from quantize.errors import InputError
from quantize.host.files import TEMPORARY_SUFFIX, write_json
from quantize.host.processes import Processes
from quantize.host.progress import metered, say
from quantize.host.units import duration
from quantize.recipe.sections import Gate
from quantize.recovery.extraction import VERSION
from quantize.recovery.gate import decides, judge_task
from quantize.recovery.limits import limits_on
from quantize.recovery.pairing import in_common, paired
from quantize.recovery.rows import Scoring
from quantize.recovery.samples import Finished, Generate, SampleStore, Share, Waiting
from quantize.recovery.scoring import keeping, score
from quantize.recovery.sequential import Part
from quantize.recovery.terms import Comparison
from quantize.reports.scores import read_scoring, write_scoring
from quantize.reports.table import interval_text
from quantize.runs.folder import EARLIER, RunDir
from quantize.runs.models import BASELINE
from quantize.stages.evaluate.baseline_pack import (
    ImportedBaseline,
    differing,
    held,
    key_of,
    store_path,
)
from quantize.stages.evaluate.compared_models import Backend, ComparedModel
from quantize.stages.evaluate.local_model import Answerer
from quantize.stages.evaluate.tasks import Task, conditions

DONE = "done.json"


class Answers:
    """Holds the scores so far, by model and task, and asks models for more answers.

    Scores are written to `folder`: the run's evaluation/ or, once it has done.json, a copy of it.
    """

    def __init__(self, run: RunDir, processes: Processes, rates: "AnswerRates") -> None:
        self._run, self._processes, self._rates = run, processes, rates
        self._loaded: Backend | None = None
        self._whole: list[SampleStore] = []
        self._over: dict[str, int] = {}  # task that the budget ended -> the budget
        self.folder = run.evaluation
        if processes.rank == 0 and (run.evaluation / DONE).exists():
            self.folder = run.path / f"evaluation{TEMPORARY_SUFFIX}"
            shutil.rmtree(self.folder, ignore_errors=True)
            unfinished = shutil.ignore_patterns(f"*{TEMPORARY_SUFFIX}*")
            shutil.copytree(run.evaluation, self.folder, ignore=unfinished)

    def finish(self, tasks: Sequence[Task], done: Mapping[Task, int]) -> None:
        """Write done.json from `done` (task -> interim looks taken); move scores to evaluation/.

        Sample files are removed once they are complete, except BF16's.
        """
        looks = {task.name: {"taken": n, "of": len(task.plan.looks)} for task, n in done.items()}
        for task in looks.keys() & self._over.keys():
            looks[task]["budget"] = self._over[task]
        not_asked = [task.name for task in tasks if task not in done]
        content = {"tasks": list(looks), "not_asked": not_asked, "looks": looks}
        write_json(self.folder / DONE, content)
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
        """Print which existing scores will be replaced, and which condition has changed."""
        for model, task in product(models, tasks):
            made, stored = made_with(model, task), self._stored_scoring(model, task)
            then = stored.made_with if stored else made
            for key, before, now in islice(differing(then, made), 1):
                say(
                    f"{task.name}, {model.name}: scored with {key} {before}, now {now}, so it is asked "
                    f"again; what stands stays until the new scores are whole, and then in "
                    f"{self._run.path / EARLIER}"
                )

    def loaded_first(self, models: Sequence[ComparedModel]) -> list[ComparedModel]:
        """Return `models` with the one that is in memory, if any, moved to the front."""
        return sorted(models, key=lambda model: model.backend is not self._loaded)

    def release(self) -> None:
        """Free the memory of the model that was asked last."""
        if self._loaded is not None:
            self._loaded.release()
        self._loaded = None

    def scored(self, model: ComparedModel, task: Task) -> Scoring | None:
        """Return a task's scores under this run's conditions, or None; only process 0 has scores."""
        stored = None if self._processes.rank else self._stored_scoring(model, task)
        if stored is None or stored.conditions.get("extraction") != VERSION:
            return None
        return stored if stored.made_with == made_with(model, task) else None

    def _stored_scoring(self, model: ComparedModel, task: Task) -> Scoring | None:
        try:
            return read_scoring(self.folder / model.name, task.name)
        except InputError:  # nothing is there, or it was changed
            return None

    def compared(
        self, judged: Sequence[ComparedModel], task: Task, gate: Gate
    ) -> tuple[int, Comparison | None]:
        """Return how many looks both `judged` models finished, and their comparison or None."""
        ours, theirs = (self.scored(model, task) for model in judged)
        looks, outcome = 0, None
        if ours and theirs:
            looks = len(in_common(ours, theirs)[2])
            terms, free = gate.terms(task.name), judged[1].free
            outcome = paired(ours, theirs, terms, other_settings=free)
        comparison = outcome if isinstance(outcome, Comparison) else None
        return self._processes.of_first((looks, comparison))

    def affordable(
        self, judged: Sequence[ComparedModel], tasks: Sequence[Task], budget: int | None, name: str
    ) -> bool:
        """Return whether the `judged` models' answers have fewer tokens than `budget` (None: any)."""
        if budget is None:
            return True
        scorings = (self.scored(model, task) for model, task in product(judged, tasks))
        spent = sum(row.tokens for scoring in scorings if scoring for row in scoring.rows)
        if (spent := self._processes.of_first(spent)) < budget:
            return True
        say(f"{name}: not asked further: {spent:,} tokens are spent, token_budget is {budget:,}")
        self._over[name] = budget
        return False

    def ask(
        self, models: Sequence[ComparedModel], looks: Mapping[Task, int], title: str = ""
    ) -> None:
        """Let models answer the questions of each task's first `looks[task]` interim looks.

        Existing answers are not asked for again. If a model has not answered a task, it gets the
        questions of these looks at once: no slot idles after a look. Progress bars show `title`.
        """
        for model in self.loaded_first(models):
            for task, number in looks.items():
                parts = task.plan.parts[:number]
                if number and self._processes.of_first(self.scored(model, task) is None):
                    parts = [task.plan.first(task.plan.looks[number - 1])]
                for part in parts:
                    self._extend(model, task, part, title)

    def _extend(self, model: ComparedModel, task: Task, part: Part, title: str) -> None:
        """Let a model answer one part of a task, and score the answers, unless they are scored."""
        scored = self.scored(model, task)
        if self._processes.of_first(scored is not None and part.answers <= scored.answered):
            return
        if self._loaded is not model.backend:
            self.release()
        self._loaded = model.backend
        before = None if scored else self._stored_scoring(model, task)
        with self._store(model, task) as store, self._also_shorter(model, task) as answering:
            more = score(
                task.name,
                store,
                answering,
                part,
                data_file=task.data,
                definition=task.definition,
                seed=model.seed,
                sampler=model.backend.sampler_settings,
                earlier=before if before and before.made_with == store.made_with else None,
                progress=lambda finished, total: self._rates.counted(
                    finished, total, model, task, title
                ),
            )
            if more is None:
                return
            whole = more if scored is None else scored.and_more(more)
            if before is not None:
                earlier = self._run.path / EARLIER / key_of(before.made_with)
                write_scoring(earlier / model.name, before)
            write_scoring(self.folder / model.name, whole)
            if model.name != BASELINE and len(whole.rows) == task.samples:
                self._whole.append(store)

    @contextmanager
    def _also_shorter(self, model: ComparedModel, task: Task) -> Generator[Generate]:
        """Yield what answers `task`, and stores the answers as they begin for its `shorter` tasks."""
        backend = model.backend
        if not isinstance(backend, Answerer) or not task.shorter:
            yield backend
            return
        with ExitStack() as stack:
            stores = {
                other.token_limit: (
                    stack.enter_context(self._store(model, other)),
                    keeping(other.name, other.definition),
                )
                for other in task.shorter
            }

            def answering(requests: Waiting) -> Iterator[Finished]:
                for request, completion in backend(requests):
                    if request.max_new_tokens == task.token_limit:
                        yield request, completion
                    else:
                        store, keep = stores[request.max_new_tokens]
                        store.add(request, completion, keep)

            backend.also_at = list(stores)
            stack.callback(setattr, backend, "also_at", ())
            yield answering

    def tell_look(
        self, tasks: Sequence[Task], task: Task, looks: int, comparison: Comparison
    ) -> None:
        """Print a task's verdict at interim look `looks` in one short line, and the time left."""
        outcome = judge_task(task.name, comparison).outcome.replace("INCONCLUSIVE", "undecided")
        later = tasks[tasks.index(task) + 1 :]
        answered = comparison.questions * comparison.repeats
        rest = task.samples - answered if outcome == "undecided" else 0
        seconds = 3600 * self._rates.hours(2 * (rest + sum(other.samples for other in later)))
        say(
            f"{task.name}, look {looks} of {len(task.plan.looks)}, {answered} of {task.samples} a "
            f"model: {outcome}, {in_brief(outcome, comparison)}"
            + (f"; at most about {duration(seconds)} left" if seconds else "")
        )

    def tell(self, tasks: Sequence[Task], taken: Mapping[str, int], outcome: str) -> None:
        """Print how the evaluation ended, and the time that an early end saved."""
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
        """Hold the store of a task's samples: the run's own, or a shared one for a local BF16."""
        made, backend = made_with(model, task), model.backend
        path = self._run.evaluation / model.name / f"{task.name}-{key_of(made)}.partial.jsonl"
        if model.name == BASELINE and isinstance(backend, Answerer):
            path = store_path(self._run, task.name, made)
        processes = self._processes
        share = Share(processes.rank, processes.count, processes.wait, processes.numbers)
        with held(path, made, share) as store:
            if isinstance(backend, ImportedBaseline):
                store.done |= backend.pack.answers[task.name]
            yield store


def in_brief(outcome: str, comparison: Comparison) -> str:
    """Return a look's difference and its bounds, and which limits it exceeds or leaves open."""
    failed = outcome == "FAIL"
    named = [
        name
        for name, limit in limits_on(comparison).items()
        if decides(limit.p_fail if failed else limit.p_pass, comparison.confidence) == failed
    ]
    bounds = interval_text(asdict(comparison.bounds_at_look), "+.1f")
    return (
        f"{comparison.difference_pp:+.1f} points, this look's bounds {bounds}, margin "
        f"{comparison.margin_pp:g}"
        + (f"; {'exceeds' if failed else 'open'}: {', '.join(named)}" if named else "")
    )


def made_with(model: ComparedModel, task: Task) -> dict[str, Any]:
    """Return everything that a model's samples of a task depend on besides their requests."""
    return conditions(model.backend.made_with, model.seed, task)


class AnswerRates:
    """Counts this process' samples, tokens and seconds per model, and shows the progress."""

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes
        self.by_model: dict[str, Any] = {}

    def hours(self, samples: int) -> float:
        """Return the hours that all take for `samples` at the rate so far; 0 before the first."""
        counted = sum(counts["samples"] for counts in self.by_model.values())
        seconds = sum(counts["seconds"] for counts in self.by_model.values())
        return samples * seconds / counted / self._processes / 3600 if counted else 0.0

    def counted(
        self,
        finished: Iterator[Finished],
        samples: int,
        model: ComparedModel,
        task: Task,
        look: str,
    ) -> Iterator[Finished]:
        """Yield all of `finished` and show how many of `samples` are done; the title names `look`."""
        facts = self.by_model.setdefault(model.name, {"samples": 0, "tokens": 0, "seconds": 0.0})
        began, before = time.monotonic() - model.backend.loading_seconds, facts["seconds"]
        title = ", ".join(filter(None, (task.name, look, model.name)))
        with metered(title, samples, "samples", brief=bool(look)) as meter:
            if isinstance(model.backend, Answerer):
                model.backend.announce = meter.announce
            for request, completion in finished:
                meter.add(1, completion.tokens)
                facts["samples"] += 1
                facts["tokens"] += completion.tokens
                seconds = time.monotonic() - began - model.backend.loading_seconds
                facts["seconds"] = round(before + seconds, 3)
                yield request, completion
