"""Tasks through lm-eval's harness: its own scores on the same outputs, repeats, thinking, privacy."""

import csv
import json
import random
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from quantize.recovery.catalog import TASKS
from quantize.recovery.filters import final_choice, integer
from quantize.recovery.lm import cut
from quantize.recovery.own import Definition, at_limit, finding, from_lm_eval, from_questions
from quantize.recovery.rows import Scoring
from quantize.recovery.samples import Request, SampleStore
from quantize.recovery.scoring import first_requests, known_tasks, score, size
from quantize.recovery.sequential import Part
from tests.support.scripted import Answer, answering, run, write_jsonl

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"


def problems(folder: Path, count: int = 4) -> Path:
    rows = [{"question": f"What is {i} + 1?", "answer_number": i + 1} for i in range(count)]
    return write_jsonl(folder / "problems.jsonl", rows)


def test_no_library_draws_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.utils.tqdm._disabled", False, raising=False)
    asked = {"data_file": problems(tmp_path), "questions": [0, 2], "seed": 0}
    assert len(first_requests("word_problems", **asked)) == 2
    assert capsys.readouterr().err == ""


def number_in(request: Request) -> int:
    return int(request.prompt.split()[2])


# --- GSM8K as lm-eval itself scores it ---------------------------------------------------------


class Scripted(LM):
    """lm-eval's side of the comparison: the same outputs, by question."""

    def __init__(self, outputs: dict[str, str]) -> None:
        super().__init__()
        self.outputs = outputs

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [self.outputs[instance.doc["question"]] for instance in requests]

    def loglikelihood(self, requests: Any) -> Any:
        raise AssertionError(requests)

    loglikelihood_rolling = loglikelihood


def outputs() -> dict[str, str]:
    """Answers right and wrong, in every form that the two filters read differently."""
    forms = [
        "so\n#### {}", "#### {}.", "It is {}.", "#### ${}", "The answer is ${} in all", "####{}",
        "#### {} apples, not 3", "\\boxed{{{}}}", "#### {:,}", "{:,} it is", "nothing", "#### -{}",
        "#### {}.0", "first 7 then {}", "#### 1\n#### {}",
    ]  # fmt: skip
    rng = random.Random(5)
    rows = [json.loads(line) for line in GSM8K.read_text("utf-8").splitlines()]
    found: dict[str, str] = {}
    for i, row in enumerate(rows):
        truth = int(row["answer"].split("#### ")[1].replace(",", ""))
        found[row["question"]] = forms[i % len(forms)].format(truth + (rng.random() < 0.2))
    return found


def test_gsm8k_has_lm_evals_own_scores_beside_its_own(tmp_path: Path) -> None:
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.origin is not None
    theirs = {
        "include": str(Path(spec.origin).parent / "tasks" / "gsm8k" / "gsm8k.yaml"),
        "task": "theirs",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"train": str(GSM8K), "test": str(GSM8K)}},
    }
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    script = outputs()
    evaluate: Any = simple_evaluate
    expected = evaluate(
        model=Scripted(script),
        tasks=["theirs"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    found = run("gsm8k", tmp_path, GSM8K, lambda r: script[r.prompt.split("\n\nThink step")[0]])
    assert len(found.rows) == 24
    by_document: dict[tuple[str, int], float] = {
        (s["filter"], s["doc_id"]): s["exact_match"] for s in expected["samples"]["theirs"]
    }
    for name in ("strict-match", "flexible-extract"):
        ours = [row.scores[name] for row in found.rows]
        assert ours == [by_document[name, row.doc_id] for row in found.rows]
        metric = expected["results"]["theirs"][f"exact_match,{name}"]
        assert sum(ours) / len(ours) == metric
        assert 0.1 < metric < 0.9
    assert [row.score for row in found.rows] == [row.scores["final-number"] for row in found.rows]
    more = {row.answer for row in found.rows if row.score > row.scores["strict-match"]}
    assert more <= {row.target for row in found.rows}
    assert len(more) > 3


# --- repeats, thinking, stops -------------------------------------------------------------------


def test_every_repeat_is_scored_by_its_own_answer(tmp_path: Path) -> None:
    """lm-eval's take_first would give each repeat the score of the first."""
    turns: dict[str, int] = {}

    def right_on_the_second_turn(request: Request) -> str:
        turns[request.prompt] = turns.get(request.prompt, 0) + 1
        return f"#### {number_in(request) + (1 if turns[request.prompt] == 2 else 9)}"

    found = run("word_problems", tmp_path, problems(tmp_path), right_on_the_second_turn, repeats=3)
    assert len(found.rows) == 12
    assert sorted(map(sum, found.by_question().values())) == [1, 1, 1, 1]
    assert len({row.seed for row in found.rows}) == 12
    assert [(r.doc_id, r.repeat) for r in found.rows] == [
        (d, k) for d in range(4) for k in range(3)
    ]


def test_thinking_goes_before_anything_is_searched_for(tmp_path: Path) -> None:
    def thinks(request: Request) -> str:
        assert request.thinking
        right = f"#### {number_in(request) + 1}"
        wrong = "#### 999"
        return f"<|channel>thought\n{wrong}<channel|>{right}" if number_in(request) else right

    found = run("word_problems_thinking", tmp_path, problems(tmp_path), thinks)
    assert [row.score for row in found.rows] == [1, 1, 1, 1]


def test_stops_are_sought_behind_the_thinking_channel() -> None:
    text = "<|channel>thought\nSTOP 1<channel|>two STOP three"
    assert cut(text, ["STOP"]) == "two "
    assert cut("a\n\nb", ["", "\n\n"]) == "a"
    assert cut("<|channel>thought\n#### 5 and no end", []) == ""


def test_answers_that_are_missing_or_cut_short_are_counted_apart(tmp_path: Path) -> None:
    found = run("word_problems", tmp_path, problems(tmp_path, 30), lambda r: "no number")
    assert not any(row.answered for row in found.rows)
    assert [row.truncated for row in found.rows] == [row.seed % 7 == 0 for row in found.rows]
    assert any(row.truncated for row in found.rows)


# --- what a comparison rests on -----------------------------------------------------------------


def test_conditions_hold_what_two_scorings_must_share(tmp_path: Path) -> None:
    def right(request: Request) -> str:
        return f"#### {number_in(request) + 1}"

    data = problems(tmp_path)
    (tmp_path / "again").mkdir()
    first = run("word_problems", tmp_path, data, right)
    again = run("word_problems", tmp_path / "again", data, lambda _: "")
    assert first.conditions == again.conditions
    (tmp_path / "shorter").mkdir()
    shorter = run("word_problems", tmp_path / "shorter", data, right, limit=3)
    assert len(shorter.rows) == 3
    differ = {k for k in first.conditions if first.conditions[k] != shorter.conditions[k]}
    assert differ == {"documents", "prompts", "seeds"}
    json.dumps(first.conditions)


def test_parts_make_up_the_whole(tmp_path: Path) -> None:
    """Documents keep their number, whichever of them are asked, and every repeat its seed."""

    def answer(request: Request) -> str:
        return f"#### {number_in(request) + request.seed % 2}"

    data = problems(tmp_path)
    whole = run("word_problems", tmp_path, data, answer, repeats=2)
    parts: list[Scoring] = []
    store = SampleStore(tmp_path / "parts.jsonl", {"model": "scripted"})
    for part in (Part([1, 3], range(1)), Part([0, 2], range(1)), Part(range(4), range(1, 2))):
        found = score(
            "word_problems", store, answering(answer), part, data_file=data, seed=0,
            sampler={"entropy_bound": 0.1}, progress=lambda finished, _: finished,
        )  # fmt: skip
        assert found is not None
        assert found.answered == part.answers
        parts.append(found)
    joined = parts[0].and_more(parts[1]).and_more(parts[2])
    assert (joined.rows, joined.conditions) == (whole.rows, whole.conditions)
    assert whole.only(parts[0].answered) == parts[0]
    assert len({row.score for row in whole.rows}) == 2


def test_equal_questions_stay_two_questions(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "twice.jsonl", [{"question": "q", "answer_number": 1}] * 2)
    assert len(run("word_problems", tmp_path, data, lambda _: "#### 1").by_question()) == 2


def test_requests_can_be_had_without_answers(tmp_path: Path) -> None:
    data = problems(tmp_path)
    asked: list[Request] = []
    run("word_problems", tmp_path, data, lambda r: asked.append(r) or "")
    requests = first_requests("word_problems", data_file=data, questions=range(3), seed=0)
    assert [number_in(r) for r in requests] == [0, 1, 2]
    assert set(requests) < set(asked)


def test_a_task_of_ones_own_scores_as_told(tmp_path: Path) -> None:
    rows = [
        {"sum": f"What is {i} + 1?", "total": f"{i + 1:,}", "kind": "code" if i % 2 else "chat"}
        for i in range(998, 1002)
    ]
    data = write_jsonl(tmp_path / "sums.jsonl", rows)
    definition = from_questions(
        data, prompt="{{sum}}", target="{{total}}", extract=r"= (\S+)", max_tokens=64, thinking=True
    )
    assert size("sums", data, definition) == (4, 64)
    scored = score_own("sums", data, definition, tmp_path, lambda r: f"= 7\n= {number_in(r) + 1}.")
    assert [row.scores for row in scored.rows] == [{"answer": 1.0}] * 4
    assert [row.kind for row in scored.rows] == ["chat", "code"] * 2
    assert all(request.thinking for request in own_requests(data, definition))
    wrong = score_own("sums", data, definition, tmp_path / "w", lambda r: f"= {number_in(r)}\n")
    assert [row.score for row in wrong.rows] == [0.0] * 4


def test_an_lm_eval_task_of_ones_own(tmp_path: Path) -> None:
    data = problems(tmp_path)
    base = yaml.safe_load((TASKS / "word_problems.yaml").read_text())
    base["dataset_kwargs"] = {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "c")}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "mine.yaml").write_text("include: base.yaml\ndoc_to_text: 'Say: {{question}}'\n")
    definition = from_lm_eval(tmp_path / "mine.yaml")
    requests = first_requests(
        "mine", data_file=None, definition=definition, questions=range(4), seed=0
    )
    assert requests[1].prompt == "Say: What is 1 + 1?"
    scored = score_own("mine", None, definition, tmp_path, lambda r: f"#### {r.prompt[13]}")
    assert [row.score for row in scored.rows] == [0.0] * 4
    assert [row.answer for row in scored.rows] == ["0", "1", "2", "3"]


def score_own(
    task: str, data: Path | None, definition: Definition, folder: Path, answer: Answer
) -> Scoring:
    found = score(
        task,
        SampleStore(folder / f"{task}.samples.jsonl", {}),
        answering(answer),
        Part(range(4), range(1)),
        data_file=data,
        definition=definition,
        seed=0,
        sampler={},
        progress=lambda finished, _: finished,
    )
    assert found is not None
    return found


def own_requests(data: Path, definition: Definition) -> list[Request]:
    return first_requests("sums", data_file=data, definition=definition, questions=range(4), seed=0)


def test_unknown_tasks_and_empty_data_sets_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no task named 'gsm9k'; there are aime25"):
        run("gsm9k", tmp_path, GSM8K, lambda _: "", limit=1)
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(ValueError, match=r"empty\.jsonl cannot be read"):
        size("word_problems", empty)
    assert size("gsm8k", GSM8K) == (24, 1024)


# --- the other tasks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("70", 70), ("070", 70), ("70.0", 70), (" 7 0 ", 70), ("1,000", 1000), ("\\text{70}", 70),
     ("70.5", None), ("x", None), ("", None), ("-3", -3), ("[invalid]", None)],
)  # fmt: skip
def test_integers(text: str, value: int | None) -> None:
    assert integer(text) == value


def test_aime_compares_integers_in_the_last_box(tmp_path: Path) -> None:
    answers = [
        "\\boxed{070}",
        "\\boxed{3} no, \\boxed{70.0}",
        "p = 70 and q is open",
        "\\boxed{\\text{70}}",
        "\\boxed{71}",
    ]
    rows = [{"problem": f"p{i}", "answer": "70"} for i in range(len(answers))]
    data = write_jsonl(tmp_path / "aime25.jsonl", rows)
    found = run("aime25", tmp_path, data, lambda r: answers[int(r.prompt.split("\n")[0][1:])])
    assert [row.score for row in found.rows] == [1, 1, 0, 1, 0]
    assert [row.answered for row in found.rows] == [True, True, False, True, True]
    assert "\\boxed{}" in first_requests("aime25", data_file=data, questions=[0], seed=0)[0].prompt


def test_svamp_compares_numbers_by_value(tmp_path: Path) -> None:
    answers = ["#### 51", "#### 51.0", "#### 1,051", "#### 5", "51 or so"]
    rows = [{"question": f"q{i}", "answer": "1051" if i == 2 else "51"} for i in range(5)]
    data = write_jsonl(tmp_path / "svamp.jsonl", rows)
    found = run("svamp", tmp_path, data, lambda r: answers[int(r.prompt.split("\n")[0][1:])])
    assert [row.score for row in found.rows] == [1, 1, 1, 0, 0]


# --- GPQA leaves no text behind -------------------------------------------------------------------

MARKER = "MARKERSTRING"


def gpqa_file(folder: Path) -> Path:
    path = folder / "gpqa_diamond.csv"
    with path.open("w", newline="") as file:
        names = ["Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2",
                 "Incorrect Answer 3"]  # fmt: skip
        writer = csv.writer(file)
        writer.writerow(names)
        for i in range(12):
            writer.writerow([f"{MARKER}q{i}", *(f"{MARKER}o{i}.{j}" for j in range(4))])
    return path


def test_gpqa_keeps_hashes_letters_and_counts_only(tmp_path: Path) -> None:
    data = gpqa_file(tmp_path)
    out = tmp_path / "out"
    out.mkdir()

    def knows(request: Request) -> str:
        right = next(line for line in request.prompt.splitlines() if line.endswith(".0"))
        return f"<|channel>thought\n{MARKER}<channel|>{MARKER} since ... The answer is {right[:3]}"

    found = run("gpqa_diamond", out, data, knows)
    assert [row.score for row in found.rows] == [1] * 12
    assert len({row.target for row in found.rows}) > 1  # the right option is not always one letter
    shorter = at_limit("gpqa_diamond", 99)
    assert size("short", data, shorter) == (12, 99)
    short = score_own("short", data, shorter, out, knows)
    assert short.private
    assert [row.scores for row in short.rows] == [row.scores for row in found.rows[:4]]
    written = b"".join(p.read_bytes() for p in out.rglob("*") if p.is_file())
    assert written
    assert MARKER.encode() not in written
    kept = json.dumps([asdict(row) for row in found.rows]) + json.dumps(found.conditions)
    assert MARKER not in kept


@pytest.mark.parametrize("extract", [r"#### (.+)", r"result: \[([^\]]*)\]"])
def test_a_private_own_task_keeps_what_its_expression_finds(extract: str, tmp_path: Path) -> None:
    """Scores are those of the open task; of texts the samples keep the answer, and rows hashes."""
    rows = [{"question": f"{MARKER} is {i} + 1?", "answer": f"{MARKER}{i + 1}"} for i in range(6)]
    data = write_jsonl(tmp_path / "mine.jsonl", rows)
    written = {r"#### (.+)": "#### {}", r"result: \[([^\]]*)\]": "result: [{}] ..."}[extract]

    def answer(request: Request) -> str:
        n = number_in(request)
        found = f"{MARKER}{n + 1}" if n % 2 else f"wrong{n}"
        tail = written.format(found) if n else "no answer"
        return f"<|channel>thought\nSECRETTHOUGHT<channel|>SECRETTEXT\n{tail}"

    found: dict[bool, Scoring] = {}
    for private in (False, True):
        options: Any = {"prompt": "{{question}}", "target": "{{answer}}", "extract": extract}
        definition = from_questions(data, **options, max_tokens=64, thinking=True, private=private)
        out = tmp_path / str(private)
        out.mkdir()
        found[private] = run("mine", out, data, answer, definition=definition)
    open_, closed = found[False], found[True]
    assert [row.score for row in closed.rows] == [row.score for row in open_.rows]
    assert 0 < sum(row.score for row in closed.rows) < 6
    assert [row.answered for row in closed.rows] == [False] + [True] * 5
    assert (open_.private, closed.private) == (False, True)
    assert MARKER in json.dumps([asdict(row) for row in open_.rows])
    kept = json.dumps([asdict(row) for row in closed.rows]) + json.dumps(closed.conditions)
    samples = (tmp_path / "True" / "mine.samples.jsonl").read_text()
    for secret in ("SECRET", f"{MARKER} is"):
        assert secret not in samples
        assert secret not in kept
    assert MARKER not in kept
    assert len({row.answer for row in closed.rows}) == 6
    assert [row.target == row.answer for row in closed.rows] == [bool(r.score) for r in closed.rows]


def test_what_a_private_tasks_expression_needs_must_be_in_it(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "mine.jsonl", [{"question": "q", "answer": "7"}])
    definition = from_questions(
        data, prompt="{{question}}", target="{{answer}}", extract=r"(?<=is )(\d+)", max_tokens=9,
        thinking=False, private=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="only with the text around it"):
        finding(definition)("it is 7")
    assert finding(definition)("nothing") == ""


def test_gpqa_options_have_one_order_everywhere(tmp_path: Path) -> None:
    data = gpqa_file(tmp_path)
    random.seed(1)
    first = first_requests("gpqa_diamond", data_file=data, questions=range(12), seed=0)
    random.seed(2)
    assert first == first_requests("gpqa_diamond", data_file=data, questions=range(12), seed=0)


def test_errors_of_a_private_data_set_do_not_quote_it(tmp_path: Path) -> None:
    broken = tmp_path / "gpqa_diamond.csv"
    broken.write_text(f"Question\n{MARKER}\n")
    with pytest.raises(ValueError, match="cannot be read") as error:
        size("gpqa_diamond", broken)
    assert MARKER not in str(error.value)
    own: Any = {
        "metadata": {"private": True},
        "doc_to_text": f"{{{{{MARKER}",
        "dataset_path": "json",
    }
    with pytest.raises(ValueError, match="cannot be read") as error:
        size("mine", broken, own)
    assert MARKER not in str(error.value)


def test_final_choice_reads_the_last_letter() -> None:
    assert final_choice("The answer is (A). No: the answer is **C**") == "(C)"
    assert final_choice("the Answer is: b.") == "(B)"
    assert final_choice("A or B") == ""
    assert final_choice("The answer is Cobalt") == ""


def test_every_task_is_complete() -> None:
    assert {"word_problems", "gsm8k", "svamp", "aime25", "gpqa_diamond"} < set(known_tasks())
    for task in known_tasks():
        assert task.removesuffix("_thinking") in known_tasks()


def test_a_data_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    """What is unchanged is read once a process."""
    file = tmp_path / "gsm8k.jsonl"
    for count in (2, 3):
        rows = [{"question": f"{i} + 0?", "answer": f"#### {i}"} for i in range(count)]
        file.write_text("\n".join(map(json.dumps, rows)))
        assert size("gsm8k", file)[0] == count


def test_the_template_of_a_task_file_reaches_no_python(tmp_path: Path) -> None:
    """lm-eval's own environment let it call `os.system`."""
    data, mark = problems(tmp_path), tmp_path / "mark"
    base = yaml.safe_load((TASKS / "word_problems.yaml").read_text())
    base["dataset_kwargs"] = {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "c")}
    reach = "question.__class__.__mro__[1].__subclasses__()"
    base["doc_to_text"] = (
        f"{{% for c in {reach} if c.__name__ == '_wrap_close' %}}"
        f"{{{{c.__init__.__globals__['system']('touch {mark}')}}}}{{% endfor %}}"
    )
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(base))
    definition = from_lm_eval(tmp_path / "mine.yaml")
    with pytest.raises(ValueError, match="SecurityError access to attribute '__class__'"):
        size("mine", None, definition)
    assert not mark.exists()


def test_lm_evals_own_filter_works_in_the_sandbox(tmp_path: Path) -> None:
    data = write_jsonl(
        tmp_path / "sums.jsonl", [{"sum": f"{i} + 1?", "total": i} for i in range(4)]
    )
    prompt = "{{ sum | regex_replace('[0-9] ', 'N ') }}"
    definition = from_questions(
        data, prompt=prompt, target="{{total}}", extract="(.)", max_tokens=9, thinking=False
    )
    assert own_requests(data, definition)[2].prompt == "N + 1?"
