"""The flags that `splitserve plan` prints: refused by a worker, or less than the plan promises."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import pytest
from cyclopts import Parameter
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.config import DecodeConfig
from splitserve.engine.layout import KVLayout
from splitserve.engine.shape import LinearShape, ModelShape
from splitserve.plan.gpus import GPUS, Gpu
from splitserve.plan.model_size import ModelSize, model_size
from splitserve.plan.sizing import Plan, Workload, make_plan, step_s, worker_flags
from splitserve.service.config import new_app
from splitserve.service.errors import InvalidRequest
from splitserve.worker.config import WorkerConfig
from tests.plan.architectures import LLAMA, written


def parser(config_type: type[WorkerConfig]) -> Callable[[list[str]], WorkerConfig]:
    """Of a worker's command line."""
    app = new_app("worker", "")

    def command(config: Any) -> Any:
        return config

    command.__defaults__ = (config_type(),)
    command.__annotations__ = {"config": Annotated[config_type, Parameter(name="*")], "return": Any}
    app.default(command)
    return lambda flags: app(flags, exit_on_error=False, print_error=False)


PARSERS = {"prefill": parser(WorkerConfig), "decode": parser(DecodeConfig)}


def require_kept(plan: Plan, size: ModelSize, gpu: Gpu, load: Workload, memory_share: float) -> None:
    """The flags are those of workers that fit the GPU and hold what the plan says, in time."""
    configs = {role: PARSERS[role](flags) for role, flags in worker_flags(plan, size.layout.block_size).items()}
    for config in configs.values():
        layout = replace(size.layout, block_size=config.block_size)
        assert size.weight_nbytes + config.kv_cache_memory <= gpu.memory * memory_share
        assert config.kv_cache_memory // layout.block_nbytes == plan.num_blocks
        assert layout.blocks_for(load.prompt_tokens + load.output_tokens) <= plan.num_blocks
    num_seqs = configs["decode"].max_num_seqs
    assert num_seqs == plan.num_seqs
    assert num_seqs * layout.blocks_for(load.prompt_tokens + load.output_tokens) <= plan.num_blocks
    assert step_s(size, gpu, num_seqs, load.prompt_tokens + load.output_tokens // 2) <= load.itl_s


@pytest.mark.parametrize(
    ("memory_share", "load", "num_seqs"),
    [
        (0.675, Workload(prompt_tokens=100, output_tokens=50, ttft_s=1.0, itl_s=0.2), 6),
        (0.9, Workload(prompt_tokens=1024, output_tokens=256, ttft_s=3.0, itl_s=0.1), 33),
    ],
    ids=["less than a GiB", "no whole GiB"],
)
def test_pool_is_rounded_to_what_holds_less(memory_share: float, load: Workload, num_seqs: int, tmp_path: Path) -> None:
    size = model_size(written(LLAMA, tmp_path), 16)
    plan = make_plan(size, GPUS["L4"], load, memory_share)
    require_kept(plan, size, GPUS["L4"], load, memory_share)
    assert plan.num_seqs == num_seqs


LAYOUTS = st.builds(
    KVLayout,
    num_layers=st.integers(1, 100),
    num_kv_heads=st.integers(1, 64),
    head_dim=st.sampled_from([32, 64, 80, 128, 256]),
    block_size=st.integers(1, 128),
    dtype=st.just("bfloat16"),
)


@st.composite
def sizes(draw: st.DrawFn) -> ModelSize:
    layout = draw(LAYOUTS)
    width = draw(st.integers(64, 16_384))
    pattern = draw(st.lists(st.none() | st.integers(1, 5000), min_size=1, max_size=3))
    body = LinearShape("body", width, width * layout.num_layers, False, False)
    shape = ModelShape(
        linears=(body, LinearShape("head", draw(st.integers(256, 200_000)), width, False, True)),
        weight_nbytes=2,
        windows=tuple(islice(cycle(pattern), layout.num_layers)),
        num_heads=layout.num_kv_heads * draw(st.integers(1, 8)),
        head_dim=layout.head_dim,
        layer_token_nbytes=layout.token_nbytes // layout.num_layers,
    )
    num_other_experts = draw(st.sampled_from([0, 0, 10**9, 10**10]))
    num_parameters = shape.num_weights + shape.num_head_weights + num_other_experts
    return ModelSize(
        num_parameters=num_parameters,
        num_other_experts=num_other_experts,
        shape=shape,
        layout=layout,
        max_model_len=100_000,
    )


LOADS = st.builds(
    Workload,
    prompt_tokens=st.integers(1, 5000),
    output_tokens=st.integers(1, 2000),
    ttft_s=st.just(1e3),
    itl_s=st.floats(0.01, 10.0),
)


@settings(max_examples=60, deadline=None)
@given(sizes(), st.sampled_from(sorted(GPUS)), LOADS, st.floats(0.05, 1.0))
def test_flags_are_refused_or_hold_less_than_promised(
    size: ModelSize, gpu: str, load: Workload, memory_share: float
) -> None:
    try:
        plan = make_plan(size, GPUS[gpu], load, memory_share)
    except InvalidRequest:
        return  # said instead of flags
    require_kept(plan, size, GPUS[gpu], load, memory_share)
