"""`splitserve plan`: sizes of models whose sizes are known, and arithmetic whose outcome is."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitserve.models.locate import locate_model
from splitserve.plan.gpus import GPUS, Gpu, find_gpu
from splitserve.plan.model_size import ModelSize, model_size
from splitserve.plan.sizing import (
    BANDWIDTH_SHARE,
    MATMUL_SHARE,
    MAX_BUSY,
    Workload,
    make_plan,
    prefill_s,
    step_s,
    workers_for,
)
from splitserve.service.errors import InvalidRequest

# Llama 3 8B, as its config has it; it is published with 8,030,261,248 parameters.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
# Mixtral 8x7B: 46.7 billion, of which a token uses 12.9.
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GPU = Gpu("test", memory=10e9, bandwidth=1e12 / BANDWIDTH_SHARE, flops=1e14 / MATMUL_SHARE)
SIZE = ModelSize(
    num_parameters=1_200_000_000,
    num_matmul=1_000_000_000,
    num_head=200_000_000,
    num_read=1_000_000_000,
    num_layers=10,
    attention_width=1000,
    kv_token_nbytes=100_000,
    kv_block_nbytes=1_600_000,
    block_size=16,
    max_model_len=8192,
)
LOAD = Workload(prompt_tokens=1000, output_tokens=200, ttft_s=1.0, itl_s=0.05)


def written(config: dict[str, Any], directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_size_of_a_known_model_is_another(tmp_path: Path) -> None:
    default = model_size(locate_model(None, loads_weights=False).directory, 16)
    assert (default.num_parameters, default.num_matmul, default.num_read) == (134_515_008,) * 3
    assert (default.weight_nbytes, default.kv_token_nbytes) == (269_030_016, 23_040)
    llama = model_size(written(LLAMA, tmp_path), 32)
    assert llama.num_parameters == 8_030_261_248
    assert llama.num_matmul == llama.num_read == 8_030_261_248 - 128256 * 4096, "an embedding is only looked up"
    assert (default.num_head, llama.num_head) == (49_152 * 576, 128256 * 4096)
    assert (llama.kv_token_nbytes, llama.kv_block_nbytes) == (131_072, 32 * 131_072)
    assert (llama.attention_width, llama.num_layers, llama.max_model_len) == (4096, 32, 8192)


def test_experts_that_are_not_chosen_count_as_work(tmp_path: Path) -> None:
    size = model_size(written(MIXTRAL, tmp_path), 16)
    assert size.num_parameters == pytest.approx(46.7e9, rel=0.002)
    assert size.num_matmul == pytest.approx(12.9e9 - 32000 * 4096, rel=0.01)
    assert size.num_read == size.num_parameters - 32000 * 4096


def test_model_that_is_not_served_gets_a_plan(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="encoder"):
        model_size(written({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, tmp_path), 16)
    with pytest.raises(InvalidRequest, match=r"no usable model config"):
        model_size(tmp_path / "nowhere", 16)


def test_time_of_a_prompt_or_a_step_is_not_that_of_its_bytes_and_operations() -> None:
    # 1.6e12 of linear layers, one token's head, and 4 x 10 x 1000 x 500,500 of attention, at 1e14 a second.
    assert prefill_s(SIZE, GPU, 1000) == pytest.approx((1.6e12 + 4e8 + 40_000 * 500_500) / 1e14)
    # 2 GB of weights and 10 x 1000 x 100 kB of KV at 1 TB/s.
    assert step_s(SIZE, GPU, 10, 1000) == pytest.approx(3e9 / 1e12)
    # Without KV to speak of, 1000 sequences are bound by matmuls.
    assert step_s(SIZE, GPU, 1000, 1) == pytest.approx(1000 * (2e9 + 40_000) / 1e14)
    experts = replace(SIZE, num_matmul=250_000_000)
    assert step_s(experts, GPU, 1, 1) == pytest.approx((0.5e9 + 100_000) / 1e12)
    assert step_s(experts, GPU, 2, 1) == pytest.approx((2e9 + 200_000) / 1e12), "many sequences meet all experts"


def test_plan_of_a_known_case_comes_out_otherwise() -> None:
    plan = make_plan(SIZE, GPU, LOAD, 0.9)
    assert plan.num_blocks == 6_600_000_000 // 1_600_000 == 4125
    assert plan.num_cached_tokens == 66_000
    assert (plan.num_seqs, plan.limit) == (55, "memory")
    assert plan.step_s == pytest.approx((2e9 + 55 * 1100 * 1e5) / 1e12)
    assert plan.decode_tokens_per_s == pytest.approx(55 / plan.step_s)
    assert plan.requests_per_decode == pytest.approx(55 / (200 * plan.step_s))
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
        (replace(SIZE, kv_block_nbytes=1_000_000_000), LOAD, "room for 6 blocks.*needs 75"),
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


def test_command_prints_something_else(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "splitserve", "plan", str(written(LLAMA, tmp_path)), "--gpu", "h200"]
    command += ["--requests-per-s", "1000"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert "8.03 billion" in shown.stdout
    assert "131,072 bytes a token" in shown.stdout
    body = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120).stdout)
    assert body["plan"]["num_blocks"] == (141e9 * 0.9 - 2 * 8_030_261_248) // (16 * 131_072)
    prefill, decode = body["workers"]
    assert f"{prefill} : {decode}" in shown.stdout
    assert f"--max-num-seqs {body['plan']['num_seqs']} " in shown.stdout
    assert body["plan"].keys() >= {"num_seqs", "ratio", "ttft_s"}
