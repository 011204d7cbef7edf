"""A baseline that travels: BF16's answers in one file, made on one machine and used on others.

BF16's answers do not depend on the recipe, and cost most where BF16's weights are streamed. A pack
holds the answers to a run's tasks as JSON lines, like the store `.bf16/`, in gzip. Its first line
has the origin, the conditions of each task's answers, and a sha256 over everything. An answer is
found by the hash of its request. No pack holds questions, and of a private task only the extracted
answers are kept.

A run uses a pack only if everything that the pack's answers depend on is equal in the run. Only
MAY_DIFFER is excepted: what changes just the order of sums, versions of four packages, and how much
was planned. Trust a pack only as far as its giver: the sha256 finds damage, not forgery.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quantize.errors import InputError
from quantize.host.files import parse_json, read_json, write_bytes, write_json
from quantize.host.locks import locked
from quantize.recovery.estimands import Estimand
from quantize.recovery.rows import Answer
from quantize.recovery.samples import Completion, Finished, SampleStore, Share, Waiting
from quantize.recovery.sequential import Plan
from quantize.reports.scores import read_scoring, scored_tasks
from quantize.runs.folder import SHARED, RunDir
from quantize.runs.models import BASELINE

FORMAT = "diffusiongemma-quantize baseline 1"
SUMS = ("device", "launches", "threads", "batch_size", "model.capacity")
READERS = tuple(f"versions.{p}" for p in ("torch", "triton", "safetensors", "compressed-tensors"))
MAY_DIFFER = (*SUMS, *READERS, "planned")
# Text of answers takes 3 to 20 times the bytes that gzip makes of it; a bomb, up to 1,000 times.
MOST_TIMES, MOST_BESIDE = 64, 1 << 20


class _PackRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _PackTool(BaseModel):
    version: str
    commit: str | None


class _Origin(_PackRecord):
    tool: _PackTool
    commit: str | None


_Count = Annotated[int, Field(ge=1, lt=1 << 31)]


class _Planned(_PackRecord):
    estimand: Estimand
    questions: _Count
    repeats: _Count
    seed: int


class _Conditions(BaseModel):
    planned: _Planned


class _Header(_PackRecord):
    format: Literal["diffusiongemma-quantize baseline 1"]
    origin: _Origin
    tasks: dict[str, _Conditions]
    sha256: str


class _PackedAnswer(_PackRecord):
    task: str
    key: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    text: str
    tokens: Annotated[int, Field(ge=0, lt=1 << 31)]
    denoising_steps: list[_Count]
    truncated: bool
    signs: list[str] | None = None


@dataclass(frozen=True)
class Pack:
    """A pack: `made_with` is task -> conditions, `answers` is task -> request's key -> answer."""

    path: Path
    sha256: str
    origin: dict[str, Any]
    made_with: dict[str, dict[str, Any]]
    answers: dict[str, dict[str, Completion]]

    def __str__(self) -> str:
        counts = (f"{len(answers):,} answers to {task}" for task, answers in self.answers.items())
        devices = sorted({str(made.get("device")) for made in self.made_with.values()})
        return f"{', '.join(counts)}, made on {', '.join(devices)}"

    def answered(self, task: str) -> set[Answer]:
        """Return the answers to `task` that its whole looks cover, as the run that made it planned."""
        if task not in self.made_with:
            return set()
        covered, plan = set[Answer](), Plan(**self.made_with[task]["planned"])
        if plan.looks[0].questions * plan.looks[0].repeats > len(self.answers[task]):
            return covered  # before a plan as large as it likes takes memory
        for part in plan.parts:
            if len(covered) + len(part.answers) > len(self.answers[task]):
                break
            covered |= part.answers
        return covered

    def lacks(self, task: str, plan: Plan) -> str | None:
        """Return what the first interim look of `plan` asks and the pack has not; None if it has it."""
        look, has = plan.looks[0], len(self.answers.get(task, {}))
        if plan.parts[0].answers <= self.answered(task):
            return None
        return (
            f"{task}: its {has:,} answers lack some of the {look.questions * look.repeats:,} that the "
            f"first of {len(plan.looks)} looks at {plan.questions:,} questions x {plan.repeats} asks "
            f"(another --limit asks others)"
        )


class ImportedBaseline:
    """Takes BF16's place if an imported pack has BF16's answers; it cannot make further answers.

    The argument `made_with` has the conditions that answers made on this machine would have.
    """

    loading_seconds = 0.0

    def __init__(
        self, pack: Pack, made_with: Mapping[str, Any], sampler_settings: dict[str, Any]
    ) -> None:
        first = flat(next(iter(pack.made_with.values())))
        elsewhere = {key: first.get(key) for key in (*SUMS, *READERS)}
        origin = {"pack": pack.sha256, **pack.origin, "made_with": elsewhere}
        self.pack, self.sampler_settings = pack, sampler_settings
        self.made_with = dict(made_with) | {"model": made_with["model"] | {"imported": origin}}

    def __call__(self, requests: Waiting) -> Iterator[Finished]:
        """Raise InputError: the pack lacks answers to `requests`, and BF16 is not loaded here."""
        raise InputError(
            f"{self.pack.path}: lacks {len(requests.missing):,} answers, to other questions or behind "
            f"the end of the run that made it; import one of `quantize evaluate RUN --all`, or remove "
            f"this file to ask BF16 here"
        )

    def release(self) -> None:
        """Do nothing: no model is loaded."""


def key_of(made_with: Mapping[str, Any]) -> str:
    """Return a short hash (12 hexadecimal digits) of everything that samples depend on."""
    return hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:12]


def store_path(run: RunDir, task: str, made_with: Mapping[str, Any]) -> Path:
    """Return the file of local BF16's answers to a task, shared by runs with equal `made_with`."""
    return run.path.parent / SHARED / f"{task}-{key_of(made_with)}.jsonl"


@contextmanager
def held(
    path: Path, made_with: Mapping[str, Any], share: Share | None = None
) -> Generator[SampleStore]:
    """Yield the store of samples at `path`, locked until the `with` block ends.

    Raises:
        InputError: the store or the block raised ValueError. ResourceError: the lock is taken.
    """
    with locked(path.with_name(f".{path.stem}.lock"), str(path)):
        try:
            yield SampleStore(path, made_with, share)
        except ValueError as error:
            raise InputError(str(error)) from error


def imports(runs: Path) -> Path:
    """Return the folder of the imported packs, which all runs in the folder `runs` may use."""
    return runs / SHARED / "imported"


def export_pack(run: RunDir, out: Path) -> Pack:
    """Write BF16's answers to a run's tasks, with their conditions, to `out`; return the pack.

    Raise InputError if the run has no scores, or BF16's answers were served, imported or removed.
    """
    tasks: dict[str, Any] = {}
    lines: list[str] = []
    for task in scored_tasks(run):
        made = read_scoring(run.evaluation / BASELINE, task).made_with
        path = store_path(run, task, made)
        if not path.exists():
            raise InputError(
                f"{path}: missing; BF16's answers to {task} were served, imported or removed, and only "
                f"those that were made here can be exported"
            )
        with held(path, made) as store:
            done = sorted(store.done.items())
        tasks[task] = made
        lines += [
            json.dumps({"task": task, "key": key, **asdict(completion)}) for key, completion in done
        ]
    manifest = read_json(run.manifest_json, "source.fingerprint", "tool")
    origin = {"tool": manifest["tool"], "commit": manifest["source"].get("commit")}
    header = {"format": FORMAT, "origin": origin, "tasks": tasks}
    text = "\n".join([json.dumps(header | {"sha256": _digest(header, lines)}), *lines])
    write_bytes(out, gzip.compress(text.encode(), mtime=0))
    return read_pack(out)


def _digest(header: Mapping[str, Any], lines: Sequence[str]) -> str:
    text = "\n".join([json.dumps(header, sort_keys=True), *lines])
    return hashlib.sha256(text.encode()).hexdigest()


def _unpacked(path: Path) -> list[str]:
    """Return the lines of a pack, of which no more is unpacked than a real one may hold."""
    limit = MOST_TIMES * path.stat().st_size + MOST_BESIDE
    with gzip.open(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it unpacks to more than {MOST_TIMES} times its size")
    return content.decode().split("\n")


def read_pack(path: Path) -> Pack:
    """Read and check a pack; InputError: the file is no pack, or was changed after its export."""
    try:
        head, *lines = _unpacked(path)
        header = parse_json(head)
        digest = _Header.model_validate(header).sha256
        if digest != _digest({k: v for k, v in header.items() if k != "sha256"}, lines):
            raise ValueError("its sha256 is of other content")
        answers: dict[str, dict[str, Completion]] = {task: {} for task in header["tasks"]}
        for line in lines:
            answer = _PackedAnswer.model_validate(parse_json(line)).model_dump()
            task, key = answer.pop("task"), answer.pop("key")
            if key in answers.get(task, {key}):
                why = f"a second answer to a request of {task}, or one of no task: {key}"
                raise ValueError(why)
            answers[task][key] = Completion(**answer)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: no baseline pack as it was exported: {why}") from error
    return Pack(path, digest, header["origin"], header["tasks"], answers)


def import_pack(path: Path, runs: Path, hub: str | None = None, sha256: str | None = None) -> Pack:
    """Check a pack, copy it to `imports(runs)` for all runs in the folder `runs`; return the copy.

    If the pack was pulled, `hub` is ORG/NAME@COMMIT of its repository, and is noted beside the copy,
    and `sha256` is the one that its name there promises.
    """
    pack = read_pack(path)
    if sha256 is not None and sha256 != pack.sha256:
        raise InputError(f"{hub}: the pack {sha256[:12]} holds another one ({pack.sha256[:12]})")
    place = imports(runs) / f"{pack.sha256[:12]}.jsonl.gz"
    write_bytes(place, path.read_bytes())
    if hub is not None:
        write_json(_noted(place), {"hub": hub})
    return replace(pack, path=place)


def _noted(place: Path) -> Path:
    """Return the file that says from where the pack at `place` was pulled."""
    return place.with_name(place.name.replace(".jsonl.gz", ".hub.json"))


def find_pack(folder: Path, weights: str, here: Mapping[str, Mapping[str, Any]]) -> Pack | None:
    """Return the fullest imported pack that fits all tasks; None if no pack is of this BF16 model.

    `weights` is the model's fingerprint; `here` is task -> conditions of answers made here. A pack is
    fuller that has all planned answers to more tasks, then that has more answers.

    Raises:
        InputError: a pack is damaged; or this model has packs and none fits (the message says why
            the first does not).
    """
    refused, fitting = list[str](), list[Pack]()
    for path in sorted(folder.glob("*.jsonl.gz")):
        pack = read_pack(path)
        if (noted := _noted(path)).exists():
            pack = replace(pack, origin=pack.origin | read_json(noted, "hub"))
        if all(flat(made).get("model.weights") != weights for made in pack.made_with.values()):
            continue
        reasons = (_unfit(pack.made_with.get(task), made, task) for task, made in here.items())
        if why := next(filter(None, reasons), None):
            refused.append(f"{path}: NOT COMPARABLE: {why}; remove this file to ask BF16 here")
        else:
            fitting.append(pack)
    if refused and not fitting:
        raise InputError(refused[0])
    return max(fitting, key=lambda pack: _fullness(pack, here), default=None)


def check_packs(folder: Path, weights: str, plans: Mapping[str, Plan]) -> None:
    """Raise InputError if `folder` has packs of this BF16 model, and none reaches each first look."""
    refused = list[str]()
    for path in sorted(folder.glob("*.jsonl.gz")):
        pack = read_pack(path)
        if all(flat(made).get("model.weights") != weights for made in pack.made_with.values()):
            continue
        reasons = filter(None, (pack.lacks(task, plan) for task, plan in plans.items()))
        if (reason := next(reasons, None)) is None:
            return
        refused.append(
            f"{path}: this imported baseline has too few answers: {reason}; import one of a run at "
            f"these limits (`quantize evaluate RUN --all` gives all), or remove this file "
            f"to ask BF16 here"
        )
    if refused:
        raise InputError(refused[0])


def _fullness(pack: Pack, here: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """Return how many tasks a pack has all planned answers to, and how many of these it has in all."""
    planned = {task: made["planned"]["questions"] * made["planned"]["repeats"]
               for task, made in here.items()}  # fmt: skip
    counts = {task: min(most, len(pack.answers[task])) for task, most in planned.items()}
    return sum(counts[task] == most for task, most in planned.items()), sum(counts.values())


def _unfit(pack: Mapping[str, Any] | None, here: Mapping[str, Any], task: str) -> str | None:
    if pack is None:
        return f"it has no answers to {task}"
    for key, theirs, ours in differing(pack, here):
        if not f"{key}.".startswith(tuple(f"{name}." for name in MAY_DIFFER)):
            return f"{task} was answered with {key} {theirs}, and here it is {ours}"
    return None


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value in `a`, value in `b`) of each condition that differs."""
    ours, theirs = flat(a), flat(b)
    for key in sorted(ours | theirs):
        if ours.get(key) != theirs.get(key):
            yield key, ours.get(key), theirs.get(key)


def flat(made_with: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `made_with` as a flat dict; the keys of nested dicts are joined: "versions.torch"."""
    pairs: dict[str, Any] = {}
    for key, value in made_with.items():
        name = f"{prefix}{key}"
        pairs |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return pairs
