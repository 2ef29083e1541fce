"""A model that computes from nothing but the bytes of its pool, so that a lost, foreign or partial block changes the
text at once; and a pool that knows which of its blocks are lent to the KV thread.

The "K and V" of a token are eight bytes that depend on it and on all tokens before it. Logits are looked up by a hash
of the bytes of the whole context, read back through the block table.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xxhash

from splitserve.engine.batch import Segment
from splitserve.engine.history import TokenHistory
from splitserve.engine.layout import KVLayout
from splitserve.engine.packing import check_segment
from splitserve.engine.pool import KVPool
from splitserve.engine.sampling_params import SamplingParams
from splitserve.worker import messages
from splitserve.worker.sampling import Draw, draw_tokens, logprobs_of
from tests.router.fakes import model_description

BLOCK_SIZE = 4
VOCAB_SIZE = 32
MAX_MODEL_LEN = 32
EOS_TOKEN_IDS = (7,)
MODEL = model_description(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, eos_token_ids=EOS_TOKEN_IDS)
SLOT_NBYTES = 8
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32")
assert LAYOUT.token_nbytes == SLOT_NBYTES

_ROWS = torch.from_numpy(np.random.default_rng(3).normal(size=(4096, VOCAB_SIZE)).astype(np.float32) * 3)


class CheckedPool(KVPool):
    """Between `Reserve` and join a transfer's blocks belong to the KV thread, which alone writes them; what is on its
    way to a sink is not written at all."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(LAYOUT, num_blocks)
        self.receiving: set[int] = set()
        self.sending: Counter[int] = Counter()

    def write(self, block_id: int, data: bytes | bytearray | memoryview) -> None:
        assert block_id in self.receiving, f"the KV thread wrote block {block_id}, which is not lent to it"
        super().write(block_id, data)

    def copy_block(self, source: int, target: int) -> None:
        self.check_reads([source])
        self.check_writes([target])
        super().copy_block(source, target)

    def check_reads(self, blocks: Iterable[int]) -> None:
        lent = self.receiving.intersection(blocks)
        assert not lent, f"the engine read blocks {lent}, which are being received"

    def check_writes(self, blocks: Iterable[int]) -> None:
        lent = {block for block in blocks if block in self.receiving or self.sending[block] > 0}
        assert not lent, f"the engine wrote blocks {lent}, which are lent to the KV thread"


class HashRunner:
    """What the role engines use of a `ModelRunner`."""

    def __init__(self, pool: CheckedPool) -> None:
        self.pool = pool
        self.layout = LAYOUT
        self.vocab_size = VOCAB_SIZE
        self.max_model_len = MAX_MODEL_LEN
        self.num_forwards = 0

    def run(self, segments: Sequence[Segment]) -> torch.Tensor:
        assert segments
        self.num_forwards += 1
        rows = [row for segment in segments for row in self._run(segment)]
        return _ROWS[rows].reshape(-1, VOCAB_SIZE)

    def _run(self, segment: Segment) -> list[int]:
        check_segment(
            segment,
            block_size=BLOCK_SIZE,
            num_blocks=self.pool.num_blocks,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
        )
        first, last = segment.start // BLOCK_SIZE, (segment.end - 1) // BLOCK_SIZE
        self.pool.check_reads(segment.block_table[: last + 1])
        self.pool.check_writes(segment.block_table[first : last + 1])
        context = bytearray(b"".join(self.pool.view(block) for block in segment.block_table[: last + 1]))
        rows = []
        for position, token_id in enumerate(segment.token_ids, segment.start):
            at = position * SLOT_NBYTES
            context[at : at + SLOT_NBYTES] = _slot(context[:at], token_id)
            rows.append(_row(context[: at + SLOT_NBYTES]))
        for index in range(first, last + 1):
            block = context[index * LAYOUT.block_nbytes : (index + 1) * LAYOUT.block_nbytes]
            self.pool.view(segment.block_table[index])[:] = block
        return rows[len(rows) - segment.num_logits :]


def _slot(context: bytes | bytearray, token_id: int) -> bytes:
    return xxhash.xxh3_64_digest(bytes(context[-SLOT_NBYTES:]) + bytes([token_id]))


def _row(context: bytes | bytearray) -> int:
    return xxhash.xxh3_64_intdigest(bytes(context)) % len(_ROWS)


class Reference:
    """What the model says undisturbed: the bytes of any tokens, and the text that follows a prompt."""

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams, num_samples: int) -> None:
        self.prompt_ids = list(prompt_ids)
        self.texts = [self._text(params, sample) for sample in range(num_samples)]

    def _text(self, params: SamplingParams, sample: int) -> list[messages.Token]:
        token_ids = list(self.prompt_ids)
        history = TokenHistory(token_ids, len(token_ids))
        text: list[messages.Token] = []
        while not text or not text[-1].finish_reason:
            logits = _ROWS[[_row(kv_bytes(token_ids))]]
            (token,) = draw_tokens(logits, [Draw(params, sample, history)], frozenset(EOS_TOKEN_IDS), MAX_MODEL_LEN)
            assert token is not None
            token_ids.append(token.token_id)
            text.append(token)
        return text

    def prompt_logprobs(self, num_top: int) -> list[messages.Logprobs | None]:
        first = messages.Logprobs(self.prompt_ids[0], None, [], [])
        rows = [_ROWS[_row(kv_bytes(self.prompt_ids[:end]))] for end in range(1, len(self.prompt_ids))]
        return [first, *(logprobs_of(row, i, num_top) for row, i in zip(rows, self.prompt_ids[1:], strict=True))]

    def sequences(self) -> list[list[int]]:
        """Every token that an attempt may come to compute, sample by sample."""
        return [self.prompt_ids + [token.token_id for token in text] for text in self.texts]


def kv_bytes(token_ids: Sequence[int]) -> bytes:
    context = bytearray()
    for token_id in token_ids:
        context += _slot(context, token_id)
    return bytes(context)
