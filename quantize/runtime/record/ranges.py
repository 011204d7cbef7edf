"""The largest |x| that entered each Linear, or each of its channels: observers for `watching`."""

import re

import torch
from torch import Tensor
from torch.linalg import vector_norm

from quantize.host.processes import Processes


class Ranges:
    """The largest |x| that entered each Linear, exact in any order of tokens and batches."""

    launches_alone = True

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._amax: dict[str, Tensor] = {}
        self._rows: Tensor | None = None
        self._largest = torch.empty(0)

    def see(self, name: str, rows: Tensor, experts: Tensor | None) -> None:
        """Note rows [..., in] that enter `name` and their `experts` [n, k], None for a dense Linear."""
        if experts is None:
            if rows is not self._rows:  # q, k and v, or gate and up, read one input
                self._rows, self._largest = rows, vector_norm(rows, float("inf")).view(1)
            amax = self._largest
        else:
            largest = vector_norm(rows.flatten(0, -2), float("inf"), -1)
            # Not `scatter_reduce`: on a GPU thousands of rows would wait for a hundred cells.
            numbers = torch.arange(self._experts, device=experts.device)
            routed = (experts[..., None] == numbers).any(1)  # [rows, experts]
            amax = torch.where(routed, largest[:, None], 0).amax(0)
        self._keep(name, amax)

    def _keep(self, name: str, amax: Tensor) -> None:
        before = self._amax.setdefault(name, amax.clone())
        torch.maximum(before, amax.to(before.device), out=before)

    def pool(self, processes: Processes) -> None:
        """Merge all processes' ranges, in every process. Maxima do not round, so the merge is exact."""
        for amax in processes.others({name: seen.cpu() for name, seen in self._amax.items()}):
            for name, seen in amax.items():
                self._keep(name, seen)

    def amax(self, module: str) -> float:
        """Return the largest |x| that entered `module` (a name on disk); 0 if nothing entered it."""
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj", module)
        if match is None:
            return self._value(module, 0)
        return self._value(
            f"{match[1]}.{'down' if match[3] == 'down' else 'gate_up'}_proj", int(match[2])
        )

    @property
    def largest(self) -> dict[str, list[float]]:
        """Name of a Linear -> its largest |x|; of stacked experts, one for each."""
        return {name: amax.tolist() for name, amax in self._amax.items()}

    def _value(self, name: str, index: int) -> float:
        return self._amax[name][index].item() if name in self._amax else 0.0


class Channels:
    """The largest |x| of each input channel of each Linear; all experts of a layer are one."""

    launches_alone = True

    def __init__(self) -> None:
        self._amax: dict[str, Tensor] = {}

    def see(self, name: str, rows: Tensor, experts: Tensor | None) -> None:
        """Note rows [..., in] that enter `name`; their `experts` are not told apart."""
        amax = vector_norm(rows.flatten(0, -2), float("inf"), 0)
        before = self._amax.setdefault(name, amax.clone())
        torch.maximum(before, amax.to(before.device), out=before)

    def outliers(self, times: float) -> dict[str, dict[str, float]]:
        """Return Linear -> its largest and median channel, and channels above `times` the median."""
        figures: dict[str, dict[str, float]] = {}
        for name, amax in self._amax.items():
            median = amax.float().median().item()
            above = int((amax > times * median).sum())
            figures[name] = {"largest": amax.max().item(), "median": median, "outliers": above}
        return figures
