"""The model that lm-eval asks: it returns whole block-diffusion answers, from seeded samples.

lm-eval has neither seeded samples nor resumable runs, so this model adds both. Repeat j of a prompt
has a seed hashed from the run's seed, the prompt and j, and answers come from a `SampleStore`. A
canvas is denoised whole, so an answer loses its thoughts and is cut at stop strings when finished.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from quantize.recovery.health import without_thinking
from quantize.recovery.samples import Completion, Request, sample_seed
from quantize.recovery.sequential import Part


class BlockDiffusionLM(LM):
    """Gives lm-eval the answers of `part`, one repeat per call; the first call generates all."""

    def __init__(
        self,
        done: Mapping[str, Completion],  # request's key -> completion
        complete: Callable[[Sequence[Request]], None],  # adds missing completions to `done`
        *,
        seed: int,
        part: Part,
    ) -> None:
        super().__init__()
        self.done, self.complete, self.seed, self.part = done, complete, seed, part
        self.repeat = part.repeats[0]
        self.requests: dict[tuple[int, int], Request] = {}  # (doc_id, repeat)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return each request's answer in the current `repeat`, shortened by `cut`."""
        for repeat in self.part.repeats:
            for instance in requests:
                self.requests[self._doc_id(instance), repeat] = self._request(instance, repeat)
        if self.repeat == self.part.repeats[0]:
            self.complete(list(self.requests.values()))
        return [self._answer(instance) for instance in requests]

    def completion(self, doc_id: int, repeat: int) -> Completion:
        """Return the model's completion for document `doc_id` in repeat `repeat`."""
        return self.done[self.requests[doc_id, repeat].key]

    def loglikelihood(self, requests: Sequence[Instance]) -> list[Any]:
        """Raise TypeError: a block-diffusion model has no token likelihoods."""
        raise TypeError("block diffusion has no loglikelihood; use a generative task")

    loglikelihood_rolling = loglikelihood

    def _request(self, instance: Instance, repeat: int) -> Request:
        prompt, options = cast(tuple[str, dict[str, Any]], instance.args)
        return Request(
            prompt=prompt,
            seed=sample_seed(self.seed, prompt, repeat),
            max_new_tokens=int(options["max_gen_toks"]),
            thinking=bool(options.get("thinking", False)),
        )

    def _answer(self, instance: Instance) -> str:
        _, options = cast(tuple[str, dict[str, Any]], instance.args)
        text = self.completion(self._doc_id(instance), self.repeat).text
        return cut(text, options.get("until") or [])

    def _doc_id(self, instance: Instance) -> int:
        """Return the document's index in its data set; lm-eval counts only requested documents."""
        return self.part.questions[cast(int, instance.doc_id)]


def cut(text: str, stops: Iterable[str]) -> str:
    """Return an answer without its thinking channel, cut before the first stop string."""
    answer = without_thinking(text)
    for stop in stops:
        answer = answer.partition(stop)[0] if stop else answer
    return answer
