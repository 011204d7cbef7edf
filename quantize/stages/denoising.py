"""Denoises a recipe's calibration prompts, for the stages calibrate and round.

If the recipe rounds with GPTQ, calibrate records in a scratch folder what enters the first layer
(`record.recording`). The stage round repeats a missing or damaged recording, and removes the folder
at its end. Results depend on the batch size. So the size is never changed to save memory: a batch
that does not fit is an error. If weights are streamed, batches denoise in lockstep.
"""

import hashlib
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from quantize.checkpoints.reader import Checkpoint
from quantize.errors import ResourceError
from quantize.host.processes import ALONE, Processes
from quantize.recipe.sections import Calibration
from quantize.runs.manifest import fingerprint, package_versions
from quantize.runtime import Placement, open
from quantize.runtime.engine.interface import BatchEngine, Engine
from quantize.runtime.gpu.gpus import launches_of
from quantize.runtime.model.watching import Observer
from quantize.runtime.record.recording import PassesShape, Recorder, Recording
from quantize.runtime.record.trajectory import Trajectory, context_of, record_all
from quantize.runtime.sampler.sampler import Sampler
from quantize.stages.memory_needs import HELD_OUT
from quantize.stages.prompts import load_prompts

NEEDED = ("torch", "triton", "transformers")  # packages that results depend on
SCRATCH = "scratch"  # folder beside a stage's result


class Denoising:
    """Denoises the calibration prompts with the BF16 checkpoint in the folder `source`.

    If `held_out` is set, HELD_OUT more prompts are denoised for the replay; observers do not see them.

    Raises:
        InputError, ResourceError: the prompts or the checkpoint are wrong or missing.
    """

    def __init__(
        self, source: Path, settings: Calibration, place: Placement, *, held_out: bool = False
    ) -> None:
        self._source, self._settings, self._place = source, settings, place
        self._held_out = HELD_OUT if held_out else 0
        self._prompts = load_prompts(source, settings, settings.prompts + self._held_out)
        self.sampler = Sampler.from_checkpoint(source)

    @cached_property
    def identity(self) -> str:
        """A digest of what a recording depends on: checkpoint, prompts, settings, versions, device."""
        versions = package_versions()
        observed = self._prompts[: self._settings.prompts]
        facts = [
            fingerprint(Checkpoint.open(self._source)), self._settings.counted(),
            [[prompt.ids, prompt.thinking] for prompt in observed],
            {name: versions.get(name) for name in NEEDED},
            launches_of(torch.device(self._place.device)),
        ]  # fmt: skip
        digest = hashlib.sha256(json.dumps(facts).encode())
        for prompt in observed:
            if prompt.images is not None:
                digest.update(prompt.images.pixels.numpy().tobytes())
        return digest.hexdigest()

    def run(
        self,
        *,
        title: str,
        observers: Sequence[Observer] = (),
        recorder: Recorder | None = None,
        processes: Processes = ALONE,
    ) -> list[Trajectory]:
        """Denoise all prompts, in batches that `processes` share; return each prompt's trajectory.

        `observers` (as in `BatchEngine.watching`) and `recorder` see no held-out prompt.

        Raises:
            ResourceError: a batch does not fit the GPU, or scratch is full.
        """
        engine = self._opened()

        @contextmanager
        def watching(engine: BatchEngine, start: int) -> Generator[None]:
            recording = nullcontext() if recorder is None else recorder.batch(start)
            with recording as add, engine.watching(*observers, on_pass=add):
                yield

        recorded = record_all(
            engine, self._prompts, self._settings, self.sampler, title=title,
            processes=processes, held_out=self._held_out, watching=watching,
        )  # fmt: skip
        if recorder is not None:
            recorder.finish(self.identity, PassesShape(engine.capacity, engine.max_length))
        engine.close()
        return recorded

    def _opened(self) -> Engine:
        size = self._settings.batch_size
        ids = [prompt.ids for prompt in self._prompts]
        context = context_of(self._source, ids, self._settings.canvases)
        batches = sum(-(-n // size) for n in (self._settings.prompts, self._held_out))
        place = replace(
            self._place, capacity=size, max_context=context, batches=batches, fixed_batch=True
        )
        return open(self._source, place)

    def recording(self, folder: Path) -> Recording:
        """Return the recording of these prompts in `folder`; make it again if it is missing or damaged.

        Raises:
            ResourceError: a batch does not fit the GPU, or scratch is full.
        """
        hidden = Checkpoint.open(self._source).config["text_config"]["hidden_size"]
        recording = Recording.find(folder, self.identity, 2 * hidden)
        if recording is None:
            self.run(title="recording what enters the first layer", recorder=Recorder(folder))
            recording = Recording.find(folder, self.identity, 2 * hidden)
        if recording is None:
            raise ResourceError(
                f"{folder}: what was just recorded there is gone or damaged; check the disk, or name "
                f"another with --scratch; the same command goes on"
            )
        return recording
