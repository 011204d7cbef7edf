"""Scores baseline and candidate alike (harness, prompts, seeds, sampler) until a verdict is certain.

Tasks are asked one after the other, the cheapest first. Each task is asked in at most eight parts, and
after each part the two models are compared (`recovery.sequential`). A task that passes is not asked
further, nor is one that hardly decides, and a run that fails, or has spent its budget of tokens, ends.
The plan is fixed before the first answer and stored with every score. Models that the gate does not
judge answer the same questions.

A model skips a part whose answers it has already given under this run's conditions. If the run has
a finished evaluation, new scores go to a copy, which replaces evaluation/ once complete. Scores
made under other conditions move to evaluation-earlier/. BF16's samples do not depend on the recipe,
so all runs in one folder share the samples in that folder's `.bf16/`. One model is in memory at a
time; it answers a whole part before another model is loaded.

Under `torchrun --nproc-per-node N` the processes share each part's samples, one GPU each: whoever has
a free slot takes the next. The scores are as with one process, and the first process writes them.
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from quantize.errors import ResourceError
from quantize.host.files import read_json
from quantize.host.processes import Processes, joined
from quantize.host.progress import say
from quantize.recipe.controls import SETTINGS
from quantize.recipe.sections import Evaluation, Gate
from quantize.recovery.gate import judge
from quantize.recovery.sequential import LEAST_CHANCE, out_of_reach, until_decided
from quantize.recovery.served import ServerError
from quantize.recovery.terms import Comparison
from quantize.runs.folder import RunDir
from quantize.runs.models import AT_POINT, BASELINE
from quantize.runtime import Sampler
from quantize.stages.evaluate.answers import AnswerRates, Answers
from quantize.stages.evaluate.baseline_pack import (
    ImportedBaseline,
    differing,
    find_pack,
    imports,
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
from quantize.stages.evaluate.tasks import Task, conditions, open_tasks
from quantize.stages.memory_needs import scored_positions


def evaluate(
    run: RunDir,
    source: Path,
    digest: str,
    settings: Evaluation,
    *,
    gate: Gate,
    options: ModelOptions | None = None,
    data_dir: Path | None = None,
    go_on: bool = False,
) -> dict[str, Any]:
    """Score the recipe's tasks on every model; write evaluation/<model>/<task>.jsonl.

    `digest` is the fingerprint of the BF16 checkpoint `source`; `data_dir` has <task>.jsonl or .csv
    files in place of data sets on the Hub. `go_on` asks all planned questions whatever the verdict.

    Returns:
        Model -> the numbers of "samples" and "tokens" that this process made, and the "seconds"
        that it took, without loading.

    Raises:
        InputError: a task's own file cannot be read, a task has only one question, options do not
            go together, an imported baseline does not fit or lacks answers, or as in `open_models`.
        ResourceError: a data set or server cannot be reached, or not one sample fits the GPU.
    """
    options = options or ModelOptions()
    options.check()
    tasks = open_tasks(settings, gate, data_dir)
    longest = max(task.token_limit for task in tasks)
    config = read_json(run.checkpoint / "config.json", "canvas_length", "text_config")
    canvas = int(config["canvas_length"])
    with joined() as processes:
        try:
            room = max(task.token_limit + task.prompt_tokens for task in tasks)
            context = scored_positions(config, room)
            packs = imports(run.path.parent)
            imported = partial(_imported, packs, source, digest, settings.seed, tasks)
            models = open_models(
                source, digest, run.checkpoint, settings, options, context, imported
            )
            check_alike(models, processes)
            warn_of_servers(models, longest, canvas)
            rates = AnswerRates(processes.count)
            answers = Answers(run, processes, rates)
            _announce(tasks, models, gate)
            answers.tell_what_differs(models, tasks)
            points = [model for model in models[2:] if model.name.startswith(AT_POINT)]
            how = {"go_on": go_on, "budget": settings.token_budget}
            taken = _ask_until_decided(answers, models[:2], tasks, gate, **how)
            done = {task: taken[task.name] for task in tasks if task.name in taken}
            answers.ask([model for model in models[2:] if model not in points], done)
            _ask_points(answers, models[0], points, tasks, gate, go_on=go_on)
        except ServerError as error:
            raise ResourceError(str(error)) from error
        if processes.rank == 0:
            _leave_for_the_report(answers, models[:2], list(done))
            answers.finish(tasks, done)
        answers.release()
    return rates.by_model


def _imported(
    folder: Path, source: Path, weights: str, seed: int, tasks: Sequence[Task], candidate: Backend
) -> ImportedBaseline | None:
    """Return the imported answers of the BF16 model `source`; `candidate` runs under its conditions."""
    sampler = {k: v for k, v in candidate.sampler_settings.items() if k not in SETTINGS}
    sampler |= Sampler.from_checkpoint(source).noted()
    made = candidate.made_with | {"model": {"weights": weights, "activations": "none"}}
    made |= {"sampler": sampler}
    here = {task.name: conditions(made, seed, task) for task in tasks}
    if (pack := find_pack(folder, weights, here)) is None:
        return None
    say(f"{BASELINE}: {pack} ({pack.path})")
    for task in tasks:
        if (count := len(pack.answers[task.name])) < task.samples:
            say(
                f"warning: {task.name}: it has {count} of {task.samples} answers; evaluate ends where "
                f"the verdict needs more"
            )
    return ImportedBaseline(pack, made, sampler)


def check_alike(models: Sequence[ComparedModel], processes: Processes) -> None:
    """Raise ResourceError if this process' answers would depend on else than the first process'."""
    for model in models:
        made = model.backend.made_with
        for key, first, here in islice(differing(processes.of_first(made), made), 1):
            raise ResourceError(
                f"process {processes.rank + 1} of {processes.count}: {model.name} would answer with "
                f"{key} {here}, in the first process {first}; all need equal GPUs, files and versions, "
                f"and --batch-size for the GPU with the least free memory"
            )


def _announce(tasks: Sequence[Task], models: Sequence[ComparedModel], gate: Gate) -> None:
    for task in tasks:
        shares = ", ".join(f"{look.fraction:.0%}" for look in task.plan.looks)
        say(
            f"{task.name}: {task.samples} samples a model of at most {task.token_limit} tokens; judged "
            f"after {shares} of them, until the verdict is certain"
        )
        if sentence := out_of_reach(task.name, task.plan, gate.terms(task.name)):
            say(sentence)
    tokens, count = len(models) * sum(task.cost for task in tasks), len(models)
    say(f"at most {tokens:,} tokens over {count} models, were no answer to end before its limit")


def _ask_until_decided(
    answers: Answers,
    judged: Sequence[ComparedModel],
    tasks: Sequence[Task],
    gate: Gate,
    *,
    go_on: bool,
    least_chance: float = LEAST_CHANCE,
    budget: int | None = None,
) -> dict[str, int]:
    """Ask baseline and candidate, look by look; return task -> number of looks taken, if any."""
    if go_on:  # no look ends the run, so each model is loaded only once
        answers.ask(judged, {task: len(task.plan.looks) for task in tasks})
    by_name = {task.name: task for task in tasks}

    def ask(name: str, looks: int) -> tuple[int, Comparison | None]:
        task = by_name[name]
        answers.ask(judged, {task: looks}, f"look {looks} of {len(task.plan.looks)}")
        taken, comparison = answers.compared(judged, task, gate)
        if looks and comparison is not None:
            answers.tell_look(tasks, task, taken, comparison)
        return taken, comparison

    plans = {task.name: task.plan for task in tasks}
    affordable = partial(answers.affordable, judged, tasks, budget)
    taken, seen = until_decided(plans, ask, least_chance, affordable)
    answers.tell(tasks, taken, judge(seen).outcome)
    return {name: looks for name, looks in taken.items() if looks}


def _ask_points(
    answers: Answers, baseline: ComparedModel, points: Sequence[ComparedModel],
    tasks: Sequence[Task], gate: Gate, *, go_on: bool,
) -> None:  # fmt: skip
    """Ask baseline and each operating point, look by look, until the point's verdict is certain."""
    for point in points:
        confidence = 1 - (1 - gate.confidence) / len(points)
        shared = (
            f" ({len(points)} points share the error; its verdict is provisional, the report decides "
            f"by Holm's correction over all of them)"
        )
        say(f"operating point {point.name.removeprefix(AT_POINT)}" + shared * (len(points) > 1))
        update = {"max_step_inflation": None, "confidence": confidence}
        stricter = gate.model_copy(update=update)
        # Holm may yet allow a point more error than that, so none is given up.
        _ask_until_decided(
            answers, [baseline, point], tasks, stricter, go_on=go_on, least_chance=0.0
        )


def _leave_for_the_report(
    answers: Answers, judged: Sequence[ComparedModel], tasks: Sequence[Task]
) -> None:
    folder = answers.folder
    requests = {
        task.name: leave_questions(folder, task.name, task.data, task.definition) for task in tasks
    }
    if not all(isinstance(model.backend, Answerer) for model in judged):
        return
    for model in answers.loaded_first(judged):
        assert isinstance(model.backend, Answerer)
        for task, questions in requests.items():
            if questions:
                record_differing(folder, task, questions, {model.name: model.backend})
        model.backend.release()
