"""Random tokens of real kinds of tokenizers: pieces and stop strings as in the text that comes of them in one go."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from router.text import TextStream
from splitserve.models.detokenizer import DecodeStream, Detokenizer
from tests.models.tiny_tokenizers import byte_fallback, metaspace
from tests.router.test_text import reference, shown
from tests.tiny_models import add_tokenizer

KINDS = ("byte BPE", "byte fallback", "metaspace")


class Decoder:
    """A tokenizer as the router sees it. `text` is the one-shot decoding, by the library itself."""

    def __init__(self, library: LibraryTokenizer) -> None:
        self._library = library
        self._detokenizer = Detokenizer.for_tokenizer(library)
        self.num_ids = library.get_vocab_size()

    def decode_stream(self, skip_special_tokens: bool = True) -> DecodeStream:
        return self._detokenizer.stream(skip_special_tokens)

    def text(self, ids: list[int]) -> str:
        return self._library.decode(ids)

    def streamed(self, ids: list[int]) -> str:
        return shown(TextStream(self), ids)[0]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer(directory)
    byte_bpe = LibraryTokenizer.from_file(str(directory / "tokenizer.json"))
    libraries = (byte_bpe, byte_fallback(), metaspace())
    return {kind: Decoder(library) for kind, library in zip(KINDS, libraries, strict=True)}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_together_are_another_text(kind: str, data: st.DataObject, decoders: dict[str, Decoder]) -> None:
    """C13, C19. With byte fallback the library takes back characters that a broken byte follows; a stream cannot."""
    decoder = decoders[kind]
    ids = data.draw(st.lists(st.integers(0, decoder.num_ids - 1), max_size=40))
    text = decoder.text(ids)
    if kind != "byte fallback" or "\ufffd" not in text:
        assert decoder.streamed(ids) == text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_that_goes_on_loses_a_space(kind: str, data: st.DataObject, decoders: dict[str, Decoder]) -> None:
    """C19: prompt and output together are the one-shot decoding of both."""
    decoder = decoders[kind]
    drawn = st.lists(st.integers(0, decoder.num_ids - 1), max_size=20)
    prompt, ids = data.draw(drawn), data.draw(drawn)
    before, whole = decoder.text(prompt), decoder.text(prompt + ids)
    if "\ufffd" not in before and (kind != "byte fallback" or "\ufffd" not in whole):
        assert before + shown(TextStream(decoder, context=prompt), ids)[0] == whole


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stop_string_over_token_borders_is_missed_or_shown(
    kind: str, data: st.DataObject, decoders: dict[str, Decoder]
) -> None:
    """C16, C18: pieces of the text itself, wherever its tokens begin, and others that are not there."""
    decoder = decoders[kind]
    ids = data.draw(st.lists(st.integers(0, decoder.num_ids - 1), min_size=1, max_size=40))
    text = decoder.streamed(ids)
    there = st.integers(0, max(len(text) - 1, 0)).flatmap(
        lambda start: st.integers(start + 1, start + 6).map(lambda end: text[start:end])
    )
    drawn = data.draw(st.lists(st.one_of(there, st.text("abcé ", min_size=1, max_size=3)), min_size=1, max_size=4))
    stop = tuple(string for string in drawn if string)
    assert shown(TextStream(decoder, stop), ids) == reference(text, stop)
