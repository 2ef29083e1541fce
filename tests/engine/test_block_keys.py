"""Names of blocks: equal exactly for equal tokens after equal prefixes under equal circumstances."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.block_keys import KeyChain

EXTRAS = {"model": "tiny@1", "tenant": ""}
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=24)


def block_keys(token_ids: list[int], block_size: int, extras: dict[str, str]) -> list[bytes]:
    return KeyChain(block_size, extras).all_keys(token_ids)


def test_keys_change_with_the_release() -> None:
    """Workers of two releases must agree: the first key of a known prompt is written down."""
    keys = block_keys([1, 2, 3, 4, 5], 4, {"model": "m"})
    assert [key.hex()[:16] for key in keys] == ["00ab32450eabb67e", "15e6edff5c47ddde"]


@settings(deadline=None)
@given(first=tokens, second=tokens)
def test_two_prompts_share_a_key_they_should_not(first: list[int], second: list[int]) -> None:
    ours, theirs = block_keys(first, 4, EXTRAS), block_keys(second, 4, EXTRAS)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        assert (one == other) == (first[: 4 * index + 4] == second[: 4 * index + 4])
    assert len(ours) == -(-len(first) // 4)
    assert len({*ours}) == len(ours)


def test_partial_block_is_taken_for_a_complete_one() -> None:
    complete = block_keys([7, 7, 0, 0], 4, EXTRAS)
    assert block_keys([7, 7], 4, EXTRAS)[0] not in complete
    # The same tokens as a complete block of another size, or as a tail under a longer block.
    assert block_keys([7, 7], 2, EXTRAS) != block_keys([7, 7], 4, EXTRAS)


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"model": "tiny@1"},
        {"model": "tiny@2", "tenant": ""},
        {"model": "tiny@1t", "enant": ""},
        {"tenant": "tiny@1", "model": ""},
    ],
)
def test_block_of_another_model_or_tenant_is_a_hit(extras: dict[str, str]) -> None:
    assert block_keys([1, 2, 3, 4], 4, extras) != block_keys([1, 2, 3, 4], 4, EXTRAS)


def test_order_of_extras_changes_the_key() -> None:
    assert block_keys([1], 4, {"a": "1", "b": "2"}) == block_keys([1], 4, {"b": "2", "a": "1"})


@pytest.mark.parametrize("token", [-1, 2**32, "7", 1.5])
def test_bad_token_gets_a_key(token: object) -> None:
    with pytest.raises(ValueError, match="unsigned 32-bit"):
        block_keys([1, token], 4, EXTRAS)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="block_size"):
        block_keys([1], 0, EXTRAS)
