"""Tasks by name: IFEval as lm-eval defines it, MMLU-Pro as it asks it, and needles made here."""

import re
from functools import partial
from pathlib import Path

import pytest

from quantize.recovery.samples import Request, SampleStore
from quantize.recovery.scoring import first_requests, score, size
from quantize.recovery.sequential import Part
from tests.support.scripted import answering, run, write_jsonl


def test_ifeval_is_checked_by_lm_evals_own_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is right when all its instructions are followed; nothing is downloaded."""
    asked = [(["punctuation:no_comma"], [{}])] * 2 + [
        (["punctuation:no_comma", "keywords:existence"], [{}, {"keywords": ["rain"]}])
    ] * 2
    rows = [
        {"key": i, "prompt": f"p{i}", "instruction_id_list": names, "kwargs": options}
        for i, (names, options) in enumerate(asked)
    ]
    data = write_jsonl(tmp_path / "ifeval.jsonl", rows)
    answers = ["no pause", "one, two", "rain falls", "sun shines"]
    monkeypatch.setattr("nltk.download", lambda *_: False)
    monkeypatch.setattr("nltk.data.find", lambda *_: "there")
    found = run("ifeval", tmp_path, data, lambda r: answers[int(r.prompt[1:])])
    assert [row.score for row in found.rows] == [1, 0, 1, 0]
    monkeypatch.setattr("nltk.data.find", partial(raises, LookupError("a page of text")))
    with pytest.raises(ValueError, match="lacks punkt_tab: `python -m nltk"):
        size("ifeval", data)


def raises(error: Exception, *_: object) -> None:
    raise error


def test_mmlu_pro_is_asked_as_lm_eval_asks_it(tmp_path: Path) -> None:
    """All subjects in one task, without examples; the letter by our filter, lm-eval's beside it."""
    fields = {"cot_content": "", "category": "math", "answer": "J"}
    options = [f"o{i}" for i in range(10)]
    rows = [{"question": f"q{i}", "options": options, **fields} for i in range(4)]
    data = write_jsonl(tmp_path / "mmlu_pro.jsonl", rows)
    (first, *_) = first_requests("mmlu_pro", data_file=data, questions=[0], seed=0)
    assert first.prompt.endswith("I. o8\nJ. o9\nAnswer: Let's think step by step.")
    answers = ["the answer is (J).\nQuestion: the answer is (A)", "the answer is (A)", "J", "Argon"]
    found = run("mmlu_pro", tmp_path, data, lambda r: answers[number_of(r)])
    assert [row.score for row in found.rows] == [1, 0, 1, 0]
    assert [row.scores["custom-extract"] for row in found.rows] == [1, 0, 0, 0]
    assert [row.answered for row in found.rows] == [True, True, True, False]


def number_of(request: Request) -> int:
    return int(request.prompt.partition("\nq")[2][0])


@pytest.mark.parametrize(("task", "words"), [("needle_1k", 1024), ("needle_8k", 8192)])
def test_a_needle_lies_at_every_depth_and_is_asked_alike_everywhere(task: str, words: int) -> None:
    asked = first_requests(task, data_file=None, questions=range(0, 120, 17), seed=0)
    assert asked == first_requests(task, data_file=None, questions=range(0, 120, 17), seed=0)
    depths: list[float] = []
    for request in asked:
        number = re.findall(r"[0-9]{7}", request.prompt)
        assert len(number) == 1
        assert words <= len(request.prompt.split()) < words + 60
        depths.append(request.prompt.index(number[0]) / len(request.prompt))
    assert depths == sorted(depths)
    assert depths[0] < 0.05
    assert depths[-1] > 0.95


def test_a_needle_is_found_by_its_number(tmp_path: Path) -> None:
    def knows(request: Request) -> str:
        number = re.findall(r"[0-9]{7}", request.prompt)[0]
        return f"It is {number}." if "0" in number else "It is 1234567."

    part = Part(range(4), range(1))
    found = score(
        "needle_1k", SampleStore(tmp_path / "s.jsonl", {}), answering(knows), part, data_file=None,
        seed=0, sampler={}, progress=lambda finished, _: finished,
    )  # fmt: skip
    assert found
    assert [row.score for row in found.rows] == ["0" in row.target for row in found.rows]
