"""The rates at which a device copies and multiplies, stated by its maker or measured now."""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from math import inf

import torch
from fused_dequant.formats import EIGHT_BIT, FOUR_BIT

from quantize.host.progress import say

WARM = 0.5  # seconds of work after which a GPU's clocks have risen
AGREE = 0.02  # by which two readings in a row may differ
MOST = 20.0  # seconds of work after which a reading is taken as it is


@dataclass(frozen=True)
class Rates:
    """How fast a device copies memory, and how fast it multiplies in each precision."""

    copy: float  # bytes/s
    bf16: float  # FLOP/s of products
    fp8: float  # FLOP/s of 8-bit products
    fp4: float = 0  # FLOP/s of NVFP4 products (W4A4); 0 if unknown, then only bytes count

    def seconds(self, nbytes: float, flop: float, scheme: str) -> float:
        """Return the least seconds of a product with weights of `scheme`, by bytes read and by FLOP."""
        rate = self.fp8 if scheme in EIGHT_BIT else self.bf16
        if scheme == FOUR_BIT:
            rate = self.fp4 or inf
        return max(nbytes / self.copy, flop / rate)

    def or_faster(self, other: "Rates") -> "Rates":
        """Return the faster of two readings of each rate."""
        return Rates(*map(max, astuple(self), astuple(other)))


def measure_rates(device: torch.device) -> Rates:
    """Return the measured rates of negating 2 GB into another tensor and of 8192 x 8192 products."""
    source = torch.zeros(2**30, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 4 * source.numel() / seconds_of(lambda: torch.neg(source, out=target))
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    bf16 = 2 * 8192**3 / seconds_of(lambda: a @ a.T)
    fp8 = bf16  # also the rate of a GPU without FP8, before sm_89
    if torch.cuda.get_device_capability(device) >= (8, 9):
        q = a.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)

        def product() -> torch.Tensor:
            return torch._scaled_mm(  # noqa: SLF001 - the only FP8 product
                q, q.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        fp8 = 2 * 8192**3 / seconds_of(product)
    return Rates(copy, bf16, fp8)


def seconds_of(work: Callable[[], object], repeats: int = 10) -> float:
    """Return the GPU seconds per call of `work`, a mean of `repeats` calls, once the GPU is warm."""
    work()

    def reading() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

    return settled(reading) / repeats


def settled(reading: Callable[[], float]) -> float:
    """Return the seconds of the fastest `reading`, up to the first that agrees with the one before it.

    A GPU that was idle raises its clocks while it works, for longer than a reading may take, and
    lowers them again once it has worked at its power limit, which other products do not reach. So
    it is read until two readings agree, WARM seconds of work later at the earliest, and the least
    time counts. If no two agree within MOST seconds of work, other programs use the GPU: `settled`
    says so.
    """
    before, least, worked = inf, inf, 0.0
    while True:
        seconds = reading()
        worked, least = worked + seconds, min(least, seconds)
        if worked >= WARM and abs(seconds - before) <= AGREE * seconds:
            return least
        if worked >= MOST and before < inf:
            say(
                f"warning: this GPU's speed does not settle: the last two readings differ by "
                f"{abs(seconds / before - 1):.0%}; other work may run on it"
            )
            return least
        before = seconds
