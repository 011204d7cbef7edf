"""Prints which instruction multiplies what on each target.

    PYTHONPATH=.:kernels python -m tests.support.kernels_support.matrix

One line a kind of product, of the launches that tests/fused_dequant/test_compile.py compiles: the
instruction, and the most shared memory, registers and stack of any of them. What no test compiled yet
is compiled now. Needs the repository and its folder kernels on PYTHONPATH.
"""

import sys

from fused_dequant.launch.targets import TARGETS, name_of

from tests.fused_dequant.test_compile import ELDER, OPERAND, compiled, of_its_own, operand
from tests.support.kernels_support.compile_check import size

BLACKWELL = [target for target in TARGETS if target >= (10, 0)]


def main() -> None:
    """Print a table in Markdown."""
    print("| target | kernel | of | instruction | shared KiB | registers | stack bytes |")
    print("|---|---|---|---|---:|---:|---:|")
    for target in BLACKWELL:
        own = target in ELDER[True]
        chosen = of_its_own(target, True) if own else compiled(target, True).values()
        kinds = sorted({(each.kernel, operand(each).strip("*")) for each in chosen})
        for kernel, kind in kinds:
            alike = [e for e in chosen if (e.kernel, operand(e).strip("*")) == (kernel, kind)]
            sizes = [size(each) for each in alike]
            products = sorted({short(p) for found in sizes for p in found.products})
            print(
                f"| {name_of(target)} | {kernel.removesuffix('_kernel')} | {kind} | "
                f"{', '.join(products)} | {max(s.shared for s in sizes) / 1024:.0f} | "
                f"{max(s.registers for s in sizes)} | {max(s.stack for s in sizes)} |",
                flush=True,
            )


def short(product: str) -> str:
    """Return an instruction without the parts that all of its kind have."""
    for part in (".aligned", ".row.col", ".cta_group::1"):
        product = product.replace(part, "")
    return f"`{product.removesuffix('.')}`"


if __name__ == "__main__":
    assert OPERAND
    sys.exit(main())
