"""From a model directory to a tested runner: config decision, safetensors weights, self-test, pool.

Called by the worker's engine process; keeps no state. Everything that a model can be refused for is raised here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from splitserve.engine import selftest, support
from splitserve.engine.attention import INTERFACE_NAME, AttentionBackend, register_paged_attention
from splitserve.engine.cpu_attention import choose_attention
from splitserve.engine.fusing import fuse_layers
from splitserve.engine.layout import KVLayout
from splitserve.engine.linear import LinearBackend, choose_linear
from splitserve.engine.pool import DTYPES, KVPool
from splitserve.engine.report import LoadReport, PartTimes, WeightBytes
from splitserve.engine.runner import ModelRunner
from splitserve.engine.selftest_result import ResultFolder, SelfTestResult, result_name
from splitserve.engine.support import UnsupportedModel
from splitserve.engine.transformers_api import AutoConfig, AutoModelForCausalLM, transformers_logging, without_compiler
from splitserve.engine.trust import SAFE, Trust

# Rows below which a matmul may round differently than with more: packed layers look after a lone row themselves; plain
# float32 layers may have their own path for up to 15 rows, and then a small decode step pays for exactness with a few
# rows more.
_MIN_ROWS = (1, 2, 16)


def resolve_dtype(dtype: str, device: str) -> str:
    """ "auto" is bfloat16 where the device multiplies it in hardware, else float32. ValueError for an unknown name."""
    if dtype == "auto":
        return "bfloat16" if _has_bfloat16_units(device) else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be auto, {' or '.join(DTYPES)}, not {dtype!r}")
    return dtype


@dataclass(frozen=True)
class _RunnerMaker:
    """What all runners of one model have in common, those on scratch pools and the one that serves."""

    attention: AttentionBackend
    device: str
    num_heads: int
    max_model_len: int

    def make(self, model: Any, layout: KVLayout, num_blocks: int, min_rows: int) -> ModelRunner:
        pool = KVPool(layout, num_blocks, self.device)
        return ModelRunner(
            model, pool, self.attention, num_heads=self.num_heads, max_model_len=self.max_model_len, min_rows=min_rows
        )

    def make_for_test(self, model: Any, layout: KVLayout, min_rows: int = _MIN_ROWS[0]) -> ModelRunner:
        return self.make(model, layout, selftest.blocks_needed(layout.block_size), min_rows)


def load_runner(
    directory: Path,
    *,
    dtype: str,
    device: str,
    block_size: int,
    kv_cache_bytes: int,
    attention: AttentionBackend | None = None,
    linear: LinearBackend | None = None,
    progress: Callable[[str], None] | None = None,
    trust: Trust = SAFE,
    kernel_folder: Path | None = None,
    selftest_folder: Path | None = None,
) -> ModelRunner:
    """Reads the model in `directory`, tests that it can be served, and makes a pool of `kv_cache_bytes`.

    `dtype` is "auto", "bfloat16" or "float32"; `trust` says what of the directory may run; back ends that are not given
    are the fastest that work here, and `report` of the runner names them; `kernel_folder` keeps what is compiled for
    them and `selftest_folder` what the self-test found, for the next start. UnsupportedModel (a ValueError) with the
    reason when the model cannot be served; ValueError when not even one block fits into `kv_cache_bytes`.
    """
    times, progress = PartTimes(), progress or (lambda _: None)
    dtype = resolve_dtype(dtype, device)
    if attention is None:
        with times.part("kernels"):
            attention = choose_attention(device, dtype, kernel_folder, progress)
    linear_reason = ""
    if linear is None:
        linear, linear_reason = choose_linear(device, DTYPES[dtype])
        if linear_reason:
            progress(f"linear layers stay as they are: {linear_reason}")
    with times.part("config"):
        config = _read_config(directory, trust)
        support.require_supported(config)
        num_heads, num_kv_heads, head_dim = support.attention_shape(config)
        maker = _RunnerMaker(attention, device, num_heads, support.max_positions(config))
        layout = KVLayout(config.num_hidden_layers, num_kv_heads, head_dim, block_size, dtype)
        name = result_name(directory, device, layout=layout, attention=attention.name, linear=linear.name)
        results = ResultFolder(selftest_folder, name)
    num_blocks = kv_cache_bytes // layout.block_nbytes
    if num_blocks < 1:
        raise ValueError(f"{kv_cache_bytes} bytes of KV cache hold no block of {layout.block_nbytes} bytes")
    register_paged_attention()
    known = results.recall()
    if known is None:
        progress(f"checking that {config.model_type} runs on paged attention")
        with times.part("self-test"):
            _require_servable(maker, config, layout, linear, trust)
    progress(f"loading weights as {dtype}")
    with times.part("weights"):
        model = _load_weights(directory, config, dtype, device, trust)
    with times.part("packing"):
        linear.prepare(model)
        layers = fuse_layers(model, attention, dtype)
    progress(f"layers: {layers}")
    with times.part("self-test"):
        result = _test(maker, model, layout, known, progress)
        results.remember(result)
    with times.part("pool"):
        runner = maker.make(model, layout, num_blocks, result.min_rows)
    runner.numerics, runner.recompute_exact = result.numerics, result.recompute_exact
    runner.report = LoadReport(
        linear=linear.name,
        linear_reason=linear_reason,
        attention=attention.name,
        layers=layers,
        weights=WeightBytes.of(model),
        pool_nbytes=num_blocks * layout.block_nbytes,
        seconds=times.seconds,
    )
    return runner


def _require_servable(maker: _RunnerMaker, config: Any, layout: KVLayout, linear: LinearBackend, trust: Trust) -> None:
    copy = _random_copy(config, trust).to(maker.device)
    linear.prepare(copy)
    fuse_layers(copy, maker.attention, "float32")
    copy_layout = replace(layout, num_layers=copy.config.num_hidden_layers, dtype="float32")
    runner = maker.make_for_test(copy, copy_layout)
    selftest.require_equal_to_eager(runner, copy, "a random copy of two layers")


def _test(
    maker: _RunnerMaker, model: Any, layout: KVLayout, known: SelfTestResult | None, progress: Callable[[str], None]
) -> SelfTestResult:
    """`known`, if the model still computes what it did then; else the outcome of the whole self-test."""
    if known is not None:
        progress("comparing with an earlier self-test of the same model")
        if selftest.numerics(maker.make_for_test(model, layout, known.min_rows)) == known.numerics:
            return known
    progress("comparing with transformers' own attention")
    tested = [maker.make_for_test(model, layout, min_rows) for min_rows in _MIN_ROWS]
    selftest.require_equal_to_eager(tested[0], model, "the model itself")
    outcomes = []
    for min_rows, runner in zip(_MIN_ROWS, tested, strict=True):
        is_exact = selftest.is_exact(runner) and selftest.linear_rows_are_exact(model, min_rows)
        outcomes.append(SelfTestResult(min_rows, selftest.numerics(runner), is_exact))
        if is_exact:
            return outcomes[-1]
    return outcomes[0]


def _read_config(directory: Path, trust: Trust) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust.remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"no usable model config in {directory}: {error}") from error


def _random_copy(config: Any, trust: Trust) -> Any:
    small = support.two_layer_copy(config, vocab_size=selftest.COPY_VOCAB_SIZE, window=selftest.WINDOW)
    with torch.random.fork_rng(devices=[]), without_compiler():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation=INTERFACE_NAME, trust_remote_code=trust.remote_code
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    # Weights as large as trained ones: the library's would leave attention nearly uniform and hide a
                    # wrong scaling or mask.
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def _load_weights(directory: Path, config: Any, dtype: str, device: str, trust: Trust) -> Any:
    transformers_logging.disable_progress_bar()
    try:
        with without_compiler():
            model, report = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=DTYPES[dtype],
                attn_implementation=INTERFACE_NAME,
                # None takes what is there, safetensors before pickle; torch reads pickles by its list of safe types.
                use_safetensors=None if trust.pickle else True,
                trust_remote_code=trust.remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"cannot load weights from {directory}: {error}") from error
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise UnsupportedModel(f"{directory} lacks weights that the model needs: {', '.join(absent[:5])}")
    return model.eval().to(device)


def _has_bfloat16_units(device: str) -> bool:
    if torch.device(device).type != "cpu":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
