"""The bundled tokenizer: 1,024 ids of byte-level BPE under Gemma 4's control ids and chat template.

Ids that Gemma 4 gives to control tokens (``<eos>`` 1, ``<|turn>`` 105, ...) and to the newline (107)
are the same here, so the real generation config (eos 1, 106, 50) and the real prompt format work
unchanged. Digits are single tokens; every byte has a token, so any text survives the round trip.
The three image ids sit at the end of the vocabulary; ids without a use are named ``<unusedN>``.

The template follows Gemma 4's: with thinking a system turn holds ``<|think|>`` and the model opens
its own thought channel; without, the prompt closes an empty one:

    <bos><|turn>user\n...<turn|>\n<|turn>model\n<|channel>thought\n<channel|>

Left out: tools, audio, video.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from experiments.bundled.problems import NARROW, Problem, synthetic
from quantize.bundled import CHECKPOINT

VOCABULARY = 1024
NEWLINE_ID, END_OF_TURN_ID, EOS_ID = 107, 106, 1
IMAGE_ID, IMAGE_BEGIN_ID, IMAGE_END_ID = VOCABULARY - 1, VOCABULARY - 2, VOCABULARY - 3
CONTROL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>",
    48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>",
    52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>",
    106: "<turn|>", IMAGE_END_ID: "<image|>", IMAGE_BEGIN_ID: "<|image>", IMAGE_ID: "<|image|>",
}  # fmt: skip
CHAT_TEMPLATE = (CHECKPOINT / "chat_template.jinja").read_text("utf-8")


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Split into digits, newlines, words with their space, and single signs; then into bytes."""
    pieces = Regex(r"\d|\n| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def corpus(gsm8k: Iterable[Problem], seed: int = 0, stories: int = 2000) -> Iterator[str]:
    """The text to learn merges from: the chat template's words, GSM8K problems, synthetic stories."""
    yield from ("user\n", "model\n", "system\n", "thought\n")
    rng = random.Random(seed)
    generated = (synthetic(rng, rng.randint(1, 3), NARROW) for _ in range(stories))
    for problem in (*gsm8k, *generated):
        yield problem.question
        yield problem.answer


def build(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the merges from `texts` and place every token at its id."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _pre_tokenizer()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = VOCABULARY - len(CONTROL)
    learner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    learned = json.loads(learner.to_str())["model"]
    fast = Tokenizer(
        models.BPE(
            vocab=_place(sorted(learned["vocab"], key=learned["vocab"].__getitem__)),
            merges=[tuple(pair) for pair in learned["merges"]],
            unk_token="<unk>",
        )
    )
    fast.pre_tokenizer = _pre_tokenizer()
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in CONTROL.values()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
        unk_token="<unk>", padding_side="left", chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def _place(learned: Sequence[str]) -> dict[str, int]:
    """Ids for the learned tokens around the control ids; the newline keeps Gemma 4's."""
    newline = "Ċ"  # byte-level BPE writes the byte 0x0A as this letter
    vocabulary = {token: i for i, token in CONTROL.items()} | {newline: NEWLINE_ID}
    free = (i for i in range(VOCABULARY) if i not in CONTROL and i != NEWLINE_ID)
    vocabulary.update({token: next(free) for token in learned if token != newline})
    vocabulary.update({f"<unused{i}>": i for i in free})
    return vocabulary


def prompt(tokenizer: PreTrainedTokenizerFast, question: str, *, thinking: bool) -> str:
    """The chat prompt that asks a question; the model's answer follows it."""
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
    )
    return cast(str, text)


def response(problem: Problem, *, thinking: bool) -> str:
    """What the model should answer: the steps in the open, or inside its thought channel."""
    if not thinking:
        return f"{problem.answer}<turn|>"
    steps, _, final = problem.answer.rpartition("\n")
    return f"<|channel>thought\n{steps}\n<channel|>{final}<turn|>"
