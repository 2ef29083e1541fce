"""What penalties read: which tokens a sample holds so far, and how often it has produced each of them.

Made over the list of ids that a sequence grows anyway; a pure function of that list, however it came about, so prefill,
decode and a later attempt elsewhere agree. The counts are a cache: each token is counted once, when penalties first
ask for it, so a step costs the same however long the sequence is.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenHistory:
    """`token_ids` is the prompt (`num_prompt` tokens) and the output; its owner may append to it, and nothing else."""

    def __init__(self, token_ids: Sequence[int], num_prompt: int) -> None:
        self._token_ids = token_ids
        self._num_prompt = num_prompt
        self._num_counted = 0
        self._places: dict[int, int] = {}
        self._ids = array("q")
        self._num_outputs = array("q")

    @property
    def num_outputs(self) -> int:
        return len(self._token_ids) - self._num_prompt

    @property
    def total_len(self) -> int:
        return len(self._token_ids)

    def counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The distinct ids of prompt and output, and how often each is in the output: 0 for those of the prompt alone.

        The arrays are views that live until the next token; nobody may keep or change them.
        """
        for position in range(self._num_counted, len(self._token_ids)):
            token_id = self._token_ids[position]
            place = self._places.setdefault(token_id, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token_id)
                self._num_outputs.append(0)
            if position >= self._num_prompt:
                self._num_outputs[place] += 1
        self._num_counted = len(self._token_ids)
        return np.frombuffer(self._ids, dtype=np.int64), np.frombuffer(self._num_outputs, dtype=np.int64)
