"""What the two carriers of a link say to each other, below the agents' messages and told apart by a first byte."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvtransfer.messages import MAX_BLOCKS_PER_MESSAGE, BadMessageError, Detail, seal, unseal

VERSION = 1

# The first byte of each header on the inner link.
PLAIN = b"\x00"  # an agents' message; its frames, if any, are beside it
PAIRED = b"\x01"  # an agents' message whose frames travel over the pair: their number follows in one more message part
OWN = b"\x02"  # one of those below

MAX_TRANSPORTS = 8
MAX_KEY_CHARS = 512
MAX_VALUE_BYTES = 65_536
MAX_VALUES = 64  # per try

Name = Annotated[str, Meta(min_length=1, max_length=16)]
Attempt = Annotated[int, Meta(ge=0, le=MAX_TRANSPORTS)]


class PairMessage(msgspec.Struct, frozen=True, array_like=True, tag_field="type", forbid_unknown_fields=True):
    """Base; the tag is the class name."""


class Offer(PairMessage, frozen=True, tag="Offer"):
    """Source → sink, first on a link and again after each try that failed: what is left to try, best first."""

    version: int
    attempt: Attempt
    transports: Annotated[list[Name], Meta(max_length=MAX_TRANSPORTS)]
    block_nbytes: Annotated[int, Meta(gt=0)]


class Answer(PairMessage, frozen=True, tag="Answer"):
    """Sink → source: the first of these that the sink can; "" for none. `detail` says what was against the others.

    `is_final`: to the same offer it will always say the same.
    """

    attempt: Attempt
    transport: Annotated[str, Meta(max_length=16)]
    detail: Detail = ""
    is_final: bool = False


class Rendezvous(PairMessage, frozen=True, tag="Rendezvous"):
    """Either way: a key of the store through which the library's two ranks find each other."""

    attempt: Attempt
    key: Annotated[str, Meta(max_length=MAX_KEY_CHARS)]
    value: Annotated[bytes, Meta(min_length=1, max_length=MAX_VALUE_BYTES)]


class Ready(PairMessage, frozen=True, tag="Ready"):
    """Either way: this side's rank has formed."""

    attempt: Attempt


class Failed(PairMessage, frozen=True, tag="Failed"):
    """Either way: this side's rank could not be formed; the source offers what is left."""

    attempt: Attempt
    detail: Detail


class Ended(PairMessage, frozen=True, tag="Ended"):
    """Either way, last on a link: why this side ends it."""

    detail: Detail


AnyPairMessage = Offer | Answer | Rendezvous | Ready | Failed | Ended

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyPairMessage] = msgspec.msgpack.Decoder(AnyPairMessage)


def encode(message: AnyPairMessage) -> bytes:
    return OWN + seal(_encoder.encode(message))


def decode(body: memoryview) -> AnyPairMessage:
    """Without the first byte. Raises BadMessageError."""
    try:
        return _decoder.decode(unseal(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessageError(f"undecodable message between carriers: {error}") from error


class Parcel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What announces the frames of a PAIRED message: `count` blocks of `block_nbytes` follow on the pair."""

    count: Annotated[int, Meta(gt=0, le=MAX_BLOCKS_PER_MESSAGE)]
    block_nbytes: Annotated[int, Meta(gt=0)]


_parcels: msgspec.msgpack.Decoder[Parcel] = msgspec.msgpack.Decoder(Parcel)


def announce(count: int, block_nbytes: int) -> bytes:
    return seal(_encoder.encode(Parcel(count, block_nbytes)))


def announced(part: memoryview, block_nbytes: int) -> int:
    """How many blocks will come. Raises BadMessageError before anything is posted for frames of another size."""
    try:
        parcel = _parcels.decode(unseal(part))
    except msgspec.MsgspecError as error:
        raise BadMessageError(f"undecodable announcement of blocks: {error}") from error
    if parcel.block_nbytes != block_nbytes:
        raise BadMessageError(f"blocks of {parcel.block_nbytes} bytes are announced, agreed were {block_nbytes}")
    return parcel.count
