"""llama.cpp as an engine: the same samples when its logits are ours, and every way it can fail."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.checkpoints.load import load
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError, ResourceError
from quantize.exports.gguf_file import export_gguf
from quantize.recipe.sections import Evaluation, Gate
from quantize.recovery.terms import Terms
from quantize.reports.provenance import scored_with
from quantize.reports.scores import pair, read_scoring
from quantize.runs.folder import RunDir
from quantize.runs.manifest import fingerprint
from quantize.runtime import Sampler, generate
from quantize.runtime.engine.llama_cpp import LlamaCpp, made_from
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.stages.evaluate.compared_models import ModelOptions
from quantize.stages.evaluate.evaluate import evaluate
from tests.support.exported import copy_bundled
from tests.support.llama_cpp_program import install
from tests.support.modules_oracle.engine import ModelEngine

SAMPLER = Sampler.from_checkpoint(CHECKPOINT)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("llama_cpp"))


@pytest.fixture(scope="module")
def file(program: Path) -> Path:
    out = program.with_name("bundled.gguf")
    export_gguf(Checkpoint.open(CHECKPOINT), out, name="bundled")
    return out


def prompts(count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(CHECKPOINT)
    lines = HELDOUT.read_text("utf-8").splitlines()[:count]
    asked = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    return [encode_chat(tokenizer, messages, thinking=False) for messages in asked]


def test_equal_logits_give_equal_samples(program: Path, file: Path):
    theirs, ours = LlamaCpp(program, file, 64), ModelEngine(load(CHECKPOINT), 1)
    torch.set_num_threads(1)
    seeds = [5, 6]
    expected = [
        generate(ours, [prompt], [seed], max_new_tokens=128, sampler=SAMPLER)[0]
        for prompt, seed in zip(prompts(2), seeds, strict=True)
    ]
    found = [
        theirs.answer(prompt, seed, max_new_tokens=128, sampler=SAMPLER)
        for prompt, seed in zip(prompts(2), seeds, strict=True)
    ]
    theirs.close()
    assert [s.committed for s in found] == [s.committed for s in expected]
    assert [s.steps_per_canvas for s in found] == [s.steps_per_canvas for s in expected]
    assert max(s.canvases for s in found) == 2  # the second one stands behind the first


def test_the_file_says_what_it_was_made_from(file: Path, tmp_path: Path):
    assert made_from(file) == fingerprint(Checkpoint.open(CHECKPOINT))
    (tmp_path / "other.gguf").write_bytes(b"GGUF" + bytes(100))
    assert made_from(tmp_path / "other.gguf") is None
    with pytest.raises(InputError, match="not a GGUF file"):
        made_from(CHECKPOINT / "config.json")
    with pytest.raises(InputError, match="cannot be read"):
        made_from(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("ERR decode", "answered 'ERR decode'"), ("end", "answered 'nothing', .* wrote: no memory")],
)
def test_a_program_that_fails_is_named(
    fault: str, expected: str, program: Path, file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LLAMA_CPP_FAULT", fault)
    failing = LlamaCpp(program, file, 64)
    with pytest.raises(ResourceError, match=f"llama-diffusion-gemma-server: {expected}"):
        failing.answer(prompts(1)[0], 0, max_new_tokens=64, sampler=SAMPLER)


def test_a_program_that_does_not_start_is_named(tmp_path: Path, file: Path):
    with pytest.raises(ResourceError, match=r"none: cannot be started"):
        LlamaCpp(tmp_path / "none", file, 64)
    (tmp_path / "bad").write_text("#!/bin/sh\necho unknown model >&2\n")
    (tmp_path / "bad").chmod(0o755)
    with pytest.raises(ResourceError, match=r"bad: answered 'nothing', .* unknown model"):
        LlamaCpp(tmp_path / "bad", file, 64)


def test_evaluate_scores_the_file_beside_the_checkpoint(program: Path, file: Path, tmp_path: Path):
    run = RunDir(tmp_path)
    copy_bundled(run.checkpoint)
    settings = Evaluation(tasks=["word_problems"], limit={"word_problems": 2}, batch_size=2)
    digest = fingerprint(Checkpoint.open(CHECKPOINT))
    gate = Gate(estimand="these_questions", margin_pp={"word_problems": 3})
    evaluate(
        run,
        CHECKPOINT,
        digest,
        settings,
        gate=gate,
        options=ModelOptions(gguf=file, llama_cpp=program),
    )
    base, ours, theirs = (
        read_scoring(run.evaluation / side, "word_problems")
        for side in ("bf16", "quantized", "quantized-gguf")
    )
    assert [row.answer for row in theirs.rows] == [row.answer for row in ours.rows]
    about = {"margin_pp": 3.0, "confidence": 0.95}
    entry, comparison = pair(base, theirs, Terms(estimand="these_questions", **about))
    assert comparison is not None
    assert entry["not_comparable"] is None
    digest_of_file = hashlib.sha256(file.read_bytes()).hexdigest()
    said = scored_with([{"task": "word_problems", "outcome": "PASS"} | entry])
    assert said == [f"llama.cpp on {digest_of_file[:12]}, seed 0: word_problems PASS"]
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes().replace(digest.encode(), b"0" * 64))
    with pytest.raises(InputError, match=r"other\.gguf: made from 0+, not from .*checkpoint"):
        evaluate(
            run, CHECKPOINT, digest, settings, gate=gate,
            options=ModelOptions(gguf=other, llama_cpp=program),
        )  # fmt: skip
    with pytest.raises(InputError, match="--gguf and --llama-cpp go together"):
        evaluate(run, CHECKPOINT, digest, settings, gate=gate, options=ModelOptions(gguf=file))
