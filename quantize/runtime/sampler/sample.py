"""One generated sample, canvas by canvas, and how many canvases the answer to a prompt may take."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quantize.errors import InputError
from quantize.runtime.sampler.sampler import Sampler


@dataclass
class Sample:
    """One generated sample."""

    tokens: list[int] = field(default_factory=list)  # ids before the first EOS
    steps_per_canvas: list[int] = field(default_factory=list)  # decoder forwards of each canvas
    # ids of each canvas; after an EOS, the sampler's pad_token_id if it has one
    committed: list[list[int]] = field(default_factory=list)
    finish: Literal["eos", "length"] = "length"  # "length" if the budget ended the sample
    new_tokens: int = 0  # counted as transformers does: with the EOS, without padding

    @property
    def canvases(self) -> int:
        """The number of committed canvases."""
        return len(self.committed)

    @property
    def denoising_steps(self) -> int:
        """The number of decoder forwards over all canvases."""
        return sum(self.steps_per_canvas)

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per decoder forward; the encoder's passes are not counted."""
        return self.new_tokens / self.denoising_steps

    def commit(self, canvas: list[int], steps: int, sampler: Sampler) -> None:
        """Append a finished canvas that took `steps` steps; an EOS in it sets `finish` to "eos"."""
        end = sampler.end_of(canvas)
        if end is not None:
            self.finish = "eos"
            if sampler.pad_token_id is not None:
                canvas = canvas[: end + 1] + [sampler.pad_token_id] * (len(canvas) - end - 1)
        self.tokens += canvas[:end]
        self.committed.append(canvas)
        self.steps_per_canvas.append(steps)
        self.new_tokens += sum(token != sampler.pad_token_id for token in canvas)

    def within(self, max_new_tokens: int, sampler: Sampler) -> "Sample":
        """Return the sample as it would be with `max_new_tokens`: its first canvases, at least one."""
        shorter = Sample()
        count = -(-max_new_tokens // len(self.committed[0]))
        for canvas, steps in zip(self.committed[:count], self.steps_per_canvas, strict=False):
            shorter.commit(canvas, steps, sampler)
        return shorter


def canvas_budgets(
    prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], sampler: Sampler,
    limit: int, length: int,
) -> list[int]:  # fmt: skip
    """Return, for each prompt, how many canvases of `length` tokens its answer may take.

    `max_new_tokens` is one number for all, or one for each. Raise InputError if that number, `limit` or
    sampler.max_length leaves an answer no token.
    """
    limit, count = min(limit, sampler.max_length or limit), len(prompts)
    most = [max_new_tokens] * count if isinstance(max_new_tokens, int) else max_new_tokens
    budgets = [-(-min(n, limit - len(p)) // length) for p, n in zip(prompts, most, strict=True)]
    for index, budget in enumerate(budgets):
        if budget <= 0:
            raise InputError(
                f"prompt {index} has {len(prompts[index])} tokens: nothing can follow it within "
                f"max_new_tokens {most[index]} and a total length of {limit}"
            )
    return budgets
