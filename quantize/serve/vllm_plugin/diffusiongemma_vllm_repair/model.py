"""vLLM's DiffusionGemma with the commit pass repaired.

In vLLM 0.24 to 0.33, `prepare_inputs` of the model's state sends every row with logits through

    embeddings = post_norm(embeddings + mlp(pre_norm(signal)))        (`_apply_self_conditioning`)

A row that commits a finished canvas has logits too. Its signal is zero, and so is the MLP's output.
But `post_norm` is an RMSNorm without weight: it still scales the embeddings to unit RMS. The scaled
embeddings are then encoded into the cache; transformers' encoder reads unscaled embeddings.

`is_encoder_phase` says which rows commit; it is read on the device, so the host never waits for it.
"""

import hashlib
import inspect
from typing import Any

import torch
from vllm.model_executor.models import diffusion_gemma as theirs

# SHA-256 of the source of the methods in `sources` -> the releases of vLLM that have them.
KNOWN = {
    "865cc4f6d83cdf073ab892eb46a507851f310acf18645750797185060bbef3b2": "0.24 to 0.30",
    "9356d3ec3271458e438dcd7737a301c40da98ee42a844be5f2b75ed2007ff460": "0.31 to 0.33",
}


def sources() -> str:
    """Return the SHA-256 of the source of the vLLM methods used; RuntimeError: a method is gone."""
    try:
        relied_on = (
            theirs.DiffusionGemmaSelfConditioning.forward,
            theirs.DiffusionGemmaModelState._apply_self_conditioning,  # noqa: SLF001
            theirs.DiffusionGemmaModelState.prepare_inputs,
            theirs.DiffusionGemmaForConditionalGeneration.get_model_state_cls,
        )
    except AttributeError as error:
        raise RuntimeError(_refusal(str(error))) from error
    text = "".join(inspect.getsource(method) for method in relied_on)
    return hashlib.sha256(text.encode()).hexdigest()


def _refusal(installed: str) -> str:
    releases = " and ".join(KNOWN.values())
    return (
        f"diffusiongemma-vllm-repair does not know this vLLM's DiffusionGemma ({installed}; it knows "
        f"{releases}): see whether its commit pass is repaired upstream, then uninstall the plugin "
        f"(pip uninstall diffusiongemma-vllm-repair) or serve with a release that it knows"
    )


if (_found := sources()) not in KNOWN:
    raise RuntimeError(_refusal(f"its source has the digest {_found[:12]}"))


class RepairedModelState(theirs.DiffusionGemmaModelState):
    """vLLM's state of a batch, repaired: a row that commits a canvas keeps its plain embeddings."""

    def _apply_self_conditioning(
        self, slots: Any, rows: Any, starts: Any, embeddings: torch.Tensor, signals: torch.Tensor
    ) -> None:
        """Condition the canvases of `rows` in `embeddings` [tokens, H], except those that commit."""
        plain = embeddings.clone()
        super()._apply_self_conditioning(slots, rows, starts, embeddings, signals)
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            canvas = slice(int(starts[row]), int(starts[row + 1]))
            commits = self.diffusion_states.is_encoder_phase[slot]
            embeddings[canvas] = torch.where(commits, plain[canvas], embeddings[canvas])


class RepairedDiffusionGemma(theirs.DiffusionGemmaForConditionalGeneration):
    """vLLM's DiffusionGemma with the repaired state of a batch."""

    @staticmethod
    def get_model_state_cls() -> type[RepairedModelState]:
        """Return the repaired class, which vLLM instantiates for its state of a batch."""
        return RepairedModelState
