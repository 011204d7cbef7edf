"""The bundled model: a small trained DiffusionGemma, its tokenizer, problems and trainer."""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
