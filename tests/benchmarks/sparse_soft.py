"""What the sparse soft embedding costs a model: tokens that rows need, replay KL, answers.

    python tests/benchmarks/sparse_soft.py [--checkpoint FOLDER] [--trajectories 32] [--problems 200]

JSON lines. `needed`: how many tokens hold 0.999 of a row's mass, by step, while the BF16 model
denoises, and the share of rows that are multiplied whole. `norms`: of rows of the embedding, and of
soft embeddings of these rows, on which the bound depends. `replay`: KL in nats from the dense BF16
model of steps after the first, and shares of positions whose argmax is the same, of BF16 and of FOLDER,
each dense and sparse, conditioned on BF16's logits and on its own; "rounded" is dense with a soft
embedding off by up to half of bf16's spacing, as if it were rounded once more. `answers`: of word
problems at the model's own settings, dense and sparse beside each other, with equal noise. FOLDER is a
quantized form of the bundled model; without it BF16 is asked alone.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from fused_dequant.reference import (  # noqa: E402
    LEFT_OUT,
    MOST,
    soft_embedding,
    sparse_soft_embedding,
    tokens_needed,
)

from quantize.bundled import CHECKPOINT, HELDOUT  # noqa: E402
from quantize.host.processes import ALONE  # noqa: E402
from quantize.recovery.samples import SampleStore  # noqa: E402
from quantize.recovery.scoring import score  # noqa: E402
from quantize.recovery.sequential import Part  # noqa: E402
from quantize.runtime import Placement, Sampler, open  # noqa: E402
from quantize.runtime.engine.interface import Engine  # noqa: E402
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer  # noqa: E402
from quantize.runtime.record.tokens_needed import TokensNeeded  # noqa: E402
from quantize.runtime.record.trajectory import Prompt, Trajectory, record  # noqa: E402
from quantize.stages.evaluate.local_model import Answerer  # noqa: E402
from quantize.stages.fidelity.replay import Compared, replay  # noqa: E402

SAMPLER, BATCH = Sampler.from_checkpoint(CHECKPOINT), 16


def told(name: str, **found: Any) -> None:
    """Print one result."""
    print(json.dumps({name: found}), flush=True)


class Norms:
    """What the bound says of some rows, and what their error is."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table, self.rows = table.double(), list[torch.Tensor]()
        self.largest = self.table.norm(dim=1).max()

    def see(self, logits: torch.Tensor, inverse: torch.Tensor, step: torch.Tensor) -> None:
        """Note norm, error and bf16's rounding of every 32nd row."""
        logits, inverse = logits[::32], inverse[::32]
        exact = soft_embedding(logits, self.table, inverse, torch.float64)
        sparse = sparse_soft_embedding(logits, self.table, inverse, torch.float64)
        rounded = exact.to(torch.bfloat16).double()
        numbers = [exact.norm(dim=1), (sparse - exact).norm(dim=1), (rounded - exact).norm(dim=1)]
        self.rows.append(torch.stack(numbers))


def recorded(engine: Engine, count: int, device: str) -> list[Trajectory]:
    """Denoise word problems with BF16; tell what rows need."""
    tokenizer = load_tokenizer(CHECKPOINT)
    prompts: list[Prompt] = []
    for line in HELDOUT.read_text("utf-8").splitlines()[-count:]:
        chat = [{"role": "user", "content": json.loads(line)["question"]}]
        prompts.append(Prompt(tuple(encode_chat(tokenizer, chat, thinking=False)), False))
    needed, norms = TokensNeeded(), Norms(engine.model.weights.embedding)
    needed.EVERY = 1
    whole, rows = [0], [0]

    def see(logits: torch.Tensor, inverse: torch.Tensor, step: torch.Tensor) -> None:
        needed.see(logits, inverse, step)
        norms.see(logits, inverse, step)
        whole[0] += int((tokens_needed(logits, inverse) > MOST).sum())
        rows[0] += len(logits)

    found: list[Trajectory] = []
    with engine.watching(lambda *_: None, on_logits=see):
        for start in range(0, count, BATCH):
            own = prompts[start : start + BATCH]
            seeds = range(start, start + len(own))
            found += record(engine, own, seeds, sampler=SAMPLER, canvases=2, held_out=True)
    told("needed", **needed.counted(ALONE), whole=whole[0], rows=rows[0])
    norm, error, rounding = torch.cat(norms.rows, 1)
    told(
        "norms",
        rows_of_embedding=[float(norms.table.norm(dim=1).min()), float(norms.largest)],
        soft_embedding=[float(norm.min()), float(norm.median()), float(norm.max())],
        largest_error_over_bound=float((error / (LEFT_OUT * norms.largest)).max()),
        error_over_norm=[float((error / norm).mean()), float((error / norm).max())],
        bf16_rounding_over_norm=[float((rounding / norm).mean()), float((rounding / norm).max())],
        rows_with_more_error_than_rounding=float((error > rounding).double().mean()),
        rows_whose_bound_is_below_largest_and_typical_rounding=[
            float((LEFT_OUT * norms.largest < norm * each).double().mean())
            for each in (2**-8, 1.65e-3)
        ],
    )
    return found


def replayed(base: Engine, checkpoint: Path, trajectories: list[Trajectory], device: str) -> None:
    """Tell the KL of a checkpoint, dense and sparse."""
    place = Placement(device, capacity=BATCH, activations="none", max_context=1024)
    ways = {"dense": False, "sparse": True, "rounded": False}
    engines = {name: open(checkpoint, replace(place, sparse=own)) for name, own in ways.items()}
    exact, generator = engines["rounded"].model.soft_embedding, torch.Generator().manual_seed(0)

    def rounded(*given: torch.Tensor) -> torch.Tensor:
        soft = exact(*given).float()
        noise = torch.rand(soft.shape, generator=generator).to(soft.device) - 0.5
        return (soft * (1 + 2**-7 * noise)).to(torch.bfloat16)

    engines["rounded"].model.soft_embedding = rounded
    compared = {
        f"{name}, {'own' if own else 'given'} conditioning": Compared(engine, own)
        for name, engine in engines.items()
        for own in (False, True)
    }
    for name, each in compared.items():  # an engine has one set of passes
        [steps] = replay(base, [each], trajectories, SAMPLER, batch_size=BATCH)
        later = [step for step in steps if step.step > 1]
        told(
            "replay", model=checkpoint.name, which=name, steps=len(later),
            kl=statistics.mean(float(step.kl.mean()) for step in later),
            median=statistics.median(float(step.kl.mean()) for step in later),
            largest=max(float(step.kl.max()) for step in later),
            agrees=statistics.mean(float(step.agrees.float().mean()) for step in later),
        )  # fmt: skip


def answers(checkpoint: Path, problems: int, device: str) -> None:
    """Tell the accuracy of a checkpoint, dense and sparse, and how many answers differ."""
    found: list[dict[str, Any]] = []
    for sparse in (False, True):
        place = Placement(device, activations="none", sparse=sparse, capacity=64)
        model, began = Answerer(checkpoint, "bundled", SAMPLER, place), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            store = SampleStore(Path(folder) / "samples.jsonl", {})
            done = score(
                "word_problems", store, model, Part(range(problems), range(1)), data_file=HELDOUT,
                seed=0, sampler={}, progress=lambda own, _: own,
            )  # fmt: skip
        model.release()
        assert done is not None
        rows = {row.doc_id: row for row in done.rows}
        found.append(rows)
        told(
            "answers", model=checkpoint.name, sparse=sparse, problems=problems,
            right=sum(row.score for row in rows.values()),
            steps=statistics.mean(n for row in rows.values() for n in row.denoising_steps),
            seconds=round(time.monotonic() - began),
        )  # fmt: skip
    dense, sparse = found
    told(
        "differ", model=checkpoint.name,
        text=sum(dense[i].text != sparse[i].text for i in dense),
        won=sum(sparse[i].score > dense[i].score for i in dense),
        lost=sum(sparse[i].score < dense[i].score for i in dense),
    )  # fmt: skip


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="a quantized form of the bundled model")
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    models = [CHECKPOINT, *([args.checkpoint] if args.checkpoint else [])]
    place = Placement(args.device, capacity=BATCH, activations="none", max_context=1024)
    base = open(CHECKPOINT, place)
    trajectories = recorded(base, args.trajectories, args.device)
    for model in models:
        replayed(base, model, trajectories, args.device)
    for model in models if args.problems else []:
        answers(model, args.problems, args.device)


if __name__ == "__main__":
    main()
