"""From a model directory to a tested runner: back ends, config, weights, self-test, pool.

Called by the worker's engine process; keeps no state. Everything that a model can be refused for is raised here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from splitserve.engine import selftest, support
from splitserve.engine.attention import AttentionBackend, register_paged_attention
from splitserve.engine.backends import Backends, choose_backends
from splitserve.engine.checkpoint import have_same_tensors, load_by_name, load_weights, random_copy, read_config
from splitserve.engine.dry_run import require_paged
from splitserve.engine.layout import KVLayout
from splitserve.engine.linear import LinearBackend
from splitserve.engine.pool import DTYPES, KVPool
from splitserve.engine.report import LoadReport, PartTimes, WeightBytes
from splitserve.engine.runner import ModelRunner
from splitserve.engine.selftest_result import ResultFolder, SelfTestResult, result_name
from splitserve.engine.shape import read_shape
from splitserve.engine.trust import SAFE, Trust

# Rows below which a matmul may round differently than with more: packed layers look after a lone row themselves; plain
# float32 layers may have their own path for up to 15 rows, and then a small decode step pays for exactness with a few
# rows more.
_MIN_ROWS = (1, 2, 16)

_COPY_DTYPE = "float32"  # of the random copy that a new model is tried with first


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

    backends: Backends
    device: str
    layout: KVLayout
    num_heads: int
    max_model_len: int

    @classmethod
    def of(cls, config: Any, backends: Backends, device: str, dtype: str, block_size: int) -> "_RunnerMaker":
        num_heads, num_kv_heads, head_dim = support.attention_shape(config)
        layout = KVLayout(config.num_hidden_layers, num_kv_heads, head_dim, block_size, dtype)
        return cls(backends, device, layout, num_heads, support.max_positions(config))

    def make(self, model: Any, num_blocks: int, result: SelfTestResult, report: LoadReport) -> ModelRunner:
        return ModelRunner(
            model,
            KVPool(self.layout, num_blocks, self.device),
            self.backends,
            num_heads=self.num_heads,
            max_model_len=self.max_model_len,
            result=result,
            report=report,
        )

    def make_for_test(self, model: Any, min_rows: int = _MIN_ROWS[0]) -> ModelRunner:
        num_blocks = selftest.blocks_needed(self.layout.block_size)
        return self.make(model, num_blocks, SelfTestResult.untested(min_rows), LoadReport())


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
    with times.part("kernels"):
        backends = choose_backends(device, dtype, kernel_folder, progress, attention, linear)
    with times.part("config"):
        config = read_config(directory, trust)
        maker = _RunnerMaker.of(config, backends, device, dtype, block_size)
        results = ResultFolder(selftest_folder, _result_name(directory, maker))
    num_blocks = _num_blocks(maker.layout, kv_cache_bytes)
    register_paged_attention()
    known = results.recall()
    if known is None:
        with times.part("kernels"):
            backends.load_kernels(_COPY_DTYPE)
        progress(f"checking that {config.model_type} runs on paged attention")
        with times.part("self-test"):
            _require_servable(maker, config, trust)
    progress(f"loading weights as {dtype}")
    with times.part("weights"):
        model, loads_by_name = _load_model(directory, config, dtype, device, trust, known)
    shape = read_shape(model, maker.layout, maker.num_heads)
    with times.part("packing"):
        layers = backends.prepare(model, dtype)
    progress(f"layers: {layers}")
    with times.part("self-test"):
        result = replace(_test(maker, model, known, progress), loads_by_name=loads_by_name)
        results.remember(result)
    if result.inexact_reason:
        progress(f"recomputation is not exact: {result.inexact_reason}")
    report = LoadReport(
        linear=backends.linear.name,
        linear_reason=backends.linear_reason,
        attention=backends.attention.name,
        layers=layers,
        weights=WeightBytes.of(model, backends.linear.packed_nbytes(model)),
        pool_nbytes=num_blocks * maker.layout.block_nbytes,
        shape=shape,
        seconds=times.seconds,
    )
    with times.part("pool"):
        return maker.make(model, num_blocks, result, report)


def _result_name(directory: Path, maker: _RunnerMaker) -> str:
    attention, linear = maker.backends.attention.name, maker.backends.linear.name
    return result_name(directory, maker.device, layout=maker.layout, attention=attention, linear=linear)


def _num_blocks(layout: KVLayout, kv_cache_bytes: int) -> int:
    num_blocks = kv_cache_bytes // layout.block_nbytes
    if num_blocks < 1:
        raise ValueError(f"{kv_cache_bytes} bytes of KV cache hold no block of {layout.block_nbytes} bytes")
    return num_blocks


def _load_model(
    directory: Path, config: Any, dtype: str, device: str, trust: Trust, known: SelfTestResult | None
) -> tuple[Any, bool]:
    """The model, and whether `load_by_name` gives the same one: found out once, because that is the faster way."""
    by_name = None
    if torch.device(device).type == "cpu" and (known is None or known.loads_by_name):
        by_name = load_by_name(directory, config, dtype, trust)
    if by_name is not None and known is not None:
        return by_name, True
    model = load_weights(directory, config, dtype, device, trust)
    return model, by_name is not None and have_same_tensors(model, by_name)


def _require_servable(maker: _RunnerMaker, config: Any, trust: Trust) -> None:
    require_paged(config, maker.layout, maker.num_heads, trust)
    copy = random_copy(config, trust, vocab_size=selftest.COPY_VOCAB_SIZE, window=selftest.WINDOW).to(maker.device)
    maker.backends.prepare(copy, _COPY_DTYPE)
    layout = replace(maker.layout, num_layers=copy.config.num_hidden_layers, dtype=_COPY_DTYPE)
    selftest.require_equal_to_eager(replace(maker, layout=layout).make_for_test(copy), "a random copy of two layers")


def _test(
    maker: _RunnerMaker, model: Any, known: SelfTestResult | None, progress: Callable[[str], None]
) -> SelfTestResult:
    """`known`, if the model still computes what it did then; else the result of the whole self-test."""
    if known is not None:
        progress("comparing with an earlier self-test of the same model")
        if selftest.numerics(maker.make_for_test(model, known.min_rows)) == known.numerics:
            return known
    progress("comparing with transformers' own attention")
    runners = [maker.make_for_test(model, min_rows) for min_rows in _MIN_ROWS]
    selftest.require_equal_to_eager(runners[0], "the model itself")
    results = []
    for runner in runners:
        reason = selftest.why_inexact(runner)
        results.append(SelfTestResult(runner.result.min_rows, selftest.numerics(runner), reason))
        if not reason:
            return results[-1]
    return results[0]


def _has_bfloat16_units(device: str) -> bool:
    if torch.device(device).type != "cpu":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
