"""Which weights answers were scored on, and whether these are the weights that a run has now.

Scores name a fingerprint under `made_with.model.weights`. It is that of the checkpoint as it stands,
or with the generation settings under which it was scored (verification.json: `artifact`, `scored_as`).
Rows of a mode or an operating point stay when others convert or calibrate again: they are then of
other weights, and say nothing about this checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantize.host.files import read_json
from quantize.runs.folder import RunDir
from quantize.runs.models import BASELINE, BASELINE_AGAIN, CANDIDATE


@dataclass(frozen=True)
class Weights:
    """The fingerprints that scores of a run may name, for the BF16 model and for its checkpoint."""

    baseline: frozenset[str]
    checkpoint: frozenset[str]
    revision: str | None = None  # the user's name for weights of which a server told no fingerprint

    @classmethod
    def of(cls, run: RunDir) -> "Weights":
        """Return those of a verified run; `revision` is that under which the candidate was scored."""
        source = read_json(run.manifest_json, "source.fingerprint")["source"]
        verified = read_json(run.verification_json)
        known = {verified.get("artifact"), verified.get("scored_as")} - {None}
        models = (made_with.get("model", {}) for made_with in _conditions(run, CANDIDATE))
        revision = next((model.get("revision") for model in models), None)
        return cls(frozenset({source["fingerprint"]}), frozenset(known), revision)

    def fault(self, model: str, made_with: Mapping[str, Any]) -> str | None:
        """Return why scores of `model` are not of these weights, as the end of a sentence; or None.

        `made_with` has the conditions under which the answers were made.
        """
        about = made_with.get("model", {})
        is_baseline = model in (BASELINE, BASELINE_AGAIN)
        weights, known = about.get("weights"), self.baseline if is_baseline else self.checkpoint
        if weights in known:
            return None
        if weights is not None:
            return f"scored on other weights ({weights[:12]}) than the run's now"
        if "served" not in about:
            return "its scores do not name the weights that they are of"
        if not is_baseline and about.get("revision") != self.revision:
            return (
                f"scored on revision {about.get('revision')}, and the candidate on {self.revision}"
            )
        return None


def scored_weights(run: RunDir) -> str | None:
    """Return the fingerprint under which a run's candidate was scored; None if a server told none."""
    models = (made_with.get("model", {}) for made_with in _conditions(run, CANDIDATE))
    return next((model.get("weights") for model in models), None)


def is_scored(run: RunDir, model: str) -> bool:
    """Return whether a model has scores, all of them of the weights that the verified run has now."""
    weights, stated = Weights.of(run), _conditions(run, model)
    return bool(stated) and not any(weights.fault(model, made_with) for made_with in stated)


def _conditions(run: RunDir, model: str) -> list[dict[str, Any]]:
    """Return the conditions of a model's answers, task by task."""
    files = sorted((run.evaluation / model).glob("*.conditions.json"))
    return [read_json(path, "made_with")["made_with"] for path in files]
