"""The names of KV blocks: the same tokens after the same prefix have the same key on every worker.

Pure functions, called by whoever computes, sends or looks up blocks.
"""

import array
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256

_ROOT = b"splitserve block key 1"
_COMPLETE, _TAIL = b"complete", b"tail"


def block_keys(token_ids: Sequence[int], block_size: int, extras: Mapping[str, str]) -> list[bytes]:
    """One 32-byte key per block of `token_ids`: complete blocks, then the partial last one if there is one.

    A key is the SHA-256 over the parent's key, the kind of block and its tokens as little-endian u32; the first parent
    is a digest of `block_size` and `extras` (model, tenant, adapter: whatever else the K and V depend on). A partial
    block hashes under another kind and is nobody's parent, so it never equals a complete block's key.
    ValueError for a token that is not an unsigned 32-bit integer.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    tokens = _little_endian_u32(token_ids)
    block_nbytes = 4 * block_size
    parent = _root(block_size, extras)
    keys = []
    for first in range(0, len(tokens), block_nbytes):
        block = tokens[first : first + block_nbytes]
        kind = _COMPLETE if len(block) == block_nbytes else _TAIL
        parent = sha256(parent + kind + block).digest()
        keys.append(parent)
    return keys


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
