"""Prompts of a wanted length that no cache has seen: random words of one token each."""

import random
from collections.abc import Sequence

from splitserve.bench.words import Words
from splitserve.models.locate import locate_model
from splitserve.models.tokenizer import Tokenizer


class Prompts:
    """Each is another one; equal seeds give equal ones, in order."""

    def __init__(self, tokenizer: Tokenizer, seed: int | str, words: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._words = words or [f" {word}" for word in Words(tokenizer, tokenizer.vocab_size).id_of]
        self._chance = random.Random(seed)  # noqa: S311  # prompts are no secrets

    @classmethod
    def of_model(cls, model: str | None, seed: int) -> "Prompts":
        """Counted in the tokens of a model as `--model` names it; None is the default one."""
        return cls(Tokenizer.load(locate_model(model, loads_weights=False).directory), seed)

    def fork(self, purpose: str) -> "Prompts":
        """Others, which do not depend on how many were drawn here."""
        return Prompts(self._tokenizer, f"{self._seed} {purpose}", self._words)

    def draw(self, num_tokens: int) -> str:
        """A text that is `num_tokens` tokens for this tokenizer; a server with another one counts otherwise.

        What the tokenizer itself puts around a text is counted in. A long one takes time: not for an event loop that
        measures.
        """
        words = self._chance.choices(self._words, k=num_tokens)
        while words and len(self._tokenizer.encode("".join(words))) > num_tokens:
            words.pop()
        while len(self._tokenizer.encode("".join(words))) < num_tokens:
            words.append(self._chance.choice(self._words))
        return "".join(words)
