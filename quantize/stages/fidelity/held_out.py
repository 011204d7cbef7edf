"""Gives the replay BF16's held-out trajectories: calibrate's, another run's, or newly recorded ones.

Where nothing was calibrated (FP8, a judgement), BF16 answers the prompts of FRESH. That is done once
for all runs in a folder: `.bf16/trajectories-KEY` holds the files of `record.trajectory`, and their
sha256. KEY covers all that trajectories depend on, as the key of BF16's shared answers does, and the
code. What is damaged there is recorded again.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.host.files import folder_when_complete, read_json, write_json
from quantize.host.processes import Processes
from quantize.host.progress import say
from quantize.recipe.sections import Calibration
from quantize.runs.digests import sha256_of
from quantize.runs.manifest import code_digest, fingerprint
from quantize.runtime import Placement, open, sized
from quantize.runtime.gpu.gpus import launches_of
from quantize.runtime.record.trajectory import (
    INDEX,
    TENSORS,
    Prompt,
    Trajectory,
    context_of,
    load_trajectories,
    record_all,
    save_trajectories,
)
from quantize.runtime.sampler.sampler import Sampler
from quantize.stages.memory_needs import HELD_OUT
from quantize.stages.prompts import BUNDLED, load_prompts

# Without a calibration (FP8 needs none) these prompts are recorded: word problems fit any model.
FRESH = Calibration(datasets=[BUNDLED], prompts=HELD_OUT, canvases=2, thinking=0.5)
SUMS = "sha256.json"


def held_out_trajectories(
    source: Path, calibration: Path, place: Placement, processes: Processes, *,
    count: int = HELD_OUT, shared: Path | None = None,
) -> tuple[list[Trajectory], Sampler]:  # fmt: skip
    """Return the first `count` held-out trajectories, and their sampler.

    They are read from the folder `calibration`; without it, from those that runs share in the folder
    `shared`. If there are none either, they are recorded, and written there (None: nowhere).
    """
    if calibration.is_dir():
        trajectories, sampler = load_trajectories(calibration)
        return [item for item in trajectories if item.held_out][:count], sampler
    settings = FRESH.model_copy(update={"prompts": min(count, FRESH.prompts)})
    prompts = load_prompts(source, settings, settings.prompts)
    sampler = Sampler.from_checkpoint(source)
    context = context_of(source, [prompt.ids for prompt in prompts], settings.canvases)
    placed = sized(source, replace(place, capacity=settings.batch_size, max_context=context))
    settings = settings.model_copy(update={"batch_size": placed.capacity})
    folder = None
    if shared is not None:
        key = _key(source, prompts, settings, sampler, torch.device(place.device))
        folder = shared / f"trajectories-{key}"
        if processes.of_first(_is_whole(folder)):
            say(f"recording BF16: done before, for another run ({folder})")
            return load_trajectories(folder)
    how: dict[str, Any] = {"title": "recording BF16", "processes": processes}
    recorded = record_all(open(source, placed), prompts, settings, sampler, **how)
    if folder is not None and processes.rank == 0:
        with folder_when_complete(folder) as partial:
            save_trajectories(partial, recorded, sampler)
            sums = {name: sha256_of(partial / name) for name in (TENSORS, INDEX)}
            write_json(partial / SUMS, sums)
    return recorded, sampler


def _key(
    source: Path,
    prompts: Sequence[Prompt],
    settings: Calibration,
    sampler: Sampler,
    device: torch.device,
) -> str:
    """Return a short hash (12 hexadecimal digits) of all that recorded trajectories depend on."""
    threads = torch.get_num_threads() if device.type == "cpu" else None
    facts = [
        fingerprint(Checkpoint.open(source)), [[prompt.ids, prompt.thinking] for prompt in prompts],
        settings.counted(), asdict(sampler), code_digest(), launches_of(device), threads,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _is_whole(folder: Path) -> bool:
    """Return whether a folder holds trajectories as they were written."""
    try:
        sums = read_json(folder / SUMS)
        return all(sha256_of(folder / name) == sums.get(name) for name in (TENSORS, INDEX))
    except (OSError, InputError):
        return False
