"""Weights that are put into their places by name: what would be another model than the one transformers makes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from splitserve.engine import loading
from splitserve.engine.attention import register_paged_attention
from splitserve.engine.checkpoint import have_same_tensors, load_by_name, load_weights, read_config
from splitserve.engine.loading import load_runner
from splitserve.engine.trust import SAFE
from tests.compiled import KERNEL_FOLDER
from tests.tiny_models import FAMILIES, build

CONVERTED = ["gpt_neox", "mixtral"]  # other names; experts that are stored one by one

TinyModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def _interface() -> None:
    register_paged_attention()


def _by_name(directory: Path, dtype: str = "float32") -> Any:
    return load_by_name(directory, read_config(directory, SAFE), dtype, SAFE)


def _by_transformers(directory: Path) -> Any:
    return load_weights(directory, read_config(directory, SAFE), "float32", "cpu", SAFE)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in CONVERTED])
def test_model_differs_from_transformers(family: str, tiny_model: TinyModel) -> None:
    ours, theirs = _by_name(tiny_model(family)), _by_transformers(tiny_model(family))
    assert have_same_tensors(ours, theirs)
    assert not ours.training
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))


@pytest.mark.parametrize("family", CONVERTED)
def test_what_transformers_converts_is_taken_as_it_is(family: str, tiny_model: TinyModel) -> None:
    assert _by_name(tiny_model(family)) is None


def test_files_of_a_large_model_are_not_put_together(tmp_path: Path) -> None:
    directory = build("llama", tmp_path)
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert have_same_tensors(_by_name(tmp_path / "parts"), _by_transformers(directory))


def _without_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _with_one_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.another.weight"] = torch.zeros(1)


def _with_one_wider(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(65)


def _with_one_of_another_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()


@pytest.mark.parametrize("change", [_without_one, _with_one_more, _with_one_wider, _with_one_of_another_dtype])
def test_tensors_that_do_not_fit_are_taken(change: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path) -> None:
    path = build("llama", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    assert _by_name(tmp_path) is None


def test_pickled_or_other_weights_stop_the_start(tmp_path: Path) -> None:
    build("llama", tmp_path)
    assert _by_name(tmp_path, dtype="bfloat16") is None
    (tmp_path / "model.safetensors").unlink()
    assert _by_name(tmp_path) is None


def test_models_that_differ_pass_for_the_same(tiny_model: TinyModel) -> None:
    directory = tiny_model("qwen3")
    expected = _by_transformers(directory)

    other = _by_name(directory)
    other.model.norm.weight.data[0] += 1
    assert not have_same_tensors(expected, other)

    other = _by_name(directory)
    other.model.rotary_emb.inv_freq[0] += 1  # in no file
    assert not have_same_tensors(expected, other)

    other = _by_name(directory)
    other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.detach().clone())
    assert not have_same_tensors(expected, other)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_second_start_tries_what_the_first_has_found_out(
    family: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> Any:
        return load_runner(
            tiny_model(family),
            dtype="float32",
            device="cpu",
            block_size=4,
            kv_cache_bytes=1 << 20,
            kernel_folder=KERNEL_FOLDER,
            selftest_folder=tmp_path,
        )

    first = start()
    assert first.result.loads_by_name is (family not in CONVERTED)
    slower = "load_weights" if first.result.loads_by_name else "load_by_name"
    monkeypatch.setattr(loading, slower, None)
    assert start().result == first.result
