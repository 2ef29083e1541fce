"""`splitserve plan`: arithmetic whose outcome is known, and what is made of it."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from splitserve.cli.plan import plan as plan_command
from splitserve.engine.cpu_attention import choose_attention
from splitserve.engine.layout import KVLayout
from splitserve.engine.shape import LinearShape, ModelShape
from splitserve.engine.torch_attention import TorchAttention
from splitserve.plan.gpus import GPUS, Gpu, find_gpu
from splitserve.plan.model_size import ModelSize
from splitserve.plan.report import PlanReport
from splitserve.plan.sizing import (
    BANDWIDTH_SHARE,
    MATMUL_SHARE,
    MAX_BUSY,
    MIB,
    Workload,
    make_plan,
    prefill_s,
    step_s,
    workers_for,
)
from splitserve.service.errors import InvalidRequest
from tests.plan.architectures import LLAMA, written

GPU = Gpu("test", memory=10e9, bandwidth=1e12 / BANDWIDTH_SHARE, flops=1e14 / MATMUL_SHARE)
SIZE = ModelSize(
    num_parameters=1_200_000_000,
    num_other_experts=0,
    shape=ModelShape(
        linears=(LinearShape("body", 1000, 800_000, False, False), LinearShape("head", 1000, 200_000, False, True)),
        weight_nbytes=2,
        windows=(None,) * 10,
        num_heads=10,
        head_dim=100,
        layer_token_nbytes=10_000,
    ),
    layout=KVLayout(num_layers=10, num_kv_heads=25, head_dim=100, block_size=16, dtype="bfloat16"),
    max_model_len=8192,
)
LOAD = Workload(prompt_tokens=1000, output_tokens=200, ttft_s=1.0, itl_s=0.05)


def test_time_of_a_prompt_or_a_step_is_not_that_of_its_bytes_and_operations() -> None:
    # 1.6e12 of linear layers, one token's head, and 4 x 10 x 1000 x 500,500 of attention, at 1e14 a second.
    assert prefill_s(SIZE, GPU, 1000) == pytest.approx((1.6e12 + 4e8 + 40_000 * 500_500) / 1e14)
    # 2 GB of weights and 10 x 1000 x 100 kB of KV at 1 TB/s.
    assert step_s(SIZE, GPU, 10, 1000) == pytest.approx(3e9 / 1e12)
    # Without KV to speak of, 1000 sequences are bound by matmuls.
    assert step_s(SIZE, GPU, 1000, 1) == pytest.approx(1000 * (2e9 + 40_000) / 1e14)


def test_experts_cost_what_all_or_none_of_them_do() -> None:
    experts = replace(SIZE, num_other_experts=9_000_000_000)
    assert step_s(experts, GPU, 1, 1) == pytest.approx((2e9 + 100_000) / 1e12)
    assert step_s(experts, GPU, 2, 1) == pytest.approx((20e9 + 200_000) / 1e12), "many sequences meet all experts"
    # A thousand tokens are two steps, and each reads all experts: that takes longer than computing with the chosen.
    assert prefill_s(experts, GPU, 1000) == pytest.approx(2 * 20e9 / 1e12)
    assert prefill_s(experts, GPU, 1) == pytest.approx(2e9 / 1e12)


def test_layers_with_a_window_cost_as_much_as_those_without() -> None:
    """Nine of ten look back 100 tokens."""
    windows = replace(SIZE, shape=replace(SIZE.shape, windows=(100,) * 9 + (None,)))
    pairs = 9 * (100 * 101 // 2 + 900 * 100) + 500_500
    assert prefill_s(windows, GPU, 1000) == pytest.approx((1.6e12 + 4e8 + 4000 * pairs) / 1e14)
    assert step_s(windows, GPU, 10, 1000) == pytest.approx((2e9 + 10 * (9 * 100 + 1000) * 10_000) / 1e12)
    assert make_plan(windows, GPU, LOAD, 0.9).num_blocks == make_plan(SIZE, GPU, LOAD, 0.9).num_blocks, "all are kept"


def test_plan_of_a_known_case_comes_out_otherwise() -> None:
    plan = make_plan(SIZE, GPU, LOAD, 0.9)
    assert plan.pool_nbytes == 6_600_000_000 // MIB * MIB
    assert plan.num_blocks == plan.pool_nbytes // 1_600_000 == 4124
    assert plan.num_cached_tokens == 65_984
    assert (plan.num_seqs, plan.limit) == (54, "memory")
    assert plan.step_s == pytest.approx((2e9 + 54 * 1100 * 1e5) / 1e12)
    assert plan.decode_tokens_per_s == pytest.approx(54 / plan.step_s)
    assert plan.requests_per_decode == pytest.approx(54 / (200 * plan.step_s))
    assert plan.prefill_busy == MAX_BUSY
    assert plan.requests_per_prefill == pytest.approx(0.8 / plan.prompt_s)
    assert plan.ttft_s == pytest.approx(plan.prompt_s * (1 + 0.8 / 0.4))
    prefill, decode = plan.ratio
    carried = prefill * plan.requests_per_prefill / (decode * plan.requests_per_decode)
    assert 0.8 < carried < 1.25


def test_goal_for_tokens_allows_more_sequences_than_it_does() -> None:
    # 2 ms for weights, 0.11 ms for each sequence: 5 ms hold 27.
    plan = make_plan(SIZE, GPU, replace(LOAD, itl_s=0.005), 0.9)
    assert (plan.num_seqs, plan.limit) == (27, "itl")
    assert plan.step_s <= 0.005 < step_s(SIZE, GPU, 28, 1100)


def test_goal_for_first_tokens_leaves_no_time_to_wait() -> None:
    # With as much slack as a prompt takes: a wait of one prompt is that of a worker busy 2/3 of its time.
    prompt = prefill_s(SIZE, GPU, 1000)
    plan = make_plan(SIZE, GPU, replace(LOAD, ttft_s=2 * prompt), 0.9)
    assert plan.prefill_busy == pytest.approx(2 / 3)
    assert plan.ttft_s == pytest.approx(2 * prompt)


@pytest.mark.parametrize(
    ("size", "load", "told"),
    [
        (replace(SIZE, num_parameters=10_000_000_000), LOAD, "does not fit on one"),
        (replace(SIZE, layout=replace(SIZE.layout, num_kv_heads=15_625)), LOAD, "room for 6 blocks.*needs 75"),
        (SIZE, replace(LOAD, prompt_tokens=8000), "8200 tokens.*8192"),
        (SIZE, replace(LOAD, ttft_s=0.01), "no first token"),
        (SIZE, replace(LOAD, itl_s=0.001), "no token comes every"),
    ],
    ids=["weights", "blocks", "context", "ttft", "itl"],
)
def test_what_cannot_be_is_planned(size: ModelSize, load: Workload, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        make_plan(size, GPU, load, 0.9)


def test_goal_that_leaves_no_time_at_all_divides_by_none() -> None:
    with pytest.raises(InvalidRequest, match="no first token"):
        make_plan(SIZE, GPU, replace(LOAD, ttft_s=prefill_s(SIZE, GPU, 1000)), 0.9)


def test_far_ratio_is_cut_off() -> None:
    plan = make_plan(SIZE, GPU, replace(LOAD, prompt_tokens=10, output_tokens=4000), 0.9)
    prefill, decode = plan.ratio
    assert (prefill, decode) == (1, math.ceil(plan.requests_per_prefill / plan.requests_per_decode))
    assert decode > 16


def test_workers_for_a_load_do_not_carry_it() -> None:
    plan = make_plan(SIZE, GPU, LOAD, 0.9)
    prefill, decode = workers_for(plan, 100.0)
    assert (prefill - 1) * plan.requests_per_prefill < 100 <= prefill * plan.requests_per_prefill
    assert (decode - 1) * plan.requests_per_decode < 100 <= decode * plan.requests_per_decode


def test_gpu_is_found_by_another_name() -> None:
    assert find_gpu("h100") is GPUS["H100"]
    with pytest.raises(InvalidRequest, match="known are A10G"):
        find_gpu("H99")


def test_gpus_are_not_what_the_caveat_says_of_them() -> None:
    """Once there is another attention for GPUs, the report and docs/deploy.md have to say so."""
    report = PlanReport(model="a model", size=SIZE, gpu=GPU, workload=LOAD, memory_share=0.75)
    assumed, attention = report.caveats
    assert isinstance(choose_attention("cuda", "bfloat16", None, print), TorchAttention)
    assert "plain torch operators" in attention
    assert "50 % of the data sheet" in assumed
    assert "75 % of the memory" in assumed
    assert "hand-offs of 100 MB" in assumed


def test_command_prints_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(written(LLAMA, tmp_path))
    assert plan_command(directory, gpu="h200", requests_per_s=1000) == 0
    shown = capsys.readouterr().out
    assert "8.03 billion" in shown
    assert "131,072 bytes a token" in shown
    command = [sys.executable, "-P", "-m", "splitserve", "plan", directory, "--gpu", "h200", "--requests-per-s", "1000"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["plan"]["pool_nbytes"] == (141e9 * 0.9 - 2 * 8_030_261_248) // MIB * MIB
    prefill, decode = body["workers"]
    assert f"{prefill} : {decode}" in shown
    for role, flags in body["flags"].items():
        assert f"{role} workers: {' '.join(flags)}" in shown.splitlines(), "a flag that is wrapped cannot be copied"
    assert " ".join(shown.split()).endswith(" ".join(body["caveats"]))
    assert body["plan"].keys() >= {"num_seqs", "ratio", "ttft_s"}
