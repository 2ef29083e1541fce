"""A prompt's text or chat in token ids, and ids in text: what is long on threads, within bounds, what is short at once.

`validation` owns one. Lengths are judged here as far as they can be before anything is tokenized.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from router.tokenizing import TokenizerThreads, TokenizingLimits
from splitserve.service.errors import InvalidRequest
from splitserve.v1 import inference_pb2 as pb

# Text longer than this many bytes per token of context is refused unseen: real text has three to five bytes a token.
MAX_BYTES_PER_TOKEN = 16
# So many ids are text, and so many messages are read, in about a millisecond: no more of them on the event loop.
_MAX_IDS_ON_LOOP = 1024
_MAX_MESSAGES_ON_LOOP = 256
_BYTES_PER_ID = 8

CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
EMPTY_PROMPT = "EMPTY_PROMPT"

_T = TypeVar("_T")


class Encoder(Protocol):
    """The part of a tokenizer that makes ids of text and text of ids. Either may take long; all may raise
    InvalidRequest."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class PromptCodec:
    """Every method raises InvalidRequest, with the contract's name of the field, or Overloaded."""

    def __init__(self, encoder: Encoder, tokenizing: TokenizingLimits) -> None:
        self._encoder = encoder
        self._threads = TokenizerThreads(tokenizing)

    def close(self) -> None:
        """Gives the threads back without waiting for text that is still being tokenized."""
        self._threads.close()

    async def encode_text(self, text: str, context_len: int) -> list[int]:
        if not text:
            raise InvalidRequest("text is empty: a prompt needs at least one token", field="text", reason=EMPTY_PROMPT)
        num_bytes = _num_bytes(text)
        _check_text_bytes(num_bytes, "text", context_len)
        return await self._encode(lambda: self._encoder.encode(text), num_bytes, "text")

    async def encode_chat(self, chat: pb.Chat, context_len: int) -> list[int]:
        if not chat.messages:
            raise InvalidRequest("chat has no messages", field="chat", reason=EMPTY_PROMPT)
        if len(chat.messages) >= context_len:
            raise InvalidRequest(
                f"chat has {len(chat.messages)} messages, more than the context of {context_len} tokens can hold",
                field="chat",
                reason=CONTEXT_LENGTH_EXCEEDED,
            )
        if len(chat.messages) <= _MAX_MESSAGES_ON_LOOP:
            messages, num_bytes = _read_chat(chat, context_len)
            return await self._encode(lambda: self._encoder.encode_chat(messages), num_bytes, "chat")
        return await self._encode(
            lambda: self._encoder.encode_chat(_read_chat(chat, context_len)[0]), chat.ByteSize(), "chat"
        )

    async def decode(self, ids: Sequence[int], field: str) -> str:
        """The text of any ids, without special tokens."""
        if len(ids) <= _MAX_IDS_ON_LOOP:
            with _named(field):
                return self._encoder.decode(ids)
        return await self._off_loop(lambda: self._encoder.decode(ids), len(ids) * _BYTES_PER_ID, field)

    async def _encode(self, encode: Callable[[], list[int]], num_bytes: int, field: str) -> list[int]:
        ids = await self._off_loop(encode, num_bytes, field)
        if not ids:
            raise InvalidRequest(
                f"{field} tokenizes to nothing: a prompt needs at least one token", field=field, reason=EMPTY_PROMPT
            )
        return ids

    async def _off_loop(self, work: Callable[[], _T], num_bytes: int, field: str) -> _T:
        with _named(field):
            return await self._threads.run(work, num_bytes)


@contextmanager
def _named(field: str) -> Iterator[None]:
    """The tokenizer knows what is wrong, but not which field of ours it was given."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(error.message, reason=error.reason, field=field) from error


def _read_chat(chat: pb.Chat, context_len: int) -> tuple[list[dict[str, str]], int]:
    """The messages as templates take them, and how many bytes of text they have."""
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    num_bytes = sum(_num_bytes(text) for message in messages for text in message.values())
    _check_text_bytes(num_bytes, "chat", context_len)
    return messages, num_bytes


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _check_text_bytes(num_bytes: int, field: str, context_len: int) -> None:
    limit = MAX_BYTES_PER_TOKEN * context_len
    if num_bytes > limit:
        raise InvalidRequest(
            f"{field} has {num_bytes} bytes, too many for the context of {context_len} tokens: more than "
            f"{limit} bytes ({MAX_BYTES_PER_TOKEN} per token) are refused without being tokenized",
            field=field,
            reason=CONTEXT_LENGTH_EXCEEDED,
        )
