"""The model card: valid for the Hub, true to the run, its commands real, no benchmark text in it."""

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from huggingface_hub import ModelCard, constants, parse_eval_result_entries
from huggingface_hub.repocard import metadata_load
from safetensors.numpy import save_file

from quantize.cli import cli
from quantize.errors import InputError
from quantize.host.files import read_json, write_json, write_text
from quantize.recipe.reading import load_recipe, parse_recipe
from quantize.recipe.sections import Recipe
from quantize.reports.card import (
    SERVING,
    Override,
    base_model,
    card,
    docker_command,
    eval_results,
    serve_command,
)
from quantize.runs.folder import RunDir
from tests.support.fake_hub import FakeHub
from tests.support.finished_run import BASE, COMMIT, finished_run

COUNT = 256  # prompts that the recipe calibrates on
REPO = "org/diffusiongemma-NVFP4"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return finished_run(tmp_path)


def recipe_of(run: RunDir) -> Recipe:
    return parse_recipe(run.recipe_yaml.read_text(), "recipe.yaml")


def card_of(run: RunDir, override: Override | None = None) -> str:
    recipe = recipe_of(run)
    base = base_model(read_json(run.manifest_json)["source"], recipe)
    return card(run, recipe, REPO, override, base)


def edit(path: Path, **changes: Any) -> None:
    write_json(path, {**read_json(path), **changes})


def blocks(text: str, language: str = "") -> list[str]:
    """The fenced code blocks of a Markdown text in one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def commands(text: str, program: str) -> list[list[str]]:
    """The command lines in a Markdown text that start a program, as words."""
    lines = [line for block in blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]


def test_front_matter_is_what_the_hub_asks_for(run: RunDir, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(card_of(run))
    head = metadata_load(path)
    assert head is not None
    assert head["base_model"] == BASE
    assert head["base_model_relation"] == "quantized"
    assert head["library_name"] == "vllm"
    assert head["pipeline_tag"] == "image-text-to-text"
    assert head["license"] == "apache-2.0"
    assert {"nvfp4", "compressed-tensors", "vllm"} <= set(head["tags"])


def test_the_hubs_own_validation_of_the_card(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """ModelCard parses and checks the head; its call to the Hub ends at the fake one."""
    loaded = ModelCard(card_of(run), ignore_metadata_errors=False)
    assert loaded.data.base_model == BASE
    with FakeHub("hf_x") as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        session = huggingface_hub.get_session()
        send = session.post
        moved = lambda url, **more: send(url.replace("https://huggingface.co", hub.url), **more)  # noqa: E731
        monkeypatch.setattr(session, "post", moved)
        loaded.validate()
        assert hub.paths("validate-yaml")
        with pytest.raises(ValueError, match="malformed"):
            ModelCard("---\nlicense: [1]\ntags: x\n---\n").validate()


def test_the_licence_comes_from_the_base_models_card(run: RunDir) -> None:
    source = Path(read_json(run.manifest_json)["source"]["folder"])
    head = "license: other\nlicense_name: gemma\nlicense_link: https://ai.google.dev/gemma/terms\n"
    (source / "README.md").write_text(f"---\n{head}pipeline_tag: text-generation\n---\n# Base\n")
    found = ModelCard(card_of(run)).data.to_dict()
    assert found["license"] == "other"
    assert found["license_name"] == "gemma"
    assert found["license_link"] == "https://ai.google.dev/gemma/terms"
    assert found["pipeline_tag"] == "text-generation"


def test_an_unknown_licence_is_refused(run: RunDir) -> None:
    source = read_json(run.manifest_json)["source"]
    edit(run.manifest_json, source={**source, "model": "org/another"})
    with pytest.raises(InputError, match="licence"):
        card_of(run)


def test_it_says_what_was_made_from_what_and_how(run: RunDir) -> None:
    text = card_of(run)
    for words in (
        "98.9 [97.1, 100.8]",  # recovery with its interval
        "-0.70 [-1.90, +0.50]",
        "Noise floor",
        "0.9123",  # fidelity
        "+0.6 % [-0.4, +1.6] |",  # steps a token
        "a limit on the distance from BF16 on replayed canvases (no gate.max_kl_nats)",
        "66,560 bytes in BF16, 19,456 here",
        "| experts | NVFP4 | 1 | 65,536 | 18,432 |",
        "BF16: routing decides",
        "random\n  numbers",  # from_pretrained
        "`import quantize.hf` before it",
        "HuggingFaceH4/ultrachat_200k",
        "transformers 5.17.0",
        "[LICENSE](LICENSE), [NOTICE](NOTICE)",
        COMMIT,
    ):
        assert words in text, words
    (recipe,) = blocks(text, "yaml")
    assert parse_recipe(recipe, "card") == recipe_of(run)


def test_no_path_no_question_no_empty_value(run: RunDir, tmp_path: Path) -> None:
    texts = [card_of(run), *eval_results(read_json(run.report_json)).values()]
    for text in texts:
        assert str(tmp_path) not in text
        assert "SECRET" not in text
        assert "None" not in text
        assert "{{" not in text
        assert "{canvas}" not in text


def test_a_source_named_by_folder_is_known_by_the_recipes_id(run: RunDir, tmp_path: Path) -> None:
    source = read_json(run.manifest_json)["source"]
    edit(run.manifest_json, source={**source, "model": str(tmp_path / "bf16"), "commit": None})
    text = card_of(run)
    assert str(tmp_path) not in text
    assert ModelCard(text).data.base_model == BASE


def test_a_hub_id_with_a_revision_is_named_without_it(run: RunDir) -> None:
    source = read_json(run.manifest_json)["source"]
    edit(run.manifest_json, source={**source, "model": f"{BASE}@main"})
    text = card_of(run)
    assert ModelCard(text).data.base_model == BASE
    assert "@main" not in text
    assert f"--revision {COMMIT}" in text


def test_the_bundled_model_is_not_passed_off_as_googles(run: RunDir) -> None:
    source = {**read_json(run.manifest_json)["source"], "model": "bundled", "bundled": True}
    (Path(source["folder"]) / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    edit(run.manifest_json, source=source)
    text = card_of(run)
    assert "not Google's" in text
    assert "base_model" not in ModelCard(text).data.to_dict()


def test_a_run_with_gaps_says_what_is_missing(run: RunDir) -> None:
    """No calibration, no replay, no noise floor, a task that cannot be compared, one without bounds."""
    fp8 = load_recipe("fp8_dynamic")
    _, second, third = read_json(run.report_json)["tasks"]
    lost = {"task": "aime25", "activations": "none", "gated": True, "margin_pp": 3.0}
    lost |= {"max_step_inflation": 0.1}
    gap = {"recovery": None, "difference_interval": {"low": None, "high": None}}
    tasks = [{**lost, "not_comparable": "seeds differ"}, {**second, **gap}, third]
    edit(run.report_json, tasks=tasks, fidelity=None, noise_floor=[])
    write_text(run.recipe_yaml, fp8.to_yaml())
    (run.checkpoint / "NOTICE").unlink()
    (run.checkpoint / "LICENSE").unlink()
    text = card_of(run)
    assert "not comparable: seeds differ" in text
    assert re.search(r"-0.70 \[no interval\] \| [0-9]+ \| - \|", text)
    assert "noise floor (BF16 against itself with a second seed) was not measured" in text
    assert "No calibration data" in text
    assert "## Fidelity" not in text
    assert "attribution" not in text
    assert "fp8_dynamic" in (ModelCard(text).data.tags or [])
    assert "in 4 bits on Blackwell" not in text  # it has no NVFP4


def test_what_was_not_asked_judged_or_made_here_is_told(run: RunDir) -> None:
    tasks = [each | {"max_step_inflation": None} for each in read_json(run.report_json)["tasks"]]
    looks = {tasks[0]["task"]: {"taken": 1, "of": 5}}
    pack = {"pack": "ab12", "tool": {"version": "1", "commit": None}}
    pack["made_with"] = {"device": "an H100", "versions.torch": "2.11"}
    edit(run.report_json, tasks=tasks, looks=looks, not_asked=["aime25"], baseline=pack)
    text = " ".join(card_of(run).split())
    for sentence in (
        f"{tasks[0]['task']}: the verdict was certain after look 1 of 5; the rest was not asked.",
        "aime25: not asked; the run's verdict was certain before.",
        "Denoising steps were not judged: the recipe sets no max_step_inflation.",
        "imported: on an H100 with torch 2.11, by diffusiongemma-quantize 1 (commit unknown)",
    ):
        assert sentence in text


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        (None, "not part of the scores"),
        ([], "not part of the calibration or of the scores"),
        ([COUNT, COUNT + 3], "not part of the calibration or of the scores"),
        (
            [0, 7, COUNT],
            f"part of 2 of the {COUNT} prompts of the calibration, and not of the scores",
        ),
    ],
    ids=["nothing says", "text", "held out", "pictures"],
)
def test_pictures_of_the_calibration_are_told(
    run: RunDir, shown: list[int] | None, says: str
) -> None:
    if shown is not None:
        names = ["00000.prompt", *(f"{index:05}.pixels" for index in shown)]
        save_file(dict.fromkeys(names, np.zeros(1)), run.calibration / "trajectories.safetensors")
    assert f"Images were {says} above." in card_of(run)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [("nvfp4_w4a4", "(input scales)"), ("nvfp4", "(input scales, GPTQ's Hessians)")],
)
def test_what_rests_on_prompts_is_told(run: RunDir, recipe: str, says: str) -> None:
    write_text(run.recipe_yaml, load_recipe(recipe).to_yaml())
    assert f"Calibrated {says}: " in card_of(run)


def test_the_command_that_makes_it_again_has_what_it_needs(run: RunDir) -> None:
    assert "Save the recipe below as `recipe.yaml`, then:" in card_of(run)
    recipe = recipe_of(run).model_dump(mode="json")
    own_task = {"data": "/home/me/orders.jsonl", "prompt": "{{question}}"}
    recipe["evaluation"]["own_tasks"] = {"orders": own_task}
    recipe["calibration"]["datasets"].append("chats.jsonl")
    recipe["evaluation"]["operating_points"] = {"few": {"max_denoising_steps": 6}}
    speeds = {"tokens_a_second": {"quantized": 1.0}}
    edit(run.report_json, operating_points=[{"name": "few", "passes": False}], speeds=speeds)
    write_text(run.recipe_yaml, yaml.safe_dump(recipe))
    text = " ".join(card_of(run).split())
    assert "as `recipe.yaml` beside `orders.jsonl`, `chats.jsonl`, which it reads and" in text
    assert " --noise-floor --operating-points ```" in text


def test_an_override_is_shown(run: RunDir) -> None:
    assert "overruled" not in card_of(run)
    text = card_of(run, Override("--no-gate", "FAIL", "gsm8k lost 4 pp"))
    assert "`--no-gate`" in text
    assert "gsm8k lost 4 pp" in text


def test_serving_commands_are_those_of_the_data_file(run: RunDir) -> None:
    (vllm,) = commands(card_of(run), "vllm")
    (docker,) = commands(card_of(run), "docker")
    assert vllm[:3] == ["vllm", "serve", REPO]
    wanted = [
        w.replace("{canvas}", "256") for e in SERVING["flags"] for w in (e["flag"], e["value"])
    ]
    assert vllm[3:] == wanted
    image = docker.index(SERVING["image"])
    assert docker[image + 1] == "-c"
    assert docker[image + 2].endswith('pip install -q /tmp/plugin && exec vllm serve "$@"')
    assert docker[image + 3 :] == ["vllm", REPO, *wanted]
    assert f"$PWD/{SERVING['plugin']}:/plugin" in docker
    assert f"pip install ./{SERVING['plugin']}\n" in card_of(run)
    assert (Path(__file__).parents[2] / SERVING["plugin"] / "pyproject.toml").is_file()
    assert SERVING["vllm"] in card_of(run)
    assert yaml.safe_load(vllm[vllm.index("--diffusion-config") + 1]) == {"canvas_length": 256}
    assert commands(f"```\n{serve_command(REPO, 64)}\n```", "vllm")[0][:3] == vllm[:3]


def test_the_card_says_how_many_tokens_its_checkpoint_states(run: RunDir) -> None:
    """The number is that of the file beside the card; without the file it names none."""
    path = run.checkpoint / "generation_config.json"
    write_json(path, {"max_new_tokens": 77})
    assert "| generation_config.json says 77 new tokens, which would cap" in card_of(run)
    path.unlink()
    text = card_of(run)
    assert "| generation_config.json says how many new tokens, which would cap" in text
    assert "new_tokens}" not in text


def test_the_tutorial_serves_with_the_same_command() -> None:
    page = Path(__file__).parents[2] / "docs/tutorials/serve-with-vllm.md"
    readme = page.read_text()
    for program, made in (("vllm", serve_command), ("docker", docker_command)):
        (stands,) = commands(readme, program)
        (wanted,) = commands(f"```\n{made('ORG/NAME', 256)}\n```", program)
        assert stands == wanted


@pytest.mark.parametrize("text", ["card", "README.md"])
def test_every_command_of_ours_is_known_to_help(text: str, run: RunDir) -> None:
    root = Path(__file__).parents[2]
    written = card_of(run) if text == "card" else (root / text).read_text()
    found = commands(written, "quantize")
    assert found
    for _, name, *arguments in found:
        done = CliRunner().invoke(cli, [name, "--help"])
        assert done.exit_code == 0, f"quantize {name}"
        for flag in (word.split("=")[0] for word in arguments if word.startswith("--")):
            assert f"{flag} " in done.output + " ", f"quantize {name} {flag}"


def test_the_python_of_the_card_uses_what_exists(run: RunDir) -> None:
    (code,) = blocks(card_of(run), "python")
    tree = ast.parse(code)
    ours = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    modules: dict[str, Any] = {}
    for node in ours:
        exec(compile(ast.Module([node], []), "card", "exec"), modules)
    assert callable(modules["open"])
    assert callable(modules["Sampler"].from_checkpoint)
    assert callable(modules["generate"])


def test_scores_are_in_the_hubs_form(run: RunDir) -> None:
    found = eval_results(read_json(run.report_json))
    assert list(found) == [f".eval_results/{t}.yaml" for t in ("aime25", "gpqa_diamond", "gsm8k")]
    (entry,) = parse_eval_result_entries(yaml.safe_load(found[".eval_results/gpqa_diamond.yaml"]))
    assert entry.dataset_id == "Idavidrein/gpqa"
    assert entry.task_id == "gpqa_diamond"
    assert entry.value == 63.4
    assert entry.notes
    assert "198 questions x 32" in entry.notes
    assert "BF16 under the same conditions 64.10" in entry.notes
    assert "thinking off" in entry.notes


def test_only_gated_comparable_scores_of_hub_data_sets_are_machine_readable(run: RunDir) -> None:
    report = read_json(run.report_json)
    ours, other, kept = report["tasks"]
    ours["task"], other["not_comparable"] = "word_problems", "seeds differ"
    extra = {**kept, "gated": False, "quantized": 0.1}
    report["tasks"].append(extra)
    assert list(eval_results(report)) == [".eval_results/gsm8k.yaml"]
    assert "63.4" in eval_results(report)[".eval_results/gsm8k.yaml"]
