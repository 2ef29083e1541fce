"""The answer to a request's options by one process: transformers in float32, a token at a time."""

from pathlib import Path
from typing import Any

import torch

from router.openai.token_texts import TokenTexts
from splitserve.engine.sampling_params import SamplingParams
from splitserve.models.tokenizer import Tokenizer
from tests.cluster.clients.told import Choice, Told
from tests.reference import logits, sampled
from tests.tiny_models import EOS_TOKEN_ID

NUM_TOP = 2


def of_one_process(directory: Path, tokenizer: Tokenizer, prompt: list[int], options: dict[str, Any]) -> Told:
    """`options` by OpenAI's names; each token with NUM_TOP of the likeliest."""
    options = dict(options)
    n, stop = options.pop("n", 1), options.pop("stop", [])
    bias = tuple(sorted((int(key), float(value)) for key, value in options.pop("logit_bias", {}).items()))
    params = SamplingParams(logit_bias=bias, **options)
    told = Told([], len(prompt), 0)
    for sample in range(n):
        ids, choice = _ended(sampled(directory, prompt, params, sample_index=sample), params, stop, tokenizer)
        _score(choice, directory, prompt, ids, TokenTexts(tokenizer))
        told.choices.append(choice)
        told.num_tokens += len(ids)
    return told


def _ended(ids: list[int], params: SamplingParams, stop: list[str], tokenizer: Tokenizer) -> tuple[list[int], Choice]:
    """What ends the sample, and its tokens up to there: after each token the whole text is looked through."""
    for length in range(params.min_tokens + 1, len(ids) + 1):
        text = tokenizer.decode(ids[:length])
        found = [string for string in stop if string in text]
        if found:
            return ids[:length], Choice(text.partition(found[0])[0], finish_reason="stop", stop_reason=found[0])
    if len(ids) > params.min_tokens and ids[-1] in params.stop_token_ids:
        return ids, Choice(tokenizer.decode(ids[:-1]), finish_reason="stop", stop_reason=ids[-1])
    is_end = ids[-1] == EOS_TOKEN_ID and not params.ignore_eos
    return ids, Choice(tokenizer.decode(ids), finish_reason="stop" if is_end else "length")


def _score(choice: Choice, directory: Path, prompt: list[int], ids: list[int], names: TokenTexts) -> None:
    rows = torch.log_softmax(logits(directory, [*prompt, *ids]), -1)[len(prompt) - 1 : -1]
    for token_id, row in zip(ids, rows, strict=True):
        top = row.topk(NUM_TOP)
        choice.tokens.append(names.text(token_id))
        choice.logprobs.append(float(row[token_id]))
        choice.top.append(dict(zip(map(names.text, top.indices.tolist()), top.values.tolist(), strict=True)))
