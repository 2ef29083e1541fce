"""The shape of one KV block: what pools, transports and fingerprints must agree on.

Built once by the model runner from the model's config; plain data, owned by nobody.
"""

from dataclasses import dataclass
from typing import ClassVar

_ITEM_NBYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class KVLayout:
    """Bytes of a block are `[layer, K/V, kv_head]`, contiguous: K of a head `[head_dim, token]`, V `[token, head_dim]`.

    K lies transposed because a score is a sum over head_dim: with neighbouring tokens side by side in memory, a
    processor computes the scores of many tokens with one instruction.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # "bfloat16" or "float32"

    LAYOUT_VERSION: ClassVar[int] = 2

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in _ITEM_NBYTES:
            raise ValueError(f"dtype must be one of {sorted(_ITEM_NBYTES)}, not {self.dtype!r}")

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size * self.head_dim)

    @property
    def token_nbytes(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _ITEM_NBYTES[self.dtype]

    @property
    def block_nbytes(self) -> int:
        return self.block_size * self.token_nbytes

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that `num_tokens` tokens occupy, the partial last one included."""
        return -(-num_tokens // self.block_size)
