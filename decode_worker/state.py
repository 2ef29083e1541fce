"""What a decode worker keeps of an attempt: a reservation while its blocks arrive, or its prompt while that is computed
here; then one sequence per sample."""

import enum
from dataclasses import dataclass, field

from splitserve.engine.block_keys import KeyChain
from splitserve.engine.history import TokenHistory
from splitserve.engine.sampling_params import SamplingParams
from splitserve.worker import commands, messages
from splitserve.worker.prompts import Prompt


class Phase(enum.Enum):
    """Of a reservation. In all but one a transfer is open, and the reserved blocks are the KV thread's."""

    RECEIVING = enum.auto()
    PARKED = enum.auto()
    "The transfer has failed: the blocks are the engine's, and kept for another one."
    RENEWING = enum.auto()
    "The transfer is being cancelled; with its terminal event another one is opened."
    CLOSING = enum.auto()
    "The transfer is being cancelled; its blocks come back with the terminal event."


@dataclass(slots=True)
class Sequence:
    """A running sample. `token_ids` is prompt + outputs; the last one's KV is not in the pool yet. `keys` names the
    blocks that are complete, `history` is the sampler's view of the tokens."""

    attempt: str
    session: int
    params: SamplingParams
    sample: int
    num_prompt: int
    token_ids: list[int]
    keys: KeyChain
    blocks: list[int]
    traceparent: str
    history: TokenHistory = field(init=False)

    def __post_init__(self) -> None:
        self.history = TokenHistory(self.token_ids, self.num_prompt)

    @property
    def key(self) -> str:
        return f"{self.attempt}/{self.sample}"

    @property
    def num_tokens_in_pool(self) -> int:
        """All but the newest, whose K and V the next step computes."""
        return len(self.token_ids) - 1


@dataclass(slots=True)
class Reservation:
    """Room for an attempt, which may outlive its transfer: for `keep_s` another one can take the place of one that
    failed. While one is open, until its terminal event, the reserved blocks are the KV thread's.

    `full_blocks` hold whole blocks of `token_ids`, which all samples will share; the first `num_cached_blocks` of them
    came from the prefix cache and are pinned, the others are reserved. `own_blocks` has one block per sample, for the
    rest of the tokens and the first decoded one; the transfer fills the first of them.
    """

    attempt: str
    session: int
    start: messages.Start
    params: SamplingParams
    token_ids: list[int]
    keys: KeyChain
    num_cached_blocks: int
    full_blocks: list[int]
    own_blocks: list[int]
    keep_s: float
    traceparent: str
    transfer_id: str = ""
    deadline: float = 0.0
    phase: Phase = Phase.RECEIVING
    had_wrong_finish: bool = False
    renewal: commands.Renew | None = None
    "What is carried out when the transfer has ended, in RENEWING."

    @property
    def samples(self) -> list[messages.Sample]:
        return self.start.samples

    @property
    def blocks(self) -> list[int]:
        return self.full_blocks + self.own_blocks

    @property
    def pinned_blocks(self) -> list[int]:
        return self.full_blocks[: self.num_cached_blocks]

    @property
    def reserved_blocks(self) -> list[int]:
        return self.blocks[self.num_cached_blocks :]

    def grow(self, start: messages.Start, more_blocks: list[int]) -> None:
        """Goes on from `start`, which has a few tokens more; blocks keep their order, so the whole ones come first."""
        self.start = start
        self.token_ids = start.token_ids
        self.keys.extend(self.token_ids)
        blocks, num_full = self.blocks + more_blocks, len(self.keys.complete)
        self.full_blocks, self.own_blocks = blocks[:num_full], blocks[num_full:]


@dataclass(slots=True)
class LocalPrompt(Prompt):
    """A prompt that is computed here. Its `blocks` are those of a reservation: the whole ones of its tokens, and
    one per sample."""

    deadline: float
    traceparent: str

    @property
    def full_blocks(self) -> list[int]:
        return self.blocks[: len(self.keys.complete)]

    @property
    def own_blocks(self) -> list[int]:
        return self.blocks[len(self.keys.complete) :]
