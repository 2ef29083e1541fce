"""Single tokens as text, for log-probabilities. `answers` asks."""

from collections.abc import Sequence
from typing import Protocol

from router.text import Detokenizer, continued


class TokenBytes(Detokenizer, Protocol):
    """The part of a tokenizer that knows what a token stands for."""

    def token_bytes(self, token_id: int) -> bytes: ...


class TokenTexts:
    """`text` names tokens that are a part of a character as OpenAI does: `bytes:` and each byte in hexadecimal."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self.tokenizer = tokenizer

    def bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        piece = self.bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class OffsetText:
    """How many characters of a choice's text stand before each of its tokens. Feed every token once and in order.

    `num_chars` stand before the first one, and are the text of the tokens of `context`.
    """

    def __init__(self, texts: TokenTexts, num_chars: int = 0, context: Sequence[int] = ()) -> None:
        self._stream = continued(texts.tokenizer, context)
        self._num_chars = num_chars

    def before(self, token_id: int) -> int:
        offset = self._num_chars
        self._num_chars += len(self._stream.step(token_id) or "")
        return offset
