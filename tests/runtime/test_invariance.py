"""On a CPU a sample depends on itself alone: not on neighbours, slots, cores or kept beginnings.

Libraries sum in other orders on other CPUs, so the tests hold only if they hold on many kinds of CPU.
"""

from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path

import fused_dequant as fd
import pytest
import torch
from fused_dequant import weights
from fused_dequant.inputs import activations
from fused_dequant.launch.dispatch import sequences_of

from quantize.runtime import Sampler, generate
from quantize.runtime.engine.interface import complete
from quantize.runtime.gpu.cores import Cores
from quantize.runtime.opening import open

SAMPLER = Sampler(max_denoising_steps=2)
LENGTHS = (5, 16, 40, 41, 140)
N = 7  # rows of a sequence


@pytest.fixture
def threads() -> Generator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 500, (n,), generator=generator).tolist() for n in LENGTHS]


def answers(folder: Path, threads: int, capacity: int, order: list[int]) -> list[list[int]]:
    """Two canvases behind each prompt, in a batch of any size and order, on so many cores."""
    torch.set_num_threads(threads)
    engine = open(folder, device="cpu", capacity=capacity, max_context=400)
    found = complete(
        engine, [prompts()[i] for i in order], order,
        max_new_tokens=2 * engine.canvas_length, sampler=SAMPLER,
    )  # fmt: skip
    return [found[order.index(i)].tokens for i in range(len(order))]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("artifact", ["tiny_checkpoint", "fp8_artifact", "nvfp4_artifact"])
def test_neighbours_slots_and_cores(artifact: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(artifact)
    first = answers(folder, 1, 1, [0, 1, 2, 3, 4])
    assert answers(folder, 3, 4, [3, 0, 4, 1, 2]) == first


@pytest.mark.usefixtures("threads")
def test_a_core_shares_no_product() -> None:
    """A library's threads would, and round the last elements of their shares differently."""
    torch.set_num_threads(3)
    cores = Cores(2)
    seen = cores.each(lambda _: (torch.get_num_threads(), cores.one(torch.get_num_threads)), "ab")
    assert (seen, cores.one(torch.get_num_threads)) == ([(1, 1)] * 2, 1)
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("threads")
def test_watched_passes_and_cores(tiny_checkpoint: Path) -> None:
    """What calibration records and adds up: tokens, rows and their sums."""
    found: list[tuple[list[list[int]], float, torch.Tensor]] = []
    for count in (1, 3):
        torch.set_num_threads(count)
        engine = open(tiny_checkpoint, device="cpu", capacity=5, max_context=400)
        sums = torch.zeros(2)

        def see(_: str, rows: torch.Tensor, __: object, sums: torch.Tensor = sums) -> None:
            sums.add_(torch.stack([rows.float().sum(), (rows.T.float() @ rows.float()).norm()]))

        made: list[list[list[int]]] = []
        for watching in (engine.watching(see), nullcontext()):
            with watching:
                samples = generate(
                    engine,
                    prompts(),
                    range(5),
                    max_new_tokens=engine.canvas_length,
                    sampler=SAMPLER,
                )
            made.append([s.tokens for s in samples])
        assert made[0] == made[1]
        found.append((made[0], *sums.tolist()))
    assert found[0] == found[1]


def operands(scheme: str, experts: int) -> tuple[weights.Weight, weights.Weight]:
    """A weight [E, 2I, H] and one [E, H, I] of H = 48 and I = 32: no vector's whole multiples."""
    generator = torch.Generator().manual_seed(2)
    found: list[weights.Weight] = []
    for rows, columns in ((64, 48), (48, 32)):
        values = torch.randn(experts, rows, columns, generator=generator)
        if scheme == "bf16":
            found.append(weights.bf16(values))
        elif scheme == "nvfp4":
            own = 100.0 + torch.arange(2 * experts).view(experts, 2)
            codes = fd.formats.quantize_nvfp4(values, own[:, :1, None])
            found.append(weights.build(scheme, *codes, 128 / own))
        else:
            codes, scales = fd.formats.quantize_rows(values, torch.float8_e4m3fn)
            found.append(weights.build(scheme, codes, scales))
    return found[0], found[1]


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "nvfp4"])
def test_a_sequence_of_a_product_is_alone(scheme: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4 * N, 48, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in x])
    share = torch.rand(len(x), 2, generator=generator)
    dense, (gate_up, down) = operands(scheme, 1)[0], operands(scheme, 6)
    with sequences_of(N):
        whole = fd.linear(x, dense), fd.routed_experts(x, None, ids, share, gate_up, down)
        for start in range(0, len(x), N):
            own = slice(start, start + N)
            alone = fd.routed_experts(x[own], None, ids[own], share[own], gate_up, down)
            assert torch.equal(whole[0][own], fd.linear(x[own], dense))
            assert torch.equal(whole[1][own], alone)


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "nvfp4"])
def test_products_are_those_of_dequantized_weights(scheme: str) -> None:
    """Also with choices that no expert has, and after a weight has changed: nothing stale is kept."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(9, 48, generator=generator).bfloat16()
    ids, share = torch.randint(-1, 7, (9, 2), generator=generator), torch.rand(9, 2)
    gate_up, down = operands(scheme, 6)
    for _ in range(2):
        matrices = [weights.dequantize(weight, torch.float64) for weight in (gate_up, down)]
        rounded = (
            (lambda rows: rows)
            if scheme != "fp8"
            else lambda rows: activations.values(fd.quantize_rows(rows.bfloat16(), "fp8"))
        )
        expected = fd.reference.experts(
            x.double(), *matrices, ids, share.double(), torch.float64, rounded
        )
        found = fd.routed_experts(x, None, ids, share, gate_up, down).sum(1)
        tolerance = 0.02 if scheme == "fp8" else 2**-7  # a step of e4m3 or bf16 in the hidden rows
        assert fd.reference.relative_error(found, expected) < tolerance
        gate_up.data.view(torch.uint8).copy_(gate_up.data.view(torch.uint8).flip(1))
