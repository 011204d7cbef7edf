"""Turns tokens into text that never changes; finds thoughts, calls and stop strings in the text.

A committed canvas is final, but its text may end in half a character, or in the beginning of a stop
string or a call. Such an end is held back until the next canvas.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

from quantize.errors import InputError
from quantize.runtime import Sample, Sampler
from quantize.runtime.engine.interface import Canvas
from quantize.runtime.prompt import chat
from quantize.runtime.prompt.chat import HALF_CHARACTER, Message, special_ids, split_thoughts
from quantize.serve.calls import MARKERS, OPEN, Call, read_calls
from quantize.serve.failures import invalid, written

NO_TOOLS = (
    "this model's chat template has no place for them; to try tools all the same, start the server "
    "with --chat-template tools, or with a template of your own"
)
Split = Callable[[Sequence[int]], tuple[str, str]]


class Text:
    """A tokenizer as the server uses it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.encode = tokenizer.encode  # plain text, with what the tokenizer puts before it
        self.encode_piece = partial(tokenizer.encode, add_special_tokens=False)  # amid a canvas
        self.piece = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))
        self.spelled = lru_cache(maxsize=None)(self._spelled)
        vocabulary = tokenizer.get_vocab()
        self._markers = {vocabulary[marker] for marker in MARKERS if marker in vocabulary}
        thoughts = {
            vocabulary[marker] for marker in (chat.OPEN, chat.CLOSE) if marker in vocabulary
        }
        self._unseen = special_ids(tokenizer) - self._markers - thoughts

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the prompt's token ids; RequestError 400: the template refuses messages or tools."""
        declares = "tools" in str(self.tokenizer.chat_template)
        if not declares and (tools or any(turn["role"] == "tool" for turn in messages)):
            raise invalid("tools", NO_TOOLS)
        try:
            return chat.encode_chat(
                self.tokenizer, messages, thinking=thinking, tools=tools or None
            )
        except InputError as error:
            place = self._refused(messages, tools)
            reason = str(error).removeprefix("messages: ")
            raise invalid(written(place), reason, "invalid_prompt") from error

    def _refused(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[str | int]:
        """Return the path of what the template refuses: of a tool's property, a tool, a message."""
        asked: Sequence[Message] = [{"role": "user", "content": "?"}]

        def taken(tool: Mapping[str, Any]) -> bool:
            with suppress(InputError):
                return bool(chat.encode_chat(self.tokenizer, asked, thinking=False, tools=[tool]))
            return False

        for n, tool in enumerate(tools):
            if taken(tool):
                continue
            function, path = tool["function"], ["tools", n, "function", "parameters"]
            properties: Mapping[str, Any] = function["parameters"].get("properties", {})
            for name, schema in properties.items():
                alone = {**function["parameters"], "properties": {name: schema}, "required": []}
                if not taken({**tool, "function": {**function, "parameters": alone}}):
                    return [*path, "properties", name]
            return path
        taken_turns, refused_turns = 0, len(messages)  # how many first messages
        while refused_turns - taken_turns > 1:
            count = (taken_turns + refused_turns) // 2
            try:
                chat.encode_chat(self.tokenizer, messages[:count], thinking=False)
                taken_turns = count
            except InputError:
                refused_turns = count
        return ["messages", refused_turns - 1]

    def split(self, tokens: Sequence[int], *, calls: bool = False) -> tuple[str, str]:
        """Return (thoughts, answer) as text; with `calls` the answer keeps call markers."""
        return split_thoughts(self.tokenizer, tokens, self._markers if calls else ())

    def _spelled(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text and its bytes; None for those of half a character."""
        piece = self.piece(token)
        return piece, None if HALF_CHARACTER in piece else list(piece.encode())

    def whole(self, tokens: Sequence[int]) -> tuple[str, str]:
        """Return ("", text): no thoughts are split off; of special tokens, what marks them stays.

        So do the markers of calls. Without them a client could not find thoughts and calls.
        """
        kept = [token for token in tokens if token not in self._unseen]
        return "", self.tokenizer.decode(kept)


@dataclass(frozen=True)
class Delta:
    """What a canvas added to an answer."""

    reasoning: str
    content: str
    finish: Literal["stop", "length"] | None  # why the answer ended; None: it goes on
    calls: Sequence[Call] = ()
    called: int = 0  # number of calls in earlier deltas
    span: tuple[int, int] = (0, 0)  # start and stop of the tokens that it covers


@dataclass
class Answer:
    """One choice of a response, which grows canvas by canvas.

    `split` turns tokens into (thoughts, answer). The answer ends before the first stop string of
    `stops`; a stop string in thoughts has no effect. `tools` names functions that may be called;
    if it is empty, calls stay text. With `one_call` only the first call is kept.
    """

    split: Split
    sampler: Sampler
    max_tokens: int
    max_canvases: int
    stops: Sequence[str] = ()
    tools: Collection[str] = ()
    one_call: bool = False
    sample: Sample = field(default_factory=Sample)
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list[Call])
    covered: int = 0  # tokens that deltas have covered
    finish: Literal["stop", "length"] | None = None

    def commit(self, canvas: Canvas, complete: bool = False) -> None:
        """Take a finished canvas, and set `finish` if EOS, a limit or a stop string ends the answer.

        `complete`: whether the text so far is complete in the form asked for (JSON, regex, calls).
        If so, `finish` is "stop" even when a limit ends the answer: only EOS had no room.
        """
        self.sample.commit(canvas.tokens, canvas.steps, self.sampler)
        length = len(self.sample.tokens)
        over = length >= self.max_tokens or self.sample.canvases >= self.max_canvases
        ended = self.sample.finish == "eos" and length <= self.max_tokens
        text = self._read()[1] if self.stops else ""
        if ended or (over and complete) or cut(text, self.stops)[1]:
            self.finish = "stop"
        elif over:
            self.finish = "length"

    def delta(self) -> Delta:
        """Return what the last canvas added; its end may be held back. Call this once per canvas."""
        reasoning, content = self._read()
        content, _ = cut(content, self.stops)
        if self.finish is None:
            reasoning, content = (t.rstrip(HALF_CHARACTER) for t in (reasoning, content))
            markers = [OPEN] if self.tools else []
            content = content[: len(content) - held_back(content, [*self.stops, *markers])]
        calls: list[Call] = []
        if self.tools:
            content, calls = read_calls(content, self.tools, whole=self.finish is not None)
        calls = calls[:1] if self.one_call else calls
        delta = Delta(
            reasoning[len(self.reasoning) :],
            content[len(self.content) :],
            self.finish,
            calls[len(self.calls) :],
            len(self.calls),
            (self.covered, min(len(self.sample.tokens), self.max_tokens)),
        )
        self.covered = delta.span[1]
        self.reasoning += delta.reasoning
        self.content += delta.content
        self.calls += delta.calls
        return delta

    def _read(self) -> tuple[str, str]:
        return self.split(self.sample.tokens[: self.max_tokens])

    @property
    def tokens(self) -> int:
        """Number of tokens, EOS included, as usage and `tokens_per_forward` count them."""
        return min(self.sample.new_tokens, self.max_tokens)


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return (`text` before the stop string that ends first, True), or (`text`, False) if none."""
    # Which stop string begins first could depend on where a canvas ends.
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(ends)[1]], True) if ends else (text, False)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which a stop string begins, or 0."""
    return max((_overlap(text[1 - len(stop) :], stop) for stop in stops if stop[1:]), default=0)


def _overlap(text: str, stop: str) -> int:
    """Return how many first characters of `stop` end `text`, in linear time (Knuth, Morris, Pratt).

    `text` is shorter than `stop`. Clients choose stop strings, and the engine's thread reads them.
    """
    if stop[0] not in text:
        return 0
    borders = [0]  # of each beginning of `stop`: the longest shorter one that also ends it
    matched = 0
    for character in stop[1 : len(text)]:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        borders.append(matched)
    matched = 0
    for character in text:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
    return matched
