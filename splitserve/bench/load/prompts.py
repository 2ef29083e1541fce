"""Prompts of a wanted length that no cache has seen: random words of one token each."""

import random

from splitserve.bench.words import Words
from splitserve.models.locate import locate_model
from splitserve.models.tokenizer import Tokenizer


class Prompts:
    """Each is another one; equal seeds give equal ones, in order."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._words = [f" {word}" for word in Words(tokenizer, tokenizer.vocab_size).id_of]
        self._chance = random.Random(seed)  # noqa: S311  # prompts are no secrets

    @classmethod
    def of_model(cls, model: str | None, seed: int) -> "Prompts":
        """Counted in the tokens of a model as `--model` names it; None is the default one."""
        return cls(Tokenizer.load(locate_model(model, loads_weights=False).directory), seed)

    def draw(self, num_tokens: int) -> str:
        """A text that is `num_tokens` tokens for this tokenizer; a server with another one counts otherwise.

        What the tokenizer itself puts around a text is counted in.
        """
        words = self._chance.choices(self._words, k=num_tokens)
        while words and len(self._tokenizer.encode("".join(words))) > num_tokens:
            words.pop()
        while len(self._tokenizer.encode("".join(words))) < num_tokens:
            words.append(self._chance.choice(self._words))
        return "".join(words)
