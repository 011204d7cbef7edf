"""After `import quantize.hf`, transformers' from_pretrained loads quantized folders right, or fails.

    import quantize.hf
    from transformers import AutoModelForMultimodalLM
    model = AutoModelForMultimodalLM.from_pretrained("outputs/nvfp4-.../checkpoint")

Without this import, transformers fills the experts of an FP8 folder with random numbers and only warns.
On an NVFP4 folder it ends with an AttributeError. The import replaces from_pretrained of
`DiffusionGemmaForBlockDiffusion`, which the Auto classes call. `quantize.checkpoints.load` then loads
quantized folders: it dequantizes weights to BF16 and accounts for every tensor. The Hub id of a
quantized model is refused. All other models are loaded by transformers, as without the import.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quantize.checkpoints.from_transformers import AutoConfig, DiffusionGemmaForBlockDiffusion
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError, ResourceError
from quantize.host.doctor import NEEDED, packages
from quantize.runtime.weights.beside import load

# What says which files of a Hub model are meant, and where they are.
WHERE = {"cache_dir", "force_download", "local_files_only", "proxies", "revision", "token"}

# What Auto classes add (`revision` since transformers 5.24), and what cannot change a model that is
# read from a folder.
HARMLESS = WHERE | {
    "_commit_hash", "_from_auto", "adapter_kwargs", "config", "low_cpu_mem_usage",
    "trust_remote_code", "use_safetensors",
}  # fmt: skip

_transformers: Any = DiffusionGemmaForBlockDiffusion.from_pretrained


def from_pretrained(
    cls: type[Any], name: str | Path | None = None, *args: Any, **options: Any
) -> DiffusionGemmaForBlockDiffusion:
    """Load a model as transformers does; the weights of a quantized folder are dequantized.

    Options for a quantized folder: `dtype` (a torch.dtype or its name; by default BF16) and
    `device_map` (one device).

    Raises:
        InputError: the folder is incomplete or has another layout; an option would be ignored; or
            `name` is a quantized model on the Hub, which has to be downloaded first.
        ResourceError: the installed transformers is none that this package is made for.
    """
    if name is None or not _is_quantized(Path(name), str(name), options):
        return _transformers(name, *args, **options)
    dtype = options.pop("dtype", options.pop("torch_dtype", None))
    device = options.pop("device_map", None) or "cpu"
    device = device.get("") if isinstance(device, dict) else device
    _check_transformers()
    given = {key for key, value in options.items() if value is not None}  # Auto classes add some
    if unknown := [*sorted(given - HARMLESS), *args]:
        raise InputError(
            f"{name}: {unknown[0]!r} is not taken for a quantized folder; leave it out"
        )
    if not isinstance(device, str | torch.device | int) or device in ("auto", "balanced"):
        raise InputError(f"{name}: device_map must name one device, such as 'cpu' or 'cuda:0'")
    kept = torch.bfloat16 if dtype in (None, "auto") else getattr(torch, str(dtype), dtype)
    if not isinstance(kept, torch.dtype):
        raise InputError(f"{name}: dtype {dtype!r} is none of torch's, such as 'bfloat16'")
    return load(Path(name), dtype=kept, device=str(torch.device(device)))


def _check_transformers() -> None:
    for finding in packages():
        if finding.level == NEEDED and finding.what.startswith("transformers"):
            raise ResourceError(
                f"transformers {finding.seen} is installed, and quantize.hf is made for "
                f"{finding.what}: {finding.advice}"
            )


def _is_quantized(folder: Path, name: str, options: Mapping[str, Any]) -> bool:
    if folder.is_dir():
        return (folder / "config.json").is_file() and Checkpoint.open(folder).is_quantized
    where = {key: options[key] for key in WHERE & options.keys()}
    if getattr(AutoConfig.from_pretrained(name, **where), "quantization_config", None) is not None:
        raise InputError(
            f"{name}: download it (hf download {name} --local-dir DIR) and give the folder"
        )
    return False


DiffusionGemmaForBlockDiffusion.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]
