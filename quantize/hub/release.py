"""What may be published: a verified checkpoint whose gate passed, with a card and checksums.

The checkpoint must be the one that was verified and scored: verification.json, report.json and the
scores name its fingerprint, and verification.json the sha256 of every shard. A verdict other than PASS
is published only by an option that says so; the card and publication.json then say so too.
"""

import re
from dataclasses import dataclass

from quantize.checkpoints.reader import Checkpoint
from quantize.errors import GateError, InputError, UndecidedError
from quantize.hub.repository import File
from quantize.manifest import fingerprint
from quantize.progress import track
from quantize.recipe import Recipe, parse_recipe
from quantize.reports.card import Override, card, eval_results
from quantize.run_dir import RunDir, read_json

PULL_REQUEST, MAIN = "pr", "main"
README = "README.md"
NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    `to` is "pr", "main" or the name of a branch. `allow_inconclusive` lets an INCONCLUSIVE verdict
    through, `no_gate` any verdict; neither lets an unverified checkpoint through.
    """

    repo: str
    to: str = PULL_REQUEST
    tag: str | None = None
    public: bool = False
    allow_inconclusive: bool = False
    no_gate: bool = False

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.repo):
            raise InputError(f"--repo {self.repo}: not of the form ORG/NAME")
        if self.to.startswith("refs/"):
            raise InputError(f"--to {self.to}: name a branch, main, or pr for a pull request")
        if self.to == PULL_REQUEST and self.tag:
            raise InputError(
                f"--tag {self.tag}: a pull request is no release yet; merge it, then "
                f"`--to main --tag {self.tag}` adds the tag without a new commit"
            )


@dataclass(frozen=True)
class Release:
    """Everything to publish from one run: weights first, the card and the scores last."""

    name: str
    weights: list[File]
    card: list[File]
    override: Override | None


def prepare(run: RunDir, request: Request) -> Release:
    """Check that a run may be released, hash its files and write its card (not to disk).

    Raises:
        InputError: a stage is missing, or the checkpoint changed since. GateError: verification or
            the gate failed. UndecidedError: the verdict is neither PASS nor FAIL.
    """
    for path, stage in (
        (run.manifest_json, "run"),
        (run.checkpoint, "convert"),
        (run.verification_json, "verify"),
        (run.report_json, "report"),
    ):
        if not path.exists():
            raise InputError(f"{path}: missing; run `quantize {stage}` first")
    recipe = parse_recipe(run.recipe_yaml.read_text("utf-8"), str(run.recipe_yaml))
    _check_artifact(run, recipe)
    override = _check_verdict(run, request)
    paths = sorted(p for p in run.checkpoint.rglob("*") if p.is_file() and p.name != README)
    weights = [
        File.of(path.relative_to(run.checkpoint).as_posix(), path)
        for path in track(paths, "checksums")
    ]
    _check_bytes(run, weights)
    texts = {README: card(run, recipe, request.repo, override)}
    texts |= eval_results(read_json(run.report_json))
    cards = [File.of(path, text.encode()) for path, text in texts.items()]
    return Release(run.path.resolve().name, weights, cards, override)


def _check_artifact(run: RunDir, recipe: Recipe) -> None:
    """Refuse a checkpoint that is damaged, unverified, or not the one that was verified and scored."""
    artifact = Checkpoint.open(run.checkpoint)
    if not artifact.is_quantized:
        raise InputError(f"{run.checkpoint}: not quantized")
    verification = read_json(run.verification_json)
    if not verification["passed"]:
        raise GateError(
            f"{run.verification_json}: static verification failed; nothing is published"
        )
    digest = fingerprint(artifact)
    if verification.get("artifact") != digest:
        raise InputError(
            f"{run.checkpoint}: not the checkpoint that was verified; run `quantize verify`, "
            f"`evaluate` and `report` again"
        )
    if read_json(run.report_json).get("artifact") != digest:
        raise InputError(f"{run.report_json}: older than the verification; run `quantize report`")
    for task in recipe.evaluation.tasks:
        path = run.evaluation / "quantized" / f"{task}.conditions.json"
        scored = read_json(path, "made_with.model.weights")["made_with"]["model"]["weights"]
        if scored not in (digest, None):  # a server may tell no fingerprint; the card then says so
            raise InputError(
                f"{path}: another checkpoint was scored; run `quantize evaluate` and `report` again"
            )
    if run.fidelity_json.exists() and (faults := read_json(run.fidelity_json).get("faults")):
        raise GateError(f"{run.fidelity_json}: {faults[0]}")


def _check_bytes(run: RunDir, weights: list[File]) -> None:
    """Compare every shard with its checksum from the verification."""
    verified = read_json(run.verification_json)["sha256"]
    for file in weights:
        if file.path in verified and verified[file.path] != file.sha256:
            raise GateError(
                f"{run.checkpoint / file.path}: its bytes have changed since they were verified; run "
                f"`quantize convert`, `verify`, `evaluate` and `report` again"
            )


def _check_verdict(run: RunDir, request: Request) -> Override | None:
    verdict = read_json(run.report_json)["verdict"]
    outcome, reason = verdict["outcome"], verdict["reason"]
    if outcome == "PASS":
        return None
    if outcome == "INCONCLUSIVE" and request.allow_inconclusive:
        return Override("--allow inconclusive", outcome, reason)
    if request.no_gate:
        return Override("--no-gate", outcome, reason)
    message = f"{run.report_json}: the verdict is {outcome} ({reason}); nothing is published"
    if outcome == "FAIL":
        raise GateError(f"{message}; --no-gate overrules it, and the model card will say so")
    option = "--allow inconclusive" if outcome == "INCONCLUSIVE" else "--no-gate"
    raise UndecidedError(f"{message}; {option} overrules it, and the model card will say so")
