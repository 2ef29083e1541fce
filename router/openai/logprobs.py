"""Log-probabilities in OpenAI's shapes, and prompts' in vLLM's. Called by `answers`, for long prompts on a thread."""

from collections.abc import Sequence

from router.openai import replies
from router.openai.token_texts import OffsetText, TokenTexts
from router.request import TokenLogprobs


def of_chat(texts: TokenTexts, entries: Sequence[TokenLogprobs]) -> replies.ChatLogprobs:
    return replies.ChatLogprobs([_token_logprob(texts, entry) for entry in entries])


def of_completion(
    texts: TokenTexts, offsets: OffsetText, entries: Sequence[TokenLogprobs]
) -> replies.CompletionLogprobs:
    """`offsets` goes on with these tokens."""
    return replies.CompletionLogprobs(
        tokens=[texts.text(entry.token_id) for entry in entries],
        token_logprobs=[None if entry.logprob is None else _finite(entry.logprob) for entry in entries],
        top_logprobs=[_top(texts, entry) for entry in entries],
        text_offset=[offsets.before(entry.token_id) for entry in entries],
    )


def joined(first: replies.CompletionLogprobs, second: replies.CompletionLogprobs) -> replies.CompletionLogprobs:
    return replies.CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def of_prompt(texts: TokenTexts, entries: Sequence[TokenLogprobs]) -> replies.PromptLogprobTable:
    return [
        None
        if entry.logprob is None
        else {
            str(token_id): replies.PromptLogprob(_finite(logprob), texts.text(token_id))
            for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top)
        }
        for entry in entries
    ]


def _token_logprob(texts: TokenTexts, entry: TokenLogprobs) -> replies.TokenLogprob:
    top = [
        replies.TopLogprob(texts.text(token_id), _finite(logprob), list(texts.bytes(token_id)))
        for token_id, logprob in entry.top
    ]
    assert entry.logprob is not None, "an output token has a logprob"
    text, own = texts.text(entry.token_id), list(texts.bytes(entry.token_id))
    return replies.TokenLogprob(text, _finite(entry.logprob), own, top)


def _top(texts: TokenTexts, entry: TokenLogprobs) -> dict[str, float] | None:
    """By text, as this shape has it: of tokens with one text the likeliest is shown."""
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in entry.top:
        top.setdefault(texts.text(token_id), _finite(logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, replies.LOWEST_LOGPROB)
