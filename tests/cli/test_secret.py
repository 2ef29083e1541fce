"""A secret that others can read, that a second start replaces, or that two starts make two of."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from splitserve.service.errors import InvalidRequest
from splitserve.service.secret import SECRET_NAME, init_secret
from tests.cli.test_commands import run


def test_secret_is_not_random_or_open_to_others(tmp_path: Path) -> None:
    made = [init_secret(tmp_path / name) for name in ("a", "b")]
    assert all(is_new for _, is_new in made)
    secrets = [path.read_bytes() for path, _ in made]
    assert [len(secret) for secret in secrets] == [32, 32]
    assert secrets[0] != secrets[1]
    path = made[0][0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [SECRET_NAME]


def test_second_start_replaces_the_secret(tmp_path: Path) -> None:
    first = run("secret", "init", str(tmp_path))
    path = tmp_path / SECRET_NAME
    assert (first.returncode, first.stdout) == (0, f"{path}: made\n")
    secret = path.read_bytes()
    assert secret.hex() not in first.stdout + first.stderr
    second = run("secret", "init", str(tmp_path))
    assert (second.returncode, second.stdout) == (0, f"{path}: kept\n")
    assert path.read_bytes() == secret


def test_two_starts_at_once_make_two_secrets(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: init_secret(tmp_path), range(32)))
    assert sum(is_new for _, is_new in made) == 1
    assert len({path for path, _ in made}) == 1
    assert os.listdir(tmp_path) == [SECRET_NAME]


def half(path: Path) -> None:
    path.write_bytes(b"x" * 16)
    path.chmod(0o400)


def readable(path: Path) -> None:
    path.write_bytes(b"x" * 32)
    path.chmod(0o440)


def a_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_bytes(b"x" * 32)
    elsewhere.chmod(0o400)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("bad", [half, readable, a_link])
def test_any_file_is_taken_for_the_secret(tmp_path: Path, bad: object) -> None:
    path = tmp_path / SECRET_NAME
    bad(path)  # type: ignore[operator]
    before = path.read_bytes()
    with pytest.raises(InvalidRequest, match=SECRET_NAME):
        init_secret(tmp_path)
    assert path.read_bytes() == before


def test_folder_that_cannot_be_written_ends_in_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("secret", "init", str(tmp_path / "file"))
    assert done.returncode == 1
    assert done.stderr.startswith("splitserve: no secret can be kept in")
