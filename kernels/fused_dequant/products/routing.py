"""Sorts rows by expert into blocks for the experts' products, entirely on the device.

Choice c of token m is slot m * topk + c. `route` sorts slots by expert into blocks of `block` rows:

    slots         int32 [max_blocks * block]  the slots; M * topk marks padding
    block_expert  int32 [max_blocks]          each block's expert
    block_rows    int32 [max_blocks]          how many rows of each block are slots; others are padding
    block_count   int32 [1]                   how many blocks are in use; the host does not know it

An expert with n > 0 slots uses ceil(n / block) blocks, so S slots need at most `max_blocks` =
min(E, S) + S // block. Kernels launch `max_blocks` blocks; those past `block_count` return at once.
So launches depend only on shapes, and one CUDA graph serves any routing.

A program places one piece of the choices. For each choice it adds up how many choices of the same
expert come before it: in earlier chunks, which `count_kernel` counted, in its own chunk before the
piece, and in the piece. Up to FEW choices are one chunk, which saves a launch. Program e also writes
the blocks and the padding of expert e. There are no atomics, so repeated runs give equal bits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fused_dequant.launch.chain import chained, follow
from fused_dequant.weights import tuning
from fused_dequant.weights.weight import Weight

FEW = 4096  # choices that are one chunk
CHUNK, MOST = 1024, 64  # else: the least choices in a chunk, and the most chunks
PIECE = 64  # choices that a program places; half as many if all are one chunk


@dataclass(frozen=True)
class Routing:
    """The blocks of one batch; the module's docstring describes the tensors."""

    slots: torch.Tensor
    block_expert: torch.Tensor
    block_rows: torch.Tensor
    block_count: torch.Tensor
    block: int
    topk: int

    @property
    def max_blocks(self) -> int:
        """Return how many blocks to launch: the most that any routing of the batch needs."""
        return len(self.block_expert)


def place_results(
    weight: Weight,
    rows: int,
    config: tuning.Config,
    routing: Routing | None,
    share: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, Any], int]:
    """Return memory for a product's results, its kernel's arguments, and how many blocks to launch.

    dense     `routing` is None: results bf16 [rows, N]
    gate_up   `share` is None: bf16 [slots, N / 2], gelu_tanh(gate) * up; x has one row per token
    down      bf16 [slots, N], times the routing weights `share` f32 [slots]; x has one row per slot

    Raise ValueError if the blocks of `routing` are not of as many rows as `config` says.
    """
    _, N, K = weight.shape
    if routing is not None and routing.block != tuning.block_rows(config):
        raise ValueError(
            f"blocks of {routing.block} rows, but a configuration for others: {config}"
        )
    topk = 1 if routing is None or share is not None else routing.topk
    gelu_mul = routing is not None and share is None
    y = weight.data.new_empty(rows * topk, N // 2 if gelu_mul else N, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {
        "TOPK": topk, "GROUPED": routing is not None, "GELU_MUL": gelu_mul,
        "WEIGHTED": share is not None, "row_weight": y if share is None else share,
        "y": y, "total": len(y), "N": N, "K": K, "EVEN_K": K % config["BK"] == 0,
    }  # fmt: skip
    for name in ("slots", "block_expert", "block_rows", "block_count"):
        arguments[name] = y if routing is None else getattr(routing, name)
    blocks = routing.max_blocks if routing else -(-rows // tuning.block_rows(config))
    return y, arguments, blocks


@triton.jit
def count_kernel(
    ids, counts, total, CHAINED: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Program i counts the ids of each expert in chunk i, into counts int32 [chunks, EXPERTS]."""
    follow(CHAINED)
    chunk = tl.program_id(0)
    offset = chunk * CHUNK + tl.arange(0, CHUNK)
    id = tl.load(ids + offset, mask=offset < total, other=-1)
    chunk_counts = tl.histogram(id.to(tl.int32), EXPERTS, mask=(id >= 0) & (id < E))
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), chunk_counts)


@triton.jit
def route_kernel(
    ids, counts, slots, block_expert, block_rows, block_count, total, chunks,
    CHAINED: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    PADDING: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Program i writes the slots of choices i * PIECE and on, and the blocks and padding of expert i.

    EXPERTS, PADDING and CHUNKS are E, BLOCK and `chunks`, rounded up to powers of two. `counts` is from
    `count_kernel`; it is not read if there is one chunk.
    """
    follow(CHAINED)
    i = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    chunk = tl.minimum(i * PIECE // CHUNK, chunks - 1)
    offset = chunk * CHUNK + tl.arange(0, CHUNK)
    id = tl.load(ids + offset, mask=offset < total, other=-1)
    real = (id >= 0) & (id < E)
    id = id.to(tl.int32)
    before = tl.histogram(id, EXPERTS, mask=real & (offset < i * PIECE))
    if CHUNKS == 1:
        sums = tl.histogram(id, EXPERTS, mask=real)
    else:
        chunks_before = tl.arange(0, CHUNKS)[:, None]
        chunk_counts = tl.load(
            counts + chunks_before * EXPERTS + expert[None, :], mask=chunks_before < chunks, other=0
        )
        sums = tl.sum(chunk_counts, 0)
        before += tl.sum(tl.where(chunks_before < chunk, chunk_counts, 0), 0)
    blocks = (sums + BLOCK - 1) // BLOCK
    first = tl.cumsum(blocks, 0) - blocks
    choice = tl.arange(0, PIECE)
    slot = i * PIECE + choice
    chosen = tl.load(ids + slot, mask=slot < total, other=-1)
    hit = chosen[:, None] == expert[None, :]
    # How many earlier choices of the piece have an expert: products of zeros and ones are exact.
    earlier = (choice[:, None] > choice[None, :]).to(tl.float16)
    place = tl.dot(earlier, hit.to(tl.float16)).to(tl.int32) + (first * BLOCK + before)[None, :]
    place = tl.sum(tl.where(hit, place, 0), 1)
    tl.store(slots + place, slot, mask=(chosen >= 0) & (chosen < E))
    if i < E:
        begin = tl.sum(tl.where(expert == i, first, 0))
        rows = tl.sum(tl.where(expert == i, sums, 0))
        end = begin + tl.cdiv(rows, BLOCK)
        padding = begin * BLOCK + rows + tl.arange(0, PADDING)
        tl.store(slots + padding, total, mask=padding < end * BLOCK)
        for block in range(begin, end):
            tl.store(block_expert + block, i)
            tl.store(block_rows + block, tl.minimum(rows - (block - begin) * BLOCK, BLOCK))
        if i == E - 1:
            tl.store(block_count, end)


def route(expert_ids: torch.Tensor, experts: int, block: int) -> Routing:
    """Return the `Routing` of expert_ids int [M, topk]; ids not in 0..experts - 1 are left out."""
    total = expert_ids.numel()
    bound = min(experts, total) + total // block
    device = expert_ids.device
    slots = torch.empty(bound * block, dtype=torch.int32, device=device)
    block_expert, block_rows = torch.empty(2, bound, dtype=torch.int32, device=device)
    block_count = torch.empty(1, dtype=torch.int32, device=device)
    few = total <= FEW
    least, most, piece = (PIECE, 1, PIECE // 2) if few else (CHUNK, MOST, PIECE)
    chunk = max(least, triton.next_power_of_2(triton.cdiv(total, most)))
    chunks = -(-total // chunk)
    options: dict[str, Any] = {
        "E": experts, "EXPERTS": max(16, triton.next_power_of_2(experts)), "CHUNK": chunk,
        "num_warps": 8 if few else 4, **chained(device),
    }  # fmt: skip
    counts = torch.empty(chunks, options["EXPERTS"], dtype=torch.int32, device=device)
    if chunks > 1:
        count_kernel[(chunks,)](expert_ids, counts, total, **options)
    route_kernel[(max(experts, triton.cdiv(total, piece)),)](
        expert_ids, counts, slots, block_expert, block_rows, block_count, total, chunks,
        BLOCK=block, PADDING=triton.next_power_of_2(block), CHUNKS=triton.next_power_of_2(chunks),
        PIECE=piece, **options,
    )  # fmt: skip
    return Routing(slots, block_expert, block_rows, block_count, block, expert_ids.shape[-1])
