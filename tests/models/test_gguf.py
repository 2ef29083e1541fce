"""A GGUF becomes a directory once, whole, and with the tokenizer it was trained with."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from splitserve.models.description import ModelDescription
from splitserve.models.gguf import MANIFEST, file_digest
from splitserve.models.gguf_tokenizers import STAGES_BY_NAME, GGUFTokenizerInfo, restore_stages
from splitserve.models.locate import locate_model
from splitserve.models.tokenizer import Tokenizer
from splitserve.service.errors import InvalidRequest
from tests.models.reference_bpe import encode, pieces_with_single_digits
from tests.models.texts import TEXTS
from tests.models.tiny_gguf import CONTEXT_LENGTH, MERGES, PIECES, VOCABULARY, write_tiny_gguf

_CONTEXT = multiprocessing.get_context("spawn")


def _locate_and_report(gguf: str, cache: str, results: "multiprocessing.Queue[tuple[str, bool]]") -> None:
    stages: set[str] = set()
    model = locate_model(gguf, cache_dir=Path(cache), progress=lambda stage, done, total: stages.add(stage))
    results.put((str(model.directory), "converting the model" in stages))


def test_a_conversion_loses_what_the_file_says(tiny_model: ModelDescription) -> None:
    assert (tiny_model.name, tiny_model.vocab_size) == ("tiny", len(VOCABULARY))
    assert tiny_model.max_model_len == CONTEXT_LENGTH
    assert (tiny_model.num_layers, tiny_model.num_kv_heads, tiny_model.head_dim) == (1, 1, 16)
    assert tiny_model.bos_token_id == 1
    assert tiny_model.eos_token_ids == (2, 3), "end of turn ends a generation too"
    config = json.loads((tiny_model.directory / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == CONTEXT_LENGTH
    assert json.loads((tiny_model.directory / "config.json").read_text())["dtype"] == "bfloat16"
    chat = Tokenizer.load(tiny_model.directory).encode_chat([{"role": "user", "content": "abc"}])
    assert [chat[0], chat[-1]] == [1, 3]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_digits_stage_is_dropped(text: str, tiny_model: ModelDescription) -> None:
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    merges = [(first, second) for first, second in (merge.split(" ") for merge in MERGES)]
    expected = encode(pieces_with_single_digits(text), merges, ids)
    tokenizer = Tokenizer.load(tiny_model.directory)
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


def test_a_text_becomes_an_id_behind_the_vocabulary(tiny_model: ModelDescription) -> None:
    """The conversion's intermediate class brings an end-of-text token of its own."""
    tokenizer = Tokenizer.load(tiny_model.directory)
    assert tokenizer.vocab_size == len(VOCABULARY)
    assert max(tokenizer.encode("a<|endoftext|>b")) < len(VOCABULARY)


def test_several_processes_convert_the_same_file_several_times(tmp_path: Path) -> None:
    gguf, cache = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    results: multiprocessing.Queue[tuple[str, bool]] = _CONTEXT.Queue()
    processes = [_CONTEXT.Process(target=_locate_and_report, args=(str(gguf), str(cache), results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=240) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert len({directory for directory, _ in found}) == 1
    assert sum(converted for _, converted in found) == 1
    assert [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")] == [
        Path(found[0][0]).name
    ]


def test_a_killed_conversion_leaves_half_a_directory(tmp_path: Path) -> None:
    gguf, cache = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    results: multiprocessing.Queue[tuple[str, bool]] = _CONTEXT.Queue()
    process = _CONTEXT.Process(target=_locate_and_report, args=(str(gguf), str(cache), results))
    process.start()
    assert process.pid is not None
    children = _wait_for_children(psutil.Process(process.pid))
    os.kill(process.pid, signal.SIGKILL)
    process.join(timeout=60)
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, "the converting child outlived its caller"
    assert len(gone) == 1
    assert [path for path in (cache / "models").iterdir() if not path.name.startswith(".")] == []

    model = locate_model(str(gguf), cache_dir=cache)
    assert Tokenizer.load(model.directory).vocab_size == len(VOCABULARY)
    assert list((cache / "models").glob(".*.partial-*")) == []


def test_an_orphaned_conversion_works_on_for_nobody(tmp_path: Path) -> None:
    """The file is a pipe that nobody writes to: the child hangs in it until it sees that its caller is gone."""
    os.mkfifo(tmp_path / "endless.gguf")
    command = [sys.executable, "-P", "-m", "splitserve.models.convert", str(tmp_path / "endless.gguf"), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert b"reading the file" in child.stdout.readline()
            child.stdin.close()
            assert child.wait(timeout=60) == 1
        finally:
            child.kill()


def _wait_for_children(process: psutil.Process) -> list[psutil.Process]:
    """The converting child, once it runs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = [child for child in process.children() if "splitserve.models.convert" in child.cmdline()]
        if children:
            return children
        time.sleep(0.01)
    raise AssertionError("no conversion was started")


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    folder = tmp_path_factory.mktemp("pieces")
    gguf = write_tiny_gguf(folder / "pieces.gguf", kind="llama", pre="default", adds_bos=None, adds_space=False)
    return locate_model(str(gguf), cache_dir=folder / "cache")


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_sentencepiece_text_does_not_survive(text: str, sentencepiece_model: ModelDescription) -> None:
    tokenizer = Tokenizer.load(sentencepiece_model.directory)
    ids = tokenizer.encode(text)
    assert ids[0] == 1, "such a file wants BOS unless it says otherwise"
    assert tokenizer.decode(ids) == text


def test_a_space_is_put_before_the_text_against_the_files_word(sentencepiece_model: ModelDescription) -> None:
    id_of = {token: index for index, token in enumerate(PIECES)}
    tokenizer = Tokenizer.load(sentencepiece_model.directory)
    assert tokenizer.encode("ab b") == [1, id_of["ab"], id_of["▁b"]]
    assert tokenizer.encode("é") == [1, id_of["<0xC3>"], id_of["<0xA9>"]]


@pytest.mark.parametrize("pre", [None, "default", "superbpe"])
def test_an_unknown_pre_tokenizer_is_guessed(pre: str | None, tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "odd.gguf", pre=pre)
    with pytest.raises(InvalidRequest, match="pre-tokenizer") as refused:
        locate_model(str(gguf), cache_dir=tmp_path / "cache")
    assert refused.value.reason == "UNSUPPORTED_MODEL"
    assert list((tmp_path / "cache" / "models").glob("odd*")) == []


def test_a_file_that_is_no_gguf_hangs_or_leaves_something(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"no model" * 100)
    with pytest.raises(InvalidRequest, match=r"broken\.gguf"):
        locate_model(str(tmp_path / "broken.gguf"), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").glob("broken*")) == []


def test_a_changed_file_is_served_from_the_old_conversion(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"one")
    first = file_digest(path, tmp_path)
    assert file_digest(path, tmp_path) == first
    os.utime(path, ns=(1, 1))
    path.write_bytes(b"two")
    assert file_digest(path, tmp_path) != first


def test_a_converted_directory_given_by_path_is_another_model(tiny_model: ModelDescription) -> None:
    """Router and worker may name one model in two ways; name and revision decide whether they fit."""
    assert (tiny_model.directory / MANIFEST).is_file()
    assert locate_model(str(tiny_model.directory)) == tiny_model


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["x", "1234", "'", "S", "Ġ", "Ġy"]),
        ("smollm", ["x", "1", "2", "3", "4", "'", "S", "Ġ", "Ġy"]),
        ("llama-bpe", ["x", "123", "4", "'S", "Ġ", "Ġy"]),
        ("qwen2", ["x", "1", "2", "3", "4", "'S", "Ġ", "Ġy"]),
        ("tekken", ["x", "1", "2", "3", "4", "'S", "Ġ", "Ġy"]),
        ("gpt-4o", ["x", "123", "4", "'S", "Ġ", "Ġy"]),
    ],
)
def test_a_named_pre_tokenizer_cuts_otherwise(pre: str, pieces: list[str]) -> None:
    cut = STAGES_BY_NAME[pre].pre_tokenizer().pre_tokenize_str("x1234'S  y")
    assert [piece for piece, _ in cut] == pieces


@pytest.mark.parametrize(("says", "adds"), [(None, True), (True, True), (False, False)])
def test_bos_is_missing_where_the_file_is_silent(says: bool | None, adds: bool, tiny_model: ModelDescription) -> None:
    """Llama 3 files often leave it to the reader to know that BOS is wanted."""
    tokenizer = LibraryTokenizer.from_file(str(tiny_model.directory / "tokenizer.json"))
    restore_stages(tokenizer, GGUFTokenizerInfo("gpt2", "llama-bpe", says, None, None, "<bos>", "<eos>"))
    assert (tokenizer.encode("abc").tokens[0] == "<bos>") == adds
    assert json.loads(tokenizer.to_str())["model"]["ignore_merges"] is True
