"""Where a worker's blocks are reached. Published through `Join`, read by every source that dials the worker."""

import msgspec


class KVEndpoint(msgspec.Struct, frozen=True):
    """`ipc_path` is used only by a peer that can read `nonce_path` and whose SHA-256 of it equals `nonce_digest`.

    Empty ipc fields mean: reached by `tcp` alone.
    """

    tcp: str
    ipc_path: str = ""
    nonce_path: str = ""
    nonce_digest: bytes = b""
