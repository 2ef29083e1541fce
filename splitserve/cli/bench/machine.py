"""`splitserve bench engine`, `gpu` and `router`: what this machine and this installation do, part by part."""

import signal
from pathlib import Path
from typing import Literal

from splitserve.cli.bench.output import MESSAGES, RESULTS, require_writable, save, tell
from splitserve.cli.main import INTERRUPTED
from splitserve.cli.up import interrupt, require_serving
from splitserve.service.config import Device, Positive
from splitserve.service.errors import InvalidRequest


def engine(
    *,
    model: str | None = None,
    revision: str | None = None,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    device: Device = "auto",
    threads: Positive = 1,
    decode: str | None = None,
    prefill: str | None = None,
    max_num_batched_tokens: Positive = 512,
    clock: Literal["wall", "cpu"] = "wall",
    quick: bool = False,
    output: Path | None = None,
) -> int:
    """Measure the engine's steps beside their floors, and where the rest of the time goes.

    The floor is what this machine cannot beat, measured in the same run, in turns with the steps: the model's linear
    layers alone with prepacked weights; for decode, plus the bytes of the KV cache at the bandwidth of reading memory;
    for prefill, plus attention's useful operations at the rate of a batched matmul. Sampling is no part of a step.

    Columns: step, floor and the floor's two parts in milliseconds, step / floor, tokens per second; then one step's
    time by part. docs/benchmarks.md explains them. Measure on a machine that does nothing else.

    Parameters
    ----------
    model
        Hugging Face repo id, local directory, or GGUF file; default: SmolLM2-135M-Instruct.
    revision
        Branch, tag or commit of a Hugging Face repo.
    dtype
        auto: bfloat16 where the device has bfloat16 units, else float32.
    device
        auto, cpu, cuda or cuda:N; auto: the first CUDA device, or the processor where there is none.
    threads
        Threads that a step, and every floor, computes with.
    decode
        Sequences x context, such as 1x128,8x1024; "" for none. Default: 1, 8, 32 x 128, 1024, 4096, as far as the
        model's context goes.
    prefill
        Lengths of prompts in tokens, such as 256,2048; "" for none. Default: 256, 2048, 8000, as far as it goes.
    max_num_batched_tokens
        Tokens of a prompt that one forward computes, as on a prefill worker.
    clock
        wall: as time passes. cpu: by the processor's account, which leaves out what other programs take; 1 thread only.
    quick
        Two rounds of everything: a try-out, whose figures mean little.
    output
        Write the report to this file, as JSON.
    """
    require_serving()
    from splitserve.bench import engine as bench
    from splitserve.bench import tables

    require_writable(output)
    settings = bench.EngineSettings(
        model=model,
        revision=revision,
        dtype=dtype,
        device=device,
        threads=threads,
        decode=decode,
        prefill=prefill,
        chunk=max_num_batched_tokens,
        clock=clock,
        is_quick=quick,
    )
    report, rows = bench.run_engine_bench(settings, MESSAGES.print, lambda report: save(report, output))
    for result in (tables.machine_line(report.machine), *tables.engine_tables(rows), *tables.rates(rows)):
        RESULTS.print(result, soft_wrap=isinstance(result, str))
    tell(output)
    return 0 if len(rows) == report.args["cases"] else INTERRUPTED


def gpu(
    *,
    device: Device = "cuda:0",
    model: str = "random",
    quick: bool = False,
    output: Path | None = None,
) -> int:
    """Try a GPU: does a cluster on it give the right tokens, how fast is the engine, does NCCL work? Takes minutes.

    Starts a router, a prefill and a decode worker, as `splitserve up` does, and compares their greedy tokens with
    transformers' own, in float32 on the same device: exit status 1 if any differs that is not a tie. Then sends KV
    blocks over NCCL, between two GPUs or between two processes on one, and if that can be, has a cluster do the same,
    whose tokens have to be those of the first. Then measures decode steps of 1, 8 and 32 sequences and a prefill in
    this process, in the model's dtype. docs/benchmarks.md explains the columns.

    Parameters
    ----------
    device
        cuda, cuda:N, or cpu for a dry run, with Gloo in the place of NCCL.
    model
        random: one of 0.7 billion parameters, made on the spot; or a Hugging Face repo id, directory, or GGUF file.
    quick
        A tiny model and few steps: a try-out, whose figures mean little.
    output
        Write the report to this file, as JSON.
    """
    require_serving()
    from splitserve.bench import tables
    from splitserve.bench.gpu import GpuSettings, run_gpu_bench

    require_writable(output)
    signal.signal(signal.SIGTERM, interrupt)  # a cluster must not be left behind
    settings = GpuSettings(device=device, model=model, is_quick=quick)
    result = run_gpu_bench(settings, MESSAGES.print)
    RESULTS.print(tables.machine_line(result.report.machine), soft_wrap=True)
    for shown in tables.gpu_tables(result.tokens, result.pairs, result.steps):
        RESULTS.print(shown, soft_wrap=isinstance(shown, str))
    RESULTS.print(f"all of it took {result.seconds:.0f} s")
    save(result.report, output)
    tell(output)
    return 0 if result.is_exact else 1


def router(
    *,
    edges: Literal["grpc,sse", "grpc", "sse"] = "grpc,sse",
    streams: str = "1,64,512,5000,20000",
    seconds: float = 5.0,
    output: Path | None = None,
) -> int:
    """Measure the router alone: the tokens per second that one process carries, and what a token costs it.

    Starts a real router on a core of its own, fake workers that compute nothing, and clients that read as fast as they
    can. First so many tokens are on their way that the router always has something to do; then half as many per second,
    when the time that a token takes through the router is measured. docs/benchmarks.md explains the columns.

    Parameters
    ----------
    edges
        grpc: streams that share a few connections. sse: the OpenAI API's server-sent events, a connection for each.
    streams
        How many streams at once, such as 1,64,512.
    seconds
        How long each of the two parts of a row lasts.
    output
        Write the report to this file, as JSON.
    """
    require_serving()
    from splitserve.bench import tables
    from splitserve.bench.router import RouterSettings, run_router_bench

    require_writable(output)
    try:
        counts = [int(count) for count in streams.split(",")]
    except ValueError:
        raise InvalidRequest(f"--streams {streams}: numbers are needed, such as 1,64", field="streams") from None
    if min(counts) < 1 or seconds <= 0:
        raise InvalidRequest("--streams and --seconds: numbers above 0 are needed", field="streams")
    settings = RouterSettings(edges=edges.split(","), streams=counts, seconds=seconds)
    signal.signal(signal.SIGTERM, interrupt)  # a router must not be left behind
    report, rows = run_router_bench(settings, MESSAGES.print)
    RESULTS.print(tables.machine_line(report.machine), soft_wrap=True)
    RESULTS.print(tables.router_table(rows))
    save(report, output)
    tell(output)
    return 0
