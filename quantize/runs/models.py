"""Names of the models that a run compares: folders of `evaluation/`, and keys of report.json.

bf16                 the baseline
quantized            the candidate, which the gate judges; activations rounded as the recipe says
quantized-<mode>     the same weights, activations rounded in another way, when asked for
quantized-gguf       the checkpoint's GGUF file in llama.cpp, when given
quantized-at-<name>  the same weights at an operating point's sampler settings, when asked for
bf16-again           the baseline with a second seed, the noise floor, when asked for
"""

from quantize.schemes.modes import ACTIVATION_MODES

BASELINE, CANDIDATE = "bf16", "quantized"
AT_POINT = f"{CANDIDATE}-at-"
BASELINE_AGAIN, EXPORTED = "bf16-again", "quantized-gguf"


def in_mode(mode: str) -> str:
    """Return the name of the candidate whose activations are rounded as `mode` says."""
    return f"{CANDIDATE}-{mode.replace('_', '-')}"


# Further candidates -> what the report calls their activations.
FURTHER = {in_mode(mode): str(mode) for mode in ACTIVATION_MODES} | {EXPORTED: "GGUF in llama.cpp"}
