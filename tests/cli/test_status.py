"""`quantize status`: what another terminal sees of the process at work in a run."""

from pathlib import Path

from click.testing import CliRunner

from quantize.cli import cli
from quantize.host import progress
from quantize.host.progress import metered, say
from quantize.pipeline.run import working_in
from quantize.runs.folder import RunDir


def status(folder: Path) -> list[str]:
    done = CliRunner().invoke(cli, ["status", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout.splitlines()


def test_another_terminal_sees_stage_task_look_rate_and_time_left(
    tmp_path: Path, monkeypatch
) -> None:
    """It got "process 3859 is at work there" and no more."""
    monkeypatch.setattr(progress, "NOTED_EVERY", 0.01)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    with working_in(run):
        say("look 1 of 5: undecided")
        with metered("gsm8k, look 2 of 5, bf16", 4, "samples", brief=True) as meter:
            meter.add(1, 10)
            while not (lines := status(run.path))[2:]:
                pass
    assert lines[0].endswith(" is at work")
    assert lines[1] == "results there: none"
    assert lines[2].startswith("gsm8k, look 2 of 5, bf16: 1 of 4 samples, 10 tokens (")
    assert lines[2].endswith(" left")
    assert lines[3] == "last said: look 1 of 5: undecided"
    assert status(run.path)[0].endswith("no process is at work")


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["status", str(tmp_path)])
    assert "no run there" in str(done.exception)
