"""From expert ids to blocks of rows, and from slot results back to tokens, without asking the host.

A slot is token * topk + choice. `route` sorts the slots by expert and pads each expert's run to a
multiple of `block` rows:

    slots         int32 [max_blocks * block]  slot ids; M * topk marks padding
    block_expert  int32 [max_blocks]          expert of a block
    block_rows    int32 [max_blocks]          its rows that are slots; padding is behind them
    block_count   int32 [1]                   blocks in use, known to the device alone

`max_blocks` bounds every routing: an expert with c > 0 slots uses ceil(c / block) blocks, hence at most
min(E, S) + S // block in all for S slots. Kernels are launched for the bound; blocks past
`block_count` return at once. So the launch depends on shapes alone and a CUDA graph can replay it
with another routing.

One program an expert: each counts all ids itself (8 KB from L2 at 2,048 slots) rather than wait for a
second launch, then writes its own run in slot order. No atomics, so two runs are equal bit for bit. On
an H200 that takes 3.1 us for 2,048 slots and 6.8 for 8,192, chained.
"""

# Kernels are compiled from their syntax: their parameters have no Python types, and a launch passes
# numbers for `constexpr`.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fused_dequant.chain import chained, follow


@dataclass(frozen=True)
class Routing:
    """Sorted blocks of one batch; see the module's docstring for the fields."""

    slots: torch.Tensor
    block_expert: torch.Tensor
    block_rows: torch.Tensor
    block_count: torch.Tensor
    block: int
    topk: int

    @property
    def max_blocks(self) -> int:
        """Blocks to launch."""
        return len(self.block_expert)


# How a product's kernel runs when it is dense; `place_results` has the two modes of experts.
DENSE = {"TOPK": 1, "GROUPED": False, "GELU_MUL": False, "WEIGHTED": False}


def place_results(
    x: torch.Tensor, N: int, routing: Routing, row_weight: torch.Tensor | None
) -> tuple[torch.Tensor, dict[str, int]]:
    """Empty results of one of the experts' two products with N rows of weights, and its kernel's mode.

    gate_up, without `row_weight`: x has a row a token, gate and up are combined -> bf16 [slots, N/2].
    down, with `row_weight` f32 [slots]: x has a row a slot, results are multiplied -> bf16 [slots, N].
    """
    down = row_weight is not None
    slots, topk = (len(x), 1) if down else (len(x) * routing.topk, routing.topk)
    y = torch.empty(slots, N if down else N // 2, dtype=torch.bfloat16, device=x.device)
    return y, {"TOPK": topk, "GROUPED": True, "GELU_MUL": not down, "WEIGHTED": down}


def max_blocks(slots: int, experts: int, block: int) -> int:
    """Most blocks any routing of `slots` slots can need."""
    return min(experts, slots) + slots // block


@triton.jit
def route_kernel(
    ids,
    slots,
    block_expert,
    block_rows,
    block_count,
    total,
    CHAINED: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,  # E rounded up to a power of two
    BLOCK: tl.constexpr,
    PADDING: tl.constexpr,  # BLOCK likewise
    CHUNK: tl.constexpr,
):
    """Program e lays out expert e."""
    follow(CHAINED)
    e = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, total, CHUNK):
        offset = start + tl.arange(0, CHUNK)
        id = tl.load(ids + offset, mask=offset < total, other=-1)
        counts += tl.histogram(id.to(tl.int32), EXPERTS, mask=(id >= 0) & (id < E))
    blocks = (counts + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(expert < e, blocks, 0))
    position = first * BLOCK
    for start in range(0, total, CHUNK):
        offset = start + tl.arange(0, CHUNK)
        taken = tl.load(ids + offset, mask=offset < total, other=-1) == e
        rank = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(slots + position + rank, offset, mask=taken)
        position += tl.sum(taken.to(tl.int32))
    end = tl.cdiv(position, BLOCK)
    padding = position + tl.arange(0, PADDING)
    tl.store(slots + padding, total, mask=padding < end * BLOCK)
    for block in range(first, end):
        tl.store(block_expert + block, e)
        tl.store(block_rows + block, tl.minimum(position - block * BLOCK, BLOCK))
    if e == E - 1:
        tl.store(block_count, end)


def route(expert_ids: torch.Tensor, experts: int, block: int) -> Routing:
    """expert_ids int [M, topk] -> Routing with blocks of `block` rows."""
    total = expert_ids.numel()
    bound = max_blocks(total, experts, block)
    device = expert_ids.device
    slots = torch.empty(bound * block, dtype=torch.int32, device=device)
    block_expert, block_rows = torch.empty(2, bound, dtype=torch.int32, device=device)
    block_count = torch.empty(1, dtype=torch.int32, device=device)
    chunk = min(8192, triton.next_power_of_2(total))
    route_kernel[(experts,)](
        expert_ids, slots, block_expert, block_rows, block_count, total,
        E=experts, EXPERTS=triton.next_power_of_2(experts), BLOCK=block,
        PADDING=triton.next_power_of_2(block), CHUNK=chunk,
        num_warps=8 if chunk > 1024 else 4, **chained(device),
    )  # fmt: skip
    return Routing(slots, block_expert, block_rows, block_count, block, expert_ids.shape[-1])
