"""Measures which launch configurations are fastest on this GPU, and keeps them in the user's cache.

Every engine prefers these configurations to the tables that ship (`gpus.check_gpu`).
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from fused_dequant.launch.targets import TARGETS, capability, name_of
from fused_dequant.tune.candidates import Product, candidates, products
from fused_dequant.tune.cases import EXPERTS
from fused_dequant.weights import tuning
from rich.table import Table

from quantize.errors import InputError, ResourceError
from quantize.host.progress import say, track
from quantize.runtime.gpu.gpus import TUNED, check_gpu

if TYPE_CHECKING:
    from fused_dequant.tune.search import Timed, TunedProduct

CANVAS = 256  # tokens of the 26B model's
SAVED_EVERY = 8  # choices between two saves: the most that an interruption loses


def tune_gpu(
    only: str = "", hit_by: Callable[[int], float] = lambda _: 1.0, *, folder: Path = TUNED,
    timer: "Callable[[Product], Timed] | None" = None,
) -> list["TunedProduct"]:  # fmt: skip
    """Write each matrix product's fastest configuration to this device's table; return the choices.

    The regular expression `only` is searched in "KEY M=TOKENS" of each product. Tokens choose among the
    share of experts that `hit_by` gives their number of canvases. `folder` has one table
    per device. `timer` times a product's candidates; None compiles and times them on this GPU. Raise
    InputError if `only` is no regular expression, finds no product, or finds one of the experts' two
    products (up, down) without the other. Raise ResourceError if no GPU here can be tuned, or if all
    configurations of a product compute wrong.
    """
    device = torch.device("cuda")
    check_gpu([], device)
    target, name = capability(device), torch.cuda.get_device_name(device)
    if target not in TARGETS:
        known = ", ".join(map(name_of, TARGETS))
        raise ResourceError(f"{name} is {name_of(target)}, and what can be tuned is {known}")
    try:
        chosen = [
            replace(p, used=math.ceil(EXPERTS * hit_by(math.ceil(p.M / CANVAS))))
            for p in products(target)
            if re.search(only, f"{p.key} M={p.M}")
        ]
    except re.error as error:
        raise InputError(f"--only {only}: no regular expression ({error})") from error
    halves = [p.verb for p in chosen if p.verb.startswith("experts")]
    if not chosen or halves.count("experts_up") != halves.count("experts_down"):
        raise InputError(
            f"--only {only}: finds no product, or one of the experts' two without the other"
        )
    from fused_dequant.tune import search  # triton comes with it

    if timer is None:
        say("compiling the candidates, one process a core")
        search.compile_all([(p, c) for p in chosen for c in candidates(p, target)])
    tuning.user_tables(folder)

    def now(product: search.Product) -> tuning.Config:
        verb, scheme = product.table_verb, product.scheme
        return tuning.choose(verb, scheme, product.M, product.N, product.K, device)

    path = tuning.table_path(name, folder)
    tuned: list[search.TunedProduct] = []
    try:
        for choice in track(search.tuned(chosen, now, timer), "tuning", len(chosen), "products"):
            tuned.append(choice)
            if len(tuned) % SAVED_EVERY == 0 or len(tuned) == len(chosen):
                search.write_table(path, name, target, tuned)
    except ValueError as error:
        raise ResourceError(f"{name}: {error}; please report this") from error
    tuning.forget()
    say(f"wrote {path}")
    return tuned


def gains_table(choices: Sequence["TunedProduct"]) -> Table:
    """Return a table of each product's microseconds before and after tuning."""
    table = Table(title="us a launch, before and after", title_justify="left")
    for column in ("product", "tokens", "before", "after", "gained"):
        table.add_column(column, justify="left" if column == "product" else "right")
    for choice in choices:
        before, after = choice.before, choice.microseconds
        cells = ("?", "?") if before is None else (f"{before:.1f}", f"{1 - after / before:.1%}")
        table.add_row(choice.product.key, str(choice.product.M), cells[0], f"{after:.1f}", cells[1])
    return table
