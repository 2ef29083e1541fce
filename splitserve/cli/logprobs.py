"""Logprobs as lines to read, one token a line. Pure; `generate` and `chat` print them beside the answer."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from splitserve.client.types import Chunk, TokenLogprobs


class LogprobTables:
    """Collects what an answer's chunks bring of logprobs."""

    def __init__(self) -> None:
        self._prompt: list[tuple[TokenLogprobs, str]] = []
        self._answers = defaultdict[int, list[tuple[TokenLogprobs, str]]](list)

    def add(self, chunk: Chunk) -> None:
        self._prompt += [(entry, "") for entry in chunk.prompt_logprobs]
        if chunk.logprobs:
            # The text of several tokens is not told apart: it came with the last one.
            answer = self._answers[chunk.index]
            answer += [(entry, "") for entry in chunk.logprobs[:-1]]
            answer.append((chunk.logprobs[-1], repr(chunk.text)))

    def lines(self) -> Iterator[str]:
        """A table of the prompt and one of each sample of the answer, each if its logprobs were asked for."""
        if self._prompt:
            yield from _table("prompt", self._prompt)
        for index, rows in sorted(self._answers.items()):
            yield from _table("answer" if len(self._answers) == 1 else f"[{index}]", rows)


def _table(title: str, rows: Sequence[tuple[TokenLogprobs, str]]) -> Iterator[str]:
    has_text = any(text for _, text in rows)
    width = max(len("text"), *(len(text) for _, text in rows)) if has_text else 0
    yield _line(title, "token", "logprob", "text".ljust(width) if has_text else "", "likeliest in its place")
    for position, (entry, text) in enumerate(rows):
        logprob = "" if entry.logprob is None else f"{entry.logprob:.4f}"
        top = ", ".join(f"{token_id} {value:.4f}" for token_id, value in entry.top.items())
        yield _line(str(position), str(entry.token_id), logprob, text.ljust(width), top)


def _line(position: str, token: str, logprob: str, text: str, top: str) -> str:
    return "  ".join(filter(None, (f"{position:>7} {token:>7} {logprob:>9}", text, top))).rstrip()
