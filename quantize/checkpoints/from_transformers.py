"""All that this package takes from transformers, reached here and nowhere else.

A name is imported when it is first asked for: transformers takes seconds, and most commands need none
or one of these. Seen with 5.17 to 5.24. Between these the rotary embedding's bits moved (5.19), and
`past_key_values` of the model's forward became `cache` (5.24; the old name goes at 5.40): nothing
here passes either. The sampler, names on disk and the configuration's values did not change.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from quantize.errors import ResourceError

if TYPE_CHECKING:
    from transformers import AutoConfig as AutoConfig
    from transformers import AutoTokenizer as AutoTokenizer
    from transformers import DiffusionGemmaConfig as DiffusionGemmaConfig
    from transformers import DiffusionGemmaForBlockDiffusion as DiffusionGemmaForBlockDiffusion
    from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
        DiffusionGemmaMultimodalEmbedder as DiffusionGemmaMultimodalEmbedder,
    )
    from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
        DiffusionGemmaTextRotaryEmbedding as DiffusionGemmaTextRotaryEmbedding,
    )
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        Gemma4ImageProcessorPil as Gemma4ImageProcessorPil,
    )
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size as get_aspect_ratio_preserving_size,
    )
    from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionModel as Gemma4VisionModel
    from transformers.utils import logging as logging

MODULES = {  # name -> module of transformers
    "AutoConfig": "",
    "AutoTokenizer": "",
    "DiffusionGemmaConfig": "",
    "DiffusionGemmaForBlockDiffusion": "",
    "DiffusionGemmaMultimodalEmbedder": ".models.diffusion_gemma.modeling_diffusion_gemma",
    "DiffusionGemmaTextRotaryEmbedding": ".models.diffusion_gemma.modeling_diffusion_gemma",
    "Gemma4ImageProcessorPil": ".models.gemma4.image_processing_pil_gemma4",
    "Gemma4VisionModel": ".models.gemma4.modeling_gemma4",
    "get_aspect_ratio_preserving_size": ".models.gemma4.image_processing_pil_gemma4",
    "logging": ".utils",
}


def __getattr__(name: str) -> Any:
    """Return what transformers calls `name`.

    Raises:
        AttributeError: MODULES does not have the name.
        ResourceError: the installed transformers does not have it, or is not one to import.
    """
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"transformers{MODULES[name]}"), name)
    except (AttributeError, ImportError) as error:
        version = metadata.version("transformers")
        raise ResourceError(
            f"transformers {version} lacks {name}, which DiffusionGemma needs ({error}); "
            "install one that is declared: pip install --upgrade diffusiongemma-quantize"
        ) from error
