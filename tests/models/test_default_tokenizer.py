"""The default model's tokenizer, against an encoder written from the definition and against known ids."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.models.description import ModelDescription
from splitserve.models.tokenizer import Tokenizer
from tests.models.reference_bpe import encode, gpt2_pieces, pieces_with_single_digits
from tests.models.texts import TEXTS

# Written down once from the vocabulary of the published file: a vocabulary out of order shows here.
KNOWN_IDS = {
    "1234567": [33, 34, 35, 36, 37, 38, 39],
    "a 12 b": [81, 216, 33, 34, 278],
}


@pytest.fixture(scope="session")
def vocabulary(default_model: ModelDescription) -> dict[str, int]:
    return dict(_bpe(default_model)["vocab"])


@pytest.fixture(scope="session")
def merges(default_model: ModelDescription) -> list[tuple[str, str]]:
    return [(first, second) for first, second in _bpe(default_model)["merges"]]


def _bpe(model: ModelDescription) -> dict[str, Any]:
    content = json.loads((model.directory / "tokenizer.json").read_text())
    return dict(content["model"])


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_dropped_digits_stage_changes_the_ids(
    text: str, default_tokenizer: Tokenizer, vocabulary: dict[str, int], merges: list[tuple[str, str]]
) -> None:
    assert default_tokenizer.encode(text) == encode(pieces_with_single_digits(text), merges, vocabulary)


@given(text=st.text(alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n'0123abé"))))
@settings(max_examples=150, deadline=None)
def test_some_text_is_cut_in_another_way_than_the_model_was_trained_with(
    text: str, default_tokenizer: Tokenizer, vocabulary: dict[str, int], merges: list[tuple[str, str]]
) -> None:
    assert default_tokenizer.encode(text) == encode(pieces_with_single_digits(text), merges, vocabulary)


@pytest.mark.parametrize(("text", "ids"), KNOWN_IDS.items())
def test_known_ids_change(text: str, ids: list[int], default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.encode(text) == ids


def test_the_reference_does_not_see_a_missing_digits_stage(
    default_tokenizer: Tokenizer, vocabulary: dict[str, int], merges: list[tuple[str, str]]
) -> None:
    """Without the stage at least one of the texts must come out otherwise, or the tests above prove nothing."""
    differing = [
        text for text in TEXTS if default_tokenizer.encode(text) != encode(gpt2_pieces(text), merges, vocabulary)
    ]
    assert differing


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_does_not_survive_a_round_trip(text: str, default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.decode(default_tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_or_limits_are_not_the_models(
    default_model: ModelDescription, default_tokenizer: Tokenizer
) -> None:
    config = json.loads((default_model.directory / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == default_model.max_model_len == 8192
    assert default_model.eos_token_ids == (2,)
    assert default_model.bos_token_id == 1
    assert default_tokenizer.vocab_size == default_model.vocab_size == 49152
    for name, token_id in {"bos_token": 1, "eos_token": 2, "pad_token": 2, "unk_token": 0}.items():
        assert default_tokenizer.encode(config[name]) == [token_id]
    generation = json.loads((default_model.directory / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)


def test_chat_ids_are_not_those_of_the_models_template(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode_chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 17 + 25?"}]
    )
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids == default_tokenizer.encode(text)
    assert ids[0] == 1
    assert ids.count(1) == 3
