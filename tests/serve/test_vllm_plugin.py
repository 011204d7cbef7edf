"""The plugin that repairs vLLM's commit pass, on a stand-in for vLLM with the fault.

vLLM pins another compressed-tensors and is never installed beside us. What of its sources the plugin
relies on is held to digests, which name the releases that were read.
"""

import asyncio
import importlib
import sys
import tomllib
from collections.abc import Generator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import tiny_model

PLUGIN = Path(__file__).parents[2] / "quantize/serve/vllm_plugin"
MODEL = "diffusiongemma_vllm_repair.model"
STAND_IN = """
class DiffusionGemmaSelfConditioning:
    def forward(self): ...
class DiffusionGemmaModelState:
    def __init__(self, self_conditioning, committing):
        self.self_conditioning, self.diffusion_states = self_conditioning, committing
    def prepare_inputs(self, *batch):
        self._apply_self_conditioning(*batch)
        return batch[3]
    def _apply_self_conditioning(self, slots, rows, starts, embeddings, signals):
        for slot, row in zip(slots.tolist(), rows.tolist()):
            canvas = slice(starts[row], starts[row + 1])
            signal = signals[slot, : starts[row + 1] - starts[row]]
            embeddings[canvas] = self.self_conditioning(embeddings[canvas], signal)
class DiffusionGemmaForConditionalGeneration:
    @staticmethod
    def get_model_state_cls():
        return DiffusionGemmaModelState
"""


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[dict[str, str]]:
    """A `vllm` with that model, the plugin beside it, and what the plugin registers there."""
    models = tmp_path / "vllm/model_executor/models"
    models.mkdir(parents=True)
    (models / "diffusion_gemma.py").write_text(STAND_IN)
    (tmp_path / "vllm/__init__.py").write_text(
        "class ModelRegistry:\n    register_model = staticmethod(lambda a, c: found.update({a: c}))\n"
        "found = {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(PLUGIN)
    importlib.invalidate_caches()
    yield importlib.import_module("vllm").found
    for name in [n for n in sys.modules if n.split(".")[0] in ("vllm", MODEL.split(".")[0])]:
        del sys.modules[name]


def repaired() -> ModuleType:
    """The plugin's module, made to know the stand-in."""
    with pytest.raises(RuntimeError) as refused:
        importlib.import_module(MODEL)
    digest = str(refused.value).partition("digest ")[2][:12]
    source = (PLUGIN / MODEL.replace(".", "/")).with_suffix(".py").read_text("utf-8")
    module = ModuleType(MODEL)
    known = source.replace(
        "if (_found := sources()) not in KNOWN:", "if not sources().startswith(DIGEST):"
    )
    assert known != source
    module.__dict__["DIGEST"] = digest
    exec(compile(known, MODEL, "exec"), module.__dict__)
    return module


def test_committing_rows_keep_plain_embeddings(registered: dict[str, str]) -> None:
    """What transformers' encoder reads, while rows that denoise are conditioned as before."""
    model = tiny_model().float()
    committing = SimpleNamespace(is_encoder_phase=torch.tensor([False, True, False]))
    make = repaired().RepairedDiffusionGemma.get_model_state_cls()
    state = make(model.model.decoder.self_conditioning, committing)
    plain = model.model.decoder.embed_tokens(torch.arange(12))
    signals = torch.randn(3, 4, 64)
    signals[1] = 0  # as vLLM's sampler leaves it for a row that commits
    batch = (np.array([2, 1, 0]), np.array([0, 1, 2]), np.array([0, 4, 8, 12]))
    with torch.no_grad():
        found = state.prepare_inputs(*batch, plain.clone(), signals)
        theirs = type(state).__mro__[1].prepare_inputs
        faulty = theirs(_Unrepaired(state), *batch, plain.clone(), signals)
    assert torch.equal(found[4:8], plain[4:8])
    assert not torch.allclose(faulty[4:8], plain[4:8], rtol=0.1)
    assert torch.equal(found[:4], faulty[:4])
    assert torch.equal(found[8:], faulty[8:])


class _Unrepaired:
    """A state with vLLM's own method."""

    def __init__(self, state: Any) -> None:
        self.self_conditioning = state.self_conditioning
        theirs = type(state).__mro__[1]._apply_self_conditioning
        self._apply_self_conditioning = lambda *batch: theirs(self, *batch)


def test_registering_imports_no_model(registered: dict[str, str]) -> None:
    """So that other models are served whatever vLLM this is, and a process may still fork."""
    plugin = importlib.import_module("diffusiongemma_vllm_repair")
    plugin.register()
    plugin.register()
    assert registered == {"DiffusionGemmaForBlockDiffusion": f"{MODEL}:RepairedDiffusionGemma"}
    assert MODEL not in sys.modules
    assert "vllm.model_executor.models.diffusion_gemma" not in sys.modules


def test_a_vllm_that_it_does_not_know_is_refused(
    registered: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(
        RuntimeError, match=r"knows 0\.24 to 0\.30 and 0\.31 to 0\.33\): see whether"
    ):
        importlib.import_module(MODEL)
    source = tmp_path / "vllm/model_executor/models/diffusion_gemma.py"
    source.write_text(STAND_IN.replace("def prepare_inputs", "def prepare"))
    for name in [name for name in sys.modules if name.startswith("vllm")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    with pytest.raises(RuntimeError, match="no attribute 'prepare_inputs'"):
        importlib.import_module(MODEL)


@pytest.mark.parametrize("loaded", [True, False])
def test_every_response_says_that_it_is_repaired_where_vllm_loaded_the_plugin(
    registered: dict[str, str], loaded: bool
) -> None:
    """VLLM_PLUGINS may leave it out; then the middleware alone repairs nothing."""
    plugin = importlib.import_module("diffusiongemma_vllm_repair")
    if loaded:
        plugin.register()
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(plugin.SaysRepaired(app)({}, None, send))
    said = [(b"x-diffusiongemma-commit-pass", b"repaired")] * loaded
    assert sent[0]["headers"] == [(b"a", b"b"), *said]
    assert sent[1]["body"] == b"x"


def test_it_needs_vllm_alone_and_is_found_by_it(registered: dict[str, str]) -> None:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
    assert [need.partition(">")[0] for need in project["dependencies"]] == ["vllm"]
    (target,) = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
