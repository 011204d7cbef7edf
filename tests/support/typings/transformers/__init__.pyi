# What this project takes from the top of transformers, for pyrefly: the library's own file imports
# every model there is, which pyrefly would read. A name that it misses is added here.
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import (
    AutoModelForMultimodalLM as AutoModelForMultimodalLM,
)
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.diffusion_gemma.configuration_diffusion_gemma import (
    DiffusionGemmaConfig as DiffusionGemmaConfig,
)
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
    DiffusionGemmaForBlockDiffusion as DiffusionGemmaForBlockDiffusion,
)
from transformers.tokenization_utils_tokenizers import (
    PreTrainedTokenizerFast as PreTrainedTokenizerFast,
)
