"""What `splitserve scale` and a running `splitserve up` say to each other: one JSON object a line, over a Unix socket.

One request to a connection. `Describe` is answered by a `Cluster`; `Scale` by any number of `Progress` and then `Done`;
either by `Refused` at any point. The end of the connection before that means that the other side is gone.
"""

import msgspec

from splitserve.service.errors import ERRORS_BY_GRPC_CODE, Internal, SplitserveError

MAX_LINE_BYTES = 64 * 1024


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    pass


class Scale(msgspec.Struct, frozen=True, tag="scale", forbid_unknown_fields=True):
    """`wait_s`: how long to wait until all is as it was asked for; None: answer as soon as it is under way."""

    target: dict[str, int]
    wait_s: float | None


class Cluster(msgspec.Struct, frozen=True, tag="cluster"):
    """`counts`: workers by role that are to stay."""

    pid: int
    model: str
    grpc_port: int
    http_port: int
    counts: dict[str, int]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    text: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    pass


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A SplitserveError of the other side."""

    code: str
    message: str
    reason: str
    field: str | None = None

    @classmethod
    def of(cls, error: SplitserveError) -> "Refused":
        return cls(error.grpc_code, error.message, error.reason, error.field)

    def error(self) -> SplitserveError:
        return ERRORS_BY_GRPC_CODE.get(self.code, Internal)(self.message, reason=self.reason, field=self.field)


Request = Describe | Scale
Answer = Cluster | Progress | Done | Refused

_encoder = msgspec.json.Encoder()
_request_decoder = msgspec.json.Decoder(Request)
_answer_decoder = msgspec.json.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """One line, with its end."""
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises msgspec.DecodeError."""
    request: Request = _request_decoder.decode(line)
    return request


def decode_answer(line: bytes) -> Answer:
    """Raises msgspec.DecodeError."""
    answer: Answer = _answer_decoder.decode(line)
    return answer
