"""An answer in OpenAI's shapes, from the pieces of its samples: whole, or as the events of a stream.

`exchange` feeds one of these per HTTP request. A request has one or several prompts and each has n samples; the choice
with index `prompt * n + sample` is one sample's. State of one request; nothing here knows the network.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from router.openai import replies
from router.openai.tally import Tally
from router.openai.token_texts import OffsetText, TokenTexts
from router.pieces import Delta, Piece, PromptEcho, SampleEnd
from router.request import PromptLogprobs, TokenLogprobs


class Answer(Protocol):
    def take(self, prompt: int, piece: Piece) -> Iterator[Struct]:
        """The events that a stream shows for it."""

    def last_events(self) -> Iterator[Struct]:
        """What follows when all choices have ended."""

    def whole(self) -> Struct:
        """The reply that is no stream, when all choices have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the client asked for, as far as it shapes the answer."""

    id: str
    model: str
    num_prompts: int
    n: int
    has_logprobs: bool
    has_prompt_logprobs: bool
    is_stream: bool
    includes_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))


class _Choice:
    """One sample, as far as it has come. Text and logprobs are kept only for an answer that is sent whole."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.end: SampleEnd | None = None
        self.has_begun = False


class _Choices(ABC):
    """What both shapes do with a piece. Each shows the events of one choice in its own."""

    def __init__(self, asked: Asked, texts: TokenTexts) -> None:
        self._asked = asked
        self._texts = texts
        self._choices = [_Choice(index) for index in range(asked.num_prompts * asked.n)]
        self._tally = Tally(len(self._choices))
        self._prompts: list[list[TokenLogprobs]] = [[] for _ in range(asked.num_prompts)]
        self._echoes: dict[int, str] = {}

    def take(self, prompt: int, piece: Piece) -> Iterator[Struct]:
        if isinstance(piece, PromptEcho):
            self._echoes[prompt] = piece.text
            return
        if isinstance(piece, PromptLogprobs):
            self._prompts[prompt] += piece.tokens
            return
        choice = self._choices[prompt * self._asked.n + piece.sample]
        timings: replies.Timings | UnsetType = UNSET
        if isinstance(piece, SampleEnd):
            choice.end = piece
            timings = self._tally.add(prompt, piece)
        if self._asked.is_stream:
            yield from self._events(choice, piece, UNSET if self._asked.includes_usage else timings)
        elif isinstance(piece, Delta):
            _keep(choice, piece)

    @abstractmethod
    def _events(
        self, choice: _Choice, piece: Delta | SampleEnd, timings: replies.Timings | UnsetType
    ) -> Iterator[Struct]:
        """What a stream shows of `choice` for the piece; `timings` are to be told with it, where there are any."""


class ChatAnswer(_Choices):
    """`chat.completion`, or its chunks: the first has the role, the last the reason."""

    def _events(
        self, choice: _Choice, piece: Delta | SampleEnd, timings: replies.Timings | UnsetType
    ) -> Iterator[Struct]:
        if not choice.has_begun:
            choice.has_begun = True
            first = self._chunk(replies.ChatChunkChoice(choice.index, replies.ChatDelta("", "assistant"), None, None))
            if choice.index == 0:
                first.prompt_logprobs = _prompt_table(self._asked, self._texts, self._prompts[0])
            yield first
        if isinstance(piece, SampleEnd):
            ended = replies.ChatChunkChoice(choice.index, replies.ChatDelta(), None, piece.finish.reason)
            ended.stop_reason, ended.seed = _stop_reason(piece), piece.seed
            last = self._chunk(ended)
            last.timings = timings
            yield last
        elif piece.text or piece.logprobs:
            logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
            yield self._chunk(replies.ChatChunkChoice(choice.index, replies.ChatDelta(piece.text), logprobs, None))

    def last_events(self) -> Iterator[Struct]:
        if self._asked.includes_usage:
            last = replies.ChatChunk(self._asked.id, self._asked.created, self._asked.model, [], self._tally.usage())
            last.timings = self._tally.timings()
            yield last

    def whole(self) -> Struct:
        return replies.ChatCompletion(
            self._asked.id,
            self._asked.created,
            self._asked.model,
            [self._whole_choice(choice) for choice in self._choices],
            self._tally.usage(),
            _prompt_table(self._asked, self._texts, self._prompts[0]),
            self._tally.timings(),
        )

    def _whole_choice(self, choice: _Choice) -> replies.ChatChoice:
        end = choice.end
        assert end is not None, "a choice has not ended"
        logprobs = self._logprobs(choice.logprobs) if self._asked.has_logprobs else None
        message = replies.ChatReply("".join(choice.text))
        return replies.ChatChoice(choice.index, message, logprobs, end.finish.reason, _stop_reason(end), end.seed)

    def _chunk(self, choice: replies.ChatChunkChoice) -> replies.ChatChunk:
        usage = None if self._asked.includes_usage else UNSET
        return replies.ChatChunk(self._asked.id, self._asked.created, self._asked.model, [choice], usage)

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> replies.ChatLogprobs:
        return replies.ChatLogprobs([self._logprob(entry) for entry in entries])

    def _logprob(self, entry: TokenLogprobs) -> replies.TokenLogprob:
        top = [
            replies.TopLogprob(self._texts.text(token_id), finite(logprob), list(self._texts.bytes(token_id)))
            for token_id, logprob in entry.top
        ]
        assert entry.logprob is not None, "an output token has a logprob"
        text, own = self._texts.text(entry.token_id), list(self._texts.bytes(entry.token_id))
        return replies.TokenLogprob(text, finite(entry.logprob), own, top)


class CompletionAnswer(_Choices):
    """`text_completion`, which has the same shape in whole and in chunks."""

    def __init__(self, asked: Asked, texts: TokenTexts) -> None:
        super().__init__(asked, texts)
        self._offsets = [OffsetText(texts) for _ in self._choices]

    def _events(
        self, choice: _Choice, piece: Delta | SampleEnd, timings: replies.Timings | UnsetType
    ) -> Iterator[Struct]:
        if not choice.has_begun:
            choice.has_begun = True
            text, entries, table = self._beginning(choice)
            if text or entries or table is not UNSET:
                yield self._reply([self._choice(choice, text, entries, None, table)])
        if isinstance(piece, SampleEnd):
            last = self._reply([self._choice(choice, "", [], piece)])
            last.timings = timings
            yield last
        elif piece.text or piece.logprobs:
            yield self._reply([self._choice(choice, piece.text, piece.logprobs, None)])

    def last_events(self) -> Iterator[Struct]:
        if self._asked.includes_usage:
            yield self._last_reply([])

    def whole(self) -> Struct:
        return self._last_reply([self._whole_choice(choice) for choice in self._choices])

    def _beginning(
        self, choice: _Choice
    ) -> tuple[str, Sequence[TokenLogprobs], replies.PromptLogprobTable | UnsetType]:
        """What comes before the output: the prompt and its tokens where it is echoed, and the table of its logprobs."""
        asked = self._asked
        prompt, sample = divmod(choice.index, asked.n)
        scored = self._prompts[prompt]
        table = _prompt_table(asked, self._texts, scored) if sample == 0 else UNSET
        if prompt not in self._echoes:
            return "", (), table
        return self._echoes[prompt], scored if asked.has_logprobs else (), table

    def _whole_choice(self, choice: _Choice) -> replies.CompletionChoice:
        text, entries, table = self._beginning(choice)
        return self._choice(choice, text + "".join(choice.text), [*entries, *choice.logprobs], choice.end, table)

    def _choice(
        self,
        choice: _Choice,
        text: str,
        entries: Sequence[TokenLogprobs],
        end: SampleEnd | None,
        table: replies.PromptLogprobTable | UnsetType = UNSET,
    ) -> replies.CompletionChoice:
        logprobs = self._logprobs(choice.index, entries) if entries else None
        shown = replies.CompletionChoice(choice.index, text, logprobs, None, prompt_logprobs=table)
        if end is not None:
            shown.finish_reason, shown.stop_reason, shown.seed = end.finish.reason, _stop_reason(end), end.seed
        return shown

    def _reply(self, choices: list[replies.CompletionChoice], usage: replies.Usage | None = None) -> replies.Completion:
        shown = UNSET if usage is None and not self._asked.includes_usage else usage
        return replies.Completion(self._asked.id, self._asked.created, self._asked.model, choices, shown)

    def _last_reply(self, choices: list[replies.CompletionChoice]) -> replies.Completion:
        last = self._reply(choices, self._tally.usage())
        last.timings = self._tally.timings()
        return last

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> replies.CompletionLogprobs:
        offsets = self._offsets[index]
        return replies.CompletionLogprobs(
            tokens=[self._texts.text(entry.token_id) for entry in entries],
            token_logprobs=[None if entry.logprob is None else finite(entry.logprob) for entry in entries],
            top_logprobs=[self._top(entry) for entry in entries],
            text_offset=[offsets.before(entry.token_id) for entry in entries],
        )

    def _top(self, entry: TokenLogprobs) -> dict[str, float] | None:
        """By text, as this shape has it: of tokens with one text the likeliest is shown."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            top.setdefault(self._texts.text(token_id), finite(logprob))
        return top


def finite(logprob: float) -> float:
    return max(logprob, replies.LOWEST_LOGPROB)


def _keep(choice: _Choice, delta: Delta) -> None:
    choice.text.append(delta.text)
    choice.logprobs += delta.logprobs


def _stop_reason(end: SampleEnd) -> str | int | UnsetType:
    """Which stop string or token it was; absent where the model or a limit ended the sample."""
    return UNSET if end.finish.matched_stop is None else end.finish.matched_stop


def _prompt_table(
    asked: Asked, texts: TokenTexts, entries: Sequence[TokenLogprobs]
) -> replies.PromptLogprobTable | UnsetType:
    if not asked.has_prompt_logprobs:
        return UNSET
    return [
        None
        if entry.logprob is None
        else {
            str(token_id): replies.PromptLogprob(finite(logprob), texts.text(token_id))
            for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top)
        }
        for entry in entries
    ]
