"""Each bad input ends with one clear line and the exit code that design promises."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from quantize import cli
from quantize.checkpoints.reader import Checkpoint

Done = subprocess.CompletedProcess[str]


def quantize(*arguments: object) -> Done:
    """Run a command in this process."""
    command, out, err = ["quantize", *map(str, arguments)], StringIO(), StringIO()
    ends = pytest.raises(SystemExit)
    with patch("sys.argv", command), redirect_stdout(out), redirect_stderr(err), ends as exit_:
        cli.main()
    assert isinstance(exit_.value.code, int)
    return subprocess.CompletedProcess(command, exit_.value.code, out.getvalue(), err.getvalue())


def by_a_user(*arguments: object) -> Done:
    """Run a command as a user does, in a process of its own."""
    command = [sys.executable, "-m", "quantize", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def complains(done: Done, code: int, *words: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code, done.stderr
    assert lines[-1].startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[-1], lines[-1]


@pytest.mark.parametrize("quantize", [quantize, by_a_user])
def test_no_such_model(quantize: Callable[..., Done], tmp_path: Path) -> None:
    complains(quantize("run", "--model", tmp_path / "nowhere"), 2, "nowhere", "no such folder")


def test_a_hub_model_that_cannot_be_reached() -> None:
    complains(
        quantize("run", "--model", "nobody/nothing"), 3, "nobody/nothing", "cannot be reached"
    )


def test_not_a_diffusion_gemma(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    complains(quantize("run", "--model", tmp_path), 2, "llama", "diffusion_gemma")


def test_unknown_recipe_and_recipe_key(tmp_path: Path) -> None:
    complains(quantize("plan", "--recipe", "nvfp5"), 2, "nvfp5", "nvfp4")
    text = quantize("recipes", "nvfp4").stdout.replace("ignore:", "ingore:")
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    complains(quantize("plan", "--recipe", path), 2, "quantization.ingore", "ignore")


def test_a_missing_shard(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    names = list(Checkpoint.open(folder).tensors)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    complains(quantize("run", "--model", folder), 2, "model-00001-of-00001.safetensors", "missing")


def test_a_truncated_shard(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    complains(quantize("plan", "--model", folder), 2, "model.safetensors", "truncated")


def calibrating_on(dataset: str, tmp_path: Path) -> Path:
    text = quantize("recipes", "nvfp4").stdout.replace(
        "datasets: [bundled]", f"datasets: [{dataset}]"
    )
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_an_unreadable_local_dataset(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("no json\n")
    recipe = calibrating_on(str(tmp_path / "chats.jsonl"), tmp_path)
    done = quantize("run", "--recipe", recipe, "--out", tmp_path, "--until", "calibrate")
    complains(done, 2, "chats.jsonl")
    assert not list(tmp_path.glob("*/calibration"))


def test_a_hub_dataset_that_cannot_be_reached(tmp_path: Path) -> None:
    recipe = calibrating_on("nobody/nothing", tmp_path)
    done = quantize("run", "--recipe", recipe, "--out", tmp_path, "--until", "calibrate")
    complains(done, 3, "nobody/nothing")


def test_less_free_disk_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is asked before a byte is written."""
    from quantize import cli

    arguments = ["run", "--recipe", "fp8_dynamic", "--out", str(tmp_path), "--until", "convert"]
    monkeypatch.setattr(sys, "argv", ["quantize", *arguments])
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000)
    )  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 3
    assert not list(tmp_path.glob("*/checkpoint"))


def test_an_existing_run_is_not_touched(tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("run", "--recipe", "fp8_dynamic", "--model", tiny_checkpoint, "--out", tmp_path)
    assert quantize(*arguments, "--until", "plan").returncode == 0
    complains(quantize(*arguments), 2, "this run exists", "--resume")
    assert quantize(*arguments, "--until", "plan", "--resume").returncode == 0


def test_a_stage_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    complains(quantize("verify", tmp_path), 2, "manifest.json")


def test_plan_of_the_real_model_needs_no_weights() -> None:
    done = quantize("plan", "--model", "google/diffusiongemma-26B-A4B-it")
    assert done.returncode == 0, done.stderr
    assert "11,725" in done.stdout


def test_an_unknown_option_is_usage() -> None:
    assert quantize("run", "--recepi", "nvfp4").returncode == 2


def test_sigterm_ends_as_ctrl_c_does() -> None:
    program = (
        "import os, signal, sys, quantize.cli as cli\n"
        "cli.cli.main = lambda **_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.argv = ['quantize', 'run', '--recipe', 'nvfp4']\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 130
    assert "interrupted; `quantize run --recipe nvfp4 --resume` goes on" in done.stderr


def test_an_interrupted_command_says_that_it_stops_and_a_second_signal_ends_it() -> None:
    program = (
        "import os, signal, sys, time, quantize.cli as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job behind & ignores it
        "def work(**_):\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(10)\n"
        "    finally: print('ending', flush=True); time.sleep(10)\n"
        "cli.cli.main = work\n"
        "sys.argv = ['quantize', 'run', '--recipe', 'nvfp4']\n"
        "cli.main()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as running:
        assert running.stdout
        assert running.stderr
        assert "press Ctrl-C again to stop at once" in running.stderr.readline()
        assert running.stdout.readline() == "ending\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130
        last = running.stderr.read()
    assert last == "error: interrupted; `quantize run --recipe nvfp4 --resume` goes on\n"


def test_a_command_ends_without_a_last_collection() -> None:
    program = (
        "import quantize.cli as cli\n"
        "class Cycle:\n"
        "    def __init__(self): self.me = self\n"
        "    def __del__(self, write=__import__('os').write): write(1, b'collected')\n"
        "cli.cli.main = lambda **_: Cycle() and 0\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
