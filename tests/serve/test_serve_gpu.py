"""What a request may ask for, on the kernels' captured graphs, by OpenAI's client."""

import json
from typing import Any

import openai
import pytest
import torch

from tests.support.server_process import KEY, process
from tests.support.serving import chances_after_one_step

pytestmark = pytest.mark.gpu
QUESTION = "Tom has 9 pens. Tom loses 4. How many pens are left?"
UNSURE = "Tell me a story."  # the bundled model knows none
SCHEMA = {
    "type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"],
    "additionalProperties": False,
}  # fmt: skip


def test_a_form_and_logprobs() -> None:
    """The answer fits its schema; log-probabilities are those of the model's own logits.

    One step over noise leaves a model unsure. There the kernels' BF16 differs from the modules'
    float32, on a CPU by 0.1 nats on average; logits divided by the step's temperature would by 0.7.
    """
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    asked: dict[str, Any] = {
        "model": "bundled",
        "messages": [{"role": "user", "content": QUESTION}],
        "seed": 1,
    }
    told: dict[str, Any] = {"max_tokens": 64, "logprobs": True, "top_logprobs": 5}
    unsure: dict[str, Any] = {"messages": [{"role": "user", "content": UNSURE}]}
    with process() as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        create = client.chat.completions.create
        held = create(**asked, max_tokens=64, response_format=form)
        said = create(**asked, **told)
        plain = create(**asked, max_tokens=64)
        one_step = create(**asked | unsure, **told, extra_body={"num_inference_steps": 1})
    answer = json.loads(held.choices[0].message.content or "")
    assert list(answer) == ["answer"]
    assert isinstance(answer["answer"], int)
    entries = said.choices[0].logprobs.content
    text = b"".join(bytes(entry.bytes or []) for entry in entries).decode()
    assert said.choices[0].message.content in text
    assert said.choices[0].message.content == plain.choices[0].message.content
    assert all(-0.05 < entry.logprob <= 0 for entry in entries)  # it is certain where it stops
    entries = one_step.choices[0].logprobs.content
    shown = torch.tensor([[c.logprob for c in entry.top_logprobs] for entry in entries]).double()
    expected = chances_after_one_step(UNSURE, 1).topk(5).values[: len(entries)]
    away = (shown - expected).abs().mean().item()
    least = min(entry.logprob for entry in entries)
    print(f"form: {answer}; {len(entries)} tokens, {least:.2f} nats at least, {away:.3f} away")
    assert len(entries) >= 8
    assert least < -0.5
    assert away < 0.2
