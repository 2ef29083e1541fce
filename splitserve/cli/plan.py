"""`splitserve plan`: how large a cluster for a model has to be."""

import json as json_module
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from splitserve.cli.up import require_serving
from splitserve.service.config import Positive

if TYPE_CHECKING:
    from splitserve.plan.gpus import Gpu
    from splitserve.plan.model_size import ModelSize
    from splitserve.plan.sizing import Plan, Workload

PositiveMs = Annotated[float, Parameter(validator=Number(gt=0))]


def plan(
    model: str | None = None,
    *,
    revision: str | None = None,
    gpu: str = "H100",
    prompt_tokens: Positive = 1024,
    output_tokens: Positive = 256,
    ttft_ms: PositiveMs = 1000.0,
    itl_ms: PositiveMs = 50.0,
    block_size: Positive = 16,
    memory_share: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = 0.9,
    requests_per_s: Annotated[float | None, Parameter(validator=Number(gt=0))] = None,
    json: bool = False,
) -> int:
    """Say what one worker of a model carries, and how many of each role, from its config alone; no weights are fetched.

    Prefill is bound by matmuls, a decode step by reading weights and KV cache. What comes out is arithmetic over the
    GPU's data sheet, good for a first choice; `splitserve bench serve` measures what a cluster really carries.

    Parameters
    ----------
    model
        Hugging Face repo id, local directory, or GGUF file; default: SmolLM2-135M-Instruct.
    revision
        Branch, tag or commit of a Hugging Face repo.
    gpu
        A10G, A100 (80 GB), B200, H100, H200, L4 or L40S.
    prompt_tokens
        Mean length of prompts.
    output_tokens
        Mean length of answers.
    ttft_ms
        The first token's goal, waiting included.
    itl_ms
        The goal for the time between two tokens.
    block_size
        Tokens in a KV block.
    memory_share
        Part of the GPU's memory for weights and KV cache; the rest is for what a step computes with.
    requests_per_s
        The load; then the workers of each role that it takes are told, else in what ratio they fit together.
    json
        Print everything as JSON.
    """
    require_serving()
    from splitserve.models.locate import locate_model
    from splitserve.plan.gpus import find_gpu
    from splitserve.plan.model_size import model_size
    from splitserve.plan.sizing import Workload, make_plan, workers_for

    chosen = find_gpu(gpu)
    located = locate_model(model, revision=revision, loads_weights=False)
    size = model_size(located.directory, block_size)
    workload = Workload(
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, ttft_s=ttft_ms / 1e3, itl_s=itl_ms / 1e3
    )
    made = make_plan(size, chosen, workload, memory_share)
    if json:
        workers = None if requests_per_s is None else workers_for(made, requests_per_s)
        parts = {"gpu": asdict(chosen), "size": asdict(size), "workload": asdict(workload), "plan": asdict(made)}
        sys.stdout.write(json_module.dumps({"model": located.name, "workers": workers, **parts}, indent=2) + "\n")
        return 0
    console = Console(markup=False, highlight=False)
    console.print(f"{located.name} on {chosen.name}, bfloat16")
    console.print(_table(size, chosen, workload, made, requests_per_s))
    return 0


def _table(size: "ModelSize", gpu: "Gpu", workload: "Workload", made: "Plan", requests_per_s: float | None) -> Table:
    from splitserve.plan.sizing import BANDWIDTH_SHARE, MATMUL_SHARE, workers_for

    table = Table(box=None, pad_edge=False, show_header=False)
    prefill, decode = made.ratio if requests_per_s is None else workers_for(made, requests_per_s)
    kv_gib = made.num_blocks * size.kv_block_nbytes / 2**30
    limits = {"memory": "more do not fit", "itl": "with more a step takes longer than the goal"}
    rows = [
        ("parameters", f"{_count(size.num_parameters)}, {_count(size.num_matmul)} in a token's matmuls"),
        ("weights", f"{size.weight_nbytes / 1e9:.2f} GB of {gpu.memory / 1e9:.0f} GB"),
        ("KV cache", f"{size.kv_token_nbytes:,} bytes a token, {size.kv_block_nbytes:,} a block of {size.block_size}"),
        ("blocks", f"{made.num_blocks:,} of one worker: {made.num_cached_tokens:,} tokens"),
        ("request", f"{workload.prompt_tokens} tokens in, {workload.output_tokens} out"),
        ("prefill worker", f"{1e3 * made.prompt_s:.0f} ms a prompt, {_rate(made.requests_per_prefill)} requests/s"),
        ("", f"busy {100 * made.prefill_busy:.0f} %, first token after {1e3 * made.ttft_s:.0f} ms on average"),
        ("decode worker", f"{made.num_seqs:,} sequences at once ({limits[made.limit]})"),
        ("", f"{1e3 * made.step_s:.1f} ms a step, {made.decode_tokens_per_s:,.0f} tokens/s"),
        ("", f"{_rate(made.requests_per_decode)} requests/s"),
        ("", f"with --max-num-seqs {made.num_seqs} --kv-cache-memory {math.floor(kv_gib)}GiB"),
        ("prefill : decode", f"{prefill} : {decode}"),
        (
            "such a cluster",
            f"{_rate(min(prefill * made.requests_per_prefill, decode * made.requests_per_decode))} requests/s on "
            f"{prefill + decode} GPUs",
        ),
        ("assumed", f"{100 * MATMUL_SHARE:.0f} % of the matmul rate, {100 * BANDWIDTH_SHARE:.0f} % of the bandwidth"),
    ]
    for name, text in rows:
        table.add_row(name, text)
    return table


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _rate(per_s: float) -> str:
    return f"{per_s:.3g}"
