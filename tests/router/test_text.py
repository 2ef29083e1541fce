"""What a client would read wrongly: broken characters, leaked or missed stop strings, text that changes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text import StopMatcher, TextStream
from tests.router.fakes import ByteTokenizer, PieceDetokenizer


def shown(stream: TextStream, ids: list[int]) -> tuple[str, str | None]:
    """All text and the stop string, of a stream that ends by itself after `ids`."""
    text = ""
    for token_id in ids:
        delta = stream.push(token_id)
        text += delta.text
        if delta.matched_stop is not None:
            return text, delta.matched_stop
    delta = stream.finish()
    return text + delta.text, delta.matched_stop


def reference(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """Reads `text` a character at a time, with no thought for speed."""
    for end in range(len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(data: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(borders)]


short_text = st.text(alphabet="ab é😀\n", max_size=30)


@given(
    text=short_text,
    stop=st.lists(st.text(alphabet="ab é😀\n", min_size=1, max_size=4), max_size=4),
    places=st.lists(st.integers(0, 200)),
)
def test_how_text_is_cut_into_tokens_changes_nothing(text: str, stop: list[str], places: list[int]) -> None:
    """C13, C16, C19."""
    pieces = cut(text.encode(), places)
    stream = TextStream(PieceDetokenizer(pieces), tuple(stop))
    assert shown(stream, list(range(len(pieces)))) == reference(text, tuple(stop))


@given(text=short_text, stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_is_withheld_only_while_it_could_start_a_stop_string(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(tuple(stop))
    fed = sent = ""
    for character in text:
        fed += character
        delta = matcher.feed(character)
        sent += delta.text
        if delta.matched_stop is not None:
            return
        held = fed.removeprefix(sent)
        assert sent + held == fed
        longest = max(
            (n for n in range(len(fed) + 1) if any(s.startswith(fed[len(fed) - n :]) for s in stop)), default=0
        )
        assert len(held) == longest


@given(
    ids=st.lists(
        st.one_of(st.integers(0, 255), st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 256, 257])), max_size=40
    )
)
def test_pieces_together_are_the_one_shot_text_for_any_bytes(ids: list[int]) -> None:
    """C13, C19: also for bytes that are no text, cut-off characters and special tokens in between."""
    tokenizer = ByteTokenizer(" seven")
    assert shown(TextStream(tokenizer), ids) == (tokenizer.decode(ids), None)


@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧‍👦", "ภาษาไทย", "हिन्दी", "příliš žluťoučký", "    .", "a    b", " ,", "        return x", " x"]
)
def test_characters_of_several_tokens_are_not_shown_in_parts(text: str) -> None:
    """C13, C19."""
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer)
    pieces = [stream.push(token_id).text for token_id in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize(
    ("words", "text", "stop", "expected"),
    [
        ((), "one, two, three, four", ("two, three",), ("one, ", "two, three")),
        ((" seven",), "six seven eight", ("eve",), ("six s", "eve")),
        ((), "xabcd", ("abcd", "ab"), ("x", "ab")),
        ((), "aab", ("ab",), ("a", "ab")),
        ((), "x\n\ny", ("\n\n",), ("x", "\n\n")),
        ((), "abab", ("abac",), ("abab", None)),
    ],
)
def test_stop_strings_end_the_text_before_their_first_character(
    words: tuple[str, ...], text: str, stop: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    """C16: over several tokens, inside one token, one a prefix of another, a start that fails."""
    tokenizer = ByteTokenizer(*words)
    assert shown(TextStream(tokenizer, stop), tokenizer.encode(text)) == expected


def test_a_stop_string_within_min_tokens_is_text() -> None:
    tokenizer = ByteTokenizer()
    assert shown(TextStream(tokenizer, ("b",), min_tokens=4), tokenizer.encode("abcdbe")) == ("abcd", "b")
