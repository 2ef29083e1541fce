"""Why a process could not start, from what it wrote: the sentence, not the frame or the JSON around it."""

import pytest

from splitserve.cli.child import last_words


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "it wrote nothing"),
        (["a", "the pool holds no block"], "the pool holds no block"),
        (['{"event": "cannot serve", "reason": "no such model"}'], "no such model"),
        (['{"event": "stopping"}'], "stopping"),
        (["╭─ Error ─╮", "│ Invalid value for --device: cuda │", "╰─────────╯"], "Invalid value for --device: cuda"),
        (["[1]", ""], "[1]"),
    ],
)
def test_reason_is_hidden(lines: list[str], said: str) -> None:
    assert last_words(lines) == said
