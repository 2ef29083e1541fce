"""What `splitserve plan` says: a plan and what it rests on, as rows for people and as JSON."""

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from splitserve.engine.shape import ModelShape
from splitserve.plan.gpus import Gpu
from splitserve.plan.model_size import ModelSize
from splitserve.plan.sizing import (
    BANDWIDTH_SHARE,
    MATMUL_SHARE,
    MAX_BUSY,
    PREFILL_STEP_TOKENS,
    Plan,
    Workload,
    make_plan,
    worker_flags,
    workers_for,
)

_LIMITS = {"memory": "more do not fit", "itl": "with more a step takes longer than the goal"}

# True for as long as `choose_attention` has nothing but the reference for GPUs.
_ATTENTION_CAVEAT = (
    "On GPUs this version attends with plain torch operators, which reach a smaller share; the longer the contexts, "
    "the smaller. So measure before you buy: splitserve bench gpu, splitserve bench serve."
)


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Without `requests_per_s` the numbers of workers are the ratio in which the roles fit together."""

    model: str
    size: ModelSize
    gpu: Gpu
    workload: Workload
    memory_share: float
    requests_per_s: float | None = None

    @cached_property
    def plan(self) -> Plan:
        """Raises InvalidRequest as `make_plan` does."""
        return make_plan(self.size, self.gpu, self.workload, self.memory_share)

    @property
    def flags(self) -> dict[str, list[str]]:
        """By role."""
        return worker_flags(self.plan, self.size.layout.block_size)

    @property
    def caveats(self) -> list[str]:
        """Sentences: what the figures rest on, and why a cluster may do less."""
        hand_off_nbytes = self.workload.prompt_tokens * self.size.layout.token_nbytes
        return [
            f"Assumed: {_percent(MATMUL_SHARE)} of the data sheet's matmul rate and {_percent(BANDWIDTH_SHARE)} of its "
            f"bandwidth, as good engines reach; {_percent(self.memory_share)} of the memory for weights and KV cache; "
            f"prompts computed in steps of {PREFILL_STEP_TOKENS} tokens. Not counted: hand-offs of "
            f"{hand_off_nbytes / 1e6:,.0f} MB, sampling, and whatever keeps a GPU waiting between its kernels.",
            _ATTENTION_CAVEAT,
        ]

    def rows(self) -> list[tuple[str, str]]:
        """What there is, and how much of it."""
        size, plan, workload, layout = self.size, self.plan, self.workload, self.size.layout
        prefill, decode = plan.ratio if self.requests_per_s is None else workers_for(plan, self.requests_per_s)
        carried = min(prefill * plan.requests_per_prefill, decode * plan.requests_per_decode)
        return [
            ("parameters", f"{_count(size.num_parameters)}, {_count(size.num_matmul)} in a token's matmuls"),
            ("weights", f"{size.weight_nbytes / 1e9:.2f} GB of {self.gpu.memory / 1e9:.0f} GB"),
            ("attention", _attention(size.shape)),
            (
                "KV cache",
                f"{layout.token_nbytes:,} bytes a token, {layout.block_nbytes:,} a block of {layout.block_size}",
            ),
            ("blocks", f"{plan.num_blocks:,} of one worker: {plan.num_cached_tokens:,} tokens"),
            ("request", f"{workload.prompt_tokens} tokens in, {workload.output_tokens} out"),
            ("prefill worker", f"{1e3 * plan.prompt_s:.0f} ms a prompt, {_rate(plan.requests_per_prefill)} requests/s"),
            ("", f"busy {100 * plan.prefill_busy:.0f} %, first token after {1e3 * plan.ttft_s:.0f} ms on average"),
            ("decode worker", f"{plan.num_seqs:,} sequences at once ({_LIMITS[plan.limit]})"),
            ("", f"{1e3 * plan.step_s:.1f} ms a step, {plan.decode_tokens_per_s:,.0f} tokens/s"),
            ("", f"{_rate(plan.requests_per_decode)} requests/s"),
            ("prefill : decode", f"{prefill} : {decode}"),
            ("such a cluster", f"{_rate(carried)} requests/s on {prefill + decode} GPUs"),
        ]

    def as_json(self) -> dict[str, Any]:
        size, layout = self.size, self.size.layout
        return {
            "model": self.model,
            "workers": None if self.requests_per_s is None else workers_for(self.plan, self.requests_per_s),
            "flags": self.flags,
            "gpu": asdict(self.gpu),
            "size": {
                "num_parameters": size.num_parameters,
                "num_matmul": size.num_matmul,
                "weight_nbytes": size.weight_nbytes,
                "windows": size.shape.windows,
                "kv_token_nbytes": layout.token_nbytes,
                "kv_block_nbytes": layout.block_nbytes,
                "block_size": layout.block_size,
                "max_model_len": size.max_model_len,
            },
            "workload": asdict(self.workload),
            "plan": asdict(self.plan),
            "assumed": {
                "matmul_share": MATMUL_SHARE,
                "bandwidth_share": BANDWIDTH_SHARE,
                "memory_share": self.memory_share,
                "max_prefill_busy": MAX_BUSY,
                "prefill_step_tokens": PREFILL_STEP_TOKENS,
            },
            "caveats": self.caveats,
        }


def _attention(shape: ModelShape) -> str:
    """Layers by how far back they look; the pool keeps all tokens of each."""
    counts = Counter(window for window in shape.windows if window is not None)
    some = "".join(f", {count} of them with a window of {window:,} tokens" for window, count in sorted(counts.items()))
    return f"{len(shape.windows)} layers{some}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
