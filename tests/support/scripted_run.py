"""A run folder as the stages before the report leave it, in seconds: scripted servers answer.

The tasks are GSM8K's sample and a mock GPQA file whose every text holds a marker.
"""

import csv
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.host.files import write_json
from quantize.recipe.reading import parse_recipe, shipped_recipes
from quantize.recipe.sections import Evaluation, Recipe
from quantize.recovery.samples import Completion, Finished, Request, Waiting
from quantize.runs.digests import sha256_of
from quantize.runs.folder import RunDir
from quantize.runs.manifest import fingerprint, new_manifest
from quantize.stages.evaluate import compared_models, evaluate

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"
MARKER = "MARKERSTRING"
TASKS = ("gsm8k", "gpqa_diamond")
HOSTILE = "</script><b>&\n"


class Scripted:
    """A served model that knows every answer; the quantized one forgets some."""

    loading_seconds = 0.0

    def __init__(
        self, urls: Sequence[str], in_flight: int, digest: str, revision: str | None
    ) -> None:
        (url,) = urls
        self.servers = SimpleNamespace(all=[SimpleNamespace(url=url, commit_pass="scripted")])
        self.sampler_settings = {"sampler": "scripted"}
        self.forgets = url == "quantized"
        self.made_with = {"model": {"served": url, "weights": None, "revision": "v1"}}
        rows = [json.loads(line) for line in GSM8K.read_text("utf-8").splitlines()]
        self.truth = {row["question"]: row["answer"].split("#### ")[1] for row in rows}

    def __call__(self, requests: Waiting) -> Iterator[Finished]:
        for request in requests:
            forgotten = request.seed % (4 if self.forgets else 9) == 0
            text = "?" if forgotten else self.answer(request.prompt)
            yield request, Completion(text, 5, [], False)

    def release(self) -> None:
        """Hold nothing."""

    def answer(self, prompt: str) -> str:
        if MARKER not in prompt:
            return f"#### {self.truth[prompt.partition(chr(10) * 2 + 'Think step')[0]]}"
        right = next(line for line in prompt.splitlines() if line.endswith(".0"))
        return f"{MARKER} it is. The answer is {right[:3]}"


def mock_data(folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(GSM8K, folder / "gsm8k.jsonl")
    with (folder / "gpqa_diamond.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["Question", "Correct Answer"] + [f"Incorrect Answer {i}" for i in (1, 2, 3)]
        )
        for i in range(12):
            writer.writerow([f"{MARKER}q{i}", *(f"{MARKER}o{i}.{j}" for j in range(4))])
    return folder


def recipe() -> Recipe:
    fields = yaml.safe_load(shipped_recipes()["nvfp4_w4a4"])
    fields["evaluation"] = {"tasks": list(TASKS), "repeats": {"gpqa_diamond": 2}}
    fields["gate"] = {
        "estimand": "these_questions",
        "margin_pp": dict.fromkeys(TASKS, 20),
        "max_kl_nats": {"none": 0.02},
    }
    return parse_recipe(yaml.safe_dump(fields), "test")


def make_run(folder: Path, data: Path, *, seed: int = 0) -> RunDir:
    """A run folder as the stages before the report leave it."""
    run, source = RunDir(folder), Checkpoint.open(CHECKPOINT)
    folder.mkdir()
    run.checkpoint.symlink_to(CHECKPOINT)
    write_json(run.manifest_json, new_manifest(source, fingerprint(source), "nvfp4", None))
    experts = {f"model.decoder.layers.{i}.experts.down_proj": 0.095 for i in range(6)}
    checks = [{"name": "layout", "looked_at": 7, "passed": True, "faults": []}]
    write_json(run.verification_json, {"passed": True, "checks": checks, "relative_error": experts})
    settings = Evaluation(**recipe().evaluation.model_dump() | {"seed": seed})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compared_models, "ServedModel", Scripted)
        evaluate.evaluate(
            run,
            CHECKPOINT,
            "digest",
            settings,
            gate=recipe().gate,
            go_on=True,
            options=compared_models.ModelOptions(
                noise_floor=True, servers=["quantized"], base_servers=["bf16"]
            ),
            data_dir=data,
        )
    return run


def add_optional_parts(run: RunDir) -> None:
    """What only some runs have: coverage, fidelity, recorded canvases."""
    run.calibration.mkdir()
    coverage = {"tokens_per_expert": {"0": [3, 0], "1": [500, 9]}, "min_tokens_per_expert": 4}
    write_json(run.calibration / "coverage.json", coverage | {"fallbacks": ["layers.0.experts.1"]})
    value = {"mean": 0.01, "interval": [0.0, 0.02]}
    names = ("kl_nats", "top1_agreement", "acceptance_jaccard", "commit_agreement")
    hit = {"bf16": 7.5, "quantized": 7.25}
    step = {"step": 1, "canvases": 2, "kl_nats": 0.1, "top1_agreement": 1.0, "experts_hit": hit}
    step |= {"routing_overlap": 0.9, "routing_p10": 0.75, "routing_moved": 0.02}
    bin_ = {"nats_from": 0.0, "positions": 9, "kl_nats": 0.1, "top1_agreement": 1.0}
    replay = dict.fromkeys(names, value) | {"routing_overlap": [1.0, 0.9]}
    counts = {name: {"step": number, "canvas": number + 1} for name, number in hit.items()}
    replay |= {"by_step": [step], "by_entropy": [bin_]}
    replay["routing"] = {"p10": [1.0, 0.75], "moved": [0.0, 0.026], "experts_hit": counts}
    own = replay | {"activations": "none"}
    write_json(
        run.fidelity_json,
        {
            "trajectories": 1,
            "max_kl_nats": {"none": 0.02},
            "faults": [],
            "activations": {"none": replay},
            "own_conditioning": own,
            "min_routing_overlap": {"none": 0.5},
            "routing_cost": {
                "activations": "none",
                "as_it_is": value,
                "with_bf16_choices": value | {"mean": 0.007},
                "bf16_with_its_choices": value | {"mean": 0.002},
                "choices_add": {"mean": 0.003, "interval": [0.001, 0.005]},
            },
        },
    )
    for side, second in (("bf16", "1 1"), ("quantized", "0 1")):
        steps = [
            {"canvas": 0, "ids": "0 0", "accepted": "01"},
            {"canvas": 0, "ids": second, "accepted": "11"},
        ]
        scores = sha256_of(run.evaluation / side / "gsm8k.jsonl")
        asked = {"question": 0, "repeat": 0, "prompt": HOSTILE, "text": ""}
        recorded = {
            "of": {"answers": [[0, 0]], "scores": scores[:16]},
            "vocabulary": {"0": HOSTILE, "1": "b"},
            "samples": [asked | {"steps": steps}],
        }
        write_json(run.evaluation / side / "gsm8k.canvases.json", recorded)


def steps_of(*frames: str, canvas: int = 0) -> list[dict[str, Any]]:
    """Steps of a canvas from "ids accepted"."""
    pairs = (frame.rsplit(" ", 1) for frame in frames)
    return [{"canvas": canvas, "ids": ids, "accepted": accepted} for ids, accepted in pairs]


class Recorder:
    """Stands in for a model whose denoising is recorded; keeps what it was asked."""

    def __init__(self, steps: list[dict[str, Any]] | None = None) -> None:
        self.asked: list[Request] = []
        self.steps = steps or steps_of("1 2 11")

    def record(self, requests: Sequence[Request]) -> dict[str, Any]:
        self.asked += requests
        samples = [{"prompt": r.prompt, "steps": self.steps, "text": "?"} for r in requests]
        return {"vocabulary": {"1": "a", "2": "b"}, "samples": samples}

    def release(self) -> None:
        """Hold nothing."""
