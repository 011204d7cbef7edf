"""Decides what may be published: a verified checkpoint whose gate passed, with card and checksums.

The checkpoint must be what was verified and scored: verification.json names its fingerprint, and
scores name no other. Its files must be exactly those whose sha256 verification.json lists. If the
verdict is not PASS, an option must overrule it, and the card and publication.json name that option.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantize.checkpoints.reader import Checkpoint
from quantize.errors import GateError, InputError, UndecidedError
from quantize.host.files import read_json, write_json
from quantize.host.progress import say, track
from quantize.hub import signing
from quantize.hub.repository import File, Hub
from quantize.recipe.reading import read_recipe
from quantize.recipe.sections import Recipe
from quantize.reports.bundle import shareable
from quantize.reports.card import Override, base_model, card_files
from quantize.runs.folder import README, RunDir, is_card
from quantize.runs.manifest import fingerprint
from quantize.runs.models import BASELINE_AGAIN, CANDIDATE
from quantize.runs.weights import Weights

PULL_REQUEST, MAIN = "pr", "main"
EVIDENCE, BILL = "evidence", "bom.cdx.json"
FindBase = Callable[[dict[str, Any], Recipe], str | None]  # (manifest's source, recipe) -> Hub id
NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ReleaseRequest:
    """What the user asked to publish.

    `to` is "pr", "main" or the name of a branch. `allow_inconclusive` lets an INCONCLUSIVE verdict
    through, `no_gate` any verdict; neither lets an unverified checkpoint through. `sign` is a private
    key's file, "sigstore", or None for no signature. Raise InputError if `repo` or `to` is wrong, or
    if `tag` is set for a pull request.
    """

    repo: str
    to: str = PULL_REQUEST
    tag: str | None = None
    public: bool = False
    allow_inconclusive: bool = False
    no_gate: bool = False
    sign: str | None = None

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
    """All files to publish from the run folder `name`; `override` is None if the gate passed.

    `weights` are all files of the checkpoint folder except the card. `card` holds the model card and
    scores; in a signed release, also evidence, bill of materials and signature.
    """

    name: str
    weights: list[File]
    card: list[File]
    override: Override | None


def prepare(run: RunDir, request: ReleaseRequest, base: FindBase | None = None) -> Release:
    """Check that a run may be released; return its hashed files, model card and scores.

    The run's results must be up to date (`pipeline.run.reported`). `base` finds the BF16 model's Hub
    id; the default is `find_base`. Nothing is written except a signature: signature.json in the run.
    ResourceError: the Hub or Sigstore cannot be reached, or a package for signatures is missing.
    InputError: the checkpoint, or its list of files, is not what was verified and scored.
    GateError: verification or fidelity failed, a verified file changed, or FAIL is not overruled.
    UndecidedError: the verdict is neither PASS nor FAIL, and is not overruled.
    """
    recipe = read_recipe(run.recipe_yaml)
    _check_artifact(run)
    override = _check_verdict(run, request)
    weights = _listed_files(run)
    source = read_json(run.manifest_json, "source")["source"]
    base_model = (base or find_base)(source, recipe)
    texts = card_files(run, recipe, request.repo, override, base_model)
    if request.sign:
        for path in (run.report_json, run.verification_json):  # no questions, no folders
            text = json.dumps(shareable(read_json(path)), indent=2)
            texts[f"{EVIDENCE}/{path.name}"] = f"{text}\n"
        texts[BILL] = signing.extra("quantize.hub.bom").bill(run, recipe, request.repo, base_model)
        texts[README] += _how_to_verify(request.repo, request.sign)
    cards = [File.of(path, text.encode()) for path, text in texts.items()]
    if request.sign:
        cards.append(_signature(run, request.sign, [*weights, *cards]))
    return Release(run.path.resolve().name, weights, cards, override)


def _how_to_verify(repo: str, sign: str) -> str:
    name = repo.split("/")[-1]
    by, options = "an account, by Sigstore", "--identity ACCOUNT --issuer URL"
    if sign != signing.SIGSTORE:
        by = f"the key whose public half has the SHA-256 `{signing.fingerprint(Path(sign))}` (DER)"
        options = "--key PUBLIC.pem"
    return (
        f"\n## Signature\n\n`{signing.SIGNATURE}` (OpenSSF model signing) stands for the sha256 of "
        f"every file here, signed by {by}. Take the key from where you trust it, not from here:\n\n"
        "```\n"
        f"hf download {repo} --local-dir {name}\nquantize verify-signature {name} {options}\n```\n"
    )


def _signature(run: RunDir, sign: str, files: Sequence[File]) -> File:
    """Return the signature of files; the run keeps it, so a resumed push has the same signature."""
    key = None if sign == signing.SIGSTORE else Path(sign)
    kept = run.path / "signature.json"
    stands: dict[str, Any] = {"by": signing.fingerprint(key) if key else sign}
    stands["files"] = {file.path: file.sha256 for file in files}
    if kept.is_file() and (noted := read_json(kept)).items() >= stands.items():
        return File.of(signing.SIGNATURE, str(noted["signature"]).encode())
    made = signing.sign_files({file.path: file.content for file in files}, key)
    write_json(kept, stands | {"signature": made.decode()})
    return File.of(signing.SIGNATURE, made)


def _check_artifact(run: RunDir) -> None:
    artifact = Checkpoint.open(run.checkpoint)
    if not artifact.is_quantized:
        raise InputError(f"{run.checkpoint}: not quantized")
    verification = read_json(run.verification_json, "passed", "artifact")
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
    # If a failure was certain early, not all tasks of the recipe were scored.
    for task in read_json(run.evaluation / "done.json", "tasks")["tasks"]:
        path = run.evaluation / CANDIDATE / f"{task}.conditions.json"
        scored = read_json(path, "made_with.model.weights")["made_with"]["model"]["weights"]
        # A server may report no fingerprint; the card then says so.
        if scored not in (digest, verification.get("scored_as"), None):
            raise InputError(
                f"{path}: another checkpoint was scored; run `quantize evaluate` and `report` again"
            )
    _check_rows(run)
    if run.fidelity_json.exists() and (faults := read_json(run.fidelity_json, "faults")["faults"]):
        raise GateError(f"{run.fidelity_json}: {faults[0]}")


def _check_rows(run: RunDir) -> None:
    """Raise InputError if the report shows rows that were scored on other weights than the run's."""
    report, weights = read_json(run.report_json, "tasks", "noise_floor"), Weights.of(run)
    shown = [(CANDIDATE, entry) for entry in report["tasks"]]
    shown += [(BASELINE_AGAIN, entry) for entry in report["noise_floor"]]
    for model, entry in shown:
        if "made_with" in entry and (why := weights.fault(model, entry["made_with"])):
            raise InputError(
                f"{run.report_json}: {entry['task']}, activations {entry.get('activations')}: {why}; "
                f"run `quantize report` again"
            )


def _listed_files(run: RunDir) -> list[File]:
    """Hash the verified files; raise if the checkpoint lacks one, has others, or one changed."""
    listed: dict[str, str] = read_json(run.verification_json, "sha256")["sha256"]
    paths = [run.checkpoint, *sorted(run.checkpoint.rglob("*"))]
    for path in paths:
        name = path.relative_to(run.checkpoint).as_posix()
        if path.is_symlink():
            raise InputError(
                f"{path}: a link, and only files are published; put a copy in its place"
            )
        if path.is_file() and name not in listed and not is_card(name):
            raise InputError(f"{path}: not among the files that were verified; remove it")
    if gone := sorted(name for name in listed if not (run.checkpoint / name).is_file()):
        raise InputError(
            f"{run.checkpoint / gone[0]}: was verified and is gone; run `quantize convert`"
        )
    files: list[File] = []
    for name in track(sorted(listed), "checksums", unit="files"):
        files.append(File.of(name, run.checkpoint / name))
        if files[-1].sha256 != listed[name]:
            raise GateError(
                f"{run.checkpoint / name}: its bytes have changed since they were verified; run "
                f"`quantize convert`, `verify`, `evaluate` and `report` again"
            )
    return files


def find_base(source: dict[str, Any], recipe: Recipe) -> str | None:
    """Return the Hub id of the BF16 model, or None if the id is not certain.

    The id is certain if the Hub lists under it the checksums of the local config.json and weights.
    A name in the manifest's `source`, or of a folder, proves nothing. ResourceError: no Hub access.
    """
    if (name := base_model(source, recipe)) is None:
        return None
    revision = source.get("commit") or recipe.model.revision or MAIN
    hub, folder = Hub(name), Path(source["folder"])
    hub.account()
    try:
        remote = hub.files(revision)
    except InputError as error:
        say(f"push: no base model is named: {error}")
        return None
    paths = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    wanted = {name for name in remote if "/" not in name and name.endswith(".safetensors")}
    same = wanted == {path.name for path in paths[1:]} != set() and all(
        path.is_file() and File.of(path.name, path).is_at(remote.get(path.name))
        for path in track(paths, f"checksums of {name}", unit="files")
    )
    if not same:
        say(f"push: no base model is named: {folder} does not hold {name} at {revision}")
    return name if same else None


def _check_verdict(run: RunDir, request: ReleaseRequest) -> Override | None:
    verdict = read_json(run.report_json, "verdict.outcome", "verdict.reason")["verdict"]
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
