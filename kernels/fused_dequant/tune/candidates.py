"""Launch configurations that `tune` chooses from, for each matrix product of the real model."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fused_dequant.formats import EIGHT_BIT, FOUR_BIT
from fused_dequant.launch.targets import TARGETS, Capability
from fused_dequant.tune import cases
from fused_dequant.weights import tuning
from fused_dequant.weights.choose import PREFERRED, layout_for
from fused_dequant.weights.layouts import KERNELS
from fused_dequant.weights.tuning import Config

# 64; 1 canvas; 2 (or one that is committed with the first step of the next); 4; 8; and 16 to 64
# canvases in one pass. The two products with the embedding take at most 8 canvases at once.
TOKENS = (64, 256, 512, 1024, 2048, 8192)
PIECES = (256, 512, 1024, 2048)
# Per thread. A thread has 255 registers: decoded weights and addresses need some too. A sweep that
# allowed 256 accumulators ended in "illegal instruction"; within this limit, none did.
MAX_ACCUMULATORS = 128
HOPPER: Capability = (9, 0)


@dataclass(frozen=True)
class Product:
    """A matrix product to tune: M rows of K numbers times a weight [N, K] give M rows of N numbers."""

    verb: str  # linear, experts_up, experts_down, lm_head or soft_embedding
    scheme: str
    M: int
    N: int
    K: int
    used: int | None = None  # experts that tokens choose among; None: all

    @property
    def table_verb(self) -> str:
        """Return the verb in the product's table key: "experts" for experts_up and experts_down."""
        return "experts" if self.verb.startswith("experts") else self.verb

    @property
    def key(self) -> str:
        """Return the product's key in the tuning table, such as linear/fp8/4096x2816."""
        return f"{self.table_verb}/{self.scheme}/{self.N}x{self.K}"


def product_of(key: str, M: int) -> Product:
    """Return the product that a table has under a key and a number of tokens."""
    verb, scheme, shape = key.split("/")
    N, K = map(int, shape.split("x"))
    if verb == "experts":
        verb = "experts_down" if K == cases.INNER else "experts_up"
    return Product(verb, scheme, M, N, K)


def products(target: Capability) -> Iterator[Product]:
    """Yield every product that is tuned on a GPU of compute capability `target`."""
    for scheme, M in itertools.product(_layouts(target, dense=False), TOKENS):
        yield Product("experts_up", scheme, M, 2 * cases.INNER, cases.HIDDEN)
        yield Product("experts_down", scheme, M, cases.HIDDEN, cases.INNER)
    shapes = (*cases.LINEAR_SHAPES, (9216, cases.HIDDEN))
    for scheme, M, (N, K) in itertools.product(_layouts(target, dense=True), TOKENS[1:], shapes):
        yield Product("linear", scheme, M, N, K)
    for M in PIECES:
        yield Product("lm_head", "bf16", M, cases.VOCABULARY, cases.HIDDEN)
        yield Product("soft_embedding", "bf16", M, cases.HIDDEN, cases.VOCABULARY)


def _layouts(target: Capability, *, dense: bool) -> list[str]:
    """Return the layouts that weights may get on a target, each once; MXFP4's kernel is NVFP4's."""
    asked = [*((scheme, None) for scheme in ("bf16", "fp8", "int8", "nvfp4")), *PREFERRED]
    chosen = dict.fromkeys(layout_for(*wanted, target, (), dense=dense) for wanted in asked)
    return [layout for layout in chosen if KERNELS[layout].runs_on(target)]


def _grid(**choices: Iterable[int | tuple[int, ...]]) -> Iterator[Config]:
    """Yield a configuration for each combination; names with `_and_` between are chosen together."""
    names = "_and_".join(choices).split("_and_")
    for chosen in itertools.product(*choices.values()):
        flat = (values if isinstance(values, tuple) else (values,) for values in chosen)
        yield dict(zip(names, itertools.chain(*flat), strict=True))


def candidates(product: Product, target: Capability) -> Iterator[Config]:
    """Yield the configuration of `tuning.default`, then others whose accumulators fit the registers."""
    first = tuning.default(product.table_verb, product.scheme, product.M, product.N, product.K)
    yield first
    if product.verb == "lm_head" and target == HOPPER:  # a kernel whose tiles are fixed
        yield {"STAGES": 3}
        yield {"STAGES": 4}
    if product.scheme == "nvfp4_e4m3" and product.M >= 8192:  # `experts_hopper`
        yield from _grid(BM=(256,), NARROWER=(4,), BK_and_RING=((128, 5), (64, 9)))
    for config in _sweep(product, TARGETS[target].shared * 2**10):
        accumulators = tuning.block_rows(config) * config["BN"] // (32 * config["num_warps"])
        if accumulators <= MAX_ACCUMULATORS and config != first:
            yield config


def _sweep(product: Product, shared: int) -> Iterator[Config]:
    """Yield configurations worth timing that take at most `shared` bytes of shared memory per block."""
    if product.verb == "soft_embedding":
        tiles = ((128, 256, 8), (128, 128, 8), (256, 128, 8), (64, 256, 4), (64, 128, 4))
        yield from _grid(
            SPLITS=(3, 6, 12), BM_and_BN_and_num_warps=tiles, BK=(32, 64), num_stages=(3, 4)
        )
    elif product.verb == "lm_head":
        tiles = ((128, 256, 8), (256, 128, 8), (128, 128, 8), (64, 128, 8))
        yield from _grid(BM_and_BN_and_num_warps=tiles, BK=(64, 128), num_stages=(3, 4))
    elif KERNELS[product.scheme].module == "nvfp4_hopper":
        tiles, steps, parts = _expert_tiles(product.M), itertools.product((64, 128), (3, 4)), (1,)
        rows = _expert_rows(product.M)
        if product.verb == "linear":
            sizes = ((64, 0), (64, 32), (128, 0)) if product.M < 1024 else ((128, 0), (256, 0))
            steps = ((64, 5), (64, 6), (128, 3), (128, 4), (128, 6), (256, 3))
            rows, tiles, parts = _grid(BM_and_MORE=sizes), ((64, 4), (128, 8)), (1, 2)
        shapes = list(_grid(BN_and_num_warps=tiles, BK_and_STAGES=steps, PARTS=parts))
        for rows_config, shape in itertools.product(rows, shapes):
            BN, BK, stages = shape["BN"], shape["BK"], shape["STAGES"]
            token = 1 if product.scheme in EIGHT_BIT else 2
            stage = token * tuning.block_rows(rows_config) * BK + BN * BK * 9 // 16
            parts = shape["PARTS"]
            fits = parts * stages * stage < shared and (parts == 1 or stages * BK >= 2 * BN)
            if product.N % BN == 0 and fits:
                yield rows_config | shape
    elif KERNELS[product.scheme].module in ("nvfp4", "nvfp4_blackwell"):
        rows = [c["BM"] for c in _expert_rows(product.M) if not c["MORE"]]
        tiles = ((32, 4), (64, 4), (128, 4), (128, 8))
        yield from _grid(
            BM=(32, 64, 128) if product.verb == "linear" else rows,
            BN_and_num_warps=tiles[2:] if product.scheme == FOUR_BIT else tiles,  # scales: 128 rows
            BK=(64, 128, 256), num_stages=(2, 3, 4),
        )  # fmt: skip
    elif product.verb.startswith("experts"):
        sides = (1,) if product.M < 2048 else (0, 1)  # few rows are the product's narrow side
        depths, deep = ((64, 128, 256), (2, 3, 4)) if product.M <= 256 else ((64, 128), (3, 4))
        tiles = _expert_tiles(product.M)
        shapes = list(_grid(BN_and_num_warps=tiles, BK=depths, SWAP=sides, num_stages=deep))
        for rows, shape in itertools.product(_expert_rows(product.M), shapes):
            # 8-bit tensor cores take 64 rows and more on this side.
            if shape["SWAP"] or not rows["NARROWER"]:
                yield rows | shape
    else:
        tiles = ((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4))
        tiles += ((128, 128, 8), (128, 256, 8), (256, 128, 8))
        for rows_config in _grid(
            BM_and_BN_and_num_warps=tiles, SWAP=(0, 1), BK=(64, 128), num_stages=(3, 4, 5)
        ):
            if rows_config["num_stages"] < 5 or rows_config["BM"] * rows_config["BN"] <= 64 * 128:
                yield rows_config | {"MORE": 0}


def _expert_tiles(M: int) -> tuple[tuple[int, int], ...]:
    tiles = ((64, 4), (128, 4), (128, 8), (256, 8))
    return tiles if M <= 1024 else tiles[1:]


def _expert_rows(M: int) -> list[Config]:
    """Return numbers of rows per block around M * 8 / 128, the mean number of tokens per expert."""
    sizes = {
        64: ((16, 0, 0),),
        256: ((16, 0, 0), (32, 0, 0), (32, 0, 1), (32, 16, 2), (32, 32, 3)),
        512: ((32, 16, 2), (64, 0, 3), (64, 16, 2)),
        1024: ((64, 0, 0), (64, 16, 0), (64, 16, 2), (64, 16, 4), (64, 32, 3)),
        2048: ((64, 16, 2), (64, 16, 4), (128, 0, 0), (128, 0, 3)),
        8192: ((128, 0, 0), (128, 0, 3)),
    }[M]
    return list(_grid(BM_and_MORE_and_NARROWER=sizes))
