"""`quantize bundle`: what is sent to others holds what helps, and nothing of the questions."""

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantize.cli import cli
from quantize.errors import InputError
from quantize.host.files import read_json, write_json, write_text
from tests.support.finished_run import finished_run

SECRET = "How many pens has Tom?"


def test_a_bundle_has_no_questions_no_paths_and_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = finished_run(tmp_path, judged=True)
    report = read_json(run.report_json)
    report["questions"] = {"gsm8k": {"shown": [{"text": SECRET, "target": "9"}]}}
    report["canvases"] = {"problems": [{"prompt": SECRET, "tokens": [[SECRET]]}]}
    write_json(run.report_json, report)
    place = tmp_path / "secret" / "bf16"
    manifest = read_json(run.manifest_json)
    manifest["source"] |= {"folder": str(place), "model": str(place)}
    write_json(run.manifest_json, manifest)
    frame = f'  File "{tmp_path}/x.py", line 1, in f\n    f(x)'
    write_text(
        run.log, f"Traceback (most recent call last):\n{frame}\nValueError: {SECRET}\n{SECRET}"
    )

    done = CliRunner().invoke(cli, ["bundle", str(run.path)], standalone_mode=False)
    assert done.exception is None
    with zipfile.ZipFile(f"{run.path.name}.zip") as archive:
        texts = {n.split("/", 1)[1]: archive.read(n).decode() for n in archive.namelist()}
    assert {"manifest.json", "report.json", "verification.json", "run.log", "recipe.yaml"} <= set(
        texts
    )
    assert not any(n.endswith((".safetensors", ".jsonl", ".html")) for n in texts)
    everything = "".join(texts.values())
    assert "pens" not in everything
    assert str(tmp_path) not in everything
    assert "secret" not in everything
    told = json.loads(texts["report.json"])
    assert told["verdict"] == report["verdict"]
    assert [task["task"] for task in told["tasks"]] == [task["task"] for task in report["tasks"]]
    assert texts["run.log"].splitlines() == [
        "Traceback (most recent call last):", '  File "~/x.py", line 1, in f', "ValueError",
    ]  # fmt: skip
    again = CliRunner().invoke(cli, ["bundle", str(run.path)])
    assert isinstance(again.exception, InputError)
