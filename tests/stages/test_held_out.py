"""The trajectories that a replay reads: recorded once for all runs in a folder, fewer under a limit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quantize.bundled import CHECKPOINT
from quantize.host.processes import ALONE
from quantize.recipe.reading import resolved
from quantize.runtime import Sampler
from quantize.runtime.gpu.placement import CPU
from quantize.runtime.record.trajectory import TENSORS, Trajectory
from quantize.stages.fidelity import held_out
from quantize.stages.fidelity.held_out import held_out_trajectories
from quantize.stages.memory_needs import replayed_of
from tests.support.quick_run import in_few_steps


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of prompts that were recorded, one entry for each recording."""
    in_few_steps(monkeypatch, steps=2)
    fresh = held_out.FRESH.model_copy(update={"canvases": 1})
    monkeypatch.setattr(held_out, "FRESH", fresh)
    record_all, counts = held_out.record_all, []

    def counted(engine: Any, prompts: Any, *more: Any, **options: Any) -> list[Trajectory]:
        counts.append(len(prompts))
        return record_all(engine, prompts, *more, **options)

    monkeypatch.setattr(held_out, "record_all", counted)
    return counts


def ask(shared: Path, count: int = 2) -> tuple[list[Trajectory], Sampler]:
    nothing = shared / "no-calibration"
    return held_out_trajectories(CHECKPOINT, nothing, CPU, ALONE, count=count, shared=shared)


def assert_equal(one: list[Trajectory], other: list[Trajectory]) -> None:
    assert [t.prompt for t in one] == [t.prompt for t in other]
    assert [t.seed for t in one] == [t.seed for t in other]
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.committed, b.committed)
        assert all(map(torch.equal, a.steps, b.steps))


def test_a_second_run_or_judgement_records_nothing(
    recorded: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`judge` recorded BF16 again in a folder that had the recording."""
    first, sampler = ask(tmp_path)
    again, same = ask(tmp_path)
    assert recorded == [2]
    assert same == sampler
    assert_equal(first, again)
    ask(tmp_path / "elsewhere")
    in_few_steps(monkeypatch, steps=1)  # another sampler
    ask(tmp_path)
    assert recorded == [2, 2, 2]


def test_a_damaged_recording_is_made_again(recorded: list[int], tmp_path: Path) -> None:
    first, _ = ask(tmp_path)
    (file,) = tmp_path.glob(f"trajectories-*/{TENSORS}")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again, _ = ask(tmp_path)
    assert recorded == [2, 2]
    assert_equal(first, again)


def test_a_limited_run_replays_fewer_trajectories() -> None:
    def replayed(limit: int | None) -> int:
        return replayed_of(resolved("nvfp4", bundled=True, limit=limit))

    assert [replayed(limit) for limit in (None, 400, 80, 40, 20, 2)] == [16, 16, 16, 8, 4, 4]
    some = resolved("nvfp4", bundled=False)
    first = some.evaluation.tasks[0]
    evaluation = some.evaluation.model_copy(update={"limit": {first: 4}})
    assert replayed_of(some.model_copy(update={"evaluation": evaluation})) == 16
