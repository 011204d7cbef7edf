"""A checkpoint that was built elsewhere is judged as a run is, and nothing is written into it.

The checkpoint of a finished run stands for somebody else's.
"""

import shutil
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

import quantize
from quantize.errors import GateError
from quantize.host.files import read_json, write_json
from quantize.pipeline import judge
from quantize.recipe.reading import read_recipe
from quantize.reports.compare import compare_runs, comparison_table
from quantize.runs.folder import RunDir
from quantize.runs.weights import Weights
from quantize.stages.evaluate.compared_models import ModelOptions
from tests.support.quick_run import TASK, Quick, made_up_replay, made_up_scores


def test_a_checkpoint_is_judged(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = quick.folder.checkpoint
    before = {path: path.read_bytes() for path in theirs.iterdir()}
    words = ("judge", theirs, "--against", quick.model, "--recipe", quick.recipe)
    words = (*words, "--out", quick.out)
    done = quick(*words)
    assert done.code == 0, done.err
    assert done.redone() == ["plan", "convert", "verify", "fidelity", "evaluate", "report"]
    assert "quantized Linears" in done.out  # the inspection
    (folder,) = quick.out.glob("judge-*")
    report = read_json(folder / "report.json")
    ours = read_json(quick.folder.report_json)
    assert report["artifact"] == ours["artifact"]
    for key in ("bf16_bytes", "quantized_modules"):
        assert report["sizes"][key] == ours["sizes"][key]
    assert (folder / "report.html").exists()
    assert {path: path.read_bytes() for path in theirs.iterdir()} == before
    again = quick(*words)
    assert again.code == 2
    assert "--resume continues or shows it" in again.last
    shown = quick(*words, "--resume")
    assert (shown.code, shown.redone()) == (0, [])
    asked = (theirs, quick.model, str(quick.recipe), quick.out)
    assert quantize.judge(*asked, resume=True) == report
    stages = read_json(folder / "stages.json")
    del stages["convert"]  # as a kill behind the link leaves it
    write_json(folder / "stages.json", stages)
    linked = quick(*words, "--resume")
    assert (linked.code, linked.redone()) == (0, ["convert"])
    pair = quantize.compare(quick.folder.path, folder)
    assert {task: entry["difference_pp"] for task, entry in pair.tasks.items()} == dict.fromkeys(
        pair.tasks, 0.0
    )
    replayed = quantize.fidelity(quick.folder.path)
    assert replayed["activations"] == read_json(quick.folder.fidelity_json)["activations"]
    compared = quick("compare", quick.folder.path, folder)
    assert compared.code == 0, compared.err
    copy = shutil.copytree(quick.folder.path, quick.out.parent / "other" / quick.folder.path.name)
    comparison = compare_runs(quick.folder, RunDir(copy))
    heads = [
        column.header for column in comparison_table(comparison, quick.folder.path, copy).columns
    ]
    assert heads[1:3] == [f"A {quick.folder.path}", f"B {copy}"]
    for command in ("evaluate", "report", "card"):
        refused = quick(command, folder)
        assert (refused.code, "a judgement of" in refused.last) == (2, True)
    stages = read_json(folder / "stages.json")
    del stages["verify"]
    write_json(folder / "stages.json", stages)
    monkeypatch.setattr(judge, "_verify", Mock(side_effect=GateError("it is wrong now")))
    with pytest.raises(GateError, match="it is wrong now"):  # and the old report is none of it
        quantize.judge(*asked, resume=True)


def planted(quick: Quick) -> tuple[object, ...]:
    """Exchange two experts of the checkpoint, whole, and return the words that judge it."""
    (shard,) = quick.folder.checkpoint.glob("*.safetensors")
    tensors = load_file(shard)
    layer = "model.decoder.layers.2.experts."
    for name in [name for name in tensors if name.startswith(f"{layer}0.")]:
        other = name.replace(f"{layer}0.", f"{layer}1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    words = ("judge", quick.folder.checkpoint, "--against", quick.model, "--recipe", quick.recipe)
    return (*words, "--out", quick.out)


def test_weights_that_are_not_bf16s_fail_unless_they_differ_on_purpose(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tuned checkpoint has a judgement of its own, whose report says what was not compared."""
    words = planted(quick)
    done = quick(*words)
    assert (done.code, done.redone()) == (1, ["plan", "convert", "verify"])
    assert "model.decoder.layers.2.experts.0." in done.last
    (failed,) = quick.out.glob("judge-*")
    assert read_json(failed / "verification.json")["worst"]["module"] in done.last
    with monkeypatch.context() as patch:
        patch.setattr(
            "quantize.stages.fidelity.fidelity.fidelity", replay := Mock(wraps=made_up_replay)
        )
        done = quick(*words, "--fine-tuned")
    assert replay.call_args.kwargs["fine_tuned"]
    assert done.code == 0, done.err
    (tuned,) = set(quick.out.glob("judge-*")) - {failed}
    assert read_json(tuned / "verification.json")["checks"][1]["looked_at"] == 0
    assert "not compared with BF16's" in (tuned / "report.md").read_text()
    assert "not compared with BF16's" in (tuned / "report.html").read_text().replace("&#39;", "'")


def test_every_checkpoint_and_limit_has_a_judgement_of_its_own(quick: Quick) -> None:
    words = ("judge", quick.folder.checkpoint, "--against", quick.model, "--recipe", quick.recipe)
    words = (*words, "--out", quick.out)
    assert quick(*words).code == 0
    (first,) = quick.out.glob("judge-*")
    assert quick(*words, "--limit", 20).code == 0
    (limited,) = set(quick.out.glob("judge-*")) - {first}
    assert read_recipe(limited / "recipe.yaml").evaluation.limit == {TASK: 20}
    planted(quick)
    assert quick(*words).code == 1
    assert len(list(quick.out.glob("judge-*"))) == 3


def test_what_the_inspection_finds_fails_before_anything_is_loaded(quick: Quick) -> None:
    (quick.folder.checkpoint / "tokenizer.json").unlink()
    with pytest.raises(GateError, match="tokenizer"):
        quantize.judge(quick.folder.checkpoint, quick.model, str(quick.recipe), quick.out / "api")
    words = ("judge", quick.folder.checkpoint, "--against", quick.model, "--recipe", quick.recipe)
    done = quick(*words, "--out", quick.out)
    assert done.code == 1
    assert "tokenizer" in done.last
    assert done.redone() == ["plan", "convert", "verify"]


def own_settings(quick: Quick) -> tuple[object, ...]:
    """Let the checkpoint state settings of its own, and return the words that judge it."""
    path = quick.folder.checkpoint / "generation_config.json"
    stated = {"max_denoising_steps": 1, "t_max": 5.0}
    bound = {"sampler_config": {"entropy_bound": 100.0}}
    write_json(path, read_json(path) | stated | bound)
    words = ("judge", quick.folder.checkpoint, "--against", quick.model, "--recipe", quick.recipe)
    return (*words, "--out", quick.out)


def test_a_checkpoint_is_judged_at_the_settings_that_a_server_of_it_would_use(quick: Quick) -> None:
    words = own_settings(quick)
    done = quick(*words)
    assert done.code == 0, done.err
    (folder,) = quick.out.glob("judge-*")
    report = read_json(folder / "report.json")
    (task,) = report["tasks"]
    assert task["not_comparable"] is None
    assert task["made_with"]["sampler"]["max_denoising_steps"] == 1
    said = (
        "Judged at the settings that the checkpoint's own generation_config.json states: "
        "entropy_bound 100.0 (BF16 0.1), max_denoising_steps 1 (BF16 48), t_max 5.0 (BF16 0.8)."
    )
    assert report["judged_settings"] == said
    for name in ("report.md", "report.html"):
        text = (folder / name).read_text().replace("&#39;", "'")
        assert said in text
        assert "the model's own sampler settings hold" not in text
    assert quick(*words, "--resume").redone() == []


def test_a_judgement_at_bf16s_settings_is_made_again(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an earlier version left it: the verdict of settings that no server of it would use."""
    words = own_settings(quick)

    def at_bf16s(*more: Any, options: ModelOptions, **named: Any) -> dict[str, Any]:
        return made_up_scores(*more, options=replace(options, as_served=False), **named)

    with monkeypatch.context() as earlier:
        earlier.setattr("quantize.stages.evaluate.evaluate.evaluate", at_bf16s)
        earlier.setattr(Weights, "fault", lambda *_: None)
        earlier.setattr("quantize.stages.report.report.settings_served", lambda *_: (None, None))
        assert quick(*words).code == 0
        assert quick(*words, "--resume").redone() == []
    done = quick(*words, "--resume")
    assert "the scored weights or settings are not the checkpoint's" in done.err
    assert (done.code, done.redone()) == (0, ["evaluate", "report"])
    (folder,) = quick.out.glob("judge-*")
    (task,) = read_json(folder / "report.json")["tasks"]
    assert task["made_with"]["sampler"]["max_denoising_steps"] == 1


def test_a_judged_checkpoint_whose_settings_changed_since_is_not_shown_as_judged(
    quick: Quick,
) -> None:
    """The folder is the user's: it may change between two calls."""
    words = own_settings(quick)
    assert quick(*words).code == 0
    (folder,) = quick.out.glob("judge-*")
    path = quick.folder.checkpoint / "generation_config.json"
    write_json(path, read_json(path) | {"max_denoising_steps": 2})
    assert quick(*words).redone()[0] == "plan"  # another judgement, of what is there now
    assert len(list(quick.out.glob("judge-*"))) == 2
    assert read_json(folder / "report.json")["tasks"][0]["made_with"]["sampler"]


def test_a_bf16_model_is_not_judged(quick: Quick) -> None:
    done = quick("judge", quick.model, "--against", quick.model, "--recipe", quick.recipe)
    assert done.code == 2
    assert "a quantized checkpoint is judged against a BF16 one" in done.last
