"""The bundled model: a small trained DiffusionGemma, its tokenizer and problems.

It makes every command work from a fresh clone without a download. It is not Google's checkpoint,
and its scores say nothing about Google's: see ``checkpoint/README.md``.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent
CHECKPOINT = _FOLDER / "checkpoint"  # BF16, Google's layout: fused experts, decoder names
HELDOUT = _FOLDER / "data" / "heldout.jsonl"  # 2,000 problems, in no training set
KINDS = _FOLDER / "data" / "kinds.jsonl"  # prompts of four kinds, without answers
CALIBRATION = _FOLDER / "data" / "calibration.jsonl"  # 512 problems, disjoint from both
