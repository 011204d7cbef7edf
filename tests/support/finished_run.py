"""A small run folder as `quantize run` leaves it, made up: no model, no pipeline, a few hundred KB."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save, save_file

from quantize.checkpoints.reader import Checkpoint, known_config
from quantize.host.files import write_json, write_text
from quantize.pipeline.stages import STAGES
from quantize.pipeline.staleness import input_digests, remember
from quantize.recipe.reading import load_recipe
from quantize.recovery.rows import Scoring
from quantize.reports.scores import write_scoring
from quantize.runs.folder import RunDir
from quantize.runs.manifest import checksums, fingerprint
from quantize.stages.report.report import judge_run
from tests.support.quick_run import rows

BASE = "google/diffusiongemma-26B-A4B-it"
COMMIT = "0f28bc42f588fbd8f71e08102b1c3960298a1358"
TARGETS = """\
tensor,class,scheme,reason_kept,shape,modules,bytes,bytes_after
model.decoder.layers.0.experts.gate_up_proj,experts,NVFP4,,8x64x64,16,65536,18432
model.decoder.layers.0.router.proj.weight,router,,routing decides,8x64,0,1024,1024
"""


def finished_run(
    folder: Path, *, outcome: str = "PASS", shards: int = 3, judged: bool = False
) -> RunDir:
    """Write the folder of a finished nvfp4 run of the real model with this verdict.

    Figures of the report are made up; with `judged` they are those of made-up scores.
    """
    run = RunDir(folder / "nvfp4-0123abc")
    write_checkpoint(run.checkpoint, shards)
    source = folder / "bf16"
    source.mkdir(exist_ok=True)
    for name, content in base_files().items():
        (source / name).write_bytes(content)
    recipe = load_recipe("nvfp4_w4a4").asking(["aime25", "gpqa_diamond", "gsm8k"])
    margins = dict.fromkeys(recipe.evaluation.tasks, 10.0)  # which 60 questions can decide
    recipe = recipe.model_copy(
        update={"gate": recipe.gate.model_copy(update={"margin_pp": margins})}
    )
    write_text(run.recipe_yaml, recipe.to_yaml())
    write_text(run.targets_csv, TARGETS)
    about = {"model": BASE, "bundled": False, "commit": COMMIT, "folder": str(source)}
    versions = {"torch": "2.13.0", "transformers": "5.17.0"}
    hardware = {"cpu": "a CPU", "cores": 2, "memory_bytes": 1, "gpus": []}
    manifest: dict[str, Any] = {"recipe": "nvfp4", "versions": versions, "hardware": hardware}
    manifest["source"] = {**about, "fingerprint": "ab" * 32, "bytes": 1}
    write_json(run.manifest_json, {**manifest, "stages": {}})
    artifact = Checkpoint.open(run.checkpoint)
    digest = fingerprint(artifact)
    verification = {"artifact": digest, "sha256": checksums(artifact), "passed": True, "checks": []}
    write_json(run.verification_json, verification | {"relative_error": {}})
    write_text(run.calibration / "input_scales.safetensors", "made up")
    write_json(run.fidelity_json, {"faults": [], **fidelity()})
    write_scores(run, recipe.evaluation.tasks, digest, outcome)
    report = {
        "format": 1,
        "model": manifest["source"],
        "artifact": digest,
        "recipe": {"name": "nvfp4", "scheme": "NVFP4"},
        "verdict": {
            "outcome": outcome,
            "reason": f"it ended in {outcome}",
            "exit_code": 0,
            "estimand": recipe.gate.estimand,
        },
        "tasks": [
            comparison(task, recipe.gate.margin_pp[task]) for task in recipe.evaluation.tasks
        ],
        "looks": {},
        "not_asked": [],
        "noise_floor": [comparison("gsm8k", 2)],
        "sizes": {"bf16_bytes": 66560, "quantized_bytes": 19456, "ratio": 0.2923}
        | {"quantized_modules": 16},
        "fidelity": fidelity(),
        "canvases": {"problems": [{"question": "A SECRET QUESTION"}]},
        "versions": versions,
        "hardware": hardware,
    }
    if judged:
        report |= judge_run(run, recipe)[0]
        assert report["verdict"]["outcome"] == outcome, report["verdict"]
    write_json(run.report_json, report)
    run.lock.touch()
    bless(run)
    return run


def base_files() -> dict[str, bytes]:
    """Return the files of the made-up base model that decide whether it is the Hub's."""
    weights = save({"w": np.ones(3, dtype=np.float32)})
    return {"config.json": b"{}", "model.safetensors": weights}


def write_scores(run: RunDir, tasks: list[str], digest: str, outcome: str) -> None:
    """Write scores of both sides that lead to a verdict."""
    questions = 20 if outcome == "INCONCLUSIVE" else 60
    lost = 30 if outcome == "FAIL" else 0
    dtype = "torch.bfloat16" if outcome == "NOT COMPARABLE" else "torch.float32"
    for task in tasks:
        for side, (model, wrong, made) in {
            "bf16": ("ab" * 32, 0, "torch.float32"),
            "quantized": (digest, lost, dtype),
        }.items():
            scores = [0.0] * wrong + [1.0] * (questions // 2 - wrong) + [0.0] * (questions // 2)
            made_with = {"model": {"weights": model, "activations": "per_layer"}, "dtype": made}
            made_with |= {"device": "cpu", "versions": {"torch": "2"}, "batch_size": 1, "seed": 0}
            scoring = Scoring(task, rows(scores), {"task": task, "seed": 0}, made_with)
            write_scoring(run.evaluation / side, scoring)
    looks = {task: {"taken": 1, "of": 1} for task in tasks}
    done = {"tasks": tasks, "not_asked": [], "looks": looks}
    write_json(run.evaluation / "done.json", done)


def bless(run: RunDir) -> None:
    """Enter every result as if its stage had just written it: what is wrong now, the stages did."""
    for stage in STAGES:
        remember(run, stage, input_digests(run, stage))


def write_checkpoint(folder: Path, shards: int, *, seed: int = 0) -> None:
    """Write shards of 200 KB, their index, and the small files of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed)
    weight_map: dict[str, str] = {}
    for shard in range(1, shards + 1):
        name = f"model-{shard:05}-of-{shards:05}.safetensors"
        weight_map[f"w{shard}"] = name
        save_file({f"w{shard}": noise.random(50_000, dtype=np.float32)}, folder / name)
    known = known_config("google/diffusiongemma-26B-A4B-it")
    assert known is not None
    config = known | {"quantization_config": {"quant_method": "compressed-tensors"}}
    index = {"metadata": {}, "weight_map": weight_map}
    for name, value in {
        "config.json": config,
        "generation_config.json": {"max_new_tokens": 256},
        "model.safetensors.index.json": index,
        "tokenizer.json": {"vocab": {str(i): i for i in range(20_000)}},  # large enough for LFS
    }.items():
        write_text(folder / name, json.dumps(value))
    write_text(folder / "LICENSE", "Apache License 2.0\n")
    write_text(folder / "NOTICE", "Made by somebody.\n")


def comparison(task: str, margin: float) -> dict[str, Any]:
    """Return a report's entry of one task."""
    return {
        "task": task,
        "activations": "per_layer",
        "gated": True,
        "not_comparable": None,
        "max_step_inflation": 0.1,
        "estimand": "these_questions",
        "questions": 198,
        "repeats": 32,
        "base": 0.641,
        "base_interval": {"low": 0.58, "high": 0.7},
        "quantized": 0.634,
        "quantized_interval": {"low": 0.575, "high": 0.69},
        "difference_pp": -0.7,
        "difference_interval": {"low": -1.9, "high": 0.5},
        "other_interval": {"low": -2.6, "high": 1.2},
        "recovery": 98.9,
        "recovery_interval": {"low": 97.1, "high": 100.8},
        "step_inflation": {"ratio": 1.006, "low": 0.996, "high": 1.016},
        "margin_pp": margin,
        "confidence": 0.95,
    }


def fidelity() -> dict[str, Any]:
    """Return a report's fidelity of one activation mode."""
    value = {"mean": 0.9123, "interval": [0.9, 0.92]}
    names = ("kl_nats", "top1_agreement", "acceptance_jaccard", "commit_agreement")
    found: dict[str, Any] = dict.fromkeys(names, value) | {"by_entropy": []}
    own = found | {"activations": "per_layer"}
    return {"max_kl_nats": {}, "activations": {"per_layer": found}, "own_conditioning": own}
