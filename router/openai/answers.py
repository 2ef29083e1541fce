"""An answer in OpenAI's shapes, from the pieces of its samples: whole, or as the events of a stream.

`exchange` feeds one of these per HTTP request. A request has one or several prompts and each has n samples; the choice
with index `prompt * n + sample` is one sample's. State of one request; nothing here knows the network.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from router.openai import logprobs, replies
from router.openai.tally import Tally
from router.openai.token_texts import OffsetText, TokenTexts
from router.pieces import Delta, Piece, PromptEcho, SampleEnd
from router.request import PromptLogprobs, TokenLogprobs

# What is made in about a millisecond: so many logprobs with 20 of the likeliest tokens each, so much text, so many
# choices.
_MAX_ENTRIES_ON_LOOP = 64
_MAX_CHARS_ON_LOOP = 64 * 1024
_MAX_CHOICES_ON_LOOP = 256


class Reply(Struct, frozen=True, gc=False):
    """A whole reply or an event of a stream. One that `is_long` is not for the event loop to make and to encode."""

    make: Callable[[], Struct]
    is_long: bool = False


class Answer(Protocol):
    def take(self, prompt: int, piece: Piece) -> Iterator[Reply]:
        """The events that a stream shows for it; each is to be made before the next one is asked for."""

    def last_events(self) -> Iterator[Reply]:
        """What follows when all choices have ended."""

    def whole(self) -> Reply:
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
        # Of each prompt, in a stream until all of its choices have begun.
        self._prompts: list[list[TokenLogprobs]] = [[] for _ in range(asked.num_prompts)]
        self._num_to_begin = [asked.n] * asked.num_prompts
        # Of a reply that is sent whole, with prompts as often as it may have them.
        self._num_entries = 0
        self._num_chars = 0

    def take(self, prompt: int, piece: Piece) -> Iterator[Reply]:
        if isinstance(piece, PromptEcho):
            self._take_echo(prompt, piece)
            return
        if isinstance(piece, PromptLogprobs):
            self._prompts[prompt] += piece.tokens
            self._num_entries += len(piece.tokens) * self._asked.n
            return
        choice = self._choices[prompt * self._asked.n + piece.sample]
        timings: replies.Timings | UnsetType = UNSET
        if isinstance(piece, SampleEnd):
            choice.end = piece
            timings = self._tally.add(prompt, piece)
        if not self._asked.is_stream:
            if isinstance(piece, Delta):
                self._keep(choice, piece)
            return
        if not choice.has_begun:
            choice.has_begun = True
            yield from self._beginning(choice)
            self._num_to_begin[prompt] -= 1
            if self._num_to_begin[prompt] == 0:
                self._forget(prompt)
        if isinstance(piece, SampleEnd):
            shown = UNSET if self._asked.includes_usage else timings
            yield Reply(lambda: self._end(choice, piece, shown))
        elif piece.text or piece.logprobs:
            yield Reply(lambda: self._delta(choice, piece), _is_much(len(piece.logprobs), len(piece.text)))

    def whole(self) -> Reply:
        has_many_choices = len(self._choices) > _MAX_CHOICES_ON_LOOP
        return Reply(self._whole, has_many_choices or _is_much(self._num_entries, self._num_chars))

    def last_events(self) -> Iterator[Reply]:
        if self._asked.includes_usage:
            yield Reply(self._usage)

    def _take_echo(self, prompt: int, echo: PromptEcho) -> None:
        raise AssertionError("a chat is not echoed")

    @abstractmethod
    def _beginning(self, choice: _Choice) -> Iterator[Reply]:
        """The event before the choice's first piece, if there is one."""

    @abstractmethod
    def _delta(self, choice: _Choice, delta: Delta) -> Struct: ...

    @abstractmethod
    def _end(self, choice: _Choice, end: SampleEnd, timings: replies.Timings | UnsetType) -> Struct: ...

    @abstractmethod
    def _usage(self) -> Struct:
        """The event after all choices have ended."""

    @abstractmethod
    def _whole(self) -> Struct: ...

    def _keep(self, choice: _Choice, delta: Delta) -> None:
        choice.text.append(delta.text)
        choice.logprobs += delta.logprobs
        self._num_chars += len(delta.text)
        self._num_entries += len(delta.logprobs)

    def _forget(self, prompt: int) -> None:
        """All of the prompt's choices have begun: its logprobs have been shown."""
        self._prompts[prompt] = []

    def _num_prompt_entries(self, choice: _Choice) -> int:
        return len(self._prompts[choice.index // self._asked.n])


class ChatAnswer(_Choices):
    """`chat.completion`, or its chunks: the first has the role, the last the reason."""

    def _beginning(self, choice: _Choice) -> Iterator[Reply]:
        def role() -> Struct:
            first = self._chunk(replies.ChatChunkChoice(choice.index, replies.ChatDelta("", "assistant"), None, None))
            if choice.index == 0:
                first.prompt_logprobs = self._prompt_table()
            return first

        yield Reply(role, choice.index == 0 and _is_much(self._num_prompt_entries(choice)))

    def _delta(self, choice: _Choice, delta: Delta) -> Struct:
        told = logprobs.of_chat(self._texts, delta.logprobs) if delta.logprobs else None
        return self._chunk(replies.ChatChunkChoice(choice.index, replies.ChatDelta(delta.text), told, None))

    def _end(self, choice: _Choice, end: SampleEnd, timings: replies.Timings | UnsetType) -> Struct:
        ended = replies.ChatChunkChoice(choice.index, replies.ChatDelta(), None, end.finish.reason)
        ended.stop_reason, ended.seed = _stop_reason(end), end.seed
        last = self._chunk(ended)
        last.timings = timings
        return last

    def _usage(self) -> Struct:
        last = replies.ChatChunk(self._asked.id, self._asked.created, self._asked.model, [], self._tally.usage())
        last.timings = self._tally.timings()
        return last

    def _whole(self) -> Struct:
        return replies.ChatCompletion(
            self._asked.id,
            self._asked.created,
            self._asked.model,
            [self._whole_choice(choice) for choice in self._choices],
            self._tally.usage(),
            self._prompt_table(),
            self._tally.timings(),
        )

    def _whole_choice(self, choice: _Choice) -> replies.ChatChoice:
        end = choice.end
        assert end is not None, "a choice has not ended"
        told = logprobs.of_chat(self._texts, choice.logprobs) if self._asked.has_logprobs else None
        message = replies.ChatReply("".join(choice.text))
        return replies.ChatChoice(choice.index, message, told, end.finish.reason, end.seed, _stop_reason(end))

    def _chunk(self, choice: replies.ChatChunkChoice) -> replies.ChatChunk:
        usage = None if self._asked.includes_usage else UNSET
        return replies.ChatChunk(self._asked.id, self._asked.created, self._asked.model, [choice], usage)

    def _prompt_table(self) -> replies.PromptLogprobTable | UnsetType:
        return logprobs.of_prompt(self._texts, self._prompts[0]) if self._asked.has_prompt_logprobs else UNSET


class CompletionAnswer(_Choices):
    """`text_completion`, which has the same shape in whole and in chunks."""

    def __init__(self, asked: Asked, texts: TokenTexts) -> None:
        super().__init__(asked, texts)
        self._echoes: dict[int, PromptEcho] = {}
        self._echoed: dict[int, replies.CompletionLogprobs] = {}
        self._offsets: dict[int, OffsetText] = {}

    def _take_echo(self, prompt: int, echo: PromptEcho) -> None:
        self._echoes[prompt] = echo
        self._num_chars += len(echo.text) * self._asked.n

    def _forget(self, prompt: int) -> None:
        super()._forget(prompt)
        self._echoed.pop(prompt, None)

    def _beginning(self, choice: _Choice) -> Iterator[Reply]:
        prompt, sample = divmod(choice.index, self._asked.n)
        if prompt in self._echoes or (self._asked.has_prompt_logprobs and sample == 0):
            num_chars = len(self._echoes[prompt].text) if prompt in self._echoes else 0
            is_long = _is_much(self._num_prompt_entries(choice), num_chars)
            yield Reply(lambda: self._reply([self._begun(choice)]), is_long)

    def _delta(self, choice: _Choice, delta: Delta) -> Struct:
        told = self._logprobs(choice, delta.logprobs) if delta.logprobs else None
        return self._reply([replies.CompletionChoice(choice.index, delta.text, told, None)])

    def _end(self, choice: _Choice, end: SampleEnd, timings: replies.Timings | UnsetType) -> Struct:
        last = self._reply([_ended(replies.CompletionChoice(choice.index, "", None, None), end)])
        last.timings = timings
        return last

    def _usage(self) -> Struct:
        return self._last_reply([])

    def _whole(self) -> Struct:
        return self._last_reply([self._whole_choice(choice) for choice in self._choices])

    def _whole_choice(self, choice: _Choice) -> replies.CompletionChoice:
        assert choice.end is not None, "a choice has not ended"
        shown = self._begun(choice)
        shown.text += "".join(choice.text)
        if choice.logprobs:
            told = self._logprobs(choice, choice.logprobs)
            shown.logprobs = told if shown.logprobs is None else logprobs.joined(shown.logprobs, told)
        return _ended(shown, choice.end)

    def _begun(self, choice: _Choice) -> replies.CompletionChoice:
        """With what comes before the output: the prompt and its tokens where it is echoed, and its logprobs."""
        prompt, sample = divmod(choice.index, self._asked.n)
        echo, scored = self._echoes.get(prompt), self._prompts[prompt]
        shown = replies.CompletionChoice(choice.index, "" if echo is None else echo.text, None, None)
        if echo is not None and scored and self._asked.has_logprobs:
            # Once for all samples: a prompt may be long.
            if prompt not in self._echoed:
                self._echoed[prompt] = logprobs.of_completion(self._texts, OffsetText(self._texts), scored)
            shown.logprobs = self._echoed[prompt]
        if self._asked.has_prompt_logprobs and sample == 0:
            shown.prompt_logprobs = logprobs.of_prompt(self._texts, scored)
        return shown

    def _reply(self, choices: list[replies.CompletionChoice], usage: replies.Usage | None = None) -> replies.Completion:
        shown = UNSET if usage is None and not self._asked.includes_usage else usage
        return replies.Completion(self._asked.id, self._asked.created, self._asked.model, choices, shown)

    def _last_reply(self, choices: list[replies.CompletionChoice]) -> replies.Completion:
        last = self._reply(choices, self._tally.usage())
        last.timings = self._tally.timings()
        return last

    def _logprobs(self, choice: _Choice, entries: Sequence[TokenLogprobs]) -> replies.CompletionLogprobs:
        """Of output tokens, whose text begins after the echo."""
        offsets = self._offsets.get(choice.index)
        if offsets is None:
            echo = self._echoes.get(choice.index // self._asked.n) or PromptEcho("", ())
            offsets = self._offsets[choice.index] = OffsetText(self._texts, len(echo.text), echo.token_ids)
        return logprobs.of_completion(self._texts, offsets, entries)


def _ended(choice: replies.CompletionChoice, end: SampleEnd) -> replies.CompletionChoice:
    choice.finish_reason, choice.stop_reason, choice.seed = end.finish.reason, _stop_reason(end), end.seed
    return choice


def _is_much(num_entries: int, num_chars: int = 0) -> bool:
    return num_entries > _MAX_ENTRIES_ON_LOOP or num_chars > _MAX_CHARS_ON_LOOP


def _stop_reason(end: SampleEnd) -> str | int | UnsetType:
    """Which stop string or token it was; absent where the model or a limit ended the sample."""
    return UNSET if end.finish.matched_stop is None else end.finish.matched_stop
