"""The one place where transformers is reached: all is there, and what is not is named."""

from importlib import metadata
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from quantize.checkpoints import from_transformers
from quantize.errors import ResourceError


@pytest.mark.parametrize("name", from_transformers.MODULES)
def test_the_installed_transformers_has_it(name: str) -> None:
    found = getattr(from_transformers, name)
    module = found.__name__ if isinstance(found, ModuleType) else found.__module__
    assert module.partition(".")[0] == "transformers"


def test_a_transformers_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(from_transformers.MODULES, "DiffusionGemmaGone", "")
    monkeypatch.setitem(from_transformers.MODULES, "AlsoGone", ".models.gone")
    version = metadata.version("transformers")
    for name in ("DiffusionGemmaGone", "AlsoGone"):
        with pytest.raises(ResourceError, match=rf"transformers {version} lacks {name}, which"):
            getattr(from_transformers, name)
    with pytest.raises(AttributeError):
        from_transformers.Misspelt  # noqa: B018

    def refused(name: str) -> None:
        raise ImportError(f"huggingface-hub<2.0 is required by {name}")

    monkeypatch.setattr(from_transformers, "import_module", refused)
    with pytest.raises(ResourceError, match=r"lacks AutoConfig, .*hub<2\.0 is required.*declared:"):
        from_transformers.AutoConfig  # noqa: B018


@pytest.mark.parametrize("package", ["transformers", "compressed-tensors", "huggingface_hub"])
def test_the_installed_version_is_a_declared_one(package: str) -> None:
    declared = map(Requirement, metadata.requires("diffusiongemma-quantize") or [])
    (bounds,) = (row.specifier for row in declared if row.name == package and not row.marker)
    assert bounds.contains(metadata.version(package))
    assert {bound.operator for bound in bounds} == {">=", "<"}
