"""Score BF16 and quantized alike: same harness, prompts, seeds, sampler and batches.

Weights are dequantized and, for the quantized model, activations rounded as the recipe's
`evaluation.activations` says, so the accuracy of W4A4 can be scored without a Blackwell GPU. On a CPU
everything runs in float32 (the BF16 model too: its weights are BF16 values), on a GPU in BF16.

BF16 scores do not depend on the recipe, so runs share them: finished samples lie beside the runs in
`.bf16/`, under a hash of the model's fingerprint and everything the scores depend on.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from recovery.samples import Completion, Request, SampleStore
from recovery.scoring import Scoring, known_tasks, score
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.bundled import HELDOUT
from quantize.errors import InputError, ResourceError
from quantize.load import load
from quantize.progress import track
from quantize.recipe import ActivationMode, Evaluation
from quantize.run_dir import RunDir, write_json, write_text
from quantize.runtime import Sampler, generate
from quantize.runtime.chat import encode_chat, load_tokenizer

BF16 = "bf16"
BUNDLED_TASKS = ("word_problems", "word_problems_thinking")


def evaluate(
    run: RunDir,
    source: Path,
    digest: str,
    settings: Evaluation,
    *,
    modes: Sequence[ActivationMode] = (),
    data_dir: Path | None = None,
    device: str = "cpu",
) -> None:
    """Score every task of the recipe on BF16 and quantized; write evaluation/<side>/<task>.jsonl.

    Args:
        run: where the quantized checkpoint is and the scores go.
        source: folder of the BF16 checkpoint.
        digest: its fingerprint.
        settings: tasks, limits, repeats, seed.
        modes: activation modes to score besides the recipe's.
        data_dir: folder with <task>.jsonl files in place of data sets on the Hub.
        device: where the models run.

    Raises:
        InputError: an unknown task. ResourceError: a data set that cannot be had.
    """
    if unknown := sorted(set(settings.tasks) - set(known_tasks())):
        known = ", ".join(known_tasks())
        raise InputError(f"evaluation: no task named {unknown[0]!r}; there are: {known}")
    data = {task: data_file(task, data_dir) for task in settings.tasks}
    for side, mode in sides(settings.activations, modes):
        folder = source if side == BF16 else run.checkpoint
        missing = [t for t in settings.tasks if not (run.evaluation / side / f"{t}.jsonl").exists()]
        if not missing:
            continue
        sampler = Sampler.from_checkpoint(source)
        answer = Answerer(folder, mode, sampler, device)
        for task in missing:
            kept = _store_path(run, side, task, settings, sampler, digest, device)
            scoring = score(
                task,
                SampleStore(kept),
                answer,
                data_file=data[task],
                limit=settings.limit.get(task),
                repeats=settings.repeats.get(task, 1),
                seed=settings.seed,
                batch_size=settings.batch_size,
                sampler=asdict(sampler) | {"dtype": str(answer.dtype)},
                progress=lambda batches, task=task, side=side: _track(batches, task, side),
            )
            _write(run.evaluation / side, scoring)
            if side != BF16:
                kept.unlink(missing_ok=True)
    write_json(run.evaluation / "done.json", {"tasks": settings.tasks})


def sides(
    gated: ActivationMode, more: Sequence[ActivationMode]
) -> list[tuple[str, ActivationMode]]:
    """Return (folder name, activation mode) of everything scored; the gate reads the first two."""
    named: list[tuple[str, ActivationMode]] = [(BF16, "none"), ("quantized", gated)]
    for mode in more:
        side = f"quantized-{mode.replace('_', '-')}"
        if mode != gated and (side, mode) not in named:
            named.append((side, mode))
    return named


def data_file(task: str, data_dir: Path | None) -> Path | None:
    """Return the local file of a task, None when its data set comes from the Hub.

    Raises:
        ResourceError: `data_dir` has no such file.
    """
    if data_dir is not None:
        path = data_dir / f"{task}.jsonl"
        if not path.is_file():
            raise ResourceError(f"{path}: no such data set; put the task's jsonl there")
        return path
    return HELDOUT if task in BUNDLED_TASKS else None


class Answerer:
    """A model, its tokenizer and sampler: answers a batch of requests."""

    def __init__(
        self, folder: Path, activations: ActivationMode, sampler: Sampler, device: str
    ) -> None:
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.folder = folder
        self.activations: ActivationMode = activations
        self.device = device
        self.sampler = sampler
        self.tokenizer = load_tokenizer(folder)
        self._model: DiffusionGemmaForBlockDiffusion | None = None

    @property
    def model(self) -> DiffusionGemmaForBlockDiffusion:
        """The model, loaded when it is first needed: a finished task needs none."""
        if self._model is None:
            self._model = load(
                self.folder, activations=self.activations, dtype=self.dtype, device=self.device
            )
        return self._model

    def __call__(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer requests of one task as one batch."""
        prompts = [
            encode_chat(
                self.tokenizer, [{"role": "user", "content": r.prompt}], thinking=r.thinking
            )
            for r in requests
        ]
        samples = generate(
            self.model,
            prompts,
            [r.seed for r in requests],
            max_new_tokens=max(r.max_new_tokens for r in requests),
            sampler=self.sampler,
        )
        return [
            Completion(
                text=self.tokenizer.decode(sample.tokens, skip_special_tokens=False),
                tokens=sample.new_tokens,
                denoising_steps=sample.steps_per_canvas,
                truncated=sample.finish == "length",
            )
            for sample in samples
        ]


def _track(batches: Iterable[list[Request]], task: str, side: str) -> Iterable[list[Request]]:
    return track(batches, f"{task}, {side}")


def _store_path(
    run: RunDir,
    side: str,
    task: str,
    settings: Evaluation,
    sampler: Sampler,
    digest: str,
    device: str,
) -> Path:
    """Return where finished samples are kept: in the run, or shared by runs for BF16."""
    if side != BF16:
        return run.evaluation / side / f"{task}.partial.jsonl"
    depends_on = [
        digest,
        settings.model_dump(mode="json", include={"limit", "repeats", "seed", "batch_size"}),
        asdict(sampler),
        device,
        torch.get_num_threads(),
        torch.__version__,
    ]
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:12]
    return run.path.parent / ".bf16" / key / f"{task}.jsonl"


def _write(folder: Path, scoring: Scoring) -> None:
    """Write conditions, then rows: the rows' presence says that the task is done."""
    conditions: dict[str, Any] = scoring.conditions
    write_json(folder / f"{scoring.task}.conditions.json", conditions)
    rows = [json.dumps(asdict(row), ensure_ascii=False) for row in scoring.rows]
    write_text(folder / f"{scoring.task}.jsonl", "\n".join(rows) + "\n")
