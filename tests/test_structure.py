"""docs/structure.md names every module, with the sentence that the module begins with."""

import importlib

from tests.support.structure import PAGE, ROOT, WINGS, modules, page, sentence


def test_the_page_is_made_from_the_modules() -> None:
    assert PAGE.read_text("utf-8") == page(), "run python -m tests.support.structure"


def test_every_folder_of_code_is_listed_and_every_module_says_what_it_is() -> None:
    folders = ("quantize", "kernels", "evaluation")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py")]
    files = [f for f in files if "vllm_plugin" not in f.parts and f.parent.name != "kernels"]
    assert len(files) > 150
    listed = modules()
    for file in files:
        assert file.parent.relative_to(ROOT).as_posix() in WINGS, file
        assert sentence(file).endswith((".", ":", "?")), file
        assert file.name in listed or file.name.startswith("__")


def test_every_benchmark_is_imported() -> None:
    """In this process, which has torch already: to import it again would take seconds."""
    names = sorted(file.stem for file in (ROOT / "tests" / "benchmarks").glob("*.py"))
    assert len(names) > 20
    for name in names:
        importlib.import_module(f"tests.benchmarks.{name}")
