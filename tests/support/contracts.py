"""Shows import-linter the package `quantize.recovery`, which lies in `evaluation/recovery/`.

pyproject.toml's package-dir places it there; import-linter follows folders alone. It imports this
module for the contract below, before it reads the packages.
"""

from pathlib import Path
from typing import Any

from grimp.adaptors.packagefinder import ImportLibPackageFinder
from grimp.application.config import settings
from importlinter import Contract, ContractCheck, output

ROOT = Path(__file__).parents[2]
PLACED = {"quantize.recovery": ROOT / "evaluation/recovery"}


class Finder(ImportLibPackageFinder):
    """Finds packages as grimp does, except for those that lie elsewhere than their names say."""

    def determine_package_directories(self, package_name: str, file_system: Any) -> set[str]:
        """Return the folder of a package."""
        if package_name in PLACED:
            return {str(PLACED[package_name])}
        return super().determine_package_directories(package_name, file_system)


settings.configure(PACKAGE_FINDER=Finder())


class Seen(Contract):
    """Fails where imports of such a package were not read: the other contracts would hold blindly."""

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        """Look for an import from `quantize` and for one inside each package."""
        del verbose
        importers = {
            name: [
                importer
                for file in folder.glob("[!_]*.py")
                for importer in graph.find_modules_that_directly_import(f"{name}.{file.stem}")
            ]
            for name, folder in PLACED.items()
        }
        blind = [
            name
            for name, modules in importers.items()
            if len({module.startswith(name) for module in modules}) < 2
        ]
        return ContractCheck(kept=not blind, metadata={"blind": blind})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Say which package was not read."""
        output.print_error(f"no imports were read of {', '.join(check.metadata['blind'])}")
