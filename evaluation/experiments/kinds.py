"""Does quantization hurt long contexts and pictures more? KL from BF16 by kind of prompt.

    PYTHONPATH=evaluation python -m experiments.kinds FOLDER CHECKPOINT [CHECKPOINT ...]

FOLDER gets a mix of the bundled model's held-out problems, a third each: alone; behind solved problems,
so many that the prompt is past the sliding window of 512; and with a picture of random colours, which
the problem does not need. The model was trained on neither long prompts nor pictures: its KL there says
how far the quantized model is from BF16, not whether either is right.
"""

import json
from pathlib import Path
from typing import Any

import click
import torch
from PIL import Image

from experiments.held_out import FIRST
from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.checkpoints.reader import Checkpoint
from quantize.recipe.sections import Calibration
from quantize.runtime import open
from quantize.runtime.engine.interface import Engine
from quantize.runtime.record.trajectory import record_all
from quantize.runtime.sampler.sampler import Sampler
from quantize.schemes.modes import ACTIVATION_MODES, ActivationMode
from quantize.stages.fidelity.fidelity import summarize
from quantize.stages.fidelity.replay import Compared, replay
from quantize.stages.prompts import load_prompts

BATCH, CANVASES = 16, 2
SOLVED = 8  # problems before the one to be solved
KINDS = 3


def write_mix(folder: Path, count: int) -> Path:
    """Write a JSONL file of chats, `count` of every kind, and their pictures; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = HELDOUT.read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines[FIRST : FIRST + KINDS * count * (SOLVED + 1)]]
    draw = torch.Generator().manual_seed(0)
    chats: list[list[dict[str, Any]]] = []
    for index in range(KINDS * count):
        asked, *solved = rows[index * (SOLVED + 1) : (index + 1) * (SOLVED + 1)]
        content: Any = asked["question"]
        if index % KINDS == 2:
            colours = torch.randint(256, (6, 8, 3), generator=draw, dtype=torch.uint8).numpy()
            picture = Image.fromarray(colours).resize((96, 64), Image.Resampling.NEAREST)
            picture.save(folder / f"{index}.png")
            shown = {"type": "image", "path": f"{index}.png"}
            content = [shown, {"type": "text", "text": asked["question"]}]
        turns: list[dict[str, Any]] = []
        for row in solved if index % KINDS == 1 else ():
            turns += [{"role": "user", "content": row["question"]}]
            turns += [{"role": "assistant", "content": row["answer"]}]
        chats.append([*turns, {"role": "user", "content": content}])
    path = folder / "mix.jsonl"
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    return path


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument(
    "checkpoints", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)
@click.option("--each", "count", default=32, show_default=True, help="Trajectories a kind.")
@click.option("--mode", type=click.Choice(ACTIVATION_MODES), default="per_layer", show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def main(
    folder: Path, checkpoints: tuple[Path, ...], count: int, mode: ActivationMode, device: str
) -> None:
    """Print a table of KL from BF16: one row for each checkpoint and kind of prompt."""
    mix = Calibration(
        datasets=[str(write_mix(folder, count))], prompts=KINDS * count, canvases=CANVASES,
        thinking=0.5, batch_size=BATCH, max_prompt_tokens=4096,
    )  # fmt: skip
    window: int = Checkpoint.open(CHECKPOINT).config["text_config"]["sliding_window"]
    prompts = load_prompts(CHECKPOINT, mix, mix.prompts)
    sampler = Sampler.from_checkpoint(CHECKPOINT)

    def engine(path: Path, activations: ActivationMode) -> Engine:
        return open(path, device=device, activations=activations, capacity=BATCH)

    reference = engine(CHECKPOINT, "none")
    made = record_all(reference, prompts, mix, sampler, title="recording BF16")
    compared = [Compared(engine(path, mode)) for path in checkpoints]
    measured = replay(reference, compared, made, sampler, batch_size=BATCH)
    kinds = [trajectory.prompt.kind(window) for trajectory in made]
    print("| checkpoint | kind of prompt | trajectories | tokens | KL x 1000 |")
    print("|---|---|---:|---:|---|")
    for path, distances in zip(checkpoints, measured, strict=True):
        for entry in summarize(distances, kinds)["by_kind"]:
            pairs = zip(made, kinds, strict=True)
            of_kind = [len(t.prompt.ids) for t, kind in pairs if kind == entry["kind"]]
            mean, (low, high) = entry["kl_nats"]["mean"], entry["kl_nats"]["interval"]
            print(
                f"| {path.parent.name} | {entry['kind']} | {entry['trajectories']} | {min(of_kind)} to "
                f"{max(of_kind)} | {1000 * mean:.2f} [{1000 * low:.2f}, {1000 * high:.2f}] |",
                flush=True,
            )


if __name__ == "__main__":
    main()
