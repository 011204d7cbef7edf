"""Recipes are strict: a misspelt key must never pass as a default, nor a limit that limits nothing."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import create_model

from quantize.cli import cli
from quantize.errors import InputError
from quantize.recipe.reading import load_recipe, parse_recipe, resolved, shipped_recipes
from quantize.recipe.sections import Evaluation, Gate, OwnTask, Recipe
from quantize.recovery.catalog import is_private, known_tasks, shipped, token_limit
from quantize.recovery.scoring import keeping
from quantize.recovery.strict_yaml import read_yaml
from quantize.stages.evaluate.tasks import open_tasks
from quantize.stages.plan.estimate import cannot_pass


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_judges_kl_where_it_was_measured(name: str) -> None:
    """On the bundled model; of the real one nobody knows it, and the file says so."""
    recipe = load_recipe(name)
    limits = recipe.for_bundled_model().gate.max_kl_nats
    assert "none" in limits
    assert name.endswith("a16") or recipe.evaluation.activations in limits
    assert recipe.gate.max_kl_nats == {}
    assert "No max_kl_nats: nobody has replayed the 26B model." in shipped_recipes()[name]


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads_and_keeps_its_name(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert set(recipe.gate.margin_pp) == set(recipe.evaluation.tasks)
    bundled = recipe.for_bundled_model()
    assert set(bundled.gate.margin_pp) == set(bundled.evaluation.tasks)
    assert set(recipe.quantization.targets_by_scheme()) <= set(
        recipe.verification.max_relative_error
    )
    if recipe.needs_calibration:
        assert bundled.calibration is not None
        assert bundled.calibration.datasets == ["bundled"]


def test_a_task_that_ships_brings_its_margin_and_a_recipe_overrules_it() -> None:
    margins = load_recipe("nvfp4").gate.margin_pp
    plain = {"aime25": 3, "gpqa_diamond": 3, "gsm8k": 2}
    thinking = {"aime25_thinking": 5, "gpqa_diamond_thinking": 5, "gsm8k_thinking": 2}
    assert margins == plain | thinking
    changed = parse_recipe(edited(gate__margin_pp={"gsm8k": 7}), "test")
    assert changed.gate.margin_pp == margins | {"gsm8k": 7}


def test_tasks_are_picked_by_name() -> None:
    """Each keeps its repeats and margin; one that the recipe has not brings its own margin."""
    recipe = load_recipe("fp8_dynamic").asking(["gsm8k_thinking", "word_problems", "aime25"], 7)
    assert recipe.evaluation.tasks == ["gsm8k_thinking", "word_problems", "aime25"]
    assert recipe.evaluation.limit == dict.fromkeys(recipe.evaluation.tasks, 7)
    assert (recipe.gate.margin_pp["word_problems"], recipe.evaluation.repeats["aime25"]) == (5, 40)
    for name, told in {
        "aime24": "--task: no task named 'aime24' (did you mean 'aime25'?)",
        "svamp": "--task: gate.margin_pp has no margin for task 'svamp'",
    }.items():
        with pytest.raises(InputError, match=re.escape(told)):
            recipe.asking([name])


def test_at_least_the_two_main_recipes_ship() -> None:
    assert {"fp8_dynamic", "nvfp4"} <= set(shipped_recipes())


def edited(**changes: object) -> str:
    fields = yaml.safe_load(shipped_recipes()["nvfp4"])
    for path, value in changes.items():
        section = fields
        *parents, last = path.split("__")
        for parent in parents:
            section = section[parent]
        section[last] = value
    return yaml.safe_dump(fields)


EIGHT_BITS: dict[str, object] = {
    "quantization__scheme": "FP8_DYNAMIC",
    "verification__max_relative_error__FP8_DYNAMIC": 0.04,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quantization__ingore": []},
            "unknown key 'quantization.ingore' (did you mean 'ignore'?)",
        ),
        ({"evaluaton": {}}, "unknown key 'evaluaton' (did you mean 'evaluation'?)"),
        (
            {"bundled__gate__margin": {}},
            "unknown key 'bundled.gate.margin' (did you mean 'margin_pp'?)",
        ),
        ({"quantization__scheme": "NVFP5"}, "quantization.scheme"),
        ({"quantization__observer": "memoryless_mse"}, "quantization: observer: rounding gptq"),
        ({"calibration__thinking": 2}, "calibration.thinking"),
        ({"calibration__seed": 1 << 31}, "calibration.seed: Input should be less than 2147483648"),
        (
            {"evaluation__tasks": ["gsm8k", "gsm8k"]},
            "evaluation: tasks: 'gsm8k' stands there twice",
        ),
        ({"gate__margin_pp": {"gsm8k": 0}}, "gate.margin_pp.gsm8k: Input should be greater than 0"),
        ({"gate__margin_pp": {"gsm8k": math.nan}}, "gate.margin_pp.gsm8k: Input should be"),
        ({"gate__margin_pp": {"gsm8k": math.inf}}, "gate.margin_pp.gsm8k: Input should be"),
        ({"gate__confidence": math.nan}, "gate.confidence: Input should be"),
        (
            EIGHT_BITS | {"evaluation__activations": "fp8"},
            "evaluation.activations: activations fp8 are for NVFP4 weights",
        ),
        (
            EIGHT_BITS | {"bundled__gate__max_kl_nats__fp8": 0.1},
            "bundled.gate.max_kl_nats: activations fp8 are for NVFP4 weights",
        ),
        ({"bundled__gate__max_kl_nats__none": math.nan}, "bundled.gate.max_kl_nats.none: Input"),
        (
            {"verification__max_relative_error": {"NVFP4": math.inf}},
            "verification.max_relative_error.NVFP4: Input should be",
        ),
        (
            {"verification__max_relative_error": {"FP8_DYNAMIC": 0.04}},
            "verification.max_relative_error has no limit for scheme NVFP4",
        ),
        (
            {"gate__estimand": "all_questions"},
            "gate.estimand: Input should be 'these_questions' or",
        ),
        (
            {"bundled__evaluation__tasks": ["word_problems", "svamp"]},
            "bundled.gate.margin_pp has no margin for task 'svamp'",
        ),
        ({"evaluation__tasks": ["gsm9k"]}, "no task named 'gsm9k' (did you mean 'gsm8k'?)"),
        ({"evaluation__repeats": {"aime52": 64}}, "no task named 'aime52'"),
        ({"evaluation__repeats__gsm8k": 0}, "evaluation.repeats.gsm8k: Input should be greater"),
        ({"evaluation__repeats__gsm8k": True}, "evaluation: repeats.gsm8k is no yes or no"),
        ({"calibration__prompts": True}, "calibration: prompts is no yes or no"),
        ({"gate__margin_pp": {"gsm8k": True}}, "gate: margin_pp.gsm8k is no yes or no"),
        ({"gate__margin_pp": {"gsm8k": 101}}, "gate.margin_pp.gsm8k: Input should be less"),
        ({"gate__health_pp": {"cut": 1000}}, "gate.health_pp.cut: Input should be less"),
        ({"evaluation__limit": {"gsm8k": -1}}, "evaluation.limit.gsm8k: Input should be greater"),
        (
            {"evaluation__limit": {"gsm8k": 1}},
            "limit.gsm8k: Input should be greater than or equal to 2",
        ),
        (
            {"quantization__ignore": ["lm_head", "re:(*router["]},
            "quantization.ignore.1: 're:(*router[' is not a regular expression",
        ),
        ({"quantization__targets": ["re:["]}, "quantization.targets.0: 're:[' is not a regular"),
        (
            {"quantization__scheme": {"NVFP4": ["re:("]}},
            "'re:(' is not a regular expression",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_recipe(edited(**changes), "mine.yaml")
    assert message in str(error.value)
    assert "mine.yaml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[1, 2", "- a list", "name: nvfp4"])
def test_text_that_is_no_recipe_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_recipe(text, "mine.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 20_000, "nested deeper"),
        ("[" * 20_000 + "]" * 20_000, "nested deeper"),
        ("name: a\nname: b\n", "key 'name' stands twice"),
        ("gate: {margin_pp: {gsm8k: 2, gsm8k: 50}}", "key 'gsm8k' stands twice"),
        ("name: 2026-13-45", "not valid YAML"),
        ("name: a\0", "not valid YAML: unacceptable character"),
    ],
    ids=["open", "closed", "twice", "twice inside", "no date", "no text"],
)
def test_yaml_that_says_nothing_certain_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_recipe(text, "mine.yaml")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_estimand_has_no_default() -> None:
    fields = yaml.safe_load(edited())
    del fields["gate"]["estimand"]
    with pytest.raises(InputError, match=r"key 'gate\.estimand' is missing"):
        parse_recipe(yaml.safe_dump(fields), "mine.yaml")


def test_a_plan_says_on_which_tasks_pass_cannot_be_reached() -> None:
    assert cannot_pass(load_recipe("nvfp4")) == []
    such = parse_recipe(edited(gate__estimand="such_questions"), "mine.yaml")
    such = such.asking(["aime25", "gpqa_diamond", "gsm8k"])
    assert cannot_pass(such) == [
        "aime25: PASS cannot be reached: 30 questions cannot exclude a loss of 3 pp on questions like "
        "these at 95%, about 112 can; FAIL can be reached"
    ]
    assert len(cannot_pass(such.asking(problems=20))) == 3


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'nvfp4'"):
        load_recipe("nvpf4")


def test_a_recipe_file_round_trips_through_its_resolved_form(tmp_path: Path) -> None:
    recipe = load_recipe("nvfp4").for_bundled_model()
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(str(path)) == recipe


def test_digest_depends_on_recipe_and_model() -> None:
    recipe = load_recipe("nvfp4")
    assert recipe.digest("a") != recipe.digest("b")
    assert recipe.digest("a") != recipe.for_bundled_model().digest("a")
    assert recipe.digest("a") == load_recipe("nvfp4").digest("a")


def test_a_key_that_comes_later_counts_where_it_is_set() -> None:
    """It must rename no run that does not set it, in whichever section it stands."""
    recipe = load_recipe("nvfp4")
    newer_gate: Any = create_model("NewerGate", __base__=Gate, later=(int, 0))
    newer: Any = create_model("Newer", __base__=Recipe, gate=(newer_gate, ...), also=(bool, False))
    fields = recipe.model_dump(mode="json")
    assert newer(**fields).digest("a") == recipe.digest("a")
    assert newer(**fields, also=True).digest("a") != recipe.digest("a")
    deeper = fields | {"gate": fields["gate"] | {"later": 1}}
    assert newer(**deeper).digest("a") != recipe.digest("a")


QUESTIONS = "\n".join(f'{{"question": "{i} + 1?", "answer": "{i + 1}"}}' for i in range(5))


def own_task(folder: Path, **task: object) -> Path:
    """Write a recipe whose bundled evaluation has one task of its own."""
    path = folder / "mine.yaml"
    evaluation = {"tasks": ["sums"], "own_tasks": {"sums": task}}
    gate = {"estimand": "such_questions", "margin_pp": {"sums": 5}}
    path.write_text(edited(bundled__evaluation=evaluation, bundled__gate=gate))
    return path


def test_a_recipe_brings_its_own_questions(tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text(QUESTIONS)
    evaluation = load_recipe(str(own_task(tmp_path, data=str(data)))).for_bundled_model().evaluation
    assert evaluation.questions("sums") == 5
    digest = evaluation.own_tasks["sums"].digest()
    data.write_text(QUESTIONS.replace("+ 1?", "+ one?"))
    assert evaluation.own_tasks["sums"].digest() != digest
    data.write_text(QUESTIONS.replace("+ 1?", "\u2028+ 1?"), "utf-8")  # no end of a line in jsonl
    evaluation = load_recipe(str(own_task(tmp_path, data=str(data)))).for_bundled_model().evaluation
    assert evaluation.questions("sums") == 5


LM_EVAL = """
dataset_path: json
output_type: generate_until
doc_to_text: "{{question}}"
generation_kwargs: {until: [], max_gen_toks: 64}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "bundled.evaluation.own_tasks.sums: name `data`, a jsonl file"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl: not a jsonl file of questions"),
        ({"data": "empty.jsonl"}, "empty.jsonl: not a jsonl file of questions"),
        ({"data": "twice.jsonl"}, "stands there more than once (1 such lines)"),
        ({"data": "sums.jsonl", "target": "{{solution}}"}, "no field 'solution'"),
        ({"data": "sums.jsonl", "extract": "#### .+"}, "must have one group"),
        ({"data": "sums.jsonl", "extract": "#### (.+"}, "is not a regular expression"),
        ({"lm_eval": "likelihood.yaml"}, "'multiple_choice', not 'generate_until'"),
        ({"lm_eval": "endless.yaml"}, "lacks max_gen_toks"),
        ({"lm_eval": "bleu.yaml"}, "metric_list lacks exact_match"),
        ({"lm_eval": "private.yaml"}, "private.yaml: a private task needs one filter"),
        ({"lm_eval": "plain.yaml", "private": True}, "plain.yaml: a private task needs one filter"),
        ({"of": "gsm8", "max_tokens": 9}, "of: no task named 'gsm8' ships (did you mean 'gsm8k'?)"),
        (
            {"of": "gsm8k", "max_tokens": 1024},
            "max_tokens: gsm8k itself ends answers at 1,024; name",
        ),
        (
            {"of": "gsm8k", "max_tokens": 9, "thinking": True},
            "thinking: gsm8k states it; beside `of`",
        ),
        (
            {"of": "gsm8k", "data": "sums.jsonl"},
            "name `data`, a jsonl file of questions, `lm_eval`",
        ),
        ({"lm_eval": "nowhere.yaml"}, "nowhere.yaml: not readable as an lm-eval task"),
    ],
)
def test_a_task_of_its_own_is_checked_when_the_recipe_is_read(
    task: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text(QUESTIONS)
    Path("empty.jsonl").write_text("")
    Path("twice.jsonl").write_text(QUESTIONS + "\n" + QUESTIONS.split("\n")[2])
    Path("likelihood.yaml").write_text(LM_EVAL.replace("generate_until", "multiple_choice"))
    Path("endless.yaml").write_text(LM_EVAL.replace("max_gen_toks: 64", ""))
    Path("bleu.yaml").write_text(LM_EVAL.replace("exact_match", "bleu"))
    Path("plain.yaml").write_text(LM_EVAL)
    Path("private.yaml").write_text(LM_EVAL + "metadata: {private: true}")
    with pytest.raises(InputError, match=re.escape(message)):
        load_recipe(str(own_task(tmp_path, **task)))


def test_one_question_alone_is_refused_before_any_model_is_loaded(tmp_path: Path) -> None:
    """Two models cannot be compared on it; it ended a whole run with a failure of ours."""
    data = tmp_path / "sums.jsonl"
    data.write_text(QUESTIONS.split("\n")[0])
    recipe = load_recipe(str(own_task(tmp_path, data=str(data)))).for_bundled_model()
    with pytest.raises(
        InputError, match=re.escape(f"task sums: 1 question to score, in {data}; 2 are")
    ):
        open_tasks(recipe.evaluation, recipe.gate, None)
    data.write_text("\n".join(QUESTIONS.split("\n")[:2]))
    (task,) = open_tasks(recipe.evaluation, recipe.gate, None)
    assert task.name == "sums"


def test_every_task_says_how_long_an_answer_may_be(tmp_path: Path) -> None:
    """A task that a table did not know got 32,768 tokens without a word."""
    data = tmp_path / "sums.jsonl"
    data.write_text(QUESTIONS)
    own = {"mine": OwnTask(data=str(data), max_tokens=77)}
    settings = Evaluation(tasks=["mine", *known_tasks()], own_tasks=own)
    limits = {task: settings.answer_tokens(task) for task in settings.tasks}
    assert limits["mine"] == 77
    assert limits["aime25"] == 32_768
    assert limits["word_problems_thinking"] == 128
    with pytest.raises(ValueError, match="lacks max_gen_toks"):
        token_limit({"generation_kwargs": {}})


def test_a_task_with_fewer_tokens_is_otherwise_the_task_that_ships() -> None:
    gpqa = "gpqa_diamond_thinking"
    tasks = {"tasks": ["gpqa_8k"], "own_tasks": {"gpqa_8k": {"of": gpqa, "max_tokens": 8192}}}
    evaluation = tasks | {"limit": {gpqa: 7}, "repeats": {gpqa: 2}}
    gate = {"estimand": "such_questions"}
    text = edited(bundled__evaluation=evaluation, bundled__gate=gate)
    recipe = parse_recipe(text, "mine").for_bundled_model()
    settings = recipe.evaluation
    assert recipe.gate.margin_pp["gpqa_8k"] == 5
    assert (settings.limit["gpqa_8k"], settings.repeats["gpqa_8k"]) == (7, 2)
    assert (settings.questions("gpqa_8k"), settings.answer_tokens("gpqa_8k")) == (198, 8192)
    definition = settings.own_tasks["gpqa_8k"].definition()
    assert is_private("gpqa_8k", definition)
    keep = keeping("gpqa_8k", definition)
    text = "It is not (B), by what was said. The answer is (C)."
    assert keep(text) == keeping(gpqa, None)(text) != text
    assert definition["generation_kwargs"] == shipped(gpqa)["generation_kwargs"] | {
        "max_gen_toks": 8192
    }


def test_an_lm_eval_task_is_private_if_either_says_so(tmp_path: Path) -> None:
    found = "filter_list: [{name: n, filter: [{function: regex, regex_pattern: '#### (.+)'}]}]\n"
    path = tmp_path / "mine.yaml"
    for text, private, expected in (
        (LM_EVAL, False, False),
        (LM_EVAL + found, True, True),
        (LM_EVAL + found + "metadata: {private: true}", False, True),
    ):
        path.write_text(text)
        task = OwnTask(lm_eval=str(path), private=private)
        assert is_private("mine", task.definition()) == expected


def test_a_name_that_ships_cannot_be_an_own_task(tmp_path: Path) -> None:
    evaluation = {"tasks": ["gsm8k"], "own_tasks": {"gsm8k": {"data": "x.jsonl"}}}
    with pytest.raises(InputError, match="'gsm8k' is a task that ships"):
        parse_recipe(edited(bundled__evaluation=evaluation), "mine")


def test_tasks_lists_what_ships_and_a_recipes_own(tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text(QUESTIONS)
    path = tmp_path / "mine.yaml"
    own = {"sums": {"data": str(data), "max_tokens": 100}}
    repeats = {"sums": 3, "gsm8k": 2}
    path.write_text(edited(evaluation__own_tasks=own, evaluation__repeats=repeats))
    done = CliRunner().invoke(cli, ["tasks", "--recipe", str(path)])
    rows = {line.split()[0]: line.split()[1:] for line in done.output.splitlines()}
    assert rows["sums"] == ["5", "100", "1,500", "0.00", str(data)]
    assert rows["gsm8k"][:4] == ["1,319", "1,024", f"{2 * 1319 * 1024:,}", "0.48"]
    assert set(known_tasks()) < rows.keys()
    bundled = own_task(tmp_path, data=str(data))
    assert "\nsums " in CliRunner().invoke(cli, ["tasks", "--recipe", str(bundled)]).output
    done = CliRunner().invoke(cli, ["tasks", "--rate", "100"])
    rows = {line.split()[0]: line.split()[1:] for line in done.output.splitlines()}
    assert rows["gsm8k"][3] == "3.75"
    assert CliRunner().invoke(cli, ["tasks", "--rate", "0"]).exit_code == 2


REACHES_PYTHON = "{{question.__class__.__mro__[1].__subclasses__()}}"


@pytest.mark.parametrize("key", ["prompt", "target"])
def test_a_template_of_a_recipe_reaches_no_python(key: str, tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text(QUESTIONS)
    path = own_task(tmp_path, data=str(data), **{key: REACHES_PYTHON})
    with pytest.raises(InputError, match=r"fails on question 1: access to attribute '__class__'"):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("line", "prompt", "message"),
    [
        (
            '{"question": 3, "answer": 4}',
            "{{question.upper()}}",
            "fails on question 6: 'int object'",
        ),
        ('{"question": "3"}', "{{question}}", None),
        ('{"question": "3", "question": "4"}', "{{question}}", "a field stands there twice"),
        ("[3]", "{{question}}", "question 6 is not a JSON object"),
        ("{", "{{question}}", "not a jsonl file of questions"),
    ],
)
def test_every_question_is_rendered_before_a_model_is_loaded(
    line: str, prompt: str, message: str | None, tmp_path: Path
) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text(f"{QUESTIONS}\n{line}")
    path = str(own_task(tmp_path, data=str(data), prompt=prompt))
    if message is None:
        assert load_recipe(path).for_bundled_model().evaluation.questions("sums") == 6
        return
    with pytest.raises(InputError, match=message):
        load_recipe(path)


def bomb(levels: int = 9, width: int = 10) -> str:
    """A list of lists of lists, by aliases: 446 bytes stand for 10^9 values."""
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    lines += [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


@pytest.mark.timeout(5)
@pytest.mark.parametrize(
    "text",
    [
        bomb(),
        f"gate: {{{bomb().replace(chr(10), ', ')[:-2]}}}",
        "a: &a [*a]",
        "a: &a {b: *a}",
        "a: &a {x: 1}\nb: &b {<<: [" + "*a, " * 60_000 + "*a]}",
    ],
    ids=["top", "in a section", "itself", "itself in a mapping", "merged"],
)
def test_aliases_that_stand_for_too_much_are_refused(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_recipe(text, "mine.yaml")
    assert str(error.value) == (
        "recipe mine.yaml: not valid YAML: with its aliases it stands for more than 100,000 values"
    )


def test_aliases_are_read_as_what_they_stand_for() -> None:
    data = read_yaml("a: &a {x: 1}\nb: {<<: *a, y: *a}\nc: [*a, *a]")
    assert data == {"a": {"x": 1}, "b": {"x": 1, "y": {"x": 1}}, "c": [{"x": 1}, {"x": 1}]}
    assert read_yaml(bomb(4))["a3"][0][0][0] == ["x"] * 10


def test_a_wrong_value_is_shown_short() -> None:
    with pytest.raises(InputError) as error:
        parse_recipe(edited(calibration__prompts=["x" * 100] * 2000), "mine.yaml")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("calibration__prompts", 1_000_000),
        ("calibration__canvases", 1024),
        ("calibration__batch_size", 65_536),
        ("calibration__max_prompt_tokens", 1_000_000),
        ("evaluation__batch_size", 65_536),
        ("evaluation__repeats__aime25", 10_000),
    ],
)
def test_a_recipe_asks_for_no_more_than_a_bound(key: str, most: int) -> None:
    """`repeats: 1000000000` ended with MemoryError."""
    parse_recipe(edited(**{key: most}), "mine.yaml")
    with pytest.raises(InputError, match=rf"less than or equal to {most} \(found {most + 1}\)"):
        parse_recipe(edited(**{key: most + 1}), "mine.yaml")


def test_task_files_that_include_one_another_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: b.yaml\n")
    (tmp_path / "b.yaml").write_text("include: a.yaml\n")
    with pytest.raises(InputError, match="more than 10 files include one another"):
        load_recipe(str(own_task(tmp_path, lm_eval=str(tmp_path / "a.yaml"))))
    (tmp_path / "a.yaml").write_text(LM_EVAL + "output_type: multiple_choice\n")
    with pytest.raises(InputError, match="key 'output_type' stands twice"):
        load_recipe(str(own_task(tmp_path, lm_eval=str(tmp_path / "a.yaml"))))


def test_a_calibration_under_bundled_of_a_recipe_without_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = yaml.safe_load(shipped_recipes()["fp8_dynamic"])
    calibration = yaml.safe_load(shipped_recipes()["nvfp4"])["bundled"]["calibration"]
    path = tmp_path / "mine.yaml"
    for change in ({}, {"calibration": calibration | {"prompts": 8}}):
        path.write_text(yaml.safe_dump(fields | {"bundled": fields["bundled"] | change}))
        assert resolved(str(path), bundled=True).calibration is None
        assert ("bundled.calibration.prompts" in capsys.readouterr().err) == bool(change)
