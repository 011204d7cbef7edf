"""Reads the scores that a report shows: those of the weights that the run has now, and no others."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quantize.errors import InputError
from quantize.host.files import read_json
from quantize.recipe.controls import JUDGED, SETTINGS
from quantize.recipe.sections import Recipe
from quantize.recovery.rows import Scoring
from quantize.recovery.sequential import Plan
from quantize.recovery.terms import Comparison
from quantize.reports.scores import pair, read_scoring
from quantize.runs.folder import RunDir
from quantize.runs.models import AT_POINT, BASELINE, BASELINE_AGAIN, CANDIDATE, FURTHER
from quantize.runs.weights import Weights, scored_weights

SPEEDS = "speeds.json"
AGAIN = "`quantize evaluate` with that model's option scores it again"


@dataclass
class Scores:
    """The scores of one run.

    `as_served` says that the candidate answers at the settings of its own checkpoint, which may differ
    from BF16's. `not_read` gets a sentence on every file whose rows are of other weights.
    """

    run: RunDir
    recipe: Recipe
    as_served: bool = False
    not_read: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._weights = Weights.of(self.run)

    def candidates(self, task: str) -> Mapping[str, str]:
        """Return model -> activations of the models scored on a task, the judged model first.

        Raise InputError if BF16 or the judged model was scored on other weights than the run has now.
        """
        for name in (BASELINE, CANDIDATE):
            if why := self._unlike(name, task):
                raise InputError(f"{why}; `quantize evaluate {self.run.path}` scores it again")
        points = sorted(folder.name for folder in self.run.evaluation.glob(f"{AT_POINT}*"))
        further = {**FURTHER, **{name: f"at {name.removeprefix(AT_POINT)}" for name in points}}
        there = {name: mode for name, mode in further.items() if self.has(name, task)}
        return {CANDIDATE: str(self.recipe.evaluation.activations), **there}

    def has(self, model: str, task: str) -> bool:
        """Return whether a model was scored on a task; if on other weights, note it in `not_read`."""
        if not (self.run.evaluation / model / f"{task}.jsonl").exists():
            return False
        if why := self._unlike(model, task):
            self.not_read.append(f"{why}; {AGAIN}")
        return not why

    def _unlike(self, model: str, task: str) -> str | None:
        why = self._weights.fault(model, read_scoring(self.run.evaluation / model, task).made_with)
        return why and f"evaluation/{model}/{task}.jsonl is not read: {why}"

    def both(self, task: str, model: str = CANDIDATE) -> tuple[Scoring, Scoring]:
        """Return the scorings of BF16 and of a model."""
        base, other = (read_scoring(self.run.evaluation / m, task) for m in (BASELINE, model))
        return base, other

    def entry(self, task: str, model: str) -> tuple[dict[str, Any], Comparison | None]:
        """Return report.json's entry on a model's task, and its comparison with BF16, if comparable."""
        terms, at_point = self.recipe.gate.terms(task), model.startswith(AT_POINT)
        if at_point:  # a point changes the number of steps on purpose
            terms = replace(terms, max_step_inflation=None)
        free: Collection[str] = SETTINGS if self.as_served else JUDGED if at_point else ()
        other_seed = model == BASELINE_AGAIN
        return pair(*self.both(task, model), terms, other_seed=other_seed, other_settings=free)

    def speeds(self, models: Collection[str]) -> dict[str, Any] | None:
        """Return evaluation/speeds.json (device, tokens/s by model) if it has all `models`, else None.

        Speeds of other weights are not read either: the steps of an answer depend on them.
        """
        path = self.run.evaluation / SPEEDS
        measured = read_json(path, "device", "tokens_a_second") if path.exists() else None
        if measured is None or not measured["tokens_a_second"].keys() >= set(models):
            return None
        if measured.get("weights") != scored_weights(self.run):
            why = f"it does not name the weights that the run's scores are of; {AGAIN}"
            self.not_read.append(f"evaluation/{SPEEDS} is not read: {why}")
            return None
        return measured


def other_looks(run: RunDir) -> str | None:
    """Return a sentence on a task that was asked by the looks of another version, None if none was."""
    for task, asked in read_json(run.evaluation / "done.json", "looks")["looks"].items():
        path = run.evaluation / CANDIDATE / f"{task}.conditions.json"
        planned = read_json(path, "made_with")["made_with"].get("planned")
        if planned and (count := len(Plan(**planned).looks)) != asked["of"]:
            return (
                f"{task} was asked by {asked['of']} looks and is judged by {count} since; `quantize "
                f"evaluate {run.path}` asks what the verdict needs now"
            )
    return None
