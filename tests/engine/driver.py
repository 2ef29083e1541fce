"""A small greedy engine for tests: cuts prompts into chunks, mixes chunks and decode tokens in one forward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from splitserve.engine.allocator import BlockAllocator
from splitserve.engine.batch import Segment
from splitserve.engine.loading import load_runner
from splitserve.engine.runner import ModelRunner
from splitserve.engine.sampler import SampleRow, sample
from splitserve.engine.sampling_params import SamplingParams
from splitserve.engine.stopping import finish_reason
from tests.compiled import KERNEL_FOLDER
from tests.tiny_models import EOS_TOKEN_ID

EOS = frozenset({EOS_TOKEN_ID})


@dataclass
class Running:
    prompt: list[int]
    blocks: list[int]
    params: SamplingParams
    num_computed: int = 0
    output: list[int] = field(default_factory=list)
    is_finished: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def load(
    directory: Path, *, dtype: str = "float32", block_size: int = 16, kv_cache_bytes: int = 4 << 20
) -> ModelRunner:
    return load_runner(
        directory,
        dtype=dtype,
        device="cpu",
        block_size=block_size,
        kv_cache_bytes=kv_cache_bytes,
        kernel_folder=KERNEL_FOLDER,
    )


def generate(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], *, max_tokens: int, chunk: int, budget: int
) -> list[list[int]]:
    """Greedy outputs of all prompts, computed together: at most `budget` tokens a forward, `chunk` of one prompt."""
    allocator = BlockAllocator(runner.pool.num_blocks)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    sequences = []
    for prompt in prompts:
        blocks = allocator.allocate(runner.layout.blocks_for(len(prompt) + max_tokens))
        assert blocks is not None
        sequences.append(Running(list(prompt), blocks, params))
    while running := [sequence for sequence in sequences if not sequence.is_finished]:
        _step(runner, running, chunk, budget)
    for sequence in sequences:
        allocator.release(sequence.blocks)
    allocator.check_idle()
    return [sequence.output for sequence in sequences]


def _step(runner: ModelRunner, running: Sequence[Running], chunk: int, budget: int) -> None:
    segments, owners = [], []
    for sequence in running:
        count = min(chunk, budget, len(sequence.tokens) - sequence.num_computed)
        if count:
            budget -= count
            end = sequence.num_computed + count
            is_last = end == len(sequence.tokens)
            segments.append(
                Segment(sequence.tokens[sequence.num_computed : end], sequence.num_computed, sequence.blocks, is_last)
            )
            owners.append(sequence)
    logits = runner.run(segments)
    sampled = [owner for owner, segment in zip(owners, segments, strict=True) if segment.wants_logits]
    tokens = sample(logits, [SampleRow(owner.params, 0, len(owner.output)) for owner in sampled], EOS)
    for owner, segment in zip(owners, segments, strict=True):
        owner.num_computed = segment.end
    for owner, token in zip(sampled, tokens, strict=True):
        assert token is not None
        owner.output.append(token)
        reason = finish_reason(token, len(owner.output), owner.params, EOS, len(owner.tokens), runner.max_model_len)
        owner.is_finished = reason is not None


@lru_cache(maxsize=4)
def _reference_model(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def reference(directory: Path, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers' own `generate` makes of the prompt, greedy, in float32."""
    ids = torch.tensor([list(prompt)])
    output = _reference_model(directory).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def random_prompt(length: int, seed: int, vocab_size: int = 384) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
