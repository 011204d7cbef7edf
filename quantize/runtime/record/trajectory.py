"""Records denoising trajectories: what a model read at every step, so that another model can replay it.

A trajectory holds a prompt, the canvas ids that the decoder read at each step of each canvas, and the
committed canvases. With the sampler's settings, this is all that a teacher-forced replay needs, since
logits and self-conditioning are recomputed. A folder on disk has two files:

    trajectories.safetensors   <index>.prompt [n], <index>.steps [all steps, L], <index>.committed
                               [canvases, L]; all int32. For a prompt with pictures also
                               <index>.pixels and <index>.positions, as in `Images`
    trajectories.json          the sampler's settings; seed, thinking, held_out and steps_per_canvas
                               of each trajectory
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantize.checkpoints.reader import read_config
from quantize.errors import InputError
from quantize.host.files import read_json, write_json
from quantize.host.processes import ALONE, Processes
from quantize.host.progress import metered
from quantize.recipe.sections import Calibration
from quantize.runtime.engine.generate import OnStep, StepRecord, generate
from quantize.runtime.engine.interface import BatchEngine, Engine
from quantize.runtime.prompt.images import Images
from quantize.runtime.sampler.sampler import Sampler

Watching = Callable[[BatchEngine, int], AbstractContextManager[None]]
TENSORS, INDEX = "trajectories.safetensors", "trajectories.json"


@dataclass(frozen=True)
class Prompt:
    """One prompt; `images` are its pictures, None if it has none."""

    ids: tuple[int, ...]  # token ids
    thinking: bool  # whether its template opened the thinking channel
    images: Images | None = field(default=None, compare=False)

    def kind(self, window: int) -> str:
        """Return `pictures`, `past the window` (if longer than `window` tokens), or `text`."""
        if self.images is not None:
            return "pictures"
        return "past the window" if len(self.ids) > window else "text"


@dataclass(frozen=True)
class Trajectory:
    """One recorded sample."""

    prompt: Prompt
    seed: int  # of its noise
    held_out: bool  # whether calibration did not observe it
    steps: tuple[Tensor, ...]  # for each canvas int64 [steps, L], the ids that the decoder read
    committed: Tensor  # int64 [canvases, L], the committed ids


def record(
    engine: BatchEngine,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    *,
    sampler: Sampler,
    canvases: int,
    held_out: bool,
    on_step: OnStep | None = None,
) -> list[Trajectory]:
    """Generate up to `canvases` canvases per prompt as one batch; return one trajectory per prompt."""
    read: dict[tuple[int, int], list[Tensor]] = {}

    def remember(step: StepRecord) -> None:
        for row, ids in zip(step.rows, step.canvas_ids.cpu(), strict=True):
            read.setdefault((row, step.canvas), []).append(ids)
        if on_step is not None:
            on_step(step)

    samples = generate(
        engine,
        [prompt.ids for prompt in prompts],
        seeds,
        max_new_tokens=canvases * engine.canvas_length,
        sampler=sampler,
        on_step=remember,
        images=[prompt.images for prompt in prompts],
    )
    return [
        Trajectory(
            prompts[row],
            seeds[row],
            held_out,
            tuple(torch.stack(read[row, canvas]) for canvas in range(sample.canvases)),
            torch.tensor(sample.committed),
        )
        for row, sample in enumerate(samples)
    ]


def record_all(
    engine: Engine, prompts: Sequence[Prompt], settings: Calibration, sampler: Sampler, *,
    title: str, processes: Processes = ALONE, held_out: int = 0, watching: Watching | None = None,
) -> list[Trajectory]:  # fmt: skip
    """Record `prompts` in batches; return all trajectories, in the order of the prompts.

    `settings` has the number of canvases, the seed and the batch size. The seed of a prompt's noise
    follows from this seed and the prompt's index. `processes` share the batches, which do not depend on
    the number of processes. Each process returns all trajectories. `watching` is called with a batch's
    engine and the index of the batch's first prompt. It returns a context manager, in which the batch
    runs. The last `held_out` prompts have batches of their own, which are not watched.
    """
    observed, most = len(prompts) - held_out, settings.batch_size
    starts = processes.mine(range(0, observed, most))
    batches = {at: prompts[at : min(at + most, observed)] for at in starts}
    starts = processes.mine(range(observed, len(prompts), most))
    batches |= {at: prompts[at : at + most] for at in starts}
    held = sum(len(batch) for start, batch in batches.items() if start >= observed)
    about = [f"{held} held out for the replay"] * bool(held)
    about.append(f"at most {settings.canvases} canvases each")
    unit = f"prompts ({', '.join(about)})"
    with metered(title, sum(map(len, batches.values())), unit) as meter:

        def count(step: StepRecord) -> None:
            for ids in step.stopped()[1]:
                end = sampler.end_of(ids)
                meter.announce(0, len(ids) if end is None else end + 1)

        def recorded(start: int, lane: BatchEngine) -> list[Trajectory]:
            with watching(lane, start) if watching and start < observed else nullcontext():
                made = record(
                    lane,
                    batches[start],
                    [(settings.seed << 32) + start + row for row in range(len(batches[start]))],
                    sampler=sampler,
                    canvases=settings.canvases,
                    held_out=start >= observed,
                    on_step=count,
                )
            meter.add(len(made))
            return made

        batches_made = engine.each([partial(recorded, start) for start in batches])
    trajectories = [trajectory for batch in batches_made for trajectory in batch]
    for theirs in processes.others(trajectories):
        trajectories += theirs
    return sorted(trajectories, key=lambda trajectory: trajectory.seed)


def context_of(checkpoint: Path, prompts: Sequence[Sequence[int]], canvases: int) -> int:
    """Return how many positions the longest of `prompts` takes, followed by `canvases` canvases."""
    length: int = read_config(checkpoint)["canvas_length"]
    return max(len(prompt) for prompt in prompts) + canvases * length


def longest(trajectories: Sequence[Trajectory]) -> int:
    """Return how many positions the longest trajectory takes, prompt and committed canvases."""
    return max(len(item.prompt.ids) + item.committed.numel() for item in trajectories)


def save_trajectories(folder: Path, trajectories: Sequence[Trajectory], sampler: Sampler) -> None:
    """Write `folder`'s two files (see the module); equal trajectories give equal bytes."""
    tensors: dict[str, Tensor] = {}
    entries: list[dict[str, Any]] = []
    for index, item in enumerate(trajectories):
        prompt = torch.tensor(item.prompt.ids, dtype=torch.int32)
        fields = {"prompt": prompt, "steps": torch.cat(item.steps).int()}
        fields |= {"committed": item.committed.int()}
        if item.prompt.images is not None:
            fields |= vars(item.prompt.images)
        tensors |= {f"{index:05}.{name}": tensor for name, tensor in fields.items()}
        taken = [len(steps) for steps in item.steps]
        about = {"seed": item.seed, "thinking": item.prompt.thinking, "held_out": item.held_out}
        entries.append(about | {"steps_per_canvas": taken})
    save_file(tensors, folder / TENSORS)
    write_json(folder / INDEX, {"sampler": asdict(sampler), "trajectories": entries})


def load_trajectories(folder: Path) -> tuple[list[Trajectory], Sampler]:
    """Return the trajectories and sampler that were saved; raise InputError if a file is missing."""
    for name in (TENSORS, INDEX):
        if not (folder / name).is_file():
            raise InputError(f"{folder / name}: no recorded trajectories there; run calibrate")
    index = read_json(folder / INDEX)
    tensors = load_file(folder / TENSORS)
    settings = index["sampler"] | {"eos_token_ids": tuple(index["sampler"]["eos_token_ids"])}

    def images_of(i: int) -> Images | None:
        pixels = tensors.get(f"{i:05}.pixels")
        return None if pixels is None else Images(pixels, tensors[f"{i:05}.positions"])

    trajectories = [
        Trajectory(
            Prompt(tuple(tensors[f"{i:05}.prompt"].tolist()), entry["thinking"], images_of(i)),
            entry["seed"],
            entry["held_out"],
            tensors[f"{i:05}.steps"].long().split(entry["steps_per_canvas"]),
            tensors[f"{i:05}.committed"].long(),
        )
        for i, entry in enumerate(index["trajectories"])
    ]
    return trajectories, Sampler(**settings)
