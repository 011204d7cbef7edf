"""The tests whose result may hang on how this CPU's libraries multiply and sum.

One or a few for each promise: a sample is alone in its batch, a resumed stage writes the same bytes,
our arithmetic is transformers' and compressed-tensors'. tests/conftest.py marks them `numeric`, and
`make test-cpus` runs them as other CPUs would: at most three minutes on two cores. A test that is
left out computes nothing, or what one of these computes.
"""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
CHOSEN = {  # file below tests -> patterns of how its tests' names begin; none: all of them
    "fused_dequant/test_gptq_kernels.py": [],
    "fused_dequant/test_products.py": ["test_cpu_operations", "test_nvfp4_in_fp8"],
    "fused_dequant/test_simulated.py": [],
    "runtime/test_bf16.py": ["test_kernels_in_bf16"],
    "runtime/test_continuation.py": ["test_passes_read_what"],
    "runtime/test_fused_layers.py": ["test_every_layer", "test_pictures"],
    "runtime/test_generate.py": ["test_reference_noise"],
    "runtime/test_invariance.py": [],
    "runtime/test_known_tokens.py": [],
    "runtime/test_layer_by_layer.py": [],
    "runtime/test_lockstep.py": ["test_a_batch_is_what"],
    "runtime/test_passes.py": [r"test_the_kernels_are_as_far.*\[(nvfp4.*per_expert|fp8.*per_layer)"],
    "runtime/test_prefixes.py": ["test_tokens_are_the_same"],
    "schemes/test_gptq.py": [],
    "schemes/test_schemes.py": [],
    "stages/test_against_source.py": ["test_a_sound_checkpoint"],
    "stages/test_calibrate.py": [
        "test_scales_are_those", "test_the_same_inputs",
        "test_trajectories_replay",
    ],
    "stages/test_convert.py": ["test_artifact_equals"],
    "stages/test_evaluate.py": ["test_a_sample_of_the_kernels"],
    "stages/test_fidelity.py": [
        "test_a_model_replays", "test_replay_meets", "test_damage_grows", "test_kl_is",
        "test_a_remembered",
    ],
    "stages/test_linears.py": ["test_rounded_weights", "test_what_is_wrong"],
    "stages/test_round_weights.py": [
        "test_hessians_are_sums", "test_every_linear", "test_the_output_of_a_layer",
        r"test_a_killed_run.*\[Shuttle-run-3", "test_each_batch_of_experts", "test_an_expert_of_few",
    ],
    "stages/test_verify.py": ["test_what_convert_wrote", "test_the_parts_of_a_tensor"],
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
        names = [pattern.partition(".*")[0] for pattern in CHOSEN[file]]
        found += [f"{file}: {name}" for name in names if not re.search(f"def {name}", text)]
    return found
