"""Passes over tied copies by value: a copy that differs from its original is an error.

DiffusionGemma has one set of text weights: the encoder's are the decoder's, except each layer's
`layer_scalar`, and lm_head is the embedding. A folder may hold copies under their other names. A LoRA
that was merged into the decoder alone, or a head of its own, leaves copies that differ. transformers
then loads two sets of weights. The kernels have one, so such a folder is refused.

Copies are compared once in a process, in blocks. A folder without copies costs nothing.
"""

from collections.abc import Iterable

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import DROPPED
from quantize.errors import InputError

EMBEDDING = "model.decoder.embed_tokens.weight"
# what was found equal: folder, tensors, and their files' stamps
_compared = set[tuple[object, ...]]()


def tied_to(name: str) -> str | None:
    """Return the on-disk name of the tensor of which `name` is a tied copy; None for no copy."""
    if not DROPPED.fullmatch(name):
        return None
    if name == "lm_head.weight":
        return EMBEDDING
    return name.replace("model.encoder.language_model.", "model.decoder.", 1)


def check_ties(checkpoint: Checkpoint, layout: Iterable[str]) -> None:
    """Raise InputError if a tied copy differs from its original, or one that must be there is missing.

    `layout` has the names of the BF16 layout. With `tie_word_embeddings: false` in config.json, every
    copy must be there: transformers would fill a missing one with random numbers.
    """
    copies = {name: original for name in checkpoint.tensors if (original := tied_to(name))}
    if not checkpoint.config["tie_word_embeddings"]:
        wanted = ["lm_head.weight"]
        for name in layout:
            if name.startswith("model.decoder.") and "self_conditioning" not in name:
                wanted.append(name.replace("model.decoder.", "model.encoder.language_model.", 1))
        if missing := [name for name in wanted if name not in checkpoint.tensors]:
            raise InputError(
                f"{checkpoint.folder}: config.json says `tie_word_embeddings: false`, and tensor "
                f"{missing[0]!r} is missing ({len(missing)} in all); write true if the weights are tied"
            )
    files = sorted({checkpoint.tensors[name].file for pair in copies.items() for name in pair})
    times = [(file, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    if (key := (*sorted(copies), *times)) in _compared:
        return
    for name, original in copies.items():
        if not checkpoint.holds_the_same(name, original):
            raise InputError(
                f"{checkpoint.tensors[name].file}: tensor {name!r} differs from {original!r}, to which "
                f"DiffusionGemma ties it; one set of text weights is quantized and served, so answers "
                f"would change: merge the change into both, and save the model with tied weights"
            )
    _compared.add(key)
