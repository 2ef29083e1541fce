"""What a prefill worker keeps of an attempt, from its admission until its blocks have arrived."""

from dataclasses import dataclass, field

from kvtransfer.ticket import Ticket
from splitserve.engine.block_keys import KeyChain
from splitserve.engine.sampling_params import SamplingParams
from splitserve.worker import messages


@dataclass(slots=True)
class PrefillAttempt:
    """A prompt being computed or sent: `num_computed` tokens are in `blocks`, `num_sent` blocks are on their way.

    The first `num_cached` tokens came from the prefix cache.
    """

    attempt: str
    session: int
    ticket: Ticket
    params: SamplingParams
    samples: list[messages.Sample]
    num_prompt: int
    token_ids: list[int]
    keys: KeyChain
    blocks: list[int]
    deadline: float
    num_cached: int
    num_computed: int
    num_sent: int
    num_prompt_logprobs: int | None
    "Likeliest tokens to tell with each prompt token; None: the prompt's logprobs are not wanted."
    released: bool = field(default=False)
    "Nobody wants the result any more: no more chunks, no reports."

    @property
    def is_computing(self) -> bool:
        return not self.released and self.num_computed < len(self.token_ids)

    @property
    def has_started(self) -> bool:
        """Something of it has been computed here; what came from the cache is no work done."""
        return self.num_computed > self.num_cached
