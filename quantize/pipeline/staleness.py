"""Tells which results of a run are up to date, by digests of each result and of its inputs.

stages.json in the run folder, by stage:
  inputs   the model's fingerprint, and the digest of every result that the stage read
  result   the digest of the result that the stage wrote

A stage is stale if it has no entry, or if its files or inputs have changed since the entry. A
digest covers every byte of a result. Versions up to 268631d took samples of a result over 2 GB: such
an entry says nothing of the other bytes, so that its stage is stale. Before a stage runs, what it
reads must be what the stages before it wrote; while it runs, none of these files may change.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantize.errors import InputError
from quantize.host.files import TEMPORARY_SUFFIX, read_json, write_json
from quantize.host.processes import is_first
from quantize.pipeline.stages import STAGES, Run, Stage
from quantize.recipe.sections import Recipe
from quantize.runs.digests import hashed, identities, sampled
from quantize.runs.folder import RunDir, continued_by, is_card
from quantize.runs.manifest import fingerprint

NOTHING = "there is no result"


def why_stale(folder: RunDir, stage: Stage) -> str | None:
    """Return why a stage has to be done (again), or None if its result is up to date."""
    record = _records(folder).get(stage.name)
    result = result_digest(folder, stage)
    if result is None:
        return NOTHING
    if record is None:
        return "nothing says what its result was made from"
    if record["result"] != result:
        what = " or ".join(stage.files or (stage.result,))
        if record["result"] == sampled(_named(folder, stage)):
            return f"an earlier version read only samples of {what}"
        return f"{what} changed after it was made"
    inputs = input_digests(folder, stage)
    before = record["inputs"]
    changed = sorted(name for name in before | inputs if before.get(name) != inputs.get(name))
    return f"{changed[0]} changed since" if changed else None


def check_shown(folder: RunDir, stages: Iterable[Stage]) -> None:
    """Check results without reading the weights: each is what its stage made, of results as recorded.

    Stages without an entry, which did not end, are taken as they are. InputError names a stale one.
    """
    records = _records(folder)
    for stage in stages:
        record = records.get(stage.name)
        if record is None:
            continue
        now = {name: records[name]["result"] for name in stage.inputs if name in records}
        why = next(
            (f"{n} changed since" for n, was in record["inputs"].items() if now.get(n, was) != was),
            None,
        )
        if record["result"] != result_digest(folder, stage):
            why = f"{stage.result} changed after it was made"
        if why:
            raise InputError(
                f"{folder.path}: {stage.name} is stale, {why}; `{stage.command(folder)}` makes it again"
            )


def check_fresh(folder: RunDir, recipe: Recipe, stages: Iterable[Stage]) -> None:
    """Check that the results of `stages` are up to date.

    Raise InputError, which names the first result that is missing or stale.
    """
    for stage, why in stale(folder, recipe, stages):
        alone = stage.command(folder)
        if why == NOTHING:  # an interrupted run, most likely: one command does the rest of it
            way = f"`{continued_by(folder, alone)}` goes on"
            raise InputError(f"{folder.path}: not finished, without {stage.name}; {way}")
        raise InputError(f"{folder.path}: {stage.name} is stale, {why}; `{alone}` makes it again")


def stale(folder: RunDir, recipe: Recipe, stages: Iterable[Stage]) -> Iterator[tuple[Stage, str]]:
    """Yield (stage, why) for each of the recipe's `stages` whose result is missing or stale."""
    for stage in stages:
        if stage.is_needed(recipe) and (why := why_stale(folder, stage)):
            yield stage, why


def upstream(stage: Stage) -> list[Stage]:
    """Return the stages whose results a stage depends on, directly or not, in order."""
    names = set(stage.inputs)
    for other in reversed(STAGES):
        if other.name in names:
            names |= set(other.inputs)
    return [other for other in STAGES if other.name in names]


def input_digests(folder: RunDir, stage: Stage) -> dict[str, str | None]:
    """Return name -> digest of what a stage reads: the model, and results (None if missing)."""
    digests = {s.name: result_digest(folder, s) for s in STAGES if s.name in stage.inputs}
    about = read_json(folder.manifest_json, "source.fingerprint")["source"]
    return {"model": about["fingerprint"]} | digests


@contextmanager
def reading(run: Run, stage: Stage) -> Generator[dict[str, str | None]]:
    """Yield the digests of what a stage reads; in the block, none of it may change.

    Raises:
        InputError: a result is not what its stage wrote, or an input changed while the block ran.
    """
    inputs, records = input_digests(run.folder, stage), _records(run.folder)
    for name, digest in inputs.items():
        if name in records and records[name]["result"] != digest:
            (maker,) = (other for other in STAGES if other.name == name)
            raise InputError(
                f"{run.folder.path / maker.result}: not what {name} wrote; "
                f"`{maker.command(run.folder)}` makes it again"
            )
    before = _identities(run, stage)
    yield inputs
    # What only has another name or link in another place has another identity, and the same bytes.
    if _identities(run, stage) != before and inputs != (
        input_digests(run.folder, stage) | {"model": fingerprint(run.source)}
    ):
        raise InputError(
            f"{run.folder.path}: what {stage.name} reads changed while it ran; run it again"
        )


def _identities(run: Run, stage: Stage) -> list[str]:
    made = [f for s in STAGES if s.name in stage.inputs for f in sorted(_files(run.folder, s))]
    return identities([*(file for file in made if file.exists()), *run.source.shards])


def result_digest(folder: RunDir, stage: Stage) -> str | None:
    """Return a sha256 over a stage's files, or None if the result does not exist."""
    if not (folder.path / stage.result).exists():
        return None
    return hashed(_named(folder, stage))


def _named(folder: RunDir, stage: Stage) -> dict[str, Path]:
    return {str(f.relative_to(folder.path)): f for f in sorted(_files(folder, stage))}


def _files(folder: RunDir, stage: Stage) -> Iterable[Path]:
    for name in stage.files or (stage.result,):
        path = folder.path / name
        for file in path.rglob("*") if path.is_dir() else [path]:
            is_whole = file.is_file() and TEMPORARY_SUFFIX not in file.name
            if is_whole and not (file != path and is_card(file.relative_to(path).as_posix())):
                yield file


def forget(folder: RunDir, stage: Stage) -> None:
    """Remove a stage's entry and files (no folders) before it runs: a failed try must not look done."""
    if not is_first() or stage.adds:  # a stage that adds keeps its old result
        return
    records = _records(folder)
    if records.pop(stage.name, None):
        write_json(folder.stages_json, records)
    for name in {stage.result, *stage.files}:
        if (folder.path / name).is_file():
            (folder.path / name).unlink()


def remember(folder: RunDir, stage: Stage, inputs: dict[str, str | None]) -> None:
    """Record a finished stage: the digests of its `inputs`, and that of its result."""
    if not is_first():
        return
    entry = {"inputs": inputs, "result": result_digest(folder, stage)}
    write_json(folder.stages_json, _records(folder) | {stage.name: entry})


def change_for(folder: RunDir, stage: Stage, unconcerned: Iterable[str]) -> None:
    """Record a stage's changed result; the stages in `unconcerned` read it, but stay up to date."""
    records, result = _records(folder), result_digest(folder, stage)
    records[stage.name]["result"] = result
    for name in unconcerned:
        if name in records:
            records[name]["inputs"][stage.name] = result
    write_json(folder.stages_json, records)


def _records(folder: RunDir) -> dict[str, Any]:
    """Return stages.json; a damaged one counts as empty, so that every stage is stale."""
    try:
        return {
            name: {"inputs": dict(record["inputs"]), "result": record["result"]}
            for name, record in read_json(folder.stages_json).items()
        }
    except (OSError, InputError, AttributeError, KeyError, TypeError, ValueError):
        return {}
