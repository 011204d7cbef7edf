"""Runs several batches side by side, so that a streamed layer serves one pass of each batch.

    batch 0   denoises until it needs a pass ---.            .--- goes on with the pass' rows
    batch 1   denoises until it needs a pass ---+-- layers --+--- goes on with the pass' rows

Each batch has a thread and slots of its own, and one thread works at a time. A batch that needs a pass
hands the pass over and waits. Once all batches wait, their passes go through the layers together. Each
pass keeps its own launches, so a sample has the same bits as if its batch ran alone. When a batch ends,
its slots go to the next batch.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from quantize.runtime.engine.interface import BatchEngine, DrawingPasses
from quantize.runtime.model.passes import Pass
from quantize.runtime.model.watching import Observer
from quantize.runtime.prompt.images import Images

if TYPE_CHECKING:
    from quantize.runtime.engine.fused_engine import FusedEngine

T = TypeVar("T")


def in_lockstep(engine: "FusedEngine", works: Sequence[Callable[[BatchEngine], T]]) -> list[T]:
    """Call each of `works` with a `Lane`, up to `engine.lanes` at once; return the results in order.

    The engine's slots are divided into lanes, one for each batch that runs in lockstep.
    """
    waiting, free = deque(enumerate(works)), list(range(engine.lanes))
    asked: dict[Lane[T], Pass | None] = {}  # the pass that each running lane needs next
    done: dict[int, T] = {}

    def resume(lane: Lane[T], answer: Tensor | None) -> None:
        said = lane.resume(answer)
        if isinstance(said, Pass):
            asked[lane] = said
        else:
            del asked[lane]
            done[lane.number] = said.result
            free.append(lane.index)

    try:
        while waiting or asked:
            while waiting and free:
                lane = Lane(engine, free.pop(0), *waiting.popleft())
                asked[lane] = None
                resume(lane, None)
            needed = [(lane, entering) for lane, entering in asked.items() if entering is not None]
            results = engine.model.run([entering for _, entering in needed])
            for (lane, _), rows in zip(needed, results, strict=True):
                resume(lane, rows)
    finally:
        for lane in asked:
            lane.stop()
    return [done[number] for number in range(len(works))]


class _Stopped(BaseException):
    """Unwinds the work of a lane whose result nobody needs any more."""


class _Ended(Generic[T]):
    def __init__(self, result: T) -> None:
        self.result = result


class Lane(Generic[T]):
    """The `BatchEngine` with which a function `work` is called, on a thread of its own.

    Its slots are the `capacity` slots of lane `index`. `number` is the index of `work` among all works.
    """

    def __init__(
        self, engine: "FusedEngine", index: int, number: int, work: Callable[[BatchEngine], T]
    ) -> None:
        self.index, self.number = index, number
        self.capacity, self.canvas_length = engine.capacity, engine.canvas_length
        self.max_length, self.device = engine.max_length, engine.device
        self._engine, self._work = engine, work
        self._given: SimpleQueue[Tensor | type[_Stopped] | None] = SimpleQueue()
        self._said: SimpleQueue[Pass | _Ended[T] | BaseException] = SimpleQueue()
        self._watch = _watch_of(engine)
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> DrawingPasses:
        """Encode `prompts` as the engine does, in the lane's slots."""
        return self._engine.passes_from(self.index, self._ask, prompts, images)

    def watching(self, *observers: Observer, **how: Any) -> AbstractContextManager[None]:
        """Watch only the passes of this lane's batch, as `BatchEngine.watching` does."""
        return self._engine.watching(*observers, **how)

    def resume(self, answer: Tensor | None) -> Pass | _Ended[T]:
        """Send `work` the rows of its last pass, None at first; return its next pass.

        Once `work` has returned, return an `_Ended` with its result. Raise what `work` raises.
        """
        model, others = self._engine.model, _watch_of(self._engine)
        model.inputs, model.on_pass = self._watch
        self._given.put(answer)
        said = self._said.get()
        self._watch = _watch_of(self._engine)
        model.inputs, model.on_pass = others
        if isinstance(said, BaseException):
            raise said
        return said

    def stop(self) -> None:
        """End `work` by an exception in its thread; its result is lost."""
        self._given.put(_Stopped)
        self._thread.join()

    def _ask(self, entering: Pass) -> Tensor:
        self._said.put(entering)
        answer = self._given.get()
        if not isinstance(answer, Tensor):
            raise _Stopped
        return answer

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # this setting is per thread
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._given.get() is _Stopped:
            return
        try:
            self._said.put(_Ended(self._work(self)))
        except _Stopped:
            pass
        except BaseException as error:
            self._said.put(error)


def _watch_of(engine: "FusedEngine") -> tuple[Any, Any]:
    """Return what shows passes to observers; each lane has its own."""
    return engine.model.inputs, engine.model.on_pass
