"""What a request may ask for, on the kernels' captured graphs, by OpenAI's client."""

import json

import openai
import pytest
from server_process import KEY, process

pytestmark = pytest.mark.gpu
QUESTION = "Tom has 9 pens. Tom loses 4. How many pens are left?"
SCHEMA = {
    "type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"],
    "additionalProperties": False,
}  # fmt: skip


def test_a_form_and_logprobs() -> None:
    """The answer fits its schema; log-probabilities are of the tokens that were committed."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    asked = {"model": "bundled", "messages": [{"role": "user", "content": QUESTION}], "seed": 1}
    with process() as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        create = client.chat.completions.create
        held = create(**asked, max_tokens=64, response_format=form)
        said = create(**asked, max_tokens=64, logprobs=True, top_logprobs=5)
        plain = create(**asked, max_tokens=64)
    answer = json.loads(held.choices[0].message.content or "")
    assert list(answer) == ["answer"]
    assert isinstance(answer["answer"], int)
    entries = said.choices[0].logprobs.content
    text = b"".join(bytes(entry.bytes or []) for entry in entries).decode()
    assert said.choices[0].message.content in text
    assert said.choices[0].message.content == plain.choices[0].message.content
    for entry in entries:
        best = [candidate.logprob for candidate in entry.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert len(best) == 5
        assert entry.logprob <= best[0] <= 1e-3
    spread = [round(entry.logprob, 3) for entry in entries]
    print(
        f"form: {answer}; log-probabilities of {len(entries)} tokens, {min(spread)} to {max(spread)}"
    )
