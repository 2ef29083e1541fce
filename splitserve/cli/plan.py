"""`splitserve plan`: how large a cluster for a model has to be."""

import json as json_module
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from splitserve.cli.up import require_serving
from splitserve.service.config import Positive

if TYPE_CHECKING:
    from splitserve.plan.report import PlanReport

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

    What comes out is arithmetic over the GPU's data sheet, good for a first choice: prefill is bound by matmuls, a
    decode step by reading weights and KV cache, and both reach the shares that are shown. `splitserve bench serve`
    measures what a cluster really carries. A model that the engine refuses by its config gets no plan; of the others
    the self-test at a worker's start has the last word.

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
    from splitserve.plan.report import PlanReport
    from splitserve.plan.sizing import Workload

    chosen = find_gpu(gpu)
    located = locate_model(model, revision=revision, loads_weights=False)
    report = PlanReport(
        model=located.name,
        size=model_size(located.directory, block_size),
        gpu=chosen,
        workload=Workload(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, ttft_s=ttft_ms / 1e3, itl_s=itl_ms / 1e3
        ),
        memory_share=memory_share,
        requests_per_s=requests_per_s,
    )
    if json:
        sys.stdout.write(json_module.dumps(report.as_json(), indent=2) + "\n")
    else:
        _print(report)
    return 0


def _print(report: "PlanReport") -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in report.rows():
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    console.print(f"{report.model} on {report.gpu.name}, bfloat16")
    console.print(table)
    console.print()
    for role, flags in report.flags.items():  # whole lines, to be copied
        console.print(f"{role} workers: {' '.join(flags)}", soft_wrap=True)
    for caveat in report.caveats:
        console.print()
        console.print(caveat)
