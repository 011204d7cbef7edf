"""Writes the model card of a release and its machine-readable scores, from the run's own files.

README.md is Markdown after a YAML head that the Hub reads (base model, licence, tags). Scores go to
`.eval_results/<task>.yaml`, in the form that the Hub shows on the model's page
(https://huggingface.co/docs/hub/eval-results). A task without a data set on the Hub gets no file.

The card has no date and no path of this machine, so equal runs give equal bytes, and pushing twice
changes nothing. It has no question, prompt or sample of any benchmark.
"""

import csv
import shlex
import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, ModelCardData, eval_result_entries_to_yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from quantize.checkpoints.reader import GENERATION, read_header
from quantize.errors import InputError
from quantize.host.files import read_json, write_text
from quantize.recipe.controls import CONTROLS
from quantize.recipe.sections import Recipe
from quantize.reports.headline import chosen_point, not_tested, thinks
from quantize.reports.provenance import baseline_lines, without_places
from quantize.reports.render import markdown_table
from quantize.reports.sections import (
    JUDGED,
    ReportSection,
    ends_section,
    fidelity_section,
    health_section,
    looks_lines,
)
from quantize.reports.table import interval_text, score_table
from quantize.runs.folder import README, RESULTS, RunDir

# Task -> (data set on the Hub, name of the task in it). The name gpqa_diamond is the Hub's own, the
# others are lm-eval's. A task with thinking on has the data set of the task without thinking.
DATASETS = {
    "aime25": ("math-ai/aime25", "aime25"),
    "gpqa_diamond": ("Idavidrein/gpqa", "gpqa_diamond"),
    "gsm8k": ("openai/gsm8k", "gsm8k"),
    "svamp": ("ChilleD/SVAMP", "svamp"),
}
THINKING = "_thinking"
# Licences that base models' own cards state, for copies of the models without the card.
KNOWN_LICENCES = {"google/diffusiongemma-26B-A4B-it": {"license": "apache-2.0"}}
LICENCE_KEYS = ("license", "license_name", "license_link")
CARDS = Environment(
    loader=PackageLoader("quantize.reports"), trim_blocks=True, lstrip_blocks=True,
    undefined=StrictUndefined, keep_trailing_newline=True,
)  # fmt: skip
# How vLLM serves this model: version, image, flags with their reasons.
SERVING: dict[str, Any] = yaml.safe_load(
    files("quantize.reports").joinpath("serving.yaml").read_text("utf-8")
)


@dataclass(frozen=True)
class Override:
    """A verdict other than PASS that was overruled by hand, and the option that overruled it."""

    option: str
    outcome: str
    reason: str


def serve_command(repo: str, canvas: int, steps: int | None = None) -> str:
    """Return the vLLM command for `repo`, one flag per line; `canvas` is the length of a canvas.

    `steps` is the most denoising steps of a canvas, None for vLLM's own number: it reads this setting
    from the flag alone.
    """
    return " \\\n  ".join([f"vllm serve {repo}", *_flags(canvas, steps)])


def docker_command(repo: str, canvas: int, steps: int | None = None) -> str:
    """Return the docker command that serves `repo` with vLLM; a private `repo` needs HF_TOKEN."""
    start = "docker run --gpus all --ipc=host -p 8000:8000 -e HF_TOKEN"
    cache = "-e HF_HOME=/models -v ~/.cache/huggingface:/models"
    plugin = f'-v "$PWD/{SERVING["plugin"]}:/plugin" --entrypoint sh {SERVING["image"]}'
    serve = """-c 'cp -r /plugin /tmp && pip install -q /tmp/plugin && exec vllm serve "$@"'"""
    return " \\\n  ".join([start, cache, plugin, serve, f"vllm {repo}", *_flags(canvas, steps)])


def _flags(canvas: int, steps: int | None) -> list[str]:
    more = f'{canvas}, "max_denoising_steps": {steps}' if steps else str(canvas)
    return [
        f"{entry['flag']} {shlex.quote(entry['value'].replace('{canvas}', more))}"
        for entry in SERVING["flags"]
    ]


def _served(checkpoint: Path) -> dict[str, Any]:
    """Return the settings that a checkpoint states for generation, {} if it has no such file."""
    path = checkpoint / GENERATION
    return read_json(path) if path.is_file() else {}


def _steps_served(checkpoint: Path) -> int | None:
    """Return the most steps that a checkpoint states, None if they are the usual ones."""
    stated = _served(checkpoint).get("max_denoising_steps")
    return None if stated == CONTROLS["max_denoising_steps"].default else stated


def card(
    run: RunDir, recipe: Recipe, repo: str, override: Override | None, base: str | None
) -> str:
    """Return the text of a release's README.md; `base` is the BF16 model's Hub id, None if uncertain.

    Raises:
        InputError: a file of the run is missing, or no licence is known.
    """
    report, manifest = read_json(run.report_json), read_json(run.manifest_json)
    canvas = int(read_json(run.checkpoint / "config.json")["canvas_length"])
    steps = _steps_served(run.checkpoint)
    uses_gptq = recipe.quantization.rounding == "gptq"
    calibrated = ["input scales"] * recipe.needs_calibration + ["GPTQ's Hessians"] * uses_gptq
    scores = score_table(report["tasks"], recipe.gate.estimand, card=True)
    distance = report["fidelity"] and fidelity_section(report["fidelity"])
    return CARDS.get_template("card.md.jinja").render(
        front_matter=front_matter(recipe, manifest, base),
        name=repo.split("/")[-1],
        interval=interval_text,
        judged=JUDGED[recipe.gate.estimand],
        scores=markdown_table(ReportSection("", *scores)),
        fidelity=distance and "\n\n".join([markdown_table(distance), *distance.notes]),
        health="\n\n".join(
            markdown_table(section(report["tasks"])) for section in (health_section, ends_section)
        ),
        not_tested=not_tested({"speeds": None, "noise_floor": [], "not_asked": [], **report}),
        repo=repo,
        place=repo if "/" in repo else ".",
        base=base,
        report=report,
        looks=[*looks_lines(report), *baseline_lines(report)],
        chosen_point=chosen_point({"operating_points": [], "speeds": None, **report}),
        recipe=recipe,
        local_files=[f"`{Path(file).name}`" for file in _local_files(recipe)],
        calibrated=calibrated if recipe.calibration else [],
        pictures=_pictures(run, recipe),
        schemes=list(recipe.quantization.targets_by_scheme()),
        recipe_yaml=without_places(recipe.to_yaml()).strip(),
        source=manifest["source"],
        commit=manifest["source"].get("commit"),  # None: the base model came from a folder
        groups=_groups(run.targets_csv),
        override=override,
        serving=SERVING,
        new_tokens=str(_served(run.checkpoint).get("max_new_tokens", "how many")),
        serve=serve_command(repo, canvas, steps),
        docker=docker_command(repo, canvas, steps),
        attributions=sorted(
            path.name for name in ("LICENSE*", "NOTICE*") for path in run.checkpoint.glob(name)
        ),
    )


def card_files(
    run: RunDir, recipe: Recipe, repo: str, override: Override | None, base: str | None
) -> dict[str, str]:
    """Return path -> text of README.md and the files of scores; arguments and errors as in `card`."""
    scores = eval_results(read_json(run.report_json))
    return {README: card(run, recipe, repo, override, base)} | scores


def write_card(run: RunDir, recipe: Recipe, repo: str) -> tuple[list[Path], list[str]]:
    """Write the card and scores into a run's checkpoint, replacing older files.

    Return the paths, and the tasks that got no file of scores. The Hub is not asked. The card names the
    base model if the BF16 files came from the Hub's cache. Raise InputError as `card` does.
    """
    source = read_json(run.manifest_json, "source")["source"]
    texts = card_files(run, recipe, repo, None, stated_base(source, recipe))
    if (results := run.checkpoint / RESULTS).is_dir():
        shutil.rmtree(results)
    for name, text in texts.items():
        write_text(run.checkpoint / name, text)
    without = [t for t in recipe.evaluation.tasks if f"{RESULTS}/{t}.yaml" not in texts]
    return [run.checkpoint / name for name in texts], without


def stated_base(source: dict[str, Any], recipe: Recipe) -> str | None:
    """Return the base model's unchecked Hub id; None if its files are not from the Hub's cache."""
    return base_model(source, recipe) if source.get("commit") else None


def base_model(source: dict[str, Any], recipe: Recipe) -> str | None:
    """Return the BF16 model's Hub id from the manifest's `source` or the recipe; None if unknown."""
    if source["bundled"]:
        return None
    model = str(source["model"]).split("@")[0]
    is_folder = Path(source["model"]).is_absolute() or Path(model).is_dir()
    is_path = is_folder or model.count("/") != 1 or model.startswith((".", "~"))
    return recipe.model.id if is_path else model  # others need an id in place of a path


def front_matter(recipe: Recipe, manifest: dict[str, Any], base: str | None) -> str:
    """Return the card's YAML head without the lines of dashes; InputError: no licence is known."""
    schemes = [scheme.lower() for scheme in recipe.quantization.targets_by_scheme()]
    tags = [*schemes, "diffusion_gemma", "compressed-tensors", "vllm", "diffusiongemma-quantize"]
    source = source_card(Path(manifest["source"]["folder"]))
    licence = {key: source[key] for key in LICENCE_KEYS if key in source}
    licence = licence or KNOWN_LICENCES.get(base or "", {})
    if not licence:
        raise InputError(
            f"{manifest['source']['folder']}: no README.md with a `license:` there, so the licence of "
            f"{base} is not known; put the base model's card into that folder"
        )
    named = {"base_model": base, "base_model_relation": "quantized"} if base else {}
    about: dict[str, Any] = {**named, **licence}
    return ModelCardData(
        library_name="vllm",
        pipeline_tag=source.get("pipeline_tag", "image-text-to-text"),
        tags=tags,
        **about,
    ).to_yaml()


def source_card(folder: Path) -> dict[str, Any]:
    """Return the YAML head of the base model's own card in `folder`, {} if there is none."""
    path = folder / "README.md"
    if not path.is_file():
        return {}
    parts = path.read_text("utf-8").split("---\n", 2)
    head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    return head if isinstance(head, dict) else {}


def _local_files(recipe: Recipe) -> list[str]:
    """Return the files of its author that a recipe reads: of own tasks, and chats to calibrate on."""
    tasks = recipe.evaluation.own_tasks.values()
    chats = recipe.calibration.datasets if recipe.calibration else []
    named = [task.data or task.lm_eval for task in tasks]
    return [*filter(None, named), *(name for name in chats if name.endswith(".jsonl"))]


def _pictures(run: RunDir, recipe: Recipe) -> str:
    """Return a sentence on whether calibration and scores saw images, as the run recorded it."""
    from quantize.runtime.record.trajectory import TENSORS

    recorded = run.calibration / TENSORS
    if recipe.calibration is None or not recorded.is_file():
        return "Images were not part of the scores above."
    count = recipe.calibration.prompts
    with_pixels = [name for name in read_header(recorded) if name.endswith(".pixels")]
    if shown := sum(int(name.split(".")[0]) < count for name in with_pixels):
        return (
            f"Images were part of {shown} of the {count} prompts of the calibration, and not of the "
            f"scores above."
        )
    return "Images were not part of the calibration or of the scores above."


def _groups(targets_csv: Path) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for row in csv.DictReader(targets_csv.read_text("utf-8").splitlines()):
        kind, fate = row["class"], row["scheme"] or f"BF16: {row['reason_kept']}"
        new = {"class": kind, "fate": fate, "tensors": 0, "before": 0, "after": 0}
        group = groups.setdefault((kind, fate), new)
        group["tensors"] += 1
        group["before"] += int(row["bytes"])
        group["after"] += int(row["bytes_after"])
    return sorted(groups.values(), key=lambda group: -group["before"])


def eval_results(report: dict[str, Any]) -> dict[str, str]:
    """Return path -> YAML of each gated, comparable score whose task has its data set on the Hub."""
    results: dict[str, str] = {}
    for task in report["tasks"]:
        name = str(task["task"])
        dataset = DATASETS.get(name.removesuffix(THINKING))
        if not task["gated"] or task["not_comparable"] or dataset is None:
            continue
        low, high = (100 * task["quantized_interval"][end] for end in ("low", "high"))
        entry = EvalResultEntry(
            dataset_id=dataset[0],
            task_id=dataset[1],
            value=round(100 * task["quantized"], 4),
            notes=(
                f"accuracy in %, {task['confidence']:.0%} interval {low:.2f} to {high:.2f} "
                f"({task['estimand'].replace('_', ' ')}); "
                f"{task['questions']} questions x {task['repeats']}; thinking "
                f"{'on' if thinks(task) else 'off'}; BF16 under the same conditions "
                f"{100 * task['base']:.2f}; activations {task['activations']}"
            ),
        )
        text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False)
        results[f"{RESULTS}/{name}.yaml"] = text
    return results
