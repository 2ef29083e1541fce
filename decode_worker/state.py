"""What a decode worker keeps of an attempt: a reservation while its blocks arrive, then one sequence per sample."""

import enum
from dataclasses import dataclass, field

from splitserve.engine.history import TokenHistory
from splitserve.engine.sampling_params import SamplingParams
from splitserve.worker import messages


class Phase(enum.Enum):
    RECEIVING = enum.auto()
    CLOSING = enum.auto()
    "The transfer is being cancelled; its blocks come back with the terminal event."


@dataclass(slots=True)
class Reservation:
    """Room for an attempt. Its blocks are the KV thread's until the transfer's terminal event.

    `full_blocks` hold whole blocks of `token_ids`, which all samples will share. `own_blocks` has one block per sample,
    for the rest of the tokens and the first decoded one; the transfer fills the first of them.
    """

    attempt: str
    session: int
    transfer_id: str
    params: SamplingParams
    samples: list[messages.Sample]
    num_prompt: int
    token_ids: list[int]
    full_blocks: list[int]
    own_blocks: list[int]
    deadline: float
    traceparent: str
    phase: Phase = field(default=Phase.RECEIVING)

    @property
    def blocks(self) -> list[int]:
        return self.full_blocks + self.own_blocks


@dataclass(slots=True)
class Sequence:
    """A running sample. `token_ids` is prompt + outputs; the last one's KV is not in the pool yet. `history` is the
    sampler's view of them."""

    attempt: str
    session: int
    params: SamplingParams
    sample: int
    num_prompt: int
    token_ids: list[int]
    blocks: list[int]
    traceparent: str
    history: TokenHistory = field(init=False)

    def __post_init__(self) -> None:
        self.history = TokenHistory(self.token_ids, self.num_prompt)

    @property
    def key(self) -> str:
        return f"{self.attempt}/{self.sample}"
