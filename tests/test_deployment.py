"""Dockerfile, compose file, pre-commit and packaging lists, where no docker runs."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")


def instructions(text: str = DOCKERFILE) -> list[tuple[str, str]]:
    """Each instruction of a Dockerfile and what it says, continuations joined."""
    plain = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    lines = [" ".join(line.split()) for line in plain.splitlines() if line.strip()]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def faults(found: list[tuple[str, str]]) -> list[str]:
    """What hadolint would say of the points that matter to us."""
    said: list[str] = []
    kinds = [kind for kind, _ in found]
    for kind, text in found:
        if kind == "FROM" and not re.search(r":[\w.-]*\d", text):
            said.append(f"{text}: no version")
        if kind == "ADD":
            said.append("COPY, not ADD")
        if kind in ("CMD", "ENTRYPOINT") and not isinstance(json.loads(text), list):
            said.append(f"{kind} in the form of a shell")
        if kind == "RUN" and "apt-get install" in text:
            wanted = ("--yes", "--no-install-recommends", "rm -rf /var/lib/apt/lists/*")
            said += [f"apt-get without {word}" for word in wanted if word not in text]
        if kind == "RUN" and text.count("pip install") != text.count("--no-cache-dir"):
            said.append("pip without --no-cache-dir")
    users = [text for kind, text in found if kind == "USER"]
    if not users or users[-1] in ("root", "0"):
        said.append("root at the end")
    if "HEALTHCHECK" not in kinds:
        said.append("no HEALTHCHECK")
    return said


def test_the_dockerfile_is_clean() -> None:
    assert [kind for kind, _ in instructions()].count("FROM") == 1
    assert faults(instructions()) == []


@pytest.mark.parametrize(
    ("line", "worse", "fault"),
    [
        ("USER 10001", "USER root", "root at the end"),
        ("--no-cache-dir torch", "torch", "pip without --no-cache-dir"),
        ("&& rm -rf /var/lib/apt/lists/*", "", "apt-get without rm -rf"),
        ("base-ubuntu24.04", "latest", "no version"),
    ],
)
def test_a_worse_dockerfile_is_not(line: str, worse: str, fault: str) -> None:
    text = re.sub(r"^FROM .*$", "FROM nvidia/cuda:latest", DOCKERFILE, flags=re.M)
    changed = text if worse == "latest" else DOCKERFILE.replace(line, worse)
    assert changed != DOCKERFILE
    assert any(fault in said for said in faults(instructions(changed)))


def test_the_dockerfile_copies_what_the_distribution_needs() -> None:
    copied = {word for kind, text in instructions() if kind == "COPY" for word in text.split()[:-1]}
    assert copied == {
        "constraints.txt", "pyproject.toml", "README.md", "LICENSE",
        "quantize", "recipes", "kernels", "evaluation/recovery",
    }  # fmt: skip
    assert all((ROOT / name).exists() for name in copied)
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(allowed)


def test_the_compose_file_serves_with_a_key_and_one_gpu() -> None:
    (service,) = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    assert ":?" in service["environment"]["QUANTIZE_API_KEY"]  # refuses to start without one
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["count"], device["capabilities"]) == (1, ["gpu"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_pre_commit_calls_make_lint() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (hook,) = (hook for repo in config["repos"] for hook in repo["hooks"])
    assert hook["entry"] == "make lint"
    done = subprocess.run(
        ["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(tool in done.stdout for tool in ("ruff", "pyrefly", "lint-imports"))
