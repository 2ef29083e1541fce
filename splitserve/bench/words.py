"""What fake workers say and clients read: words, one token each, by which a client knows when its token was sent."""

import re
import time
from collections.abc import Sequence

from splitserve.models.tokenizer import Tokenizer
from splitserve.service.errors import Internal

_WORD = re.compile(r" [a-z]+")
# As many as there are steps on their way at once, and far more.
NUM_WORDS = 4096


class Words:
    """Tokens with a text of their own: a space, then letters. Each is said again after all others."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        texts: dict[str, int] = {}
        for token_id in range(vocab_size):
            text = tokenizer.token_bytes(token_id).decode(errors="replace")
            if _WORD.fullmatch(text):
                texts.setdefault(text[1:], token_id)
            if len(texts) == NUM_WORDS:
                break
        else:
            raise Internal(f"the tokenizer has {len(texts)} tokens that are words, {NUM_WORDS} are needed")
        self.ids = list(texts.values())
        self.id_of = texts


class Meter:
    """Counts tokens and chunks, and notes how long tokens were on their way while `is_noting`."""

    def __init__(self, words: Words) -> None:
        self.num_tokens = 0
        self.num_chunks = 0
        self.latencies: list[float] = []
        self.is_noting = False
        self.error: Exception | None = None
        self._words = words
        self._sent_at: dict[int, float] = {}
        self._num_said = 0

    def next_word(self) -> int:
        """The token for a step that is sent now."""
        token_id = self._words.ids[self._num_said % NUM_WORDS]
        self._num_said += 1
        self._sent_at[token_id] = time.perf_counter()
        return token_id

    def take_ids(self, token_ids: Sequence[int]) -> None:
        """One chunk of a client."""
        self.num_chunks += 1
        self.num_tokens += len(token_ids)
        if self.is_noting:
            now = time.perf_counter()
            self.latencies += [now - self._sent_at[token_id] for token_id in token_ids if token_id in self._sent_at]

    def take_text(self, text: str) -> None:
        """The same, of its text."""
        words = text.split()
        if self.is_noting:
            self.take_ids([self._words.id_of[word] for word in words])
        else:
            self.num_chunks += 1
            self.num_tokens += len(words)

    def fail(self, error: Exception) -> None:
        """A stream broke: what is measured is worth nothing any more."""
        self.error = self.error or error
