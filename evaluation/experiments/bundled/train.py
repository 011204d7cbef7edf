"""Train the bundled model.

    PYTHONPATH=evaluation python -m experiments.bundled.train GSM8K_TRAIN --out FOLDER

Objective and forward are in ``forward.py``, the data in ``problems.py``. This file packs a bank of
problems into device memory, captures one optimizer step (draw a batch, forward, backward, clip,
AdamW) in a CUDA graph, and replays it. Eager, the same step is bound by kernel launches: 8.8 steps/s
at batch 256 on an H200, where few steps, not few examples, were what kept accuracy low.

The learning rate warms up over 300 steps, stays constant, and falls linearly to zero over the last
`--decay` steps. A stretch without decay can be resumed from its `state-*.safetensors` (float32
parameters; AdamW's moments are rebuilt during the warm-up).

Fixed by the seed: data, initialisation, the order of draws. Not bit-reproducible on a GPU (atomic
adds in backward passes): the committed checkpoint is identified by its sha256.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

from experiments.bundled import tokenizer as bundled_tokenizer
from experiments.bundled.architecture import CANVAS, CANVASES, new_model
from experiments.bundled.forward import BALANCE_WEIGHT, TrainingForward, draw_batch, identity
from experiments.bundled.problems import (
    EVALUATION,
    NARROW,
    WIDE,
    Numbers,
    Problem,
    Template,
    distinct,
    load_templates,
    stream,
)
from experiments.bundled.score import score
from quantize.bundled import CHECKPOINT

P = ParamSpec("P")
R = TypeVar("R")
LONGEST_PROMPT = 112  # tokens; longer rows are dropped
ENCODER_TOKENS = LONGEST_PROMPT + CANVAS  # the last canvas is never encoded when generating
THINKING_SHARE = 0.3
WARM_UP = 300
SHARD = 10_000


@dataclass(frozen=True)
class Bank:
    """Tokenized problems: tokens int16 [N, 112 + 128], prompt lengths [N], canvases per answer [N]."""

    tokens: Tensor
    prompts: Tensor
    canvases: Tensor


def pack_shard(
    job: tuple[int, list[Template], Numbers, int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a shard's `Bank` arrays, determined by its seed; EOS fills each answer's last canvas."""
    seed, templates, numbers, rows = job
    tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
    source = stream(seed, templates, "train", numbers)
    problems = [next(source) for _ in range(rows)]
    thinking = np.random.default_rng(seed).random(rows) < THINKING_SHARE
    pairs = list(zip(problems, thinking.tolist(), strict=True))
    asked = [bundled_tokenizer.prompt(tokenizer, p.question, thinking=t) for p, t in pairs]
    answered = [bundled_tokenizer.response(p, thinking=t) for p, t in pairs]
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    questions = [e.ids for e in encode(asked, add_special_tokens=False)]
    answers = [e.ids for e in encode(answered, add_special_tokens=False)]
    tokens = np.zeros((rows, LONGEST_PROMPT + CANVAS * CANVASES), np.int16)
    kept: list[tuple[int, int]] = []
    for question, answer in zip(questions, answers, strict=True):
        canvases = -(-len(answer) // CANVAS)
        if len(question) > LONGEST_PROMPT or canvases > CANVASES:
            continue
        row = question + answer + [bundled_tokenizer.EOS_ID] * (canvases * CANVAS - len(answer))
        tokens[len(kept), : len(row)] = row
        kept.append((len(question), canvases))
    lengths = np.array(kept, np.int64)
    return tokens[: len(kept)], lengths[:, 0], lengths[:, 1]


def build_bank(
    seed: int, shards: int, templates: list[Template], numbers: Numbers, workers: int
) -> Bank:
    """`shards` shards of `SHARD` problems each, packed in parallel."""
    jobs = [(seed * 1_000_000 + i, templates, numbers, SHARD) for i in range(shards)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        parts = pool.map(pack_shard, jobs, chunksize=1)
    tokens, prompts, canvases = (
        torch.from_numpy(np.concatenate(p)) for p in zip(*parts, strict=True)
    )
    return Bank(tokens, prompts, canvases)


class Trainer:
    """Trains a model on a bank; on a GPU it replays the optimizer step as a CUDA graph."""

    def __init__(
        self, model: DiffusionGemmaForBlockDiffusion, bank: Bank, batch_size: int, lr: float
    ) -> None:
        self.device = model.device
        cuda = self.device.type == "cuda"
        self.bank, self.batch_size, self.peak = bank, batch_size, lr
        self.parameters = list(model.model.decoder.parameters())
        self.rate = torch.zeros((), device=self.device)
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": 0.05},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, 0.98), eps=1e-10, fused=cuda, capturable=cuda
        )
        self.forward = TrainingForward(
            model,
            torch.bfloat16 if cuda else torch.float32,
            positions=LONGEST_PROMPT + CANVAS * CANVASES,
            wrap=_compile if cuda else identity,
        )
        self.vocabulary = bundled_tokenizer.VOCABULARY
        self.losses = torch.zeros(3, device=self.device)
        self.run = self._capture() if cuda else self.step

    def step(self) -> None:
        """Draw a batch and update the parameters; the three losses land in `self.losses`."""
        self.optimizer.zero_grad(set_to_none=True)
        b = self.bank
        batch = draw_batch(
            b.tokens, b.prompts, b.canvases, self.batch_size, ENCODER_TOKENS, self.vocabulary
        )
        denoising, causal, balance = self.forward.losses(batch)
        (denoising + causal + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.losses.copy_(torch.stack((denoising, causal, balance)).detach())

    def _capture(self) -> Callable[[], None]:
        """Run the step three times at rate zero (compiles, allocates), then record it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def train(
        self, first: int, steps: int, decay: int, log: Callable[[Mapping[str, object]], None]
    ) -> None:
        """Run `steps` steps, numbered from `first` + 1; log every 500 of them and the last."""
        began = time.monotonic()
        for i in range(steps):
            share = min(1.0, (i + 1) / WARM_UP, (steps - i) / max(decay, 1) if decay else 1.0)
            self.rate.fill_(self.peak * share)
            self.run()
            if (i + 1) % 500 == 0 or i + 1 == steps:
                denoising, causal, balance = self.losses.tolist()
                rate = (i + 1) / (time.monotonic() - began)
                log({
                    "step": first + i + 1, "denoising_loss": round(denoising, 4),
                    "causal_loss": round(causal, 4), "balance_loss": round(balance, 4),
                    "steps_per_second": round(rate, 1),
                })  # fmt: skip


def _compile(function: Callable[P, R], /) -> Callable[P, R]:
    return torch.compile(function, dynamic=False, fullgraph=True)


def save_state(
    model: DiffusionGemmaForBlockDiffusion, folder: Path, step: int, parts: int = 2
) -> None:
    """Write the float32 text parameters and `step` to `parts` files of about equal size."""
    tensors = sorted(model.model.decoder.named_parameters(), key=lambda item: -item[1].numel())
    for part in range(parts):
        tensors_of_part = {name: t.detach().cpu().contiguous() for name, t in tensors[part::parts]}
        save_file(tensors_of_part, folder / f"state-{part}.safetensors", {"step": str(step)})


def load_state(model: DiffusionGemmaForBlockDiffusion, folder: Path) -> int:
    """Copy saved parameters into the model; returns the step they were saved at.

    Raises:
        KeyError: the files lack a parameter of the model, or hold one that the model lacks.

    """
    missing, step = dict(model.model.decoder.named_parameters()), 0
    for path in sorted(folder.glob("state-*.safetensors")):
        with safe_open(path, "pt") as file:
            step = int(file.metadata()["step"])
            for name in file.keys():  # noqa: SIM118 - not a dict
                missing.pop(name).data.copy_(file.get_tensor(name))
    if missing:
        raise KeyError(f"{folder}: no state of {sorted(missing)}")
    return step


def export(
    model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> DiffusionGemmaForBlockDiffusion:
    """Write the BF16 checkpoint in Google's layout and load it again, strictly.

    Raises:
        RuntimeError: the written checkpoint has missing or unexpected keys.

    """
    generation = model.generation_config
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20MB")
    tokenizer.save_pretrained(folder)
    generation.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(released_form(config), indent=2) + "\n", "utf-8")
    # Typed Any: with loading info the call returns a pair, which its annotation does not say.
    loaded_and_info: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    loaded, info = loaded_and_info
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise RuntimeError(f"{folder} does not load as written: {info}")
    return loaded.eval()


def released_form(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json in Google's form: two fields describe all layers of global attention.

    transformers also reads this form, but writes an entry for each layer, which vLLM 0.26 cannot read.
    """
    text = dict(config["text_config"])
    layers = list(text.pop("per_layer_config", {}).values())
    if layers:
        if any(layer != layers[0] for layer in layers):
            raise ValueError(f"layers of global attention differ: {layers}")
        text["global_head_dim"] = layers[0]["head_dim"]
        text["num_global_key_value_heads"] = layers[0]["num_key_value_heads"]
    return config | {"text_config": dict(sorted(text.items()))}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, train one stretch, export, score."""
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("gsm8k", type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder with an earlier stretch's state")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--decay", type=int, default=8_000, help="of the steps, 0 to resume later")
    parser.add_argument("--numbers", choices=["narrow", "wide"], default="wide")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--shards", type=int, default=100, help=f"of {SHARD} problems each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--score", type=int, default=400, help="held-out problems, at the end")
    a = parser.parse_args(arguments)
    a.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    curve: list[dict[str, object]] = []

    def log(entry: Mapping[str, object]) -> None:
        curve.append({"seconds": round(time.monotonic() - began, 1), **entry})
        print(json.dumps(curve[-1]), flush=True)

    numbers = NARROW if a.numbers == "narrow" else WIDE
    templates = load_templates(a.gsm8k, numbers)
    tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = new_model(a.seed)
    first = load_state(model, a.resume) if a.resume else 0
    nn.Module.to(model, device)
    bank = build_bank(a.seed + first, a.shards, templates, numbers, a.workers)
    bank = Bank(*(t.to(device) for t in (bank.tokens, bank.prompts, bank.canvases)))
    log({"rows": len(bank.tokens), "templates": len(templates), "resumed_at": first})
    torch.manual_seed(a.seed + first)
    trainer = Trainer(model, bank, a.batch, a.lr)
    log({"captured": device == "cuda"})
    trainer.train(first, a.steps, a.decay, log)
    save_state(model, a.out, first + a.steps)
    trained = export(model, tokenizer, a.out / "checkpoint")
    nn.Module.to(trained, device)
    problems: list[Problem] = distinct(stream(1, templates, "heldout", EVALUATION), a.score)
    for thinking in (False, True):
        summary, answers = score(trained, tokenizer, problems, thinking=thinking)
        log({"thinking": thinking, **asdict(summary)})
        by_kind: dict[str, list[bool]] = {}
        for problem, answer in zip(problems, answers, strict=True):
            by_kind.setdefault(f"{problem.source} {problem.level}", []).append(answer.correct)
        log({kind: round(sum(c) / len(c), 3) for kind, c in sorted(by_kind.items())})
    record = {"arguments": {k: str(v) for k, v in vars(a).items()}, "curve": curve}
    (a.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
