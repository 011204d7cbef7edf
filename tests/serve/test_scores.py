"""Accuracy through the server is accuracy in this process: lm-eval's client and our own backend."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from quantize.bundled import HELDOUT
from quantize.recovery.samples import Completion, Request
from quantize.recovery.scoring import first_requests
from quantize.recovery.served import Servers
from quantize.runtime import generate
from quantize.runtime.prompt.chat import encode_chat
from tests.support.serving import (
    SAMPLER,
    Running,
    engine_of,
    in_process,
    running,
    text_of,
    tokenizer,
)

IN_FLIGHT = 8
MANY = pytest.param(200, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    with running() as found:
        yield found


@pytest.mark.parametrize("count", [2, MANY])
@pytest.mark.parametrize("task", ["word_problems", "word_problems_thinking"])
def test_our_backend_gets_the_completions_of_this_process(
    server: Running, task: str, count: int
) -> None:
    asked = first_requests(task, data_file=HELDOUT, questions=range(count), seed=0)
    found = Servers([server.url], in_flight=IN_FLIGHT)(asked)
    served = {request.key: completion for request, completion in found}
    assert len(served) == count
    for request in asked:
        assert comparable(served[request.key]) == comparable(here(request))


def here(request: Request) -> Completion:
    ids = encode_chat(
        tokenizer(), [{"role": "user", "content": request.prompt}], thinking=request.thinking
    )
    (sample,) = generate(
        engine_of(1), [ids], [request.seed % 2**63],
        max_new_tokens=request.max_new_tokens, sampler=SAMPLER,
    )  # fmt: skip
    text = tokenizer().decode(sample.tokens, skip_special_tokens=False)
    return Completion(text, sample.new_tokens, [], sample.finish == "length")


def comparable(completion: Completion) -> tuple[str, int, bool]:
    """Text with its thinking channel; a server closes one that the token limit left open."""
    text = completion.text.removesuffix("<channel|>")
    return text, completion.tokens, completion.truncated


@pytest.mark.parametrize("count", [5, MANY])
def test_lm_eval_scores_through_the_server_as_in_this_process(
    server: Running, count: int, tmp_path: Path
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    (tmp_path / "problems.yaml").write_text(PROBLEMS.format(data=HELDOUT), "utf-8")
    arguments = f"base_url={server.url}/v1/chat/completions,model=bundled,tokenizer_backend=None,"
    found: Any = simple_evaluate(
        model="local-chat-completions",
        model_args=f"{arguments}num_concurrent={IN_FLIGHT},max_retries=1,seed=7",
        tasks=["problems"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        limit=count,
        apply_chat_template=True,
        gen_kwargs="temperature=1",  # lm-eval sends 0 otherwise, and that cannot be honoured
        bootstrap_iters=0,
    )
    questions = [json.loads(line) for line in HELDOUT.read_text("utf-8").splitlines()][:count]
    right = [says(text_of(in_process(q["question"], 7)), q["answer_number"]) for q in questions]
    scored = [sample["exact_match"] for sample in found["samples"]["problems"]]
    assert scored == [float(r) for r in right]
    assert 0 < sum(right) < count


def says(text: str, number: float) -> bool:
    return text.rpartition("#### ")[2] == f"{number:g}"


PROBLEMS = r"""
task: problems
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer_number}}}}"
generation_kwargs: {{until: [], max_gen_toks: 128}}
filter_list:
  - name: answer
    filter:
      - {{function: regex, regex_pattern: '#### (.*)$'}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
