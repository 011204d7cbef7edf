"""vLLM self-conditions the pass that commits a canvas of DiffusionGemma: shown on a CPU, without vLLM.

    pip download --no-deps --only-binary :all: vllm==0.33.0 && unzip vllm-*.whl -d vllm-0.33.0
    pip install -e . && python docs/upstream/vllm_commit_pass.py vllm-0.33.0

The four methods concerned are run as vLLM's file has them, behind a stand-in for its RMSNorm. A batch
of one canvas that is denoised and one that is committed goes through `prepare_inputs`. The program
prints how far both canvases' inputs are from the embeddings of their tokens, without and with our
plugin.
"""

import ast
import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

NAME = "vllm.model_executor.models.diffusion_gemma"
PLUGIN = Path(__file__).parents[2] / "quantize/serve/vllm_plugin"
KEPT = {
    "DiffusionGemmaSelfConditioning": ("__init__", "forward"),
    "DiffusionGemmaModelState": ("_apply_self_conditioning", "prepare_inputs"),
    "DiffusionGemmaForConditionalGeneration": ("get_model_state_cls",),
}
TOKENS, WIDTH, INNER, VOCABULARY = 8, 32, 48, 100  # of a canvas


class RMSNorm(nn.Module):
    """What vLLM's RMSNorm computes."""

    def __init__(self, width: int, eps: float = 1e-6, has_weight: bool = True) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width)) if has_weight else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [..., width] at a root mean square of one, times the weight."""
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def methods(file: Path) -> ModuleType:
    """Return a module with the classes of KEPT, which have those methods of vLLM's `file` alone."""
    tree = ast.parse(file.read_text("utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in KEPT]
    for node in classes:
        node.decorator_list = []
        node.bases = [base for base in node.bases if ast.unparse(base) == "nn.Module"]
        node.body = [line for line in node.body if getattr(line, "name", "") in KEPT[node.name]]
    future = ast.parse("from __future__ import annotations").body
    module = ModuleType(NAME)
    module.__dict__.update(
        __file__=str(file), torch=torch, nn=nn, F=nn.functional, np=np, RMSNorm=RMSNorm
    )
    exec(compile(ast.Module([*future, *classes], []), str(file), "exec"), module.__dict__)
    return module


@contextmanager
def release(folder: Path) -> Generator[tuple[Any, Any]]:
    """Yield the methods in vLLM's unpacked wheel `folder`, and the module of our plugin on them.

    Raises:
        RuntimeError: the plugin does not know this release.
    """
    names = [NAME.rsplit(".", parts)[0] for parts in (3, 2, 1)]
    packages = {name: ModuleType(name) for name in names}
    packages[NAME] = methods((folder / NAME.replace(".", "/")).with_suffix(".py"))
    packages[names[-1]].__dict__["diffusion_gemma"] = packages[NAME]
    sys.modules.update(packages)
    sys.path.insert(0, str(PLUGIN))
    try:
        yield packages[NAME], importlib.import_module("diffusiongemma_vllm_repair.model")
    finally:
        sys.path.remove(str(PLUGIN))
        for name in [*packages, "diffusiongemma_vllm_repair.model", "diffusiongemma_vllm_repair"]:
            sys.modules.pop(name, None)


def prepared(kind: type[Any], conditioning: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a state of class `kind` makes of two canvases, and their tokens' embeddings.

    Both are FP32 [2, TOKENS, WIDTH]. The first canvas is being denoised, with a random signal. The
    second is committed, with a signal of zeros, as vLLM's sampler leaves it.
    """
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(VOCABULARY, WIDTH, generator=generator)
    signals = torch.randn(2, TOKENS, WIDTH, generator=generator)
    signals[1] = 0
    tokens = torch.randint(VOCABULARY, (2 * TOKENS,), generator=generator)
    state, borders = object.__new__(kind), np.array([0, TOKENS, 2 * TOKENS])
    state.__dict__ |= {
        "model": SimpleNamespace(
            self_conditioning=conditioning, embed_input_ids=lambda ids: table[ids]
        ),
        "diffusion_states": SimpleNamespace(
            is_encoder_phase=torch.tensor([False, True]), self_conditioning_embeds=signals,
            self_conditioning_probs=signals, batch_allowed=lambda slots: None,
        ),
        "_inputs_embeds_buf": torch.zeros(2 * TOKENS, WIDTH),
        "_pending_mm_embeds": None,
        "_req_id_to_index": {"a": 0, "b": 1},
    }  # fmt: skip
    batch = SimpleNamespace(
        num_tokens=2 * TOKENS, num_reqs=2, num_tokens_after_padding=2 * TOKENS, input_ids=tokens,
        num_draft_tokens=2 * TOKENS, idx_mapping_np=np.array([0, 1]), cu_num_logits_np=borders,
        query_start_loc_np=borders,
    )  # fmt: skip
    with torch.no_grad():
        embeddings = state.prepare_inputs(batch, None)["inputs_embeds"]
    return embeddings.view(2, TOKENS, WIDTH), table[tokens].view(2, TOKENS, WIDTH)


def main(folder: str) -> None:
    """Print how far vLLM's inputs are from the embeddings, without and with the plugin."""
    torch.manual_seed(0)
    with release(Path(folder)) as (theirs, plugin):
        conditioning = theirs.DiffusionGemmaSelfConditioning(WIDTH, INNER)
        kinds = {"vLLM": theirs.DiffusionGemmaModelState, "repaired": plugin.RepairedModelState}
        for name, kind in kinds.items():
            inputs, plain = prepared(kind, conditioning)
            far = ((inputs - plain).norm(dim=(1, 2)) / plain.norm(dim=(1, 2))).tolist()
            print(
                f"{name}: inputs are away from the embeddings by {far[0]:.3f} of their norm where a "
                f"canvas is denoised, and by {far[1]:.3f} where one is committed"
            )


if __name__ == "__main__":
    main(sys.argv[1])
