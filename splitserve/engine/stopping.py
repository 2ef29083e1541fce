"""When a sequence ends by its own tokens: end-of-sequence, a stop token, or a length. Stop strings are the router's."""

from enum import Enum

from splitserve.engine.sampling_params import SamplingParams


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


def finish_reason(
    token_id: int,
    num_output_tokens: int,
    params: SamplingParams,
    eos_token_ids: frozenset[int],
    total_len: int,
    max_model_len: int,
) -> FinishReason | None:
    """Why the sequence ends with `token_id`, or None while it goes on.

    `num_output_tokens` counts the sample's output tokens over all attempts and `total_len` prompt and output tokens,
    both with this token. A token that both stops and fills up is a stop.
    """
    is_stop = token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)
    if is_stop and num_output_tokens > params.min_tokens:
        return FinishReason.STOP
    if num_output_tokens >= params.max_tokens or total_len >= max_model_len:
        return FinishReason.LENGTH
    return None
