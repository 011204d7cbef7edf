"""`quantize doctor`: what is missing is named with what to do; the exit code says if it matters."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from quantize.cli import cli
from quantize.host import doctor

GB = 10**9


def told(tmp_path: Path) -> tuple[int, str]:
    done = CliRunner().invoke(
        cli, ["doctor", "--out", str(tmp_path / "not" / "yet")], standalone_mode=False
    )
    return done.return_value, done.output


@pytest.fixture(autouse=True)
def well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing is wrong."""
    monkeypatch.setattr(metadata, "requires", lambda _: ["click>=8", "click>=8; extra == 'serve'"])
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=900 * GB))
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def test_a_machine_that_has_all(tmp_path: Path) -> None:
    code, text = told(tmp_path)
    assert code == 0
    assert "->" not in text
    for line in ("quantize: 0.", "packages: click 8", f"downloads: {tmp_path}\n", "900 GB free"):
        assert line in text


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("nowhere>=3", 3, "nowhere>=3: missing\n  -> pip install 'diffusiongemma-quantize'"),
        ("click<8", 3, "click<8: 8."),
        ("nowhere; extra == 'sign'", 0, "nowhere, for push --sign: missing\n  -> pip install "
         "'diffusiongemma-quantize[sign]'"),
        ("nowhere; python_version < '3'", 0, None),
        ("nowhere; extra == 'dev'", 0, None),
    ],
)  # fmt: skip
def test_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int, says: str | None
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: [line])
    found, text = told(tmp_path)
    assert found == code
    assert says in text if says else "->" not in text


def test_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert told(tmp_path)[0] == 3


def cuda(
    monkeypatch: pytest.MonkeyPatch, *gpus: tuple[int, int], built: str | None = "13.0"
) -> None:
    found = [
        SimpleNamespace(name="One", major=major, minor=minor, total_memory=24 * GB)
        for major, minor in gpus
    ]
    face = SimpleNamespace(
        is_available=lambda: bool(gpus),
        device_count=lambda: len(gpus),
        get_device_properties=lambda n: found[n],
    )
    fake: Any = SimpleNamespace(cuda=face, version=SimpleNamespace(cuda=built))
    monkeypatch.setitem(sys.modules, "torch", fake)


@pytest.mark.parametrize(
    ("gpus", "built", "driver", "says"),
    [
        ([(9, 0)], "13.0", "One, 580.1", "GPU 0: One, sm_90, 24.0 GB, CUDA 13.0\ndriver: One, 580.1\n"),
        ([(7, 5)], "13.0", "One, 580.1", "sm_75 has no kernels here"),
        ([], None, "One, 580.1", "this torch is a CPU build"),
        ([], "13.0", "One, 470.1", "torch does not reach it"),
        ([], None, None, "GPU: none; torch's CUDA: none\n"),
    ],
)  # fmt: skip
def test_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: Any, built: Any, driver: Any, says: str
) -> None:
    cuda(monkeypatch, *gpus, built=built)
    monkeypatch.setattr(doctor, "_driver", lambda: driver)
    code, text = told(tmp_path)
    assert code == 0
    assert says in text


def test_a_small_disk_and_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=9 * GB))
    monkeypatch.delenv("CC")
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    code, text = told(tmp_path)
    assert code == 0
    assert "9.00 GB free\n  -> a run of the 26B model needs 52.0 GB" in text
    assert "C compiler: none\n  -> install a C compiler" in text


def test_shells_complete_commands_and_options() -> None:
    def completed(*words: str) -> list[str]:
        asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        done = subprocess.run(
            [sys.executable, "-m", "quantize"], capture_output=True, text=True, check=False,
            env=os.environ | asked | {"_QUANTIZE_COMPLETE": "bash_complete"},
        )  # fmt: skip
        assert done.stderr == ""
        return [line.partition(",")[2] for line in done.stdout.split("\n") if line]

    assert completed("quantize", "doc") == ["doctor"]
    assert completed("quantize", "doctor", "--o") == ["--out"]
    assert completed("quantize", "frob", "--o") == []
