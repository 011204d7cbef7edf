"""Would OpenAI's `temperature`, as a factor of t_min and t_max, behave like a temperature?

    python -m tests.benchmarks.temperature [--problems 200] [--samples 4] [--factor 0.25 ...]

The bundled model answers each held-out problem several times under each factor, one line of JSON each:

    accuracy    share of right answers, and half its 95 % interval over problems
    distinct    mean number of different texts among the samples of a problem
    answers     mean number of different numbers among them
    words       share of words that differ between two samples of a problem, position by position
    steps       denoising steps a canvas

With a temperature, distinct, answers and words grow from (nearly) one text at 0 on, and accuracy does
not grow. The last line says where that fails.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.recovery.samples import Request, Waiting
from quantize.runtime import Placement, Sampler
from quantize.stages.evaluate.local_model import Answerer

FACTORS = (0.05, 0.25, 0.5, 1.0, 1.5, 2.0)


def number(text: str) -> str:
    """Return the answer that a text ends with."""
    return text.rsplit("####", 1)[-1].split("<")[0].strip().replace(",", "")


def apart(texts: Sequence[str]) -> float:
    """Return the share of words that differ between two texts, over all pairs."""
    shares: list[float] = []
    for one, other in itertools.combinations([text.split() for text in texts], 2):
        pairs = list(itertools.zip_longest(one, other))
        shares.append(sum(a != b for a, b in pairs) / max(1, len(pairs)))
    return statistics.mean(shares)


def measured(
    rows: list[dict[str, Any]], factor: float, samples: int, device: str
) -> dict[str, float]:
    """Answer all problems `samples` times with t_min and t_max times `factor`."""
    own = Sampler.from_checkpoint(CHECKPOINT)
    sampler = replace(own, t_min=own.t_min * factor, t_max=own.t_max * factor)
    place = Placement(device, activations="none")
    model = Answerer(CHECKPOINT, "", sampler, place, capacity=64)
    requests = [
        Request(row["question"], index * samples + again, 128)
        for index, row in enumerate(rows)
        for again in range(samples)
    ]
    done = dict(model(Waiting(requests, iter(requests))))
    groups = [requests[i : i + samples] for i in range(0, len(requests), samples)]
    texts = [[done[request].text for request in group] for group in groups]
    right = [
        statistics.mean(number(text) == str(row["answer_number"]) for text in own_texts)
        for row, own_texts in zip(rows, texts, strict=True)
    ]
    steps = [step for each in done.values() for step in each.denoising_steps]
    return {
        "factor": factor,
        "accuracy": statistics.mean(right),
        "half_interval": 1.96 * statistics.stdev(right) / len(right) ** 0.5,
        "distinct": statistics.mean(len(set(each)) for each in texts),
        "answers": statistics.mean(len({number(text) for text in each}) for each in texts),
        "words": statistics.mean(map(apart, texts)),
        "steps": statistics.mean(steps),
    }


def main() -> None:
    """Print a line a factor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--factor", type=float, action="append")
    asked = parser.parse_args()
    rows = [json.loads(line) for line in HELDOUT.read_text("utf-8").splitlines()[: asked.problems]]
    found: list[dict[str, float]] = []
    for factor in sorted(asked.factor or FACTORS):
        found.append(measured(rows, factor, asked.samples, asked.device))
        print(json.dumps(found[-1]), flush=True)
    wrong = [
        f"{name} from {a['factor']} to {b['factor']}"
        for a, b in itertools.pairwise(found)
        for name, sign in (("distinct", 1), ("answers", 1), ("words", 1), ("accuracy", -1))
        if sign * (b[name] - a[name]) < 0
    ]
    print(json.dumps({"not_like_a_temperature": wrong}))


if __name__ == "__main__":
    main()
