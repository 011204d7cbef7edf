"""Scoring on several processes gives the scores of one; servers and noise floor through evaluate."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError, ResourceError
from quantize.host.files import write_json
from quantize.host.processes import joined
from quantize.pipeline.stages import Run, evaluate_more
from quantize.recipe.reading import load_recipe, shipped_recipes
from quantize.recipe.sections import Evaluation, Gate, OperatingPoint
from quantize.recovery.samples import Completion, Request, Waiting
from quantize.runs.folder import RunDir
from quantize.runs.models import FURTHER
from quantize.runtime import Placement, Sampler
from quantize.schemes.modes import ACTIVATION_MODES
from quantize.stages.evaluate.compared_models import (
    ComparedModel,
    ModelOptions,
    ServedModel,
    candidates,
    open_models,
    warn_of_servers,
)
from quantize.stages.evaluate.evaluate import check_alike, evaluate
from quantize.stages.evaluate.local_model import Answerer
from tests.support.two_processes import in_two

PLACE = Placement(activations="none")
PROBLEMS, BATCH = 28, 4  # looked at after 20 problems, and after all


def test_sides_have_names_of_their_own() -> None:
    assert candidates("per_layer", ["none", "per_layer", "per_expert", "fp8"]) == [
        ("quantized", "per_layer"),
        ("quantized-none", "none"),
        ("quantized-per-expert", "per_expert"),
        ("quantized-fp8", "fp8"),
    ]
    for gated in ACTIVATION_MODES:  # the report finds them all
        (_, *more) = candidates(gated, ACTIVATION_MODES)
        assert all(FURTHER[name] == mode for name, mode in more)
        assert len(more) == len(ACTIVATION_MODES) - 1


def test_points_share_the_error_of_one_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of four is asked until it is certain at a quarter of the error; none is given up."""
    gates: list[Gate] = []

    def ask(
        _: object,
        models: Sequence[Any],
        __: object,
        gate: Gate,
        *,
        go_on: bool,
        least_chance: float,
    ) -> None:
        assert models[0].name == "bf16"
        assert not go_on
        assert least_chance == 0
        gates.append(gate)

    module = sys.modules[evaluate.__module__]
    monkeypatch.setattr(module, "_ask_until_decided", ask)
    models: list[Any] = [SimpleNamespace(name=name) for name in ("bf16", *"abcd")]
    gate = Gate(estimand="such_questions", confidence=0.9, max_step_inflation=0.1)
    module._ask_points(cast(Any, None), models[0], models[1:], [], gate, go_on=False)
    assert [asked.confidence for asked in gates] == pytest.approx([0.975] * 4)
    assert {asked.max_step_inflation for asked in gates} == {None}
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("its verdict is provisional, the report decides by Holm's correction") == 4


def test_a_mode_that_means_nothing_ends_before_anything_is_scored(
    tiny_checkpoint: Path, fp8_artifact: Path
) -> None:
    settings = Evaluation(tasks=["word_problems"])
    with pytest.raises(InputError, match="activations fp8 are for NVFP4 weights"):
        open_models(tiny_checkpoint, "", fp8_artifact, settings, ModelOptions(modes=["fp8"]), 64)


def test_each_model_is_planned_in_its_own_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off Hopper experts take 8 bits under `fp8`: planned without a mode, 10 GB more were held."""
    planned: list[tuple[Path, str | None, int | None]] = []

    def opened(folder: Path, _: str, __: Sampler, place: Placement, ___: object) -> object:
        planned.append((folder, place.activations, place.max_context))
        return object()

    monkeypatch.setattr("quantize.stages.evaluate.compared_models.Answerer", opened)
    monkeypatch.setattr("quantize.stages.evaluate.compared_models.check_mode", lambda *_: None)
    settings = Evaluation(tasks=["word_problems"], activations="per_layer")
    points = {"fast": OperatingPoint(activations="per_expert")}
    options = ModelOptions(modes=["fp8"], noise_floor=True, points=points)
    open_models(CHECKPOINT, "", CHECKPOINT, settings, options, 64)
    modes = ["per_layer", "fp8", "none", "per_expert"]
    assert planned == [(CHECKPOINT, mode, 64) for mode in modes]


@pytest.mark.parametrize("one", ["servers", "base_servers"])
def test_both_models_are_served_or_neither(one: str, tmp_path: Path) -> None:
    settings = Evaluation(tasks=["word_problems"])
    gate = Gate(estimand="these_questions", margin_pp={"word_problems": 3})
    served: dict[str, Any] = {one: ["http://127.0.0.1:9"]}
    with pytest.raises(InputError, match="go together"):
        evaluate(
            RunDir(tmp_path), tmp_path, "", settings, gate=gate, options=ModelOptions(**served)
        )


@pytest.mark.parametrize(
    ("commit_pass", "token_limit", "warned"),
    [(None, 65, 1), (None, 64, 0), ("repaired", 65, 0)],
)
def test_a_server_that_may_encode_canvases_wrongly_is_warned_of(
    commit_pass: str | None, token_limit: int, warned: int, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = ServedModel.__new__(ServedModel)
    server = SimpleNamespace(url="http://x/v1", commit_pass=commit_pass)
    backend.servers = cast(Any, SimpleNamespace(all=[server]))
    warn_of_servers([ComparedModel(name, backend, 0) for name in ("one", "two")], token_limit, 64)
    said = "".join(capsys.readouterr())
    assert said.count("warning:") == warned
    assert ("vllm_plugin" in said) == bool(warned)


def test_a_sample_of_the_kernels_depends_on_its_request_alone() -> None:
    """Not on what else is asked for, its order, or who shared its canvases; slots are refilled."""
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()[:5]]
    limits = 128, 128, 64, 128, 64
    requests = [Request(r["question"], 7 + i, limits[i]) for i, r in enumerate(rows)]
    sampler = Sampler.from_checkpoint(CHECKPOINT)

    def answers(asked: Sequence[Request]) -> dict[Request, Completion]:
        model = Answerer(CHECKPOINT, "", sampler, PLACE, capacity=2)
        assert model.sampler_settings["batch_invariant"]
        found = dict(model(Waiting(asked, iter(asked))))
        model.release()
        return found

    def beginnings(request: Request) -> dict[Request, Completion]:
        model = Answerer(CHECKPOINT, "", sampler, PLACE, capacity=2)
        model.also_at = (64,)
        found = dict(model(Waiting([request], iter([request]))))
        model.release()
        return found

    together = answers(requests)
    assert max(len(c.denoising_steps) for c in together.values()) == 2
    for asked in requests[0], requests[1]:  # with fewer tokens, they are the same but cut
        shorter = replace(asked, max_new_tokens=64)
        assert beginnings(asked) == {asked: together[asked]} | answers([shorter])
    assert len(together) == 5
    assert all(len(c.denoising_steps) <= r.max_new_tokens / 64 for r, c in together.items())
    assert any("####" in each.text for each in together.values())
    assert answers(requests[:0:-2]) == {r: together[r] for r in requests[:0:-2]}


def test_tokens_are_told_of_before_their_sample_is_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that minutes in which one sample is denoised show something; what is told is what comes.

    An open model reads none of its checkpoint's headers again: those of NVFP4 take half a second.
    """
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()[:4]]
    requests = [Request(row["question"], 7 + i, 128) for i, row in enumerate(rows)]
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    model = Answerer(CHECKPOINT, "", sampler, replace(PLACE, max_context=1024))
    told: list[tuple[int, int]] = []
    model.announce = lambda samples, tokens: told.append((samples, tokens))
    monkeypatch.setattr("quantize.host.progress.console.width", 1000)  # or COLUMNS wraps lines
    model.engine(0)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "open", lambda _: pytest.fail("headers are read again"))
        completions = [done for _, done in model(Waiting(requests, iter(requests)))]
    model.release()
    assert len(told) == sum(len(c.denoising_steps) for c in completions) >= len(requests)
    assert sum(tokens for _, tokens in told) == sum(c.tokens for c in completions)
    assert not any(n for n, _ in told)  # each sample is handed over as it is finished
    parts = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()[-2:]]
    assert parts[0].startswith("loaded in ")
    assert re.fullmatch(r"the first canvas [0-9.]+ s later", parts[1])  # no kernel on a CPU


def test_a_batch_size_for_the_machine_overrules_the_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []

    def note(
        run: object, source: object, digest: object, settings: Evaluation, **_: object
    ) -> dict[str, Any]:
        seen.append(settings.batch_size)
        return {}

    monkeypatch.setattr("quantize.stages.evaluate.evaluate.evaluate", note)
    recipe = load_recipe("fp8_dynamic").for_bundled_model()
    found = Run(RunDir(tmp_path), recipe, Checkpoint.open(CHECKPOINT), [], is_bundled=True)
    write_json(found.folder.manifest_json, {"source": {"fingerprint": ""}, "stages": {}})
    served = {"servers": ["http://x"], "base_servers": ["http://y"]}
    evaluate_more(found, batch_size=500)
    evaluate_more(found)
    assert seen == [500, recipe.evaluation.batch_size]
    with pytest.raises(InputError, match=r"max_step_inflation, 0\.1, cannot be judged"):
        replace(found, options=served)
    gate = recipe.gate.model_copy(update={"max_step_inflation": None})
    health = gate.model_copy(update={"health_pp": {"never_stopped": 5.0}})
    with pytest.raises(InputError, match=r"health_pp\.never_stopped, 5, cannot be judged"):
        replace(found, recipe=recipe.model_copy(update={"gate": health}), options=served)
    recipe = recipe.model_copy(update={"gate": gate})
    evaluate_more(replace(found, recipe=recipe, options=served), **served)
    assert len(seen) == 3


def test_processes_that_would_answer_otherwise_are_refused(tmp_path: Path) -> None:
    """Less free memory on one GPU means fewer samples a pass, and such answers round otherwise."""

    def check(rank: int) -> None:
        made = {"model": {"capacity": 16 - 8 * rank}, "device": "H200"}
        model = ComparedModel("bf16", cast(Any, SimpleNamespace(made_with=made)), 0)
        said = "alike"
        with joined() as processes:
            try:
                check_alike([model], processes)
            except ResourceError as error:
                said = str(error)
        (tmp_path / str(rank)).write_text(said)

    in_two(check)
    assert (tmp_path / "0").read_text() == "alike"
    assert (
        "process 2 of 2: bf16 would answer with model.capacity 8, in the first process 16"
        in (tmp_path / "1").read_text()
    )


def run(command: Sequence[str]) -> str:
    """Run with one thread a process: sums in another order would be other float32 numbers."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("WORLD_SIZE", None)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=500, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def converted(recipe: Path, out: Path) -> Path:
    run([sys.executable, "-m", "quantize", "run", "--recipe", str(recipe), "--until", "convert",
         "--out", str(out)])  # fmt: skip
    (folder,) = out.glob("small-*")
    return folder


@pytest.mark.slow
def test_two_processes_give_the_scores_of_one(tmp_path: Path) -> None:
    """They are launched as on two machines, which share the run's folder alone, over loopback."""
    fields = yaml.safe_load(shipped_recipes()["fp8_dynamic"]) | {"name": "small"}
    fields["bundled"]["evaluation"] |= {
        "limit": {"word_problems": PROBLEMS},
        "repeats": {"word_problems": 2},
        "batch_size": BATCH,
    }
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(fields))
    one, two = converted(recipe, tmp_path / "one"), converted(recipe, tmp_path / "two")
    run([sys.executable, "-m", "quantize", "evaluate", str(one), "--all"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
              "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        machines = ([*launch, n, "-m", "quantize", "evaluate", str(two), "--all"] for n in "01")
        said = list(pool.map(run, machines))
    assert ["evaluate: done" in lines for lines in said] == [True, False]
    for side in ("bf16", "quantized"):
        name = f"evaluation/{side}/word_problems.jsonl"
        rows = [json.loads(line) for line in (one / name).read_text().splitlines()]
        assert len(rows) == PROBLEMS * 2
        assert 0 < sum(row["scores"]["final_number"] for row in rows) < len(rows)
        assert (one / name).read_bytes() == (two / name).read_bytes()
    shared = sorted((tmp_path / "two" / ".bf16").glob("*.jsonl*"))
    lines = [len(file.read_bytes().splitlines()) - 1 for file in shared]
    assert len(lines) == 2
    assert sum(lines) == PROBLEMS * 2  # of the answers to all problems, two to each
