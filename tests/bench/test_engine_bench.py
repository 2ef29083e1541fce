"""The engine's benchmark on a tiny model: every case has its row, and every figure is what its name says."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.bench import engine, floor, steps, tables, workload
from splitserve.bench.parts import PARTS
from splitserve.bench.timing import Rounds, Span, measure
from splitserve.cli.main import INTERRUPTED, make_app
from splitserve.engine.shape import LinearShape, ModelShape
from splitserve.engine.stopwatch import Stopwatch
from splitserve.service.errors import InvalidRequest
from tests.tiny_models import build

torch.set_num_threads(1)

# docs/benchmarks.md explains each of them.
FIELDS = {
    "case", "kind", "batch", "context", "chunk", "rounds", "step_ms", "floor_ms", "ratio", "tokens_per_s", "gflop_s",
    "floor_parts_ms", "read_gb_s", "matmul_gflop_s", "matmul", "parts_ms", "sampler_ms",
}  # fmt: skip
DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("bench") / "llama")


@pytest.fixture(scope="module")
def report(tiny: Path) -> dict[str, Any]:
    output = tiny.parent / "engine.json"
    flags = ["--decode", "1x20,3x64", "--prefill", "40,100", "--max-num-batched-tokens", "48", "--quick"]
    make_app()(["bench", "engine", "--model", str(tiny), "--dtype", "float32", "--output", str(output), *flags])
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_report_lacks_what_a_reader_compares_by(report: dict[str, Any]) -> None:
    assert set(report) == {"bench", "version", "date", "machine", "args", "rows"}
    assert report["bench"] == "engine"
    assert {"cpu", "cores", "flags", "memory_gib", "load_average", "torch", "threads", "device"} <= set(
        report["machine"]
    )
    assert (report["machine"]["device"], report["machine"]["threads"]) == ("cpu", 1)
    assert report["args"]["dtype"] == "float32"
    assert report["args"]["model"] == "llama"
    assert report["args"]["peak_memory_gib"] > 0


def test_case_or_documented_field_is_missing(report: dict[str, Any]) -> None:
    assert [row["case"] for row in report["rows"]] == ["decode 1x20", "decode 3x64", "prefill 40", "prefill 100"]
    described = DOCS.read_text()
    for row in report["rows"]:
        assert set(row) == FIELDS
        assert not [field for field in FIELDS if f"`{field}`" not in described]
        assert row["rounds"] == 2


def test_figures_contradict_one_another(report: dict[str, Any]) -> None:
    for row in report["rows"]:
        for span in (row["step_ms"], row["floor_ms"], *row["floor_parts_ms"].values(), *row["sampler_ms"].values()):
            assert 0 < span["min"] <= span["median"]
        assert row["floor_ms"]["min"] == pytest.approx(sum(part["min"] for part in row["floor_parts_ms"].values()))
        assert row["ratio"] == pytest.approx(row["step_ms"]["min"] / row["floor_ms"]["min"])
        num_tokens = row["batch"] if row["kind"] == "decode" else row["context"]
        assert row["tokens_per_s"] == pytest.approx(num_tokens / row["step_ms"]["min"] * 1e3)
        assert set(row["parts_ms"]) == set(PARTS)
        assert all(part > 0 for part in row["parts_ms"].values())
        assert set(row["sampler_ms"]) == {"greedy", "top_p"}
    decode, prefill = report["rows"][1], report["rows"][3]
    assert set(decode["floor_parts_ms"]) == {"linear", "kv"}
    assert decode["read_gb_s"] > 0
    assert decode["matmul"] is None
    assert decode["chunk"] is None
    assert set(prefill["floor_parts_ms"]) == {"linear", "attention"}
    assert prefill["matmul_gflop_s"] > 0
    assert prefill["matmul"].startswith("float32")
    assert prefill["chunk"] == 48


def test_table_is_wider_than_a_terminal(report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    row = dict(report["rows"][1]) | {"case": "decode 32x4096"}
    for name in ("step_ms", "floor_ms"):
        row[name] = Span(12345.6, 23456.7)
    row["floor_parts_ms"] = {"linear": Span(1234.5, 1.0), "kv": Span(1234.5, 1.0)}
    row["sampler_ms"] = {name: Span(123.4, 234.5) for name in row["sampler_ms"]}
    from rich.console import Console

    console = Console(width=80)
    for table in tables.engine_tables([engine.EngineRow(**row)]):
        console.print(table)
    printed = capsys.readouterr().out
    assert "12345.6" in printed
    assert "23456.7" in printed
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.fixture(scope="module")
def shape(tiny: Path) -> ModelShape:
    runner = engine.load_runner(tiny, dtype="float32", device="cpu", block_size=16, kv_cache_bytes=1 << 20)
    return runner.report.shape


def test_floor_forgets_a_layer_or_shares_its_weights(shape: ModelShape) -> None:
    """Every linear layer of the model is there once, each with memory of its own, and computes its own shape."""
    names = [linear.name for linear in shape.linears]
    assert len(names) == len(set(names)) == 2 * 7 + 1
    assert [linear.name for linear in shape.linears if linear.is_head] == ["lm_head"]
    layers = floor.LinearLayers(shape.linears, torch.float32, torch.device("cpu"))
    assert len({weight.data_ptr() for weight in layers._weights}) == len(names)
    weights = sum(linear.in_features * linear.out_features for linear in shape.linears)
    assert shape.linear_flops(1, 1) == 2 * weights
    assert shape.linear_flops(5, 0) == 2 * 5 * (weights - 64 * 384)
    layers.task([(5, 0), (3, 1)])()


def test_chunks_of_one_size_are_packed_again_and_again(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt has many; each packing is one more copy of all weights."""
    packed: list[int] = []
    pack = floor._layer
    monkeypatch.setattr(floor, "_layer", lambda x, *rest: packed.append(x.shape[0]) or pack(x, *rest))
    floor.LinearLayers(shape.linears, torch.float32, torch.device("cpu")).task([(48, 0), (48, 0), (48, 0), (4, 1)])()
    assert sorted(packed) == [1] + [4] * 14 + [48] * 14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_layer_computes_something_else(dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = torch.randn(3, 64).to(dtype), torch.randn(32, 64).to(dtype)
    bias = torch.randn(32).to(dtype) if has_bias else None
    torch.testing.assert_close(floor._layer(x, weight, bias)(), torch.nn.functional.linear(x, weight, bias))


def test_sequences_share_blocks(tiny: Path) -> None:
    """Shared blocks would be read once from memory and then from a cache."""
    runner = engine.load_runner(tiny, dtype="float32", device="cpu", block_size=16, kv_cache_bytes=1 << 20)
    segments = workload.decode_segments(runner, 5, 100)
    tables = [block for segment in segments for block in segment.block_table]
    assert len(tables) == len(set(tables)) == 5 * 7
    assert all(segment.end == 100 and len(segment.token_ids) == 1 for segment in segments)
    chunks = workload.prefill_chunks(runner, 100, 48)
    assert [(chunk.start, chunk.end, chunk.wants_logits) for chunk in chunks] == [
        (0, 48, False), (48, 96, False), (96, 100, True),
    ]  # fmt: skip


def test_case_is_another_step_than_it_says() -> None:
    decode, prefill = workload.choose_cases("3x20", "40", 2048)
    assert (decode.sequences, decode.num_logit_rows) == ([(1, 20)] * 3, 3)
    assert (prefill.sequences, prefill.num_logit_rows) == ([(40, 40)], 1)


def test_cases_are_read_wrongly() -> None:
    cases = workload.choose_cases("1x128, 8x1024", "256", 2048)
    assert list(map(str, cases)) == ["decode 1x128", "decode 8x1024", "prefill 256"]
    assert [str(case) for case in workload.choose_cases(None, "", 1024)] == [
        f"decode {batch}x{context}" for batch in (1, 8, 32) for context in (128, 1024)
    ]
    for decode, prefill, message in [
        ("8", "", "'8' is no case"),
        ("8x0", "", "'8x0' is no case"),
        ("", "1x2", "'1x2' is no case"),
        ("", "4096", "prefill 4096: the model's context is 2048 tokens"),
        ("", "", "nothing to measure"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            workload.choose_cases(decode, prefill, 2048)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [(Rounds(at_least=3, at_most=9, seconds=0.0), 3), (Rounds(at_least=1, at_most=4, seconds=1e9), 4)],
)
def test_tasks_do_not_take_turns(rounds: Rounds, expected: int) -> None:
    order: list[str] = []
    append: Callable[[str], Callable[[], None]] = lambda name: lambda: order.append(name)  # noqa: E731
    done, spans = measure({"a": append("a"), "b": append("b")}, Stopwatch(torch.device("cpu")), rounds)
    assert done == expected
    assert order == ["a", "b"] * expected
    assert set(spans) == {"a", "b"}


def test_command_line_waits_for_torch() -> None:
    run = "import sys; from splitserve.cli.main import make_app; make_app()(sys.argv[1:])"
    use = f"{run}; assert 'torch' not in sys.modules"
    for command in (["bench", "--help"], ["bench", "engine", "--help"], ["bench", "gpu", "--help"]):
        done = subprocess.run([sys.executable, "-c", use, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "Usage: " in done.stdout


def test_unwritable_report_is_noticed_after_minutes(tiny: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no directory"):
        make_app()(["bench", "engine", "--model", str(tiny), "--output", str(tiny / "nowhere" / "report.json")])


def test_interrupted_run_loses_its_rows(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = steps.StepBench.run

    def interrupt(self: steps.StepBench, case: workload.Case) -> steps.EngineRow:
        if case.kind == "prefill":
            raise KeyboardInterrupt
        return run(self, case)

    monkeypatch.setattr(steps.StepBench, "run", interrupt)
    output = tmp_path / "report.json"
    flags = ["--decode", "2x20", "--prefill", "40", "--quick", "--output", str(output)]
    assert make_app()(["bench", "engine", "--model", str(tiny), *flags]) == INTERRUPTED
    report = json.loads(output.read_text())
    assert [row["case"] for row in report["rows"]] == ["decode 2x20"]
    assert report["args"]["cases"] == 2


def test_merged_layers_are_not_the_models() -> None:
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj")
    shapes = [LinearShape(f"layers.{i}.{name}", 8, 16, False, False) for i in range(2) for name in names]
    merged = floor.merge_siblings([*shapes, LinearShape("lm_head", 99, 16, False, True)])
    assert [(shape.out_features, shape.in_features) for shape in merged] == [(24, 16), (8, 16), (8, 16)] * 2 + [
        (99, 16)
    ]


def test_processor_time_of_several_threads_is_taken_for_the_step(tiny: Path) -> None:
    with pytest.raises(InvalidRequest, match="one thread"):
        make_app()(["bench", "engine", "--model", str(tiny), "--clock", "cpu", "--threads", "2"])
