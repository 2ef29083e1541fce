"""The names of KV blocks: the same tokens after the same prefix have the same key on every worker.

No state but a chain's own; used by whoever computes, sends or looks up blocks.
"""

import array
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from hashlib import sha256

_ROOT = b"splitserve block key 1"
_COMPLETE, _TAIL = b"complete", b"tail"


class KeyChain:
    """The keys of a growing sequence's blocks: each block is hashed once, however often the sequence grows.

    A key is the SHA-256 over the parent's key, the kind of block and its tokens as little-endian u32; the first parent
    is a digest of `block_size` and `extras` (model, tenant, adapter: whatever else the K and V depend on). A partial
    block hashes under another kind and is nobody's parent, so it never equals a complete block's key.
    """

    def __init__(self, block_size: int, extras: Mapping[str, str]) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self._block_size = block_size
        self._last = _root(block_size, extras)
        self.complete: list[bytes] = []
        "One 32-byte key per complete block so far."

    def extend(self, token_ids: Sequence[int]) -> None:
        """Names the complete blocks of the sequence's tokens so far that have no name yet.

        ValueError for a token that is not an unsigned 32-bit integer.
        """
        tokens = _little_endian_u32(token_ids[len(self.complete) * self._block_size :])
        block_nbytes = 4 * self._block_size
        for end in range(block_nbytes, len(tokens) + 1, block_nbytes):
            self._last = sha256(self._last + _COMPLETE + tokens[end - block_nbytes : end]).digest()
            self.complete.append(self._last)

    def all_keys(self, token_ids: Sequence[int]) -> list[bytes]:
        """`extend`, and the keys of every block of these tokens, the partial last one included."""
        self.extend(token_ids)
        tail = token_ids[len(self.complete) * self._block_size :]
        if not tail:
            return list(self.complete)
        return [*self.complete, sha256(self._last + _TAIL + _little_endian_u32(tail)).digest()]

    def fork(self) -> "KeyChain":
        """A chain that grows apart from here on."""
        fork = copy(self)
        fork.complete = list(self.complete)
        return fork


def _root(block_size: int, extras: Mapping[str, str]) -> bytes:
    digest = sha256(_ROOT)
    digest.update(block_size.to_bytes(4, "little"))
    for name, value in sorted(extras.items()):
        for text in (name, value):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def _little_endian_u32(token_ids: Sequence[int]) -> bytes:
    try:
        tokens = array.array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be unsigned 32-bit integers: {error}") from error
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()
