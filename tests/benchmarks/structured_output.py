"""Answers of the bundled model with and without a form: how many fit it, and how many are right.

    python -m tests.benchmarks.structured_output [--problems 200] [--form NAME]

The first held-out problems, over HTTP, to a server as a user starts it (the kernels, where there is a
GPU), with their index as seed. A JSON answer is right when its number is; a text when the number behind
its last #### is. The regular expression is what the model writes behind its thoughts.
"""

import argparse
import json
import re
import time
from typing import Any

import openai

from quantize.bundled import HELDOUT
from tests.support.server_process import KEY, process

NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}
SCHEMA = {
    "type": "object", "properties": {"answer": NUMBER}, "required": ["answer"],
    "additionalProperties": False,
}  # fmt: skip
LAST_LINE = r"#### [0-9]{1,6}"
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
FORMS: dict[str, dict[str, Any]] = {
    "any text": {},
    "JSON schema": {"response_format": FORMAT},
    "regular expression": {"extra_body": {"guided_regex": LAST_LINE}},
}


def fits(form: str, text: str) -> bool:
    """Whether a text is in the form that was asked for."""
    if form == "JSON schema":
        found = json.loads(text)
        return found.keys() == {"answer"} and found["answer"] in range(10_000)
    return form == "any text" or re.fullmatch(LAST_LINE, text) is not None


def number(form: str, text: str) -> str:
    """The number that a text answers with."""
    if form == "JSON schema":
        return str(json.loads(text)["answer"])
    return text.rpartition("#### ")[2]


def ask(client: openai.OpenAI, problems: list[Any], form: str, thinking: bool) -> None:
    """Ask all of them, and print a line."""
    fit = right = steps = 0
    began = time.monotonic()
    for seed, problem in enumerate(problems):
        options = dict(FORMS[form])
        template = {"chat_template_kwargs": {"enable_thinking": thinking}}
        options["extra_body"] = options.get("extra_body", {}) | template
        reply: Any = client.chat.completions.create(
            model="bundled", messages=[{"role": "user", "content": problem["question"]}],
            seed=seed, max_tokens=128, **options,
        )  # fmt: skip
        text = reply.choices[0].message.content
        fit += fits(form, text)
        right += number(form, text) == f"{problem['answer_number']:g}"
        steps += reply.usage.denoising_steps
    n = len(problems)
    print(
        f"{form}, thinking {thinking}: {fit} of {n} fit, {right} right, {steps / n:.1f} steps, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )


def main() -> None:
    """Measure every form, with and without thinking."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--form", action="append", choices=list(FORMS), help="one of them alone")
    asked = parser.parse_args()
    lines = HELDOUT.read_text("utf-8").splitlines()[: asked.problems]
    problems = [json.loads(line) for line in lines]
    with process() as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        for form in asked.form or FORMS:
            for thinking in (False, True):
                ask(client, problems, form, thinking)


if __name__ == "__main__":
    main()
