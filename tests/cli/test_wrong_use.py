"""The runtime, used wrongly: one clear line, the right exit code, before anything large is read."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch

from quantize import cli, runtime
from quantize.bundled import CHECKPOINT
from quantize.checkpoints.layout import bf16_layout
from quantize.checkpoints.load import load
from quantize.checkpoints.reader import known_config
from quantize.errors import InputError, ResourceError
from quantize.runtime.gpu.gpus import check_gpu
from quantize.runtime.opening import RandomModel
from quantize.schemes.modes import ACTIVATION_MODES
from quantize.stages.fidelity.fidelity import fidelity

QUESTION = "What is 2 + 2?"


def complaint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str]:
    """Run the command line in this process; return its exit code and last line."""
    monkeypatch.setattr("sys.argv", ["quantize", *map(str, words)])
    code = cli._exit_code()
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    return code, error.splitlines()[-1]


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model's 51.6 GB, all zeros in a sparse file; the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("full") / "26b"
    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = known_config("google/diffusiongemma-26B-A4B-it")
    assert config is not None
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, spec in bf16_layout(config).items():
        offsets = [end, end := end + spec.nbytes]
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    assert end == 51_647_562_456
    return folder


class Memory:
    available = 32_000_000_000


def test_the_real_model_on_a_machine_without_a_gpu(
    full_size: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", Memory)
    for command in (["generate", full_size, QUESTION], ["serve", full_size, "--port", "0"]):
        code, line = complaint(monkeypatch, capsys, *command)
        assert code == 3
        assert re.search(r"error: .*: 154\.9 GB of weights, and cpu has 32\.0 GB", line)
    with pytest.raises(ResourceError, match=r"103\.3 GB of weights as float32, and cpu has 32\.0"):
        load(full_size)


def test_a_context_over_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = complaint(monkeypatch, capsys, "generate", "bundled", "seven apples " * 5000)
    assert code == 2
    assert re.search(r"error: prompt 0 has \d+ tokens: nothing can follow it", line)
    code, line = complaint(monkeypatch, capsys, "serve", "bundled", "--max-context", 10**7)
    assert code == 2
    assert "context" in line


@pytest.mark.parametrize("command", [["generate"], ["serve", "--port", "0"]])
@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", 64), ("num_beams", 4), ("cache_implementation", "static"), ("t_max", -1)],
)
def test_a_generation_field_that_is_not_honoured(
    command: list[str],
    field: str,
    value: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINT, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    more = [QUESTION] if command == ["generate"] else []
    code, line = complaint(monkeypatch, capsys, command[0], folder, *more, *command[1:])
    assert code == 2
    assert re.match(r"error: .*generation_config\.json: ", line)
    assert field in line


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], free: float) -> None:
    """A GPU of some capability and free bytes, that nothing may be sent to."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "GPU X")
    memory = SimpleNamespace(total_memory=24_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _=None: memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _=None: (int(free), int(free)))


@pytest.mark.parametrize(
    ("capability", "artifact", "message"),
    [
        (
            (7, 5),
            "tiny_checkpoint",
            "GPU X cannot run bf16: sm_75; bf16 needs sm_80 or newer",
        ),
        ((7, 5), "nvfp4_artifact", "GPU X cannot run bf16: sm_75; bf16 needs sm_80 or newer"),
        ((7, 0), "fp8_artifact", "GPU X cannot run bf16: sm_70; bf16 needs sm_80 or newer"),
        (
            (8, 0),
            "fp8_artifact",
            "GPU X cannot run fp8: sm_80 has no FP8 tensor cores, which sm_89 or newer has",
        ),
        (
            (8, 6),
            "fp8_artifact",
            "GPU X cannot run fp8: sm_86 has no FP8 tensor cores, which sm_89 or newer has",
        ),
    ],
)
def test_a_gpu_that_a_scheme_does_not_run_on(
    capability: tuple[int, int],
    artifact: str,
    message: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder: Path = request.getfixturevalue(artifact)
    pretend(monkeypatch, capability, free=0)
    with pytest.raises(ResourceError, match=message) as error:
        runtime.open(folder, device="cuda")
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    ("capability", "scheme"),
    [((8, 0), "bf16"), ((8, 0), "nvfp4"), ((8, 9), "fp8"), ((9, 0), "fp8"), ((10, 0), "nvfp4")],
)
def test_a_gpu_that_a_scheme_runs_on(
    capability: tuple[int, int], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, capability, free=0)
    check_gpu({scheme}, torch.device("cuda"))


def test_fp8_activations_on_a_gpu_without_fp8(
    nvfp4_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFP4 runs there, but not as W4A8."""
    pretend(monkeypatch, (8, 0), free=0)
    with pytest.raises(ResourceError, match="sm_80 has no FP8 tensor cores"):
        runtime.open(nvfp4_artifact, device="cuda", activations="fp8")
    config = json.loads((nvfp4_artifact / "config.json").read_text())
    schemes = dict.fromkeys(("experts", "attention", "mlp"), "nvfp4")
    with pytest.raises(ResourceError, match="sm_80 has no FP8 tensor cores"):
        runtime.open(RandomModel(config, schemes), device="cuda", activations="fp8")


def test_an_old_gpu_in_the_command_line(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint.parent / "with-tokenizer"
    shutil.copytree(tiny_checkpoint, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(CHECKPOINT / name, folder)
    pretend(monkeypatch, (7, 5), free=1e12)
    code, line = complaint(monkeypatch, capsys, "generate", folder, QUESTION)
    assert code == 3
    assert "sm_75; bf16 needs sm_80 or newer" in line
    config = json.loads((folder / "config.json").read_text())
    random = RandomModel(config, dict.fromkeys(("experts", "attention", "mlp"), "fp8"))
    with pytest.raises(ResourceError, match="sm_75; bf16 needs sm_80 or newer"):
        runtime.open(random, device="cuda")


def test_fp8_activations_without_nvfp4_weights(
    fp8_artifact: Path,
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They would change nothing, so who asks for them expects something else."""
    words = "activations fp8 are for NVFP4 weights, of which there are none"
    for folder in (fp8_artifact, tiny_checkpoint):
        with pytest.raises(InputError, match=rf"{folder}: {words}") as error:
            runtime.open(folder, device="cpu", activations="fp8")
        assert error.value.exit_code == 2
        with pytest.raises(InputError, match=words):
            fidelity(CHECKPOINT, folder, tmp_path, tmp_path / "out", activations="fp8", limits={})
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    random = RandomModel(config, dict.fromkeys(("experts", "attention", "mlp"), "fp8"))
    with pytest.raises(InputError, match=f"random weights: {words}"):
        runtime.open(random, device="cpu", activations="fp8")
    with pytest.raises(InputError, match="no activation mode per_layer, only fp8"):
        runtime.open(random, device="cpu", activations="per_layer")
    code, line = complaint(
        monkeypatch, capsys, "generate", "bundled", "hello", "--activations", "fp8"
    )
    assert code == 2
    assert line.startswith("error: ")
    assert line.endswith(f"{words}: leave `fp8` out")


@pytest.mark.parametrize("command", ["generate", "serve", "evaluate", "fidelity", "bench"])
def test_every_command_knows_every_activation_mode(command: str) -> None:
    found = cli.cli.get_command(click.Context(cli.cli), command)
    assert found is not None
    (option,) = (each for each in found.params if "--activations" in each.opts)
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == ACTIVATION_MODES


def test_bench_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, line = complaint(monkeypatch, capsys, "bench", "--random-weights", "fp8")
    assert code == 3
    assert "bench needs an NVIDIA GPU" in line
