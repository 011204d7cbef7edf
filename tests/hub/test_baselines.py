"""Packs of BF16's answers on a Hub on the loopback: pushed once, and pulled by commit and digest."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quantize import cli
from quantize.host.files import read_json
from quantize.stages.evaluate.baseline_pack import FORMAT, _digest, find_pack, imports
from tests.support.fake_hub import TOKEN, FakeHub, Fault

REPO = "org/bf16-answers"
PLANNED = {"estimand": "these_questions", "questions": 1, "repeats": 1, "seed": 0}
MADE = {"model": {"weights": "w"}, "device": "cpu", "planned": PLANNED}
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def pack(path: Path, answer: str = "7") -> str:
    """Write a pack of one answer; return its sha256."""
    origin = {"tool": {"version": "1.0", "commit": None}, "commit": None}
    header = {"format": FORMAT, "origin": origin, "tasks": {"gsm8k": MADE}}
    completion = {"text": answer, "tokens": 1, "denoising_steps": [3], "truncated": False}
    lines = [json.dumps({"task": "gsm8k", "key": "0" * 16} | completion)]
    digest = _digest(header, lines)
    path.write_bytes(
        gzip.compress("\n".join([json.dumps(header | {"sha256": digest}), *lines]).encode())
    )
    return digest


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `quantize baseline ...` in this process; return exit code, output and errors."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quantize", "baseline", *map(str, words)])
        capsys.readouterr()
        code = cli._exit_code()
        text = capsys.readouterr()
        assert TOKEN not in text.out + text.err
        return code, text.out, text.err

    return run


def test_a_pack_is_pushed_once_and_pulled_as_it_was(
    call: Any, hub: FakeHub, tmp_path: Path
) -> None:
    digest = pack(tmp_path / "a.gz")
    code, out, _ = call("push", tmp_path / "a.gz", REPO)
    assert code == 0
    named = out.strip()
    assert named == f"{REPO}@{hub.repos[REPO].refs['main']}"
    assert hub.repos[REPO].private
    assert {*hub.files(REPO)} == {".gitattributes", "README.md", f"{digest}.jsonl.gz"}
    events = list(hub.events)
    assert call("push", tmp_path / "a.gz", REPO)[1].strip() == named
    assert hub.events == events  # nothing is committed twice

    second = pack(tmp_path / "b.gz", "8")
    call("push", tmp_path / "b.gz", REPO)
    assert {f"{digest}.jsonl.gz", f"{second}.jsonl.gz"} < {*hub.files(REPO)}
    # The commit of then has one pack; that of today has two, of which one is named.
    assert call("pull", named, "--out", tmp_path / "runs")[0] == 0
    (place,) = imports(tmp_path / "runs").glob("*.jsonl.gz")
    assert place.read_bytes() == (tmp_path / "a.gz").read_bytes()
    taken = find_pack(place.parent, "w", {"gsm8k": MADE})
    assert taken is not None
    assert (taken.sha256, taken.origin["hub"]) == (digest, named)
    code, _, err = call("pull", REPO, "--out", tmp_path / "runs")
    assert code == 2
    assert f"{REPO}: 2 packs; name one by --sha256; it has " in err
    assert call("pull", REPO, "--sha256", second[:8], "--out", tmp_path / "two")[0] == 0
    assert read_json(imports(tmp_path / "two") / f"{second[:12]}.hub.json", "hub")["hub"] == (
        f"{REPO}@{hub.repos[REPO].refs['main']}"
    )


def test_another_pack_under_a_name_is_not_imported(call: Any, hub: FakeHub, tmp_path: Path) -> None:
    digest, other = pack(tmp_path / "a.gz"), pack(tmp_path / "b.gz", "8")
    call("push", tmp_path / "a.gz", REPO)
    hub.put(REPO, "main", f"{digest}.jsonl.gz", (tmp_path / "b.gz").read_bytes())
    code, _, err = call("pull", REPO, "--out", tmp_path / "runs")
    assert code == 2
    assert f"the pack {digest[:12]} holds another one ({other[:12]})" in err
    hub.put(REPO, "main", f"{digest}.jsonl.gz", (tmp_path / "b.gz").read_bytes()[:40])
    code, _, err = call("pull", REPO, "--out", tmp_path / "runs")
    assert code == 2
    assert "no baseline pack as it was exported" in err
    assert not list(imports(tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["pull", "org/none"], 2, "org/none: cannot read it: not found (404)"),
        (["pull", f"{REPO}@gone"], 2, "no such revision (404)"),
        (["pull", REPO, "--sha256", "00"], 2, "0 packs begin with '00'; name one by --sha256"),
        (["pull", REPO, "--identity", "me@x.org"], 2, "--identity and --issuer go together"),
        (["push", "{folder}/none.gz", REPO], 2, "none.gz: no baseline pack"),
        (["push", "{folder}/a.gz", "nobody/x"], 2, "not found (404); check organisation"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], code: int, said: str, call: Any, hub: FakeHub, tmp_path: Path
) -> None:
    pack(tmp_path / "a.gz")
    call("push", tmp_path / "a.gz", REPO)
    out = ["--out", tmp_path / "runs"] if words[0] == "pull" else []
    ended, _, err = call(*(word.format(folder=tmp_path) for word in words), *out)
    assert (ended, "Traceback" in err) == (code, False)
    assert said in err


def test_an_upload_whose_answer_is_lost_is_not_repeated(
    call: Any, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    digest = pack(tmp_path / "a.gz")
    hub.faults.append(Fault("POST .*/commit/", status=503, times=1))
    assert call("push", tmp_path / "a.gz", REPO)[0] == 0
    assert f"{digest}.jsonl.gz" in hub.files(REPO)


def test_a_signed_pack(call: Any, hub: FakeHub, tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="pip install '.[sign]'")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    digest = pack(tmp_path / "a.gz")
    for name in ("ours", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        pem, encoding = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
        secret = key.private_bytes(encoding, pem, serialization.NoEncryption())
        (tmp_path / f"{name}.pem").write_bytes(secret)
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        (tmp_path / f"{name}.pub").write_bytes(key.public_key().public_bytes(encoding, form))
    pull = ("pull", REPO, "--out", tmp_path / "runs", "--key")
    assert call("push", tmp_path / "a.gz", REPO)[0] == 0
    code, _, err = call(*pull, tmp_path / "ours.pub")
    assert (code, "is not signed" in err) == (1, True)
    assert call("push", tmp_path / "a.gz", REPO, "--sign", tmp_path / "ours.pem")[0] == 0
    assert f"{digest}.jsonl.gz.sig" in hub.files(REPO)
    code, _, err = call(*pull, tmp_path / "other.pub")
    assert (code, "not a signature of" in err) == (1, True)
    assert not list(imports(tmp_path / "runs").glob("*"))
    assert call(*pull, tmp_path / "ours.pub")[0] == 0
