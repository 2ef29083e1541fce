"""One link's way from an offer to a pair, and what it holds back meanwhile. Plain state, owned by `pairs.carrier`.

The source offers transports in its order of preference, the sink picks the first that it can, both form their rank and
say so. A try that fails is followed by an offer of what is left; "zmq" needs no pair and always succeeds.
"""

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.carrier import ZMQ, Connected, LinkId, Received
from kvtransfer.frames import Frame
from kvtransfer.pairs.lane import Lane


class PairState(enum.Enum):
    AGREEING = enum.auto()  # about a transport
    FORMING = enum.auto()  # both ranks
    UP = enum.auto()


@dataclass
class Held:
    """A message that has to wait: for its own frames, or behind one that does."""

    header: memoryview
    frames: Sequence[Frame] | None
    num_blocks: int = 0
    "That its frames will be; 0 where they did not take the pair."

    @property
    def num_expected(self) -> int:
        """Blocks that have not arrived."""
        return self.num_blocks if self.frames is None else 0


@dataclass
class PairLink:
    """`offered` is the source's: what is left to try."""

    link: LinkId
    is_source: bool
    inner_path: str
    # Where the sink listens; "" at the sink.
    address: str = ""
    offered: list[str] = field(default_factory=list)
    state: PairState = PairState.AGREEING
    # Until it is up, the peer has to say something by then.
    due: float = math.inf
    # The sink has heard of none yet.
    attempt: int = -1
    transport: str = ""
    num_rendezvous: int = 0
    up_at: float = 0.0
    lane: Lane | None = None
    lane_path: str = ""
    is_formed: bool = False
    is_peer_ready: bool = False
    # Why better transports were not taken, in the order tried.
    detours: list[str] = field(default_factory=list)
    held: deque[Held] = field(default_factory=deque)
    held_nbytes: int = 0
    "Of their headers."

    @property
    def is_paired(self) -> bool:
        return self.lane is not None and self.state is PairState.UP

    @property
    def connection(self) -> Connected:
        return Connected(
            self.link,
            self.lane_path or self.inner_path,
            is_incoming=not self.is_source,
            transport=self.transport,
            has_tensors=self.lane is not None,
            fallback="; ".join(self.detours),
        )

    def begin(self, attempt: int, transport: str) -> None:
        """Of a pair. Where there is to be none, both sides are as good as ready."""
        self.attempt = attempt
        self.transport = transport
        self.is_formed = self.is_peer_ready = transport == ZMQ
        self.num_rendezvous = 0

    def end_lane(self, reason: str) -> None:
        if self.lane is not None:
            self.lane.end(reason)
        self.lane = None
        self.lane_path = ""

    def hold(self, message: Held) -> None:
        self.held.append(message)
        self.held_nbytes += message.header.nbytes

    def arrived(self, frames: Sequence[Frame]) -> None:
        """The frames of the oldest message that waits for its own."""
        next(message for message in self.held if message.frames is None).frames = frames

    def released(self) -> list[Received]:
        """What may be handled now, in order."""
        free: list[Received] = []
        while self.held and self.held[0].frames is not None:
            message = self.held.popleft()
            self.held_nbytes -= message.header.nbytes
            assert message.frames is not None
            free.append(Received(self.link, message.header, message.frames))
        return free
