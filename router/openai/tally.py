"""What an answer of the OpenAI API adds up to: its usage, and where its time went. `answers` owns one for each."""

from msgspec import UNSET, UnsetType

from router.openai import replies
from router.pieces import SampleEnd
from router.stages import Timings


class Tally:
    """Counts the ends of `num_choices` samples. Of each prompt the last one to end says how the request went."""

    def __init__(self, num_choices: int) -> None:
        self._num_to_end = num_choices
        self._last_ends: dict[int, SampleEnd] = {}
        self._num_tokens = 0

    def add(self, prompt: int, end: SampleEnd) -> replies.Timings | UnsetType:
        """What there is to tell with the end: `timings` with the last one."""
        self._num_to_end -= 1
        self._last_ends[prompt] = end
        self._num_tokens += end.num_tokens
        return self.timings()

    @property
    def _num_cached_tokens(self) -> int:
        return sum(end.cached_tokens for end in self._last_ends.values())

    def usage(self) -> replies.Usage:
        num_prompt_tokens = sum(end.num_prompt_tokens for end in self._last_ends.values())
        return replies.Usage(
            num_prompt_tokens,
            self._num_tokens,
            num_prompt_tokens + self._num_tokens,
            replies.PromptTokensDetails(self._num_cached_tokens),
        )

    def timings(self) -> replies.Timings | UnsetType:
        """Once every choice has ended, if the client asked for them."""
        told = [end.timings for end in self._last_ends.values() if end.timings is not None]
        if self._num_to_end or not told:
            return UNSET
        longest = max(told, key=_total)
        return replies.Timings(
            **{f"{stage}_s": seconds for stage, seconds in longest.seconds.items()},
            transfer_bytes=sum(timings.transfer_bytes for timings in told),
            cached_tokens=self._num_cached_tokens,
            attempts=sum(end.attempts for end in self._last_ends.values()),
        )


def _total(timings: Timings) -> float:
    return timings.total_s
