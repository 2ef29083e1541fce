"""Streaming decode: nothing is lost, nothing shown is taken back, nothing raises."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from splitserve.models.description import ModelDescription
from splitserve.models.detokenizer import Detokenizer, WindowStream
from splitserve.models.tokenizer import Tokenizer
from tests.models.texts import TEXTS
from tests.models.tiny_tokenizers import byte_fallback, metaspace

VOCAB_SIZE = 49152
# Random ids of the whole vocabulary seldom break characters; the single bytes are among the first few hundred.
TOKEN_IDS = st.one_of(st.integers(0, VOCAB_SIZE - 1), st.integers(17, 300))


def streamed(detokenizer: Detokenizer, ids: Sequence[int], *, skip: bool = True) -> str:
    stream = detokenizer.stream(skip)
    return "".join([*(stream.step(token_id) or "" for token_id in ids), stream.flush() or ""])


@pytest.fixture(scope="session")
def library_tokenizer(default_model: ModelDescription) -> LibraryTokenizer:
    return LibraryTokenizer.from_file(str(default_model.directory / "tokenizer.json"))


@pytest.fixture(scope="session")
def byte_level(library_tokenizer: LibraryTokenizer) -> Detokenizer:
    return Detokenizer.for_tokenizer(library_tokenizer)


@given(ids=st.lists(TOKEN_IDS, max_size=60), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_streamed_text_differs_from_one_shot_text(
    ids: list[int], skip: bool, byte_level: Detokenizer, library_tokenizer: LibraryTokenizer
) -> None:
    """C13: the library's one-shot decoding is the reference, broken characters and broken ends included."""
    assert streamed(byte_level, ids, skip=skip) == library_tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_replacement_mark_is_shown_before_a_character_is_whole(text: str, default_tokenizer: Tokenizer) -> None:
    """C13: after every token what was shown is the beginning of the text."""
    stream = default_tokenizer.decode_stream(skip_special_tokens=False)
    shown = ""
    for token_id in default_tokenizer.encode(text):
        shown += stream.step(token_id) or ""
        assert text.startswith(shown)
    assert shown == text
    assert stream.flush() is None


def test_a_character_cut_off_at_the_end_is_lost(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("👍")
    stream = default_tokenizer.decode_stream()
    assert [stream.step(token_id) for token_id in ids[:-1]] == [None] * (len(ids) - 1)
    assert stream.flush() == "\ufffd"
    assert stream.flush() is None


def test_ids_outside_the_vocabulary_end_a_stream(default_tokenizer: Tokenizer) -> None:
    stream = default_tokenizer.decode_stream()
    assert stream.step(VOCAB_SIZE + 100) is None
    assert stream.step(default_tokenizer.encode("a")[0]) == "a"


def test_special_tokens_are_shown(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.decode([1, 81, 2]) == "a"
    assert default_tokenizer.decode([1, 81, 2], skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> LibraryTokenizer:
    return byte_fallback()


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_byte_fallback_text_loses_or_gains_something(text: str, byte_fallback_tokenizer: LibraryTokenizer) -> None:
    ids = byte_fallback_tokenizer.encode(text).ids
    detokenizer = Detokenizer.for_tokenizer(byte_fallback_tokenizer)
    assert streamed(detokenizer, ids) == byte_fallback_tokenizer.decode(ids) == text


@given(ids=st.lists(st.integers(0, 268), max_size=40))
@settings(max_examples=200, deadline=None)
def test_random_bytes_stop_a_byte_fallback_stream(ids: list[int], byte_fallback_tokenizer: LibraryTokenizer) -> None:
    """The library takes back whole characters when a later byte of their run is broken; a stream cannot.

    Where no run of bytes is broken both agree; otherwise the same bytes are shown, some of them as marks.
    """
    detokenizer = Detokenizer.for_tokenizer(byte_fallback_tokenizer)
    text, reference = streamed(detokenizer, ids), byte_fallback_tokenizer.decode(ids)
    if "\ufffd" not in reference:
        assert text == reference
    else:
        assert "\ufffd" in text
        assert len(text) <= len(reference)


def test_a_broken_byte_takes_back_a_character_already_shown(byte_fallback_tokenizer: LibraryTokenizer) -> None:
    """The library's own stream raises here."""
    detokenizer = Detokenizer.for_tokenizer(byte_fallback_tokenizer)
    ids = [byte + 1 for byte in ("👍".encode() + b"\xf0a")]
    stream = detokenizer.stream(True)
    assert [stream.step(token_id) for token_id in ids] == [None, None, None, "👍", None, "\ufffda"]


@pytest.fixture(scope="session")
def metaspace_tokenizer() -> LibraryTokenizer:
    return metaspace()


@given(text=st.text(alphabet="abcdefgh \ufffd", max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_decoder_nothing_is_known_of_loses_spaces(text: str, metaspace_tokenizer: LibraryTokenizer) -> None:
    detokenizer = Detokenizer.for_tokenizer(metaspace_tokenizer)
    assert isinstance(detokenizer.stream(True), WindowStream)
    ids = metaspace_tokenizer.encode(text).ids
    assert streamed(detokenizer, ids) == metaspace_tokenizer.decode(ids)
