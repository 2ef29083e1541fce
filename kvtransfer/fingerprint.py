"""What two pools must share before a block may travel between them. Sent in the handshake, compared by the sink."""

import msgspec


class Fingerprint(msgspec.Struct, frozen=True):
    model: str
    revision: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    layout_version: int
    tp_rank: int
    tp_size: int


def mismatch(ours: Fingerprint, theirs: Fingerprint) -> str | None:
    """Every field in which the two differ, with both values ("block_size: ours 16, theirs 32"); None when equal."""
    differences = [
        f"{name}: ours {getattr(ours, name)}, theirs {getattr(theirs, name)}"
        for name in ours.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]
    return "; ".join(differences) or None
