"""`import quantize.hf`: transformers' Auto class loads quantized folders right, or fails."""

import sys
from pathlib import Path

import pytest

from tests.support.conversions import recipe_for, run
from tests.support.two_processes import forked

PROGRAM = """
import sys, torch
from pathlib import Path
from types import SimpleNamespace
import quantize.hf
from transformers import AutoModelForMultimodalLM
from quantize.checkpoints.load import load
from quantize.errors import InputError

plain, folder = sys.argv[1:]
model = AutoModelForMultimodalLM.from_pretrained(folder)
right = load(Path(folder), dtype=torch.bfloat16).state_dict()
found = model.state_dict()
assert found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)
assert model.dtype == torch.bfloat16 and not model.training
other = AutoModelForMultimodalLM.from_pretrained(plain, dtype=torch.bfloat16).state_dict()
assert not all(torch.equal(found[name], other[name]) for name in other)
for name, dtype in (("auto", torch.bfloat16), ("float32", torch.float32)):
    assert type(model).from_pretrained(folder, dtype=name).dtype == dtype
hub = {"revision": None, "token": None, "cache_dir": None}  # 5.24's Auto classes add the first
assert type(model).from_pretrained(folder, **hub).state_dict().keys() == right.keys()
for options in ({"device_map": "auto"}, {"max_memory": {0: 1}}, {"dtype": "fp7"}):
    try:
        type(model).from_pretrained(folder, **options)
    except InputError as error:
        print(error)
    else:
        raise AssertionError(options)
asked = []
answer = lambda name, **own: asked.append((name, own)) or model.config
quantize.hf.AutoConfig = SimpleNamespace(from_pretrained=answer)
model.config.quantization_config = {}
try:
    type(model).from_pretrained("org/name", revision="r", local_files_only=True, dtype="auto")
except InputError as error:
    print(error)
assert asked == [("org/name", {"revision": "r", "local_files_only": True})]
next(Path(folder).glob("*.safetensors")).unlink()
try:
    AutoModelForMultimodalLM.from_pretrained(folder)
except InputError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "NVFP4"])
def test_the_auto_class_loads_what_load_loads(
    scheme: str, tiny_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "quantized"
    run(tiny_checkpoint, folder, recipe_for({scheme: ["re:.*experts.*"]}))

    def load() -> None:
        sys.argv = ["program", str(tiny_checkpoint), str(folder)]
        exec(PROGRAM, {})

    process = forked(load)
    process.join(300)
    said = capfd.readouterr()
    assert process.exitcode == 0, said.err[-2000:]
    assert "device_map must name one device" in said.out
    assert "'max_memory' is not taken" in said.out
    assert "dtype 'fp7' is none of torch's" in said.out
    assert "org/name: download it" in said.out
    assert "refused:" in said.out
