"""The wire: one header per message, a checksum and typed msgpack; Blocks is followed by raw frames, one per block.

Used by the protocol machines, and by the fault wrapper to tell messages apart. Nothing here is ever pickled: a header
decodes to exactly one of these types within these limits, or the link it came from ends.
"""

from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from kvtransfer.fingerprint import Fingerprint

PROTOCOL_VERSION = 2

MAX_HEADER_BYTES = 5 * 1024 * 1024
MAX_PAYLOAD_BYTES = 1024 * 1024
MAX_BLOCKS_PER_TRANSFER = 65_536
MAX_BLOCKS_PER_MESSAGE = 256
MAX_DETAIL_CHARS = 1_000
MAX_KEY_BYTES = 32
DIGEST_BYTES = 16
CHECKSUM_BYTES = 8

Id = Annotated[str, Meta(min_length=1, max_length=256)]
Detail = Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)]
Count = Annotated[int, Meta(ge=0, le=MAX_BLOCKS_PER_TRANSFER)]
Index = Annotated[int, Meta(ge=0, lt=MAX_BLOCKS_PER_TRANSFER)]
Number = Annotated[int, Meta(ge=0, le=2**62)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Key = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="type", forbid_unknown_fields=True):
    """Base of every message; the tag is the class name."""


class Hello(Message, frozen=True, tag="Hello"):
    """Source → sink, first on every link. `sink_worker_id` is whom the source means to reach."""

    version: int
    worker_id: Id
    sink_worker_id: Id
    fingerprint: Fingerprint


class Welcome(Message, frozen=True, tag="Welcome"):
    """Sink → source: blocks may flow, at most `window_bytes` of them unacknowledged, `max_message_bytes` at once."""

    worker_id: Id
    window_bytes: Annotated[int, Meta(gt=0)]
    max_message_bytes: Annotated[int, Meta(gt=0)]


class Refused(Message, frozen=True, tag="Refused"):
    """Sink → source, last on a link: why the sink will not, or no longer, listen."""

    detail: Detail


class Ping(Message, frozen=True, tag="Ping"):
    """Either way; answered by Pong."""


class Pong(Message, frozen=True, tag="Pong"):
    pass


class Open(Message, frozen=True, tag="Open"):
    """Source → sink: the transfer begins; both sides compare the counts before any byte moves."""

    transfer_id: Id
    num_cached_blocks: Count
    num_blocks: Count
    traceparent: Annotated[str, Meta(max_length=128)] = ""


class Blocks(Message, frozen=True, tag="Blocks"):
    """Source → sink: one raw frame per index follows. `sequence` counts the link's Blocks messages."""

    transfer_id: Id
    sequence: Number
    indices: Annotated[list[Index], Meta(min_length=1, max_length=MAX_BLOCKS_PER_MESSAGE)]
    digests: Annotated[list[Digest], Meta(min_length=1, max_length=MAX_BLOCKS_PER_MESSAGE)]
    tp_rank: int
    tp_size: int


class BlocksAck(Message, frozen=True, tag="BlocksAck"):
    """Sink → source, one per Blocks: its credit is free again. `is_closed`: they were dropped; `detail` says why."""

    transfer_id: Id
    sequence: Number
    is_closed: bool = False
    detail: Detail = ""


class Finish(Message, frozen=True, tag="Finish"):
    """Source → sink: every block has been sent. `keys` has one per logical block, `digests` one per sent block."""

    transfer_id: Id
    num_cached_blocks: Count
    num_blocks: Count
    keys: Annotated[list[Key], Meta(max_length=MAX_BLOCKS_PER_TRANSFER)]
    digests: Annotated[list[Digest], Meta(max_length=MAX_BLOCKS_PER_TRANSFER)]
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]


class Acked(Message, frozen=True, tag="Acked"):
    """Sink → source: the transfer is complete and verified."""

    transfer_id: Id


class Cancel(Message, frozen=True, tag="Cancel"):
    """Either way: the sender has given the transfer up. A sink answers with Closed."""

    transfer_id: Id
    reason: Annotated[str, Meta(max_length=32)]
    detail: Detail


class Closed(Message, frozen=True, tag="Closed"):
    """Sink → source: nothing of this transfer is or will be taken.

    With `is_answer` it answers a Cancel, so the sink has read all that the source sent before that. Without, blocks of
    the transfer may still be under way.
    """

    transfer_id: Id
    detail: Detail
    is_answer: bool = False


AnyMessage = Hello | Welcome | Refused | Ping | Pong | Open | Blocks | BlocksAck | Finish | Acked | Cancel | Closed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class BadMessageError(ValueError):
    """Bytes that are no message of ours; ends the link they came from, nothing else."""


def encode(message: AnyMessage) -> bytes:
    return seal(_encoder.encode(message))


def seal(body: bytes) -> bytes:
    """Puts the checksum in front."""
    return xxhash.xxh3_64_digest(body) + body


def unseal(sealed: memoryview | bytes) -> memoryview | bytes:
    """What `seal` was given. Raises BadMessageError where it is not that any more, or too long."""
    if len(sealed) > MAX_HEADER_BYTES:
        raise BadMessageError(f"header of {len(sealed)} bytes, the limit is {MAX_HEADER_BYTES}")
    checksum, body = sealed[:CHECKSUM_BYTES], sealed[CHECKSUM_BYTES:]
    # Blocks have digests of their own; this one guards the first token and its like, which nothing else would.
    if xxhash.xxh3_64_digest(body) != checksum:
        raise BadMessageError(f"header of {len(sealed)} bytes that does not match its checksum")
    return body


def decode(header: memoryview | bytes) -> AnyMessage:
    """Raises BadMessageError for anything that is not one complete, undamaged, typed, bounded message."""
    body = unseal(header)
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessageError(f"undecodable header of {len(header)} bytes: {error}") from error


def shorten(detail: str) -> str:
    """Cut to what a message may carry."""
    return detail[:MAX_DETAIL_CHARS]
