"""The bytes that a prefill worker sends to the decode worker inside a transfer's Finish."""

import msgspec

from splitserve.worker.messages import Token


class FinishPayload(msgspec.Struct, frozen=True):
    """The first token of every sample of the attempt, with its logprobs if asked for, in order of the samples."""

    tokens: list[Token]


def encode_finish(tokens: list[Token]) -> bytes:
    return msgspec.msgpack.encode(FinishPayload(tokens))


def decode_finish(payload: bytes) -> list[Token]:
    """Raises msgspec.ValidationError or DecodeError when a peer sent something else."""
    return msgspec.msgpack.decode(payload, type=FinishPayload).tokens
