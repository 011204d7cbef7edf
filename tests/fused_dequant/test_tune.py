"""What `tune` may choose: on a CPU, where torch multiplies, and candidates are broken on purpose."""

import ast

import pytest
import torch
from fused_dequant.launch.targets import FORCE, Capability
from fused_dequant.reference import relative_error
from fused_dequant.tune import cases, launches, search, selftest
from fused_dequant.tune.candidates import Product, candidates, product_of, products
from fused_dequant.weights.tuning import Config
from triton.compiler.errors import CompilationError

LINEAR = Product("linear", "fp8", 16, 64, 128)


@pytest.fixture(autouse=True)
def _nothing_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE, "sm_90")
    monkeypatch.setattr(search, "measure", lambda *_, **__: 1.0)


def broken(monkeypatch: pytest.MonkeyPatch, factors: dict[int, float]) -> None:
    """Multiply the results of candidates by factors: by index among all candidates, -1 for the rest."""
    every = list(candidates(LINEAR, (9, 0)))
    right = launches.call

    def call(product: Product, o: launches.Operands, config: Config) -> torch.Tensor:
        factor = factors.get(every.index(config), factors.get(-1, 1.0))
        return right(product, o, config) * factor

    monkeypatch.setattr(search, "call", call)


def timed() -> list[Config]:
    return [config for _, config in search.time_candidates(LINEAR, [], "cpu")]


def test_only_candidates_within_the_self_tests_bound_are_timed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Against the exact result: also the first, with which others were compared."""
    every = list(candidates(LINEAR, (9, 0)))
    assert timed() == every
    over = 1 + 1.5 * selftest.LARGEST_ERROR
    broken(monkeypatch, {0: over, 2: float("nan"), 3: 2 - over, 4: 1 + selftest.LARGEST_ERROR / 2})
    assert timed() == [every[1], *every[4:]]
    assert caplog.text.count("left out, a relative error of") == 3


def test_products_that_are_wrong_in_every_way_end_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a broken kernel's are: all alike, and far from what is right."""
    broken(monkeypatch, {-1: 1.2})
    with pytest.raises(ValueError, match=r"no configuration.*right, the last:.*2.0e-01.*linear"):
        timed()


def test_candidates_that_do_not_compile_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is left, one line says so, also if each ended the process that tried it."""
    every, right, fails = list(candidates(LINEAR, (9, 0))), search.call, list[Config]()

    def call(product: Product, o: launches.Operands, config: Config) -> torch.Tensor:
        if config in fails:
            line = ast.parse("def kernel(): ...").body[0]
            raise CompilationError("def kernel(): ...", line, "no such layout")
        return right(product, o, config)

    monkeypatch.setattr(search, "call", call)
    fails.append(every[1])
    assert timed() == [every[0], *every[2:]]
    fails += every
    with pytest.raises(ValueError, match=r"the last: CompilationError: no such layout: .*linear"):
        timed()
    with pytest.raises(ValueError, match=r"no configuration.*right, the last: Product.*linear"):
        search.time_candidates(LINEAR, every, "cpu")


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int8", "nvfp4", "mxfp4", "nvfp4_e4m3"])
@pytest.mark.parametrize("verb", ["linear", "experts_up", "experts_down"])
def test_exact_results_are_those_of_the_operations(
    verb: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in {"EXPERTS": 4, "TOPK": 2, "HIDDEN": 128, "INNER": 64}.items():
        monkeypatch.setattr(cases, name, number)
    grouped, down = verb.startswith("experts"), verb == "experts_down"
    product = Product(verb, scheme, 9, *((128, 64) if down else (128, 128)))
    weight = cases.random_weight(scheme, 4 if grouped else 1, product.N, product.K, "cpu")
    x = weight.reads(cases.random_tokens(18 if down else 9, product.K, "cpu"))
    share = torch.ones(18) if down else None
    ids = launches._chosen(product, "cpu") if grouped else None
    if ids is not None and down:
        ids = ids.reshape(18, 1)
    result = weight.multiply(*x, {}, ids, share)
    exact = launches.exact(product, launches.Operands(*x, weight, share, {}))
    assert relative_error(result, exact) <= 5e-3


@pytest.mark.parametrize("target", [(8, 0), (9, 0), (12, 0)])
def test_a_key_of_a_table_names_its_product(target: Capability) -> None:
    for product in products(target):
        assert product_of(product.key, product.M) == product
