"""Models by repository id, through the hub's real client against a hub on loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.models.hub import is_repository_id
from tests.models.fake_hub import COMMIT, REPOSITORY, FakeHub, serving
from tests.models.test_locate import write_model

# The client reads its settings when it is imported: each test has a process of its own.
_PROGRAM = """
import json, sys
from splitserve.models.locate import locate_model
from splitserve.service.errors import SplitserveError
options = json.loads(sys.argv[1])
stages = []
try:
    found = locate_model(progress=lambda stage, done, total: stages.append(stage), **options)
    answer = {"name": found.name, "revision": found.revision, "directory": str(found.directory)}
except SplitserveError as error:
    answer = {"error": type(error).__name__, "message": error.message}
json.dump({**answer, "stages": stages, "torch": "torch" in sys.modules}, sys.stdout)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = write_model(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    others = {"tokenizer.json": b"{}", "modeling.py": b"", "pytorch_model.bin": b"x", "onnx/model.safetensors": b"x"}
    with serving({**files, **others, "consolidated.safetensors": b"x"}) as running:
        yield running


def locate(url: str, home: Path, **options: object) -> dict[str, object]:
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM, json.dumps({"model": REPOSITORY, **options})],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
def test_the_commit_is_not_the_revision(revision: str | None, hub: FakeHub, tmp_path: Path) -> None:
    found = locate(hub.url, tmp_path / "home", revision=revision)
    assert (found["name"], found["revision"]) == (REPOSITORY, COMMIT)
    assert found["torch"] is False
    assert "downloading the model" in str(found["stages"])


def test_code_pickles_or_second_copies_are_fetched_unasked(hub: FakeHub, tmp_path: Path) -> None:
    locate(hub.url, tmp_path / "home")
    assert hub.requested == {"config.json", "model.safetensors", "tokenizer.json"}


def test_code_is_not_fetched_when_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    locate(hub.url, tmp_path / "home", trust_remote_code=True)
    assert "modeling.py" in hub.requested


def test_pickled_weights_are_fetched_unasked_or_never(hub: FakeHub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    refused = locate(hub.url, tmp_path / "home")
    assert refused["error"] == "InvalidRequest"
    assert "--allow-pickle" in str(refused["message"])
    assert "pytorch_model.bin" not in hub.requested
    assert locate(hub.url, tmp_path / "home", allow_pickle=True)["revision"] == COMMIT
    assert "pytorch_model.bin" in hub.requested


def test_a_reader_of_the_tokenizer_fetches_or_must_trust_the_weights(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["pytorch_model.bin"] = hub.files.pop("model.safetensors")
    read = locate(hub.url, tmp_path / "home", loads_weights=False)
    assert (read["name"], read["revision"]) == (REPOSITORY, COMMIT)
    assert hub.requested == {"config.json", "tokenizer.json"}
    # What it left in the cache is not taken for the whole model.
    assert locate(hub.url, tmp_path / "home", allow_pickle=True)["revision"] == COMMIT
    assert "pytorch_model.bin" in hub.requested


def test_an_unknown_name_or_revision_is_tried_again(hub: FakeHub, tmp_path: Path) -> None:
    unknown = locate(hub.url, tmp_path / "home", model="maker/nothing")
    assert unknown["error"] == "NotFound"
    assert "maker/nothing" in str(unknown["message"])
    unknown = locate(hub.url, tmp_path / "home", revision="v9")
    assert unknown["error"] == "NotFound"
    assert "v9" in str(unknown["message"])


def test_a_cached_model_needs_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"  # the discard port: nothing listens there
    absent = locate(nobody, tmp_path / "home")
    assert absent["error"] == "Unavailable"
    assert REPOSITORY in str(absent["message"])
    fetched = locate(hub.url, tmp_path / "home")
    offline = locate(nobody, tmp_path / "home")
    assert offline["directory"] == fetched["directory"]


@pytest.mark.parametrize("name", ["maker/model", "gpt2", "a/B_c-1.5"])
def test_a_repository_id_is_not_seen_as_one(name: str) -> None:
    assert is_repository_id(name)


@pytest.mark.parametrize(
    "name", ["", "/abs", "./rel", "../up", "a/b/c", "a/..", "~/x", "a b", "a/b\n", "é/x", "x/é", "x" * 97]
)
def test_a_path_is_sent_to_the_hub(name: str) -> None:
    assert not is_repository_id(name)
