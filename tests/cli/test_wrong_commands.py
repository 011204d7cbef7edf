"""Commands that a user types wrong, and the one line with which each of them ends: what to do."""

import pytest
import torch

from quantize import cli

# what is typed: (the words, the exit code, what the one line says)
WRONG = {
    "a recipe": (
        ["run", "--recipe", "nvpf4"],
        2,
        ["no recipe named 'nvpf4' (did you mean 'nvfp4'?); there are: "],
    ),
    "a path": (
        ["run", "--model", "/nowhere/model"],
        2,
        [
            "/nowhere/model: no such folder, and not a Hub id (ORG/NAME or ORG/NAME@revision); name a"
        ],
    ),
    "a checkpoint": (["serve", "/nowhere/model"], 2, ["no such folder", "or `bundled` for the"]),
    "a run": (
        ["report", "/nowhere/run"],
        2,
        ["/nowhere/run: no such folder; name a folder that `q"],
    ),
    "a folder that is no run": (["report", "/"], 2, ["/: no manifest.json there; name a folder"]),
    "runs": (["compare", "/nowhere/a", "/"], 2, ["/nowhere/a: no such folder; name a folder that"]),
    "a flag": (
        ["run", "--recepi", "nvfp4"],
        2,
        ["no such option", "--recepi", "--recipe", "see `quantize run --help`"],
    ),
    "a command": (
        ["evalate", "RUN"],
        2,
        ["no such command 'evalate' (did you mean 'evaluate'?); see `quantize --help`"],
    ),
    "an argument": (["serve"], 2, ["missing argument", "see `quantize serve --help`"]),
    "a limit that servers cannot be judged by": (
        ["run", "--server", "http://x", "--base-server", "http://y"],
        2,
        [
            "recipe nvfp4: gate.max_step_inflation, 0.1, cannot be judged",
            "`max_step_inflation: null`",
        ],
    ),
    "experts of a checkpoint": (
        ["bench", "bundled", "--measured", __file__],
        2,
        ["a checkpoint's routers choose"],
    ),
    "no GPU": (["bench", "--random-weights", "nvfp4"], 3, ["bench needs an NVIDIA GPU"]),
}


SHARED = ("calibrate", "round", "fidelity", "evaluate")


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name not in SHARED])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_several_processes_of_a_command_that_shares_no_work_are_refused(
    command: str, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks of `round` wrote one folder, and both said that it was done."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("sys.argv", ["quantize", command, "x", "y"])
    assert cli._exit_code() == 2
    assert f"`quantize {command}` is one process; torchrun is for" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "code", "answers"), WRONG.values(), ids=WRONG)
def test_a_wrong_command_ends_in_one_line(
    words: list[str],
    code: int,
    answers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["quantize", *words])
    assert cli._exit_code() == code
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert found.err.startswith("error: ")
    assert [answer for answer in answers if answer not in found.err] == []


@pytest.mark.parametrize("said", [None, "0"])
def test_libraries_draw_no_bars_unless_the_user_says_so(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"TQDM_DISABLE": said} if said else {}
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.setattr("sys.argv", ["quantize", "--version"])
    assert cli._exit_code() == 0
    assert environment["TQDM_DISABLE"] == (said or "1")


def test_a_token_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gated model: the Hub answers 401 to whoever has no token."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError

    def refuses(*_: object, **__: object) -> str:
        response = type("Response", (), {"status_code": 401, "headers": {}, "request": None})()
        raise GatedRepoError("401", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuses)
    monkeypatch.setattr("sys.argv", ["quantize", "inspect", "google/gated-model"])
    assert cli._exit_code() == 3
    assert capsys.readouterr().err == (
        "error: google/gated-model: gated on the Hub; accept its terms there and set HF_TOKEN\n"
    )
