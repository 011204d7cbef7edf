"""Writes the layouts that ship, as transformers builds them; run it as a program."""

import json
from pathlib import Path
from typing import Any

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.layout import KNOWN, built, shape_key
from quantize.checkpoints.reader import known_config, read_config

MODELS = ("google/diffusiongemma-26B-A4B-it",)


def configs() -> list[dict[str, Any]]:
    """The configs of the bundled model and of the published ones."""
    published = (known_config(model) for model in MODELS)
    return [read_config(CHECKPOINT), *(config for config in published if config is not None)]


def shapes() -> dict[str, dict[str, list[int]]]:
    """Key of a config -> name -> shape. Known names keep their order: a GGUF file is written in it."""
    before = json.loads(KNOWN.read_text("utf-8"))
    found: dict[str, dict[str, list[int]]] = {}
    for config in configs():
        key, specs = shape_key(config), built(config)
        known = [name for name in before.get(key, {}) if name in specs]
        found[key] = {name: list(specs[name].shape) for name in dict.fromkeys([*known, *specs])}
    return found


if __name__ == "__main__":
    lines = (f"{json.dumps(key)}: {json.dumps(each)}" for key, each in shapes().items())
    Path(str(KNOWN)).write_text("{" + ",\n".join(lines) + "}\n")
