"""Pictures and long contexts among calibration prompts: loaded, kept, replayed, told apart."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantize.bundled import CHECKPOINT
from quantize.errors import InputError
from quantize.recipe.sections import Calibration
from quantize.reports.sections import kinds_text
from quantize.runtime import Sampler, open
from quantize.runtime.engine.interface import Engine
from quantize.runtime.record.trajectory import (
    Trajectory,
    load_trajectories,
    record,
    save_trajectories,
)
from quantize.stages.fidelity.fidelity import summarize
from quantize.stages.fidelity.replay import Compared, replay
from quantize.stages.prompts import load_prompts
from tests.support.pictures import picture

WINDOW = 512  # of the bundled model
KINDS = ["past the window", "pictures", "text"]
SAMPLER = Sampler(max_denoising_steps=2, eos_token_ids=(1, 50), pad_token_id=0)


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """One prompt of each kind, and one that is too long."""
    folder = tmp_path_factory.mktemp("mix")
    picture().save(folder / "a.png")
    parts = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "How many?"}]
    rows = [
        {"question": "Ann has 3 cards. How many?"},
        {"question": "Tom has 9 pens and loses 4. " * 60},
        {"messages": [{"role": "user", "content": parts}]},
        {"question": "Tom has 9 pens and loses 4. " * 200},
    ]
    (folder / "mix.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Calibration(
        datasets=[str(folder / "mix.jsonl")], prompts=3, canvases=1, thinking=0, batch_size=3,
        max_prompt_tokens=1500,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open(CHECKPOINT, device="cpu", capacity=3)


@pytest.fixture(scope="module")
def trajectories(mix: Calibration, engine: Engine) -> list[Trajectory]:
    prompts = load_prompts(CHECKPOINT, mix, 3)
    return record(engine, prompts, [1, 2, 3], sampler=SAMPLER, canvases=1, held_out=True)


def test_each_kind_is_known_and_the_longest_is_skipped(mix: Calibration) -> None:
    prompts = load_prompts(CHECKPOINT, mix, 3)
    assert sorted(prompt.kind(WINDOW) for prompt in prompts) == KINDS
    assert max(len(prompt.ids) for prompt in prompts) <= 1500
    with pytest.raises(InputError, match="hold 3 usable prompts and 4"):
        load_prompts(CHECKPOINT, mix, 4)
    longer = mix.model_copy(update={"max_prompt_tokens": 8000})
    assert len(load_prompts(CHECKPOINT, longer, 4)) == 4


def test_what_is_kept_replays_with_its_pictures(
    trajectories: list[Trajectory], engine: Engine, tmp_path: Path
) -> None:
    save_trajectories(tmp_path, trajectories, SAMPLER)
    kept, _ = load_trajectories(tmp_path)
    kinds = [trajectory.prompt.kind(WINDOW) for trajectory in kept]
    assert sorted(kinds) == KINDS
    (same,) = replay(engine, [Compared(engine)], kept, SAMPLER)
    assert max(distance.kl.max() for distance in same) < 1e-5
    at = kinds.index("pictures")
    images = kept[at].prompt.images
    assert images is not None
    darker = replace(images, pixels=images.pixels * 0.1)
    kept[at] = replace(kept[at], prompt=replace(kept[at].prompt, images=darker))
    before, after = (
        engine.passes([trajectory.prompt.ids], [trajectory.prompt.images]).decode(
            [0], trajectory.steps[0][:1], None
        )
        for trajectory in (trajectories[at], kept[at])
    )
    (piece,) = before.pieces()
    assert not torch.equal(before.logits(piece), after.logits(piece))
    found = summarize(same, kinds)["by_kind"]
    assert [(entry["kind"], entry["trajectories"]) for entry in found] == [(k, 1) for k in KINDS]


def test_the_report_says_kinds_where_there_are_several() -> None:
    value = {"mean": 0.01, "interval": [0.005, 0.02]}
    kinds = [{"kind": k, "trajectories": 2, "kl_nats": value} for k in ("pictures", "text")]
    assert kinds_text(kinds[1:]) == ""
    said = "pictures 0.0100 [0.0050, 0.0200] (2 trajectories); text 0.0100 [0.0050, 0.0200]"
    assert kinds_text(kinds) == f"{said} (2 trajectories)"


@pytest.mark.parametrize("part", [{"type": "image", "url": "http://a"}, "text", {"type": "video"}])
def test_a_part_that_is_neither_text_nor_a_picture_is_refused(part: object, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": [part]}]}
    (tmp_path / "bad.jsonl").write_text(json.dumps(row))
    settings = Calibration(
        datasets=[str(tmp_path / "bad.jsonl")], prompts=1, canvases=1, thinking=0
    )
    with pytest.raises(InputError, match=r"row 1 is no chat of texts .*is neither"):
        load_prompts(CHECKPOINT, settings, 1)
