"""Self-tests that are remembered: what may be believed of an earlier start, and what must be found out again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitserve.engine import selftest, selftest_result
from splitserve.engine.loading import load_runner
from splitserve.engine.runner import ModelRunner
from splitserve.engine.selftest_result import ResultFolder, SelfTestResult, result_name
from splitserve.engine.support import UnsupportedModel
from tests.compiled import KERNEL_FOLDER
from tests.tiny_models import build

TinyModel = Callable[[str], Path]


class _Tests:
    """Loads with a result folder and counts the comparisons with transformers: two per whole self-test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.num_comparisons = 0
        compare = selftest.require_equal_to_eager

        def count(*arguments: Any) -> None:
            self.num_comparisons += 1
            compare(*arguments)

        monkeypatch.setattr(selftest, "require_equal_to_eager", count)

    def load(self, directory: Path, **changes: Any) -> tuple[ModelRunner, int]:
        before = self.num_comparisons
        options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 16, "kv_cache_bytes": 1 << 20}
        runner = load_runner(directory, selftest_folder=self.folder, kernel_folder=KERNEL_FOLDER, **(options | changes))
        return runner, self.num_comparisons - before

    def results(self) -> list[Path]:
        return sorted(self.folder.iterdir())


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Tests:
    return _Tests(tmp_path / "results", monkeypatch)


def test_passed_self_test_is_repeated_or_forgotten(tests: _Tests, tiny_model: TinyModel) -> None:
    first, num_first = tests.load(tiny_model("llama"))
    second, num_second = tests.load(tiny_model("llama"))
    assert (num_first, num_second) == (2, 0)
    assert second.result == first.result
    assert len(tests.results()) == 1


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"block_size": 8}])
def test_result_is_believed_of_another_choice(tests: _Tests, tiny_model: TinyModel, change: dict[str, Any]) -> None:
    tests.load(tiny_model("llama"))
    assert tests.load(tiny_model("llama"), **change)[1] == 2
    assert len(tests.results()) == 2


def test_result_is_believed_of_other_weights(tests: _Tests, tmp_path: Path) -> None:
    directory = build("llama", tmp_path / "model")
    before = tests.load(directory)[0].numerics
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1.0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    changed, num_comparisons = tests.load(directory)
    assert num_comparisons == 1, "the config is as it was: the random copy has passed"
    assert changed.numerics != before
    again, num_comparisons = tests.load(directory)
    assert (again.numerics, num_comparisons) == (changed.numerics, 0)


def test_broken_weights_pass_because_others_did(tests: _Tests, tmp_path: Path) -> None:
    directory = build("llama", tmp_path / "model")
    tests.load(directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="the model itself"):
        tests.load(directory)


@pytest.mark.parametrize("content", ["", "[]", '{"min_rows": 2}', '{"more": 1, "min_rows": 2}', "\xff"])
def test_unreadable_result_stops_the_start(tests: _Tests, tiny_model: TinyModel, content: str) -> None:
    tests.load(tiny_model("llama"))
    tests.results()[0].write_text(content, encoding="latin-1")
    assert tests.load(tiny_model("llama"))[1] == 2
    assert json.loads(tests.results()[0].read_text())["inexact_reason"] == ""


def test_folder_that_cannot_be_written_stops_the_start(tests: _Tests, tiny_model: TinyModel) -> None:
    tests.folder.write_text("a file is in the way")
    assert tests.load(tiny_model("llama"))[1] == 2


def test_result_outlives_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model's code and config, of the libraries, their settings, the threads and our own code."""
    directory = build("llama", tmp_path / "model")
    names = [result_name(directory, "cpu", dtype="float32")]

    def name_again() -> None:
        names.append(result_name(directory, "cpu", dtype="float32"))

    (directory / "modeling_own.py").write_text("pass")
    name_again()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    name_again()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    name_again()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    name_again()
    monkeypatch.setattr(selftest_result, "version", lambda name: f"{name} of tomorrow")
    name_again()
    monkeypatch.setattr(selftest_result, "_engine_digest", lambda: "other code")
    name_again()
    assert len(set(names)) == len(names)


def test_result_without_a_folder_is_kept() -> None:
    nowhere = ResultFolder(None, "name")
    nowhere.remember(SelfTestResult(2, "abc", ""))
    assert nowhere.recall() is None
