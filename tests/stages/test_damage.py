"""Deliberate damage: the replay alone finds it, and its gate fails; what norms cancel passes.

Every name, dtype and shape stays right, so the checkpoint loads. Verification (which compares with the
source) is not run: `quantize fidelity RUN` is what must find the fault.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest
import torch
from fused_dequant.formats import E2M1
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantize.host.files import read_json
from quantize.pipeline.stages import STAGES
from quantize.pipeline.staleness import input_digests, remember
from quantize.runs.folder import RunDir

pytestmark = pytest.mark.slow

Tensors = dict[str, Tensor]
LAYER = "model.decoder.layers.3."
EXPERTS = 16


def permute_experts(tensors: Tensors) -> Tensors:
    """The experts of one layer, each in the place of the one before."""
    start = LAYER + "experts."

    def source(name: str) -> str:
        if not name.startswith(start):
            return name
        expert, rest = name.removeprefix(start).split(".", 1)
        return f"{start}{(int(expert) + 1) % EXPERTS}.{rest}"

    return {name: tensors[source(name)] for name in tensors}


def swap_nibbles(tensors: Tensors) -> Tensors:
    """Odd inputs' codes in the place of even ones."""
    return changed(tensors, "weight_packed", lambda packed: (packed >> 4) | (packed << 4))


def exchange_gate_and_up(tensors: Tensors) -> Tensors:
    """Gate in the place of up in the experts of one layer: silu goes over the wrong half."""

    def source(name: str) -> str:
        if not name.startswith(LAYER + "experts."):
            return name
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        parts = name.split(".")
        return ".".join(other.get(part, part) for part in parts)

    return {name: tensors[source(name)] for name in tensors}


def shift_block_scales(tensors: Tensors) -> Tensors:
    """One layer's block scales, one block on."""
    shifted = changed(tensors, "weight_scale", lambda scale: rolled(scale))
    return {name: shifted[name] if name.startswith(LAYER) else tensors[name] for name in tensors}


def int3_weights(tensors: Tensors) -> Tensors:
    """Codes to the nearest of 0, 2, 4, 6 and their negatives: int3 in blocks of 16."""
    sixteen = torch.arange(16)
    values = torch.tensor(E2M1)
    coarse = (values[sixteen & 7] / 2).round() * 2  # ties to even: 1 -> 0, 3 -> 4
    nearest = (coarse[:, None] - values).abs().argmin(1) | (sixteen & 8)
    pairs = torch.arange(256)
    table = (nearest[pairs & 15] | (nearest[pairs >> 4] << 4)).to(torch.uint8)
    return changed(tensors, "weight_packed", lambda packed: table[packed.long()])


def scale_what_norms_cancel(tensors: Tensors) -> Tensors:
    """o_proj and down_proj a tenth larger: an RMSNorm follows each, so nothing changes."""
    return {
        name: tensor / 1.1
        if name.endswith("weight_global_scale") and ("o_proj" in name or "down_proj" in name)
        else tensor
        for name, tensor in tensors.items()
    }


def changed(tensors: Tensors, suffix: str, change: Callable[[Tensor], Tensor]) -> Tensors:
    hit = [name for name in tensors if name.endswith("." + suffix)]
    assert len(hit) > 300
    return {name: change(t) if name in hit else t for name, t in tensors.items()}


def rolled(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).roll(1, -1).view(scale.dtype)  # no roll for e4m3 itself


DAMAGE = (permute_experts, swap_nibbles, exchange_gate_and_up, shift_block_scales, int3_weights)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the nvfp4 recipe up to its checkpoint."""
    out = tmp_path_factory.mktemp("outputs")
    command = ["run", "--recipe", "nvfp4", "--until", "convert", "--out", str(out)]
    assert quantize(*command).returncode == 0
    (run,) = out.glob("nvfp4-*")
    return run


def quantize(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantize", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)


def replay_with(change: Callable[[Tensors], Tensors], run: Path, folder: Path) -> tuple[Path, int]:
    """Copy a run, change its checkpoint, replay it; return the copy and the exit code."""
    copy = folder / run.name
    shutil.copytree(run, copy)
    (shard,) = copy.glob("checkpoint/*.safetensors")
    before = load_file(shard)
    after = change(before)
    differing = [n for n in before if not torch.equal(raw(before[n]), raw(after[n]))]
    assert len(differing) > 20
    save_file({n: t.contiguous() for n, t in after.items()}, shard, metadata={"format": "pt"})
    bless(RunDir(copy))
    spent = cpu_seconds()
    done = quantize("fidelity", str(copy))
    seconds = cpu_seconds() - spent
    content = read_json(copy / "fidelity.json")
    kl = {mode: each["kl_nats"]["mean"] for mode, each in content["activations"].items()}
    print(f"{change.__name__}: {seconds:.0f} CPU s, KL {kl}, {done.stderr.splitlines()[-1]}")
    assert seconds < 120
    return copy, done.returncode


def cpu_seconds() -> float:
    """Return the CPU seconds of all commands so far: a busy machine makes them no longer."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def bless(run: RunDir) -> None:
    """Enter the checkpoint as one that convert wrote: otherwise it is refused as changed since."""
    stage = next(stage for stage in STAGES if stage.name == "convert")
    remember(run, stage, input_digests(run, stage))


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_fails_the_gate(
    damage: Callable[[Tensors], Tensors], converted: Path, tmp_path: Path
) -> None:
    run, code = replay_with(damage, converted, tmp_path)
    assert code == 1
    assert read_json(run / "fidelity.json")["faults"]


def test_scales_that_norms_cancel_pass(converted: Path, tmp_path: Path) -> None:
    run, code = replay_with(scale_what_norms_cancel, converted, tmp_path)
    assert code == 0
    assert read_json(run / "fidelity.json")["faults"] == []
