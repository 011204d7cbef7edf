"""Packs a run into one file to share: no weights, no questions, no answers, no local paths.

JSON files lose questions, canvases and the model's folder. The log keeps tracebacks' frames and
error classes, not messages, which may quote a prompt. ~ is the home folder, RUN the run's.
"""

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantize.errors import InputError
from quantize.host.files import read_json
from quantize.reports.provenance import without_places
from quantize.runs.folder import RunDir

TAKEN = (
    "manifest.json", "recipe.yaml", "stages.json", "targets.csv", "conversion.json",
    "verification.json", "fidelity.json", "calibration/coverage.json", "rounding/rounding.json",
    "report.json", "rehearsal.json", "measured.json", "run.log",
)  # fmt: skip


def write_bundle(run: RunDir, out: Path) -> list[str]:
    """Write a run's shareable files to the zip `out`; return their names. InputError: `out` exists."""
    if out.exists():
        raise InputError(f"{out}: exists; name another file with --out")
    texts = dict(shared(run))
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(f"{run.path.resolve().name}/{name}", text)
    return list(texts)


def shared(run: RunDir) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each file of the run that may be shared; the texts are cleaned."""
    for name in TAKEN:
        path = run.path / name
        if not path.is_file():
            continue
        if name.endswith(".json"):
            text = json.dumps(shareable(read_json(path)), indent=2) + "\n"
        else:
            text = path.read_text("utf-8", "replace")
            text = without_places(text) if name.endswith(".yaml") else text
        text = _frames(text) if path == run.log else text
        for place, word in ((run.path.resolve(), "RUN"), (run.path, "RUN"), (Path.home(), "~")):
            if len(place.parts) > 1:
                text = text.replace(str(place), word)
        yield name, text


def shareable(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a run's JSON file without questions, canvases and the model's folders."""
    kept = {key: value for key, value in content.items() if key not in ("questions", "canvases")}
    for key in ("model", "source"):
        if isinstance(about := kept.get(key), dict):
            named = str(about.get("model", ""))
            short = {"model": Path(named).name} if Path(named).is_absolute() else {}
            kept[key] = about | {"folder": None} | short
    return kept


def _frames(log: str) -> str:
    kinds = re.compile(r"^([\w.]+(?:Error|Exception|Interrupt|Exit|Warning))\b")
    kept: list[str] = []
    for line in log.splitlines():
        if re.match(r'  File ".*", line \d+', line) or line.startswith("Traceback"):
            kept.append(line)
        elif match := kinds.match(line):
            kept.append(match[1])
    return "\n".join(kept) + "\n"
