"""Judges a quantized checkpoint that was built elsewhere, by NVIDIA or RedHatAI for example.

A judgement does what `quantize run` does after conversion, in a run folder of its own. There is no
plan to verify against. Instead the checkpoint is inspected and, unless it was fine-tuned, its weights
are compared with the BF16 model's (`stages.verify.against_source`). The recipe gives tasks, limits and
gate; its `quantization` section is not used. `quantize compare` compares a judgement with another run.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from quantize.checkpoints.inspect import Inspection, inspect, inspection_table
from quantize.checkpoints.reader import Checkpoint, resolve
from quantize.checkpoints.targets import Target
from quantize.errors import InputError
from quantize.host.files import write_json
from quantize.host.processes import best_device
from quantize.host.progress import screen
from quantize.pipeline.run import begin, check_source, placed, working_in
from quantize.pipeline.stages import Run, Task, replay
from quantize.recipe.reading import resolved
from quantize.runs.manifest import fingerprint
from quantize.runtime.weights.beside import LOOKS
from quantize.stages.verify.against_source import compare

# The entry for the report if weights are not compared.
FINE_TUNED = {
    "name": "weights: not compared with BF16's, from which they differ on purpose (--fine-tuned)",
    "looked_at": 0, "passed": True, "faults": [],
}  # fmt: skip


@contextmanager
def judging(
    name: str, against: str | None, recipe_name: str, out: Path, *, resume: bool,
    tasks: Sequence[str] = (), limit: int | None = None, fine_tuned: bool = False, **options: Any,
) -> Generator[Run]:  # fmt: skip
    """Yield a run for `advance`, which judges a checkpoint; lock the run's folder in the block.

    `name` is the quantized checkpoint, `against` the BF16 model (None: the bundled one); each is a
    folder or Hub id. If `fine_tuned`, weights are not compared. Others are as in `started`.

    Raises:
        InputError: `name` is not quantized, `against` is, or the run exists and `resume` is off.
    """
    checkpoint, source = Checkpoint.open(resolve(name)), Checkpoint.open(resolve(against))
    if source.is_quantized or not checkpoint.is_quantized:
        raise InputError(
            f"{checkpoint.folder} against {source.folder}: a quantized checkpoint is judged against a "
            f"BF16 one"
        )
    check_source(source)
    recipe = resolved(recipe_name, bundled=against is None, tasks=tasks, limit=limit)
    digest, judged = fingerprint(source), fingerprint(checkpoint)
    more = ["fine-tuned"] if fine_tuned else []
    digests, bundled = (digest, judged, *more), against is None
    folder, recipe = placed(recipe, out / "judge", *digests, bundled=bundled)
    inspection = inspect(checkpoint.folder, LOOKS)
    targets = _targets(inspection, inspect(source.folder))
    instead: dict[str, Task | None] = {"calibrate": None, "round": None}
    instead["convert"] = partial(_link, checkpoint)
    instead["verify"] = partial(_verify, checkpoint, inspection, fine_tuned)
    instead["fidelity"] = partial(replay, fine_tuned=fine_tuned)
    run = Run(folder, recipe, source, targets, bundled, options, instead=instead)
    with working_in(folder):
        begin(run, digest, against, resume=resume, judged=name)
        screen().print(inspection_table(inspection))
        yield run


def _link(checkpoint: Checkpoint, run: Run) -> None:
    """Link the run's checkpoint folder to the judged checkpoint, which stays unchanged."""
    run.folder.checkpoint.unlink(missing_ok=True)
    run.folder.checkpoint.symlink_to(checkpoint.folder.resolve())


def _verify(checkpoint: Checkpoint, inspection: Inspection, fine_tuned: bool, run: Run) -> None:
    check = {"name": "inspect", "looked_at": inspection.tensors, "passed": not inspection.problems}
    content: dict[str, Any] = {
        "checks": [check | {"faults": inspection.problems}],
        "relative_error": {},
    }
    if fine_tuned:
        content["checks"].append(FINE_TUNED)
    elif not inspection.problems:
        compared = compare(checkpoint, run.source, best_device())
        content |= compared | {"checks": content["checks"] + compared["checks"]}
    passed = all(check["passed"] for check in content["checks"])
    identity = {"artifact": fingerprint(checkpoint), "passed": passed}
    write_json(run.folder.verification_json, identity | content)


def _targets(inspection: Inspection, source: Inspection) -> list[Target]:
    before: dict[str, int] = {}
    for row in source.rows:
        before[row.kind] = before.get(row.kind, 0) + row.nbytes
    targets: list[Target] = []
    for row in inspection.rows:
        modules = (row.kind,) * row.count if row.quantized else ()
        spent = before.pop(row.kind, 0)  # a class of two schemes has its bytes once
        targets.append(Target(row.kind, row.kind, None, row.scheme, (), modules, spent, row.nbytes))
    return targets
