"""Token ids back to text, one token at a time, so that no text once given ever changes.

Called by `splitserve.models.tokenizer`; each stream is owned by whoever asked for it and used by one thread.

The streams of the `tokenizers` library are not used: they raise on a byte that does not continue a character where an
earlier piece is rewritten by it, and have no way to get at the text still held when a generation ends. Here a token
gives bytes, and one incremental UTF-8 decoder turns bytes into text: exact, and constant time per token.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Byte-fallback tokenizers show one mark per stray byte, byte-level ones one per broken character.
_EACH_BYTE = "splitserve-replace-each-byte"
# The pieces of a SentencePiece tokenizer's decoder, in the one order that is used.
_SENTENCEPIECE_STAGES = re.compile(r"(Replace )*(ByteFallback )?Fuse (Strip )?")


class DecodeStream(Protocol):
    """Text from token ids. The results of all calls put together are the text of all the ids."""

    def step(self, token_id: int) -> str | None:
        """The text that this token completes; None while a character is not whole, or for a token without text."""

    def flush(self) -> str | None:
        """What is left when no token follows: a replacement mark for a character that never became whole."""


class ByteStream:
    """A stream over tokens that stand for bytes."""

    def __init__(self, piece: Callable[[int], bytes], errors: str, strip_left: str = "") -> None:
        """`piece` gives a token's bytes; `strip_left` is taken off the front of the text as far as it is there."""
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._strip_left = strip_left

    def step(self, token_id: int) -> str | None:
        return self._stripped(self._decoder.decode(self._piece(token_id))) or None

    def flush(self) -> str | None:
        return self._stripped(self._decoder.decode(b"", final=True)) or None

    def _stripped(self, text: str) -> str:
        while text and self._strip_left:
            if text[0] != self._strip_left[0]:
                self._strip_left = ""
                return text
            text, self._strip_left = text[1:], self._strip_left[1:]
        return text


class WindowStream:
    """A stream for decoders of which nothing is known: decodes the last tokens anew, and shows what is added."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_shown_ids = 0
        self._shown = ""

    def step(self, token_id: int) -> str | None:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._shown) or text.endswith(_REPLACEMENT) or not text.startswith(self._shown):
            return None
        added = text[len(self._shown) :]
        # The tokens just shown stay in front of the next ones: many decoders treat a first token differently.
        self._ids = self._ids[self._num_shown_ids :]
        self._num_shown_ids = len(self._ids)
        self._shown = self._decode(self._ids)
        return added

    def flush(self) -> str | None:
        added = self._decode(self._ids)[len(self._shown) :]
        if added:  # else what has been shown stays in front
            self._ids, self._num_shown_ids, self._shown = [], 0, ""
        return added or None


@dataclass(frozen=True)
class Detokenizer:
    """Makes the right stream for a tokenizer. Build it with `for_tokenizer`."""

    tokenizer: Tokenizer
    special_ids: frozenset[int]
    piece: Callable[[int], bytes] | None
    errors: str
    strip_left: str

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer) -> "Detokenizer":
        """Reads how `tokenizer` decodes."""
        special = (token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        decoder = json.loads(tokenizer.to_str())["decoder"] or {}
        stages = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        to_bytes, errors, strip_left = _reading(stages)
        piece = None if to_bytes is None else _piece_table(tokenizer, to_bytes)
        return cls(tokenizer, frozenset(special), piece, errors, strip_left)

    def stream(self, skip_special_tokens: bool) -> DecodeStream:
        """A new stream. Ids that name no token give no text; nothing it is fed makes it raise."""
        if self.piece is None:
            return WindowStream(lambda ids: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        piece = self._piece_without_special if skip_special_tokens else self.piece
        return ByteStream(piece, self.errors, self.strip_left)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for by itself, special tokens by their name; nothing for an id that names none."""
        if self.piece is not None:
            return self.piece(token_id)
        return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def _piece_without_special(self, token_id: int) -> bytes:
        assert self.piece is not None
        return b"" if token_id in self.special_ids else self.piece(token_id)


def _reading(stages: list[dict[str, Any]]) -> tuple[Callable[[str], bytes] | None, str, str]:
    """How a decoder turns a token into bytes (None: not known), how broken bytes into text, and what is stripped."""
    names = "".join(f"{stage.get('type')} " for stage in stages)
    if names == "ByteLevel ":
        return _byte_level_piece, "replace", ""
    replaced = [stage for stage in stages if stage.get("type") == "Replace"]
    strip: dict[str, Any] = stages[-1] if names.endswith("Strip ") else {"content": "", "start": 0, "stop": 0}
    is_plain = all("String" in stage["pattern"] for stage in replaced) and strip["stop"] == 0
    if not (_SENTENCEPIECE_STAGES.fullmatch(names) and is_plain):
        return None, "replace", ""
    pairs = [(stage["pattern"]["String"], stage["content"]) for stage in replaced]
    has_byte_tokens = "ByteFallback " in names

    def piece(token: str) -> bytes:
        for old, new in pairs:
            token = token.replace(old, new)
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode("utf-8", errors="replace")

    return piece, _EACH_BYTE, str(strip["content"] * strip["start"])


def _piece_table(tokenizer: Tokenizer, to_bytes: Callable[[str], bytes]) -> Callable[[int], bytes]:
    pieces: dict[int, bytes] = {}

    def piece(token_id: int) -> bytes:
        found = pieces.get(token_id)
        if found is None:
            token = tokenizer.id_to_token(token_id)
            if token is None:
                return b""  # not remembered: the number of ids that name no token has no limit
            found = pieces[token_id] = to_bytes(token)
        return found

    return piece


def _byte_by_character() -> dict[str, int]:
    """The alphabet in which byte-level vocabularies are written: printable bytes as they are, the rest from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    shifted = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_BY_CHARACTER = _byte_by_character()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes([_BYTE_BY_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode("utf-8")  # an added token, which is written as it is


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)
