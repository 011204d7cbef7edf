"""Measures what a BF16 model does while it answers prompts of four kinds: `quantize measure`.

    by step    experts hit and load, entropy, tokens that hold .999 of the distribution
    by Linear  the range of its inputs (calibrate's observers), and channels that are outliers
    by kind    denoising steps, tokens a forward, answers that ended, loops
    routing    how far a quantized checkpoint chooses other experts, if one is named (fidelity's code)
    speed      milliseconds a forward, on a GPU (bench's code)

The prompts ship with the package (`bundled.KINDS`). measured.json and measured.html hold neither them
nor answers; both appear when all is measured. Until then the folder PARTS has what an interrupted
try finished (prompts denoised, speed, routing), for the next try of the same model and settings.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quantize.bench.speed import bench
from quantize.bundled import KINDS
from quantize.checkpoints.layout import check_mode
from quantize.checkpoints.reader import Checkpoint, hub_commit, resolve
from quantize.errors import InputError, ResourceError
from quantize.host.files import folder_when_complete, read_json, write_json, write_text
from quantize.host.processes import best_device
from quantize.host.progress import metered, say
from quantize.host.resources import now
from quantize.host.units import digits
from quantize.pipeline.run import check_source
from quantize.recovery.rows import Row
from quantize.reports.measured import measured_page
from quantize.reports.scores import by_kind, counts
from quantize.runs.digests import sha256_of
from quantize.runs.manifest import code_digest, fingerprint, hardware, package_versions, tool
from quantize.runtime import Placement, Sampler, open
from quantize.runtime.engine.interface import BatchEngine
from quantize.runtime.gpu.placement import free_unused
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.runtime.record.ranges import Channels, Ranges
from quantize.runtime.record.step_figures import StepFigures
from quantize.runtime.record.trajectory import (
    Prompt,
    Trajectory,
    context_of,
    record,
    save_trajectories,
)
from quantize.schemes.modes import ActivationMode
from quantize.stages.calibrate.coverage import Coverage
from quantize.stages.fidelity.fidelity import fidelity
from quantize.stages.memory_needs import HELD_OUT

SCHEMA_VERSION, PARTS = 1, "measured.parts"
BATCH = 16  # samples that are denoised together
OUTLIER = 8.0  # times the median channel
FIXED_STEPS, CONTEXT = "16", 512  # of the canvases that are timed


def measure(
    model: str, out: Path | None = None, *, checkpoint: str | None = None,
    activations: ActivationMode = "per_layer", prompts: int = 25, canvases: int = 4,
    gpu_memory: float | None = None,
) -> Path:  # fmt: skip
    """Measure a BF16 model on `prompts` prompts of each kind; return the folder of the two files.

    `model` is a folder or Hub id, `checkpoint` a quantized one of it, None for none; its activations
    are rounded by the mode `activations`. Each prompt gets at most `canvases` canvases. `out` is the
    folder, None for one in outputs/ that is named by the models' fingerprints.

    Raises:
        InputError: the model is quantized, the checkpoint is not one of it, a file is damaged, or
            the folder has a measured.json.
        ResourceError: a model does not fit.
    """
    source = Checkpoint.open(resolve(model))
    if source.is_quantized:
        raise InputError(
            f"{source.folder}: is quantized; name a BF16 model, and this by --checkpoint"
        )
    check_source(source)
    quantized = None if checkpoint is None else _candidate(checkpoint, source, activations)
    models = [source, *([] if quantized is None else [Checkpoint.open(quantized)])]
    digest, *replayed = map(fingerprint, models)
    names = ["measured", digest[:7], *(other[:7] for other in replayed)]
    folder = out or Path("outputs") / "-".join(names)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; name a folder with --out")
    if (folder / "measured.json").exists():
        raise InputError(f"{folder}/measured.json: exists already; remove it or name another --out")
    place = Placement(best_device(), gpu_memory)
    settings = [prompts, canvases, gpu_memory]
    made_of = [digest, sha256_of(KINDS), *settings, code_digest(), hardware()]
    denoised = folder / PARTS / "denoised"
    measured = [
        _part(denoised, made_of, partial(_denoised, source, place, prompts, canvases)),
        _part(folder / PARTS / "speed", made_of, partial(_speed, source.folder, place)),
    ]
    if quantized is not None:
        replays = partial(_routing, source.folder, quantized, activations, denoised, place)
        made_of = [*made_of, *replayed, activations]
        measured.append(_part(folder / PARTS / "routing", made_of, replays))
    content: dict[str, Any] = {"routing": None}
    for part in measured:
        content |= part["content"]
    about = {
        "schema_version": SCHEMA_VERSION,
        "ended": now(),
        "seconds": round(sum(part["seconds"] for part in measured), 1),
        "tool": tool(),
        "versions": package_versions(),
        "hardware": hardware(),
        "model": {
            "model": Path(model).name if Path(model).exists() else model,
            "commit": hub_commit(source.folder),
            "fingerprint": digest,
        },
        "prompts_a_kind": prompts,
        "canvases": canvases,
    }
    write_json(folder / "measured.json", about | content)
    write_text(folder / "measured.html", measured_page(about | content))
    shutil.rmtree(folder / PARTS)
    return folder


def _part(folder: Path, made_of: list[Any], make: Callable[[Path], dict[str, Any]]) -> Any:
    """Return the seconds and content of what `make` measures; an earlier try may have left them.

    `made_of` is all that they depend on. `make` may put other files into the folder that it is given.
    """
    path = folder / "part.json"
    keys, remedy = ("made_of", "seconds", "content"), f"remove {folder}"
    if path.exists() and read_json(path, *keys, remedy=remedy)["made_of"] == made_of:
        say(f"{folder.name}: measured before ({folder})")
    else:
        started = time.monotonic()
        with folder_when_complete(folder) as unfinished:
            content = make(unfinished)
            seconds = time.monotonic() - started
            part = dict(zip(keys, (made_of, seconds, content), strict=True))
            write_json(unfinished / path.name, part)
    return read_json(path)


def _candidate(name: str, source: Checkpoint, activations: ActivationMode) -> Path:
    checkpoint = Checkpoint.open(resolve(name))
    if not checkpoint.is_quantized:
        raise InputError(f"{checkpoint.folder}: is not quantized; --checkpoint names one that is")
    original, stated = (of.config["text_config"] for of in (source, checkpoint))
    for key in ("num_hidden_layers", "hidden_size", "num_experts"):
        if original[key] != stated.get(key):
            raise InputError(
                f"{checkpoint.folder}: {key} is {stated.get(key)}, {original[key]} in {source.folder}; "
                f"name a checkpoint of this model"
            )
    check_mode(checkpoint, activations)
    return checkpoint.folder


def _prompts(source: Path, count: int) -> tuple[list[Prompt], list[str], Any]:
    """Return the first `count` prompts of each kind, the kind of each, and the model's tokenizer."""
    tokenizer = load_tokenizer(source)
    rows = [json.loads(line) for line in KINDS.read_text("utf-8").splitlines()]
    ranks: dict[str, int] = {}
    chosen: list[tuple[int, dict[str, str]]] = []
    for row in rows:
        rank = ranks[row["kind"]] = ranks.get(row["kind"], -1) + 1
        chosen += [(rank, row)] * (rank < count)
    chosen.sort(key=lambda item: item[0])  # kinds in turn, so that every batch has all of them
    prompts = [
        Prompt(tuple(encode_chat(tokenizer, [message(row)], thinking=False)), False)
        for _, row in chosen
    ]
    return prompts, [row["kind"] for _, row in chosen], tokenizer


def message(row: dict[str, str]) -> dict[str, str]:
    """Return the chat message of a line of KINDS."""
    return {"role": "user", "content": row["prompt"]}


def _denoised(
    source: Checkpoint, place: Placement, count: int, canvases: int, folder: Path
) -> dict[str, Any]:
    """Denoise the prompts; return what was seen, and leave trajectories to be replayed in `folder`."""
    prompts, kinds, tokenizer = _prompts(source.folder, count)
    sampler = Sampler.from_checkpoint(source.folder)
    experts = int(source.config["text_config"]["num_experts"])
    context = context_of(source.folder, [prompt.ids for prompt in prompts], canvases)
    batches = -(-len(prompts) // BATCH)
    asked = replace(place, capacity=BATCH, max_context=context, batches=batches, compares=True)
    engine = open(source.folder, asked)
    size = engine.capacity
    ranges, channels, coverage = Ranges(experts), Channels(), Coverage(experts)
    whole = StepFigures(experts, sampler)
    with metered("measuring", len(prompts), "prompts") as meter:

        def recorded(start: int, lane: BatchEngine) -> tuple[list[Trajectory], StepFigures]:
            figures = StepFigures(experts, sampler)
            batch = prompts[start : start + size]
            seeds = range(start, start + len(batch))
            with lane.watching(ranges.see, channels.see, coverage.see):
                made = record(
                    lane, batch, seeds, sampler=sampler, canvases=canvases, held_out=False,
                    on_step=figures.see,
                )  # fmt: skip
            meter.add(len(made))
            return made, figures

        starts = range(0, len(prompts), size)
        seen = engine.each([partial(recorded, start) for start in starts])
    engine.close()
    del engine  # or its weights would stay on the GPU
    free_unused(place.device)
    for _, figures in seen:
        whole.add(figures)
    trajectories = [item for made, _ in seen for item in made]
    rows = [_row(*pair, sampler, tokenizer) for pair in zip(trajectories, kinds, strict=True)]
    held = [replace(item, held_out=True) for item in trajectories[:HELD_OUT]]
    save_trajectories(folder, held, sampler)
    return {
        "by_step": whole.by_step(),
        "tokens_per_expert": coverage.tokens,
        "inputs": _inputs(ranges, channels),
        "kinds": {"all": _steps(counts(rows))}
        | {kind: _steps(of) for kind, of in by_kind(rows)["by_kind"].items()},
    }


def _row(made: Trajectory, kind: str, sampler: Sampler, tokenizer: Any) -> Row:
    """Return a trajectory's answer as a row without a score, to be counted."""
    ids = made.committed.flatten().tolist()
    end = sampler.end_of(ids)
    ids = ids if end is None else ids[: end + 1]
    return Row(
        doc_id=made.seed, repeat=0, doc_hash="", prompt_hash="", target="", answer="", scores={},
        seed=made.seed, text=tokenizer.decode(ids), tokens=len(ids),
        denoising_steps=[len(steps) for steps in made.steps], truncated=end is None, kind=kind,
    )  # fmt: skip


def _steps(of_rows: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in of_rows.items() if key != "no_answer"}


def _inputs(ranges: Ranges, channels: Channels) -> list[dict[str, Any]]:
    """Return an entry for each Linear, by name; of experts also the median expert's largest |x|."""
    largest, entries = ranges.largest, []
    for name, figures in channels.outliers(OUTLIER).items():
        entry: dict[str, Any] = {"linear": name}
        entry |= {key: digits(value) for key, value in figures.items()}
        if len(values := sorted(largest[name])) > 1:
            entry["median_expert"] = digits(values[len(values) // 2])
        entries.append(entry)
    return entries


def _speed(source: Path, place: Placement, _: Path) -> dict[str, dict[str, float] | None]:
    """Return batch size -> ms a forward of canvases of FIXED_STEPS steps; None without a GPU."""
    unknown = {"ms_a_forward": None}
    if place.device == "cpu":
        say("ms a forward: not measured, there is no GPU")
        return unknown
    try:
        rows = bench(
            source, random=None, config=None, steps=[FIXED_STEPS], batches=[1, BATCH],
            context=CONTEXT, canvases=3, place=place,
        ).rows  # fmt: skip
    except ResourceError as error:
        say(f"ms a forward: not measured ({error})")
        return unknown
    free_unused(place.device)
    return {"ms_a_forward": {str(row.batch): digits(row.ms_a_forward) for row in rows}}


def _routing(
    source: Path, quantized: Path, activations: ActivationMode, denoised: Path, place: Placement,
    folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Replay trajectories of `denoised` through both models; return what `fidelity` says of routing."""
    say(f"replaying BF16's trajectories through {quantized.name}")
    out = folder / "fidelity.json"
    fidelity(source, quantized, denoised, out, activations=activations, limits={}, place=place)
    replayed = read_json(out, "activations", "routing_cost")
    figures = replayed["activations"][activations]
    kept = ("kl_nats", "routing_overlap", "routing", "by_step")
    routing = {"activations": activations, "cost": replayed["routing_cost"]}
    return {"routing": routing | {key: figures[key] for key in kept}}
