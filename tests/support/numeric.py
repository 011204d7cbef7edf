"""The tests whose result may hang on how this CPU's libraries multiply and sum.

One or two for each promise: a sample is alone in its batch, a resumed stage writes the same bytes,
our arithmetic is transformers' and compressed-tensors'. Of a test with many parameters those are
here that multiply or sum in another way: a scheme more reads other bytes with the same products.
tests/conftest.py marks them `numeric`, and `make test-cpus` runs them as other CPUs would, in about
80 seconds of one core. A test that is left out computes nothing, or what one of these computes.
"""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
CHOSEN = {  # file below tests -> patterns of how its tests' names begin; none: all of them
    "fused_dequant/test_products.py": [
        "test_cpu_operations", "test_nvfp4_in_fp8", "test_hessians_in_the_interpreter",
    ],
    "fused_dequant/test_simulated.py": [],
    "runtime/test_continuation.py": ["test_passes_read_what"],
    "runtime/test_fused_layers.py": [
        "test_every_layer_of_the_bundled", r"test_every_layer\[fp8", "test_pictures",
    ],
    "runtime/test_generate.py": [r"test_reference_noise.*\[(50-1-3|20-4-2)"],
    "runtime/test_invariance.py": [
        r"test_neighbours.*\[(tiny|fp8)", "test_watched", "test_a_sequence_of", "test_products_are",
    ],
    "runtime/test_known_tokens.py": [],
    "runtime/test_layer_by_layer.py": [r"test_layers_see.*\[1\]", "test_layers_that_nobody"],
    "runtime/test_lockstep.py": [r"test_a_batch_is_what.*\[2"],
    "runtime/test_passes.py": [r"test_the_kernels_are_as_far.*\[fp8.*per_layer"],
    "runtime/test_prefixes.py": ["test_tokens_are_the_same"],
    "schemes/test_gptq.py": [],
    "schemes/test_hessians.py": [],
    "schemes/test_schemes.py": [],
    "stages/test_against_source.py": ["test_a_sound_checkpoint"],
    "stages/test_calibrate.py": ["test_scales_are_those"],
    "stages/test_convert.py": [r"test_artifact_equals.*\[(scheme5|INT8)"],
    "stages/test_fidelity.py": ["test_a_model_replays", "test_replay_meets", "test_kl_is"],
    "stages/test_linears.py": ["test_rounded_weights", r"test_what_is_wrong.*\[swap_two_rows"],
    "stages/test_round_weights.py": [
        "test_hessians_are_sums", "test_every_linear", "test_the_output_of_a_layer",
        r"test_a_killed_run.*\[Shuttle-run-3", "test_each_batch_of_experts", "test_an_expert_of_few",
    ],
    "stages/test_verify.py": ["test_what_convert_wrote"],
}  # fmt: skip


def computes(path: Path, name: str) -> bool:
    """Return whether a test of a file is among them."""
    if not path.is_relative_to(TESTS):
        return False
    patterns = CHOSEN.get(path.relative_to(TESTS).as_posix())
    return patterns == [] or any(re.match(pattern, name) for pattern in patterns or ())


def stale() -> list[str]:
    """Return what is chosen and no longer there: a file, or the beginning of a name."""
    found = [file for file in CHOSEN if not (TESTS / file).is_file()]
    for file in CHOSEN.keys() - found:
        text = (TESTS / file).read_text("utf-8")
        names = [re.split(r"\.\*|\\\[", pattern)[0] for pattern in CHOSEN[file]]
        found += [f"{file}: {name}" for name in names if not re.search(f"def {name}", text)]
    return found
