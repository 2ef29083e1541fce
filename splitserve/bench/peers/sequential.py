"""transformers' own `generate`, one request after the other: what one has without a serving engine.

`python -P -m splitserve.bench.peers.sequential MODEL CACHE CORES ...` prints one line of JSON.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

from splitserve.service.config import parse_cores

_SHORT_PROMPT = 24


def measure(
    model_directory: str, *, uses_cache: bool, rate_tokens: int, prompt_tokens: int, output_tokens: int, burst: int
) -> Iterator[tuple[str, float]]:
    """Tokens per second of one stream, and how long the prompts of a burst wait for their first token, each behind the
    whole answer of the one before."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    loaded: Any = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16)
    model = loaded.eval()

    def generate(num_prompt: int, num_output: int) -> float:
        ids = torch.randint(0, model.config.vocab_size, (1, num_prompt))
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_output,
                min_new_tokens=num_output,
                do_sample=False,
                use_cache=uses_cache,
                pad_token_id=0,
            )
        return time.perf_counter() - began

    generate(_SHORT_PROMPT, 2)
    first_s = min(generate(_SHORT_PROMPT, 1) for _ in range(3))
    yield "b1_tokens_per_s", (rate_tokens - 1) / (generate(_SHORT_PROMPT, rate_tokens) - first_s)
    # Every answer of a burst takes as long; no need to wait for all of them.
    prompt_s = generate(prompt_tokens, 1)
    answer_s = generate(prompt_tokens, output_tokens)
    waits = [number * answer_s + prompt_s for number in range(burst)]
    yield "ttft_median_s", statistics.median(waits)
    yield "ttft_max_s", max(waits)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Started by `bench peers`, not by hand.")
    parser.add_argument("model")
    parser.add_argument("cache", choices=("cache", "no-cache"))
    parser.add_argument("cores", type=parse_cores)
    for name in ("rate_tokens", "prompt_tokens", "output_tokens", "burst"):
        parser.add_argument(name, type=int)
    arguments = vars(parser.parse_args())
    os.sched_setaffinity(0, arguments.pop("cores"))
    found = measure(arguments.pop("model"), uses_cache=arguments.pop("cache") == "cache", **arguments)
    print(json.dumps(dict(found)))  # noqa: T201
