"""Where text becomes code: each place is listed here with what bounds it, and docs/folders.md has them.

The sources are read as syntax, so a new place fails until somebody has said what bounds it.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("quantize", "kernels", "evaluation/recovery")
NEVER = {  # imports of what runs or revives whatever a file holds
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy",
    "code", "codeop", "imp",
}  # fmt: skip
NEVER_CALLED = {
    "eval", "exec", "compile", "__import__", "execfile", "torch.load", "numpy.load", "np.load",
    "yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all", "os.system", "os.popen",
    "Template", "NativeEnvironment", "importlib.metadata.entry_points", "entry_points",
    "importlib.util.module_from_spec",
}  # fmt: skip
PATTERNS = {
    "compile",
    "match",
    "fullmatch",
    "search",
    "sub",
    "subn",
    "split",
    "findall",
    "finditer",
}
OF_TEXT = {
    "import_module", "spec_from_file_location", "exec_module", "from_string", "Environment",
    "ImmutableSandboxedEnvironment", "SandboxedEnvironment", "safe_load", "SafeLoader",
    "literal_eval", "apply_chat_template", "load_dataset", "CDLL", "Popen", "LLMatcher",
}  # fmt: skip

CONSTANT = "names and patterns of this package's own source"
TIMELESS = "Python's re: nothing bounds its time; docs/folders.md says so"
SANDBOX = "jinja2's immutable sandbox"
OURS = "a template that ships in the package"
SAFE = "PyYAML's safe loader makes no objects; aliases are shared, not copied"
# (file, call) -> what bounds the text that becomes code there
KNOWN = {
    ("quantize/__init__.py", "spec_from_file_location"): CONSTANT,
    ("quantize/__init__.py", "import_module"): CONSTANT,
    ("quantize/cli/__init__.py", "import_module"): CONSTANT,
    ("quantize/checkpoints/from_transformers.py", "import_module"): CONSTANT,
    ("quantize/hub/signing.py", "import_module"): CONSTANT,
    ("quantize/serve/patterns.py", "import_module"): CONSTANT,
    ("quantize/serve/patterns.py", "re.match"): CONSTANT,
    ("kernels/fused_dequant/operations.py", "import_module"): CONSTANT,
    ("kernels/fused_dequant/weights/weight.py", "import_module"): CONSTANT,
    ("quantize/serve/app.py", "Environment"): OURS,
    ("quantize/serve/app.py", "from_string"): OURS,
    ("quantize/reports/card.py", "Environment"): OURS,
    ("quantize/reports/render.py", "Environment"): OURS,
    ("evaluation/recovery/own.py", "ImmutableSandboxedEnvironment"): SANDBOX,
    ("evaluation/recovery/own.py", "from_string"): SANDBOX,
    ("quantize/runtime/weights/beside.py", "ImmutableSandboxedEnvironment"): SANDBOX,
    ("quantize/runtime/weights/beside.py", "from_string"): SANDBOX,
    ("quantize/runtime/prompt/chat.py", "apply_chat_template"): f"transformers, in {SANDBOX}",
    ("quantize/hub/bom.py", "safe_load"): SAFE,
    ("quantize/reports/card.py", "safe_load"): SAFE,
    ("quantize/reports/headline.py", "safe_load"): SAFE,
    ("quantize/reports/provenance.py", "safe_load"): SAFE,
    ("quantize/serve/calls.py", "literal_eval"): "one string in quotes, of an answer",
    ("quantize/serve/trial.py", "LLMatcher"): "a process of its own, of bounded time and memory",
    ("quantize/serve/trial.py", "Popen"): CONSTANT,
    ("quantize/runtime/engine/llama_cpp.py", "Popen"): "a program that the user names",
    ("quantize/runtime/gpu/transfer.py", "CDLL"): "a library that this process has already loaded",
    (
        "quantize/stages/prompts.py",
        "load_dataset",
    ): "rows alone: datasets runs no code of a data set",
    ("quantize/checkpoints/targets.py", "re.compile"): TIMELESS,
    ("quantize/checkpoints/targets.py", "re.fullmatch"): CONSTANT,
    ("quantize/recipe/sections.py", "re.compile"): TIMELESS,
    ("evaluation/recovery/own.py", "re.compile"): TIMELESS,
    ("evaluation/recovery/own.py", "re.sub"): TIMELESS,
    ("evaluation/recovery/numerals.py", "re.sub"): CONSTANT,
    ("evaluation/recovery/numerals.py", "re.compile"): CONSTANT,
    ("evaluation/recovery/extraction.py", "re.compile"): CONSTANT,
    ("evaluation/recovery/extraction.py", "re.finditer"): TIMELESS,
    ("quantize/checkpoints/inspect.py", "re.compile"): CONSTANT,
    ("evaluation/recovery/letters.py", "re.compile"): "letters of a task's options, escaped",
    ("quantize/bench/tune.py", "re.search"): "the user's own --only",
    ("quantize/hub/signing.py", "re.findall"): CONSTANT,
    ("quantize/runtime/prompt/markup.py", "re.compile"): "escaped names of tokens",
}


@cache
def sources() -> dict[str, list[ast.AST]]:
    """The nodes of each file's syntax."""
    files = sorted(file for source in SOURCES for file in (ROOT / source).rglob("*.py"))
    kinds = (ast.Call, ast.Import, ast.ImportFrom)
    return {
        str(path.relative_to(ROOT)): [
            node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, kinds)
        ]
        for path in files
    }


def calls(nodes: list[ast.AST]) -> Iterator[ast.Call]:
    return (node for node in nodes if isinstance(node, ast.Call))


def is_constant(pattern: ast.expr) -> bool:
    """Whether a pattern is a text, or made of texts and this module's own constants alone."""
    if isinstance(pattern, ast.JoinedStr):
        return all(
            isinstance(part, ast.Constant) or not isinstance(part.value, (ast.Attribute, ast.Call))
            for part in pattern.values
            if isinstance(part, (ast.Constant, ast.FormattedValue))
        )
    if isinstance(pattern, ast.BinOp):
        return is_constant(pattern.left) and is_constant(pattern.right)
    if isinstance(pattern, ast.Name):
        return pattern.id.isupper()
    return isinstance(pattern, ast.Constant)


def places() -> Iterator[tuple[str, str, int]]:
    """(File, call, line) of each call that makes code of a text that is not in the source."""
    for name, nodes in sources().items():
        for node in calls(nodes):
            whole = ast.unparse(node.func)
            last = whole.rpartition(".")[2]
            if whole.startswith("re.") and last in PATTERNS:
                if not is_constant(node.args[0]):
                    yield name, whole, node.lineno
            elif whole in NEVER_CALLED or last in OF_TEXT:
                yield name, whole if whole in NEVER_CALLED else last, node.lineno


def test_every_place_is_known_and_bounded() -> None:
    found = Counter((file, call) for file, call, _ in places())
    assert len(found) > 25
    unknown = [place for place in places() if place[:2] not in KNOWN]
    assert unknown == [], "say in KNOWN, and in docs/folders.md, what bounds each"
    assert KNOWN.keys() - found == set()  # and nothing is listed that is gone
    assert not any(call in NEVER_CALLED for _, call in found)


def test_nothing_that_revives_objects_is_imported() -> None:
    for path, nodes in sources().items():
        for node in nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            line = getattr(node, "lineno", 0)
            assert not {name.partition(".")[0] for name in names} & NEVER, (path, line)


def test_no_call_trusts_code_from_elsewhere() -> None:
    for path, nodes in sources().items():
        for node in calls(nodes):
            words = {word.arg: word.value for word in node.keywords}
            for name in ("trust_remote_code", "weights_only", "shell", "allow_pickle"):
                value = words.get(name)
                assert value is None or ast.unparse(value) == "False", (path, node.lineno, name)


def test_the_page_lists_what_comes_from_files() -> None:
    page = (ROOT / "docs" / "folders.md").read_text("utf-8")
    section = page.split("## Where text of a file becomes code")[1]
    for said in (
        "chat template",
        "own_tasks",
        "!function",
        "regular expressions",
        "Triton",
        "YAML",
        "JSON schemas and regular expressions of requests",
        "Pickles are never read",
    ):
        assert said in section  # fmt: skip
