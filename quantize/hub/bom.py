"""Writes a release's bill of materials: CycloneDX 1.6, in JSON, by cyclonedx-python-lib.

Equal runs give equal bytes: the bill has the verdict's date, and a serial number made from repository
and checkpoint. CycloneDX's `modelCard` is left out, since the library cannot write it; instead the
bill links to the model's page.
"""

import hashlib
import json
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from cyclonedx import model as cdx
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Pedigree
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from quantize.host.files import read_json
from quantize.recipe.sections import Recipe
from quantize.reports.card import DATASETS, THINKING, front_matter
from quantize.runs.folder import RunDir
from quantize.runs.models import CANDIDATE

HUB = "https://huggingface.co"
LICENCES = {  # data set -> its licence, if its own page states one
    "openai/gsm8k": "MIT", "ChilleD/SVAMP": "MIT", "Idavidrein/gpqa": "CC-BY-4.0",
    "HuggingFaceH4/ultrachat_200k": "MIT", "ifeval": "Apache-2.0", "mmlu_pro": "MIT",
}  # fmt: skip
Said = tuple[str, str]


def bill(run: RunDir, recipe: Recipe, repo: str, base: str | None) -> str:
    """Return a run's bill of materials as JSON; `repo` is its Hub id, `base` the BF16 model's id."""
    report, manifest = read_json(run.report_json), read_json(run.manifest_json)
    source, digest = manifest["source"], str(report["artifact"])
    licence = yaml.safe_load(front_matter(recipe, manifest, base))["license"]
    commit, model = source.get("commit"), ComponentType.MACHINE_LEARNING_MODEL
    where = PackageURL("huggingface", *base.split("/", 1), version=commit) if base else None
    name, said = base or Path(source["model"]).name, [("fingerprint", source["fingerprint"])]
    origin = Pedigree(ancestors=[_part(model, name, said, version=commit, purl=where)])
    result = _part(model, repo, [("fingerprint", digest)], licence, HUB, pedigree=origin)
    written = _sha256(run.recipe_yaml.read_bytes())
    resolved = cdx.HashType(alg=cdx.HashAlgorithm.SHA_256, content=written)
    parts = [_part(ComponentType.DATA, "recipe.yaml", hashes=[resolved])]
    for name, said in _data(run, recipe, report).items():
        site = f"{HUB}/datasets" if "/" in name else None
        parts.append(_part(ComponentType.DATA, name, said, LICENCES.get(name), site))
    for name, version in manifest["versions"].items():
        where = PackageURL("generic" if name == "python" else "pypi", None, name, version)
        parts.append(_part(ComponentType.LIBRARY, name, version=version, purl=where))
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{HUB}/{repo}/{digest}")
    about: Any = BomMetaData(component=result)
    judged = report.get("made", {}).get("judged")
    about.timestamp = datetime.fromisoformat(judged) if judged else None
    bom: Any = Bom(components=parts, metadata=about, serial_number=serial)
    bom.register_dependency(result, parts)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _data(run: RunDir, recipe: Recipe, report: dict[str, Any]) -> dict[str, list[Said]]:
    """Return what each data set was used for, with a digest of the questions that a task asked."""
    uses: dict[str, list[Said]] = {}
    for name in recipe.calibration.datasets if recipe.calibration else ():
        uses[Path(name).name if name.endswith(".jsonl") else name] = [("use", "calibration")]
    for task in (str(row["task"]) for row in report["tasks"]):
        plain = task.removesuffix(THINKING)
        uses_of = uses.setdefault(DATASETS.get(plain, (plain,))[0], [])
        conditions = read_json(run.evaluation / CANDIDATE / f"{task}.conditions.json")
        uses_of.append(("use", f"evaluation: {task}"))
        if asked := conditions["compared"].get("documents"):
            of = f"sha256 of the questions' digests: {task}"
            uses_of.append((of, _sha256(json.dumps(asked).encode())))
    return uses


def _part(
    kind: Any, name: str, said: Sequence[Said] = (), licence: str | None = None,
    site: str | None = None, **more: Any,
) -> Component:  # fmt: skip
    page = [(cdx.ExternalReferenceType.WEBSITE, cdx.XsUri(f"{site}/{name}"))] if site else []
    return Component(
        type=kind, name=name, bom_ref=name,
        licenses=[LicenseFactory().make_from_string(licence)] if licence else None,
        external_references=[cdx.ExternalReference(type=how, url=url) for how, url in page],
        properties=[cdx.Property(name=f"quantize:{key}", value=value) for key, value in said],
        **more,
    )  # fmt: skip


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
