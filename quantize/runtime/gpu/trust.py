"""Tests a GPU's kernels before a model is opened on it, once for each GPU and software version.

    kernel with wrong results        what is done instead
    W4A4 on FP4 units                rows are rounded as in W4A4, and multiplied in bf16 (`inputs`)
    Hopper's own kernel for NVFP4    the plain kernel for NVFP4 is used
    W4A8 (the mode `fp8`)            the kernel for FP8 is used
    any other kernel                 the GPU is refused; for GPTQ's, recipes that round by it are

A kernel that the installed Triton cannot compile for the GPU counts as one with wrong results. Results
stay in the user's cache folder. If a plainer kernel is used, a printed line asks for a report.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fused_dequant
import torch
from fused_dequant.formats import FOUR_BIT
from fused_dequant.launch import dispatch
from fused_dequant.launch.targets import capability, name_of
from fused_dequant.tune import selftest, steptest
from fused_dequant.weights import tuning
from fused_dequant.weights.choose import layout_for, plainer, target_of

from quantize.checkpoints.layout import stated_schemes
from quantize.checkpoints.reader import read_config
from quantize.errors import ResourceError
from quantize.host.files import write_json
from quantize.host.locks import in_turn
from quantize.host.progress import say
from quantize.runtime.gpu.gpus import TUNED, check_gpu
from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import Scheme

REMEMBERED = TUNED.with_name("selftest")
REPORT = "please report this, with what `quantize doctor` says"
INSTEAD = "a plainer kernel is taken"
STEP = "between products"  # under which the test of all other kernels is remembered


def trust(schemes: Iterable[str], activations: ActivationMode | None, device: torch.device) -> bool:
    """Test the kernels that multiply weights of `schemes`, unless they were tested before.

    `schemes` are the weights' `Scheme.kernel`s, `activations` is their activation mode. Return whether
    NVFP4 products run on FP4 units, which needs the mode `per_layer`. On a CPU, return False, untested.
    Raise ResourceError if the GPU cannot run a scheme, or a kernel without a plainer one is wrong.
    """
    if device.type != "cuda":
        return False
    wanted = {"bf16", *schemes}
    check_gpu(wanted | {"fp8"} if activations == "fp8" else wanted, device)
    results = _Results(device)
    for scheme in sorted(wanted):
        if activations != "fp8":  # the rows of some products stay BF16 in every other mode
            _settle(scheme, None, results)
        _settle(scheme, activations, results)
    if why := results.step_fault():
        raise ResourceError(
            f"{results.name}: {why}; {REPORT}; CUDA_VISIBLE_DEVICES= hides this GPU"
        )
    return "nvfp4" in wanted and results.layout("nvfp4", activations) == FOUR_BIT


def trust_rounding(schemes: Iterable[Scheme], device: torch.device) -> None:
    """Test GPTQ's kernels for weights of `schemes`, unless they were tested before, or on a CPU.

    Raise ResourceError if one is wrong, or does not compile: GPTQ has no plainer kernels.
    """
    if device.type != "cuda":
        return
    results = _Results(device)
    for codes, scheme in sorted({scheme.codes.name: scheme for scheme in schemes}.items()):
        if why := results.rounding_fault(codes, scheme):
            raise ResourceError(
                f"{results.name}: GPTQ's kernels for {codes} codes {why}; {REPORT}; a recipe that says "
                f"`rounding: nearest` does without, and CUDA_VISIBLE_DEVICES= hides this GPU"
            )


def has_own_weights(mode: ActivationMode | None, device: torch.device) -> bool:
    """Return whether weights packed for `mode` on `device` serve this mode only."""
    target = target_of(device)
    return layout_for("nvfp4", mode, target, ()) != layout_for("nvfp4", None, target, ())


def schemes_of(folder: Path) -> set[str]:
    """Return `Scheme.kernel` of every scheme in a folder's checkpoint; only config.json is read."""
    stated = stated_schemes(read_config(folder))
    return {scheme.kernel for scheme in (stated.used if stated else ())}


def condition(
    folder: Path, activations: ActivationMode | None, device: torch.device
) -> dict[str, Any]:
    """Return facts that change scores and are stored with them: FP4 units in use, failed kernels."""
    on_units = trust(schemes_of(folder), activations, device)
    units = {"products": "fp4 units"} if on_units else {}
    failed = {"distrusted": sorted(dispatch.distrusted)} if dispatch.distrusted else {}
    return units | failed


def _settle(scheme: str, mode: ActivationMode | None, results: "_Results") -> None:
    """Distrust each layout of a scheme whose kernel computes wrong; refuse the GPU if none is left."""
    while why := results.fault(layout := results.layout(scheme, mode)):
        if not plainer(layout):
            raise ResourceError(
                f"{results.name}: products of {layout} {why}, and no other kernel has them; "
                f"{REPORT}; CUDA_VISIBLE_DEVICES= hides this GPU"
            )
        say(f"{results.name}: products of {layout} {why}: {INSTEAD}; {REPORT}")
        dispatch.distrusted.add(layout)


class _Results:
    """A GPU's test results: name of a layout of weights -> its fault, None if there is none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = torch.cuda.get_device_name(device)
        self.path = REMEMBERED / f"{self.name.replace(' ', '_')}.json"
        self.about = {
            "gpu": self.name,
            "target": name_of(capability(device)),
            "torch": torch.__version__,
            "kernels": _sources(),
        }
        self.faults: dict[str, str | None] = {}
        self.launches: dict[str, str] = {}  # layout -> digest of its configurations
        self._recall()

    def _recall(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            read = json.loads(self.path.read_text())
            if read["about"] == self.about:
                self.faults, self.launches = read["faults"], read["launches"]

    def layout(self, scheme: str, mode: ActivationMode | None) -> str:
        """Return the layout that experts of a scheme get on the GPU now."""
        return layout_for(scheme, mode, target_of(self.device))

    def fault(self, layout: str) -> str | None:
        """Return what is wrong with products of `layout`, tested now or earlier; None if nothing is."""

        def test() -> str | None:
            why = selftest.fault(layout, self.device)
            if why is None and (tuned := selftest.launch_fault(layout, self.device)):
                raise ResourceError(
                    f"{self.name}: of the launches tuned in {TUNED}, {tuned}; remove the file or run "
                    f"`quantize tune` again; {REPORT}"
                )
            return why

        return self._known(layout, layout, f"products of {layout}", test)

    def step_fault(self) -> str | None:
        """Return what is wrong with the kernels between products; None if nothing is."""
        test = partial(steptest.fault, self.device)
        return self._known(STEP, "bf16", "all other kernels", test)

    def rounding_fault(self, codes: str, scheme: Scheme) -> str | None:
        """Return what is wrong with GPTQ's rounding of `scheme` to `codes`; None if nothing is."""
        from quantize.runtime.gpu import gptqtest  # triton comes with it

        test = partial(gptqtest.fault, scheme, self.device)
        return self._known(f"gptq {codes}", "bf16", f"GPTQ's rounding to {codes}", test)

    def _known(
        self, name: str, layout: str, tested: str, test: Callable[[], str | None]
    ) -> str | None:
        """Return the fault that is remembered under `name`, or that `test` finds now.

        It is remembered for as long as launches with weights of `layout` keep their configurations.
        """
        configurations = json.dumps(tuning.of_layout(layout, self.device), sort_keys=True)
        launches = hashlib.sha256(configurations.encode()).hexdigest()[:16]
        if not self._knows(name, launches):
            with in_turn(self.path.with_suffix(".lock")):
                self._recall()  # a process beside this one may have tested meanwhile
                if not self._knows(name, launches):
                    say(f"testing {tested} on {self.name}, once")
                    self._note(name, test(), launches)
        return self.faults[name]

    def _knows(self, name: str, launches: str) -> bool:
        return name in self.faults and self.launches.get(name) == launches

    def _note(self, name: str, why: str | None, launches: str) -> None:
        self.faults[name], self.launches[name] = why, launches
        about = {"about": self.about, "faults": self.faults, "launches": self.launches}
        write_json(self.path, about)
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:  # the GPU no longer answers; the next process knows the fault
            raise ResourceError(f"{self.name}: {why}; {REPORT}, and run this again") from None


def _sources() -> str:
    """Return a digest of triton's version and of all kernels' files."""
    digest = hashlib.sha256(selftest.compiler().encode())
    for path in sorted(Path(fused_dequant.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
