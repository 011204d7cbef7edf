"""The oracle behind the face of a `BatchEngine`: batches, observers, no slots."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from transformers import DiffusionGemmaForBlockDiffusion

from quantize.runtime import Sample, generate
from quantize.runtime.engine import generate as batch
from quantize.runtime.engine.interface import BatchEngine
from quantize.runtime.model.watching import Observer
from quantize.runtime.prompt.images import Images
from tests.support.modules_oracle.batch import ModulePasses
from tests.support.modules_oracle.inputs import watch_inputs
from tests.support.modules_oracle.noise import Heard
from tests.support.modules_oracle.passes import canvas_length, text_config

T = TypeVar("T")


class ModelEngine:
    """What `generate`, `record` and `replay` ask of an engine, over a transformers model."""

    def __init__(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        capacity: int = 1,
        noise: Heard | None = None,
    ) -> None:
        self.model, self.capacity, self._noise = model, capacity, noise
        self.canvas_length = canvas_length(model)
        self.device = model.device
        self.max_length: int = text_config(model).max_position_embeddings

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> ModulePasses:
        return ModulePasses(self.model, prompts, images, self._noise)

    @contextmanager
    def watching(
        self, *observers: Observer, on_pass: Callable[[Any], object] | None = None
    ) -> Generator[None]:
        """Show the input rows of every Linear while the block runs."""
        assert on_pass is None, "no pass of modules can be taken through one layer"
        with watch_inputs(self.model, *observers):
            yield

    def each(self, works: Sequence[Callable[[BatchEngine], T]]) -> list[T]:
        return [work(self) for work in works]

    def close(self) -> None:
        """Do nothing: nothing is on its way."""


def generate_as_heard(
    model: DiffusionGemmaForBlockDiffusion,
    prompts: Sequence[Sequence[int]],
    noise: Heard,
    **settings: Any,
) -> list[Sample]:
    """Generate with the random numbers that transformers drew for as many prompts."""
    with mock.patch.object(batch, "random_tokens", noise.begin):
        return generate(ModelEngine(model, noise=noise), prompts, range(len(prompts)), **settings)
