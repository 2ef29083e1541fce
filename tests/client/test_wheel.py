"""What a user installs: the wheel, in an environment of its own, without the serving extra."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.client.fake_router import WORDS, FakeRouter

ROOT = Path(__file__).parents[2]
USE = """
import importlib.util, sys
assert importlib.util.find_spec("torch") is None
import splitserve
from splitserve import AsyncClient, Client
assert "/site-packages/" in splitserve.__file__, splitserve.__file__
with Client(sys.argv[1]) as client:
    print(client.generate("Where?").text)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a fresh environment with nothing but the wheel and what it asks for."""
    work = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(work), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = work.glob("*.whl")
    venv.create(work / "venv", with_pip=True)
    binaries = work / "venv" / "bin"
    pip = [str(binaries / "python"), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, str(wheel)], check=True)
    return binaries


@pytest.mark.cluster
def test_client_needed_what_its_wheel_does_not_bring(installed: Path) -> None:
    with FakeRouter() as router:
        use = [str(installed / "python"), "-P", "-c", USE, router.target]
        done = subprocess.run(use, check=True, capture_output=True, text=True, cwd=installed)
        assert done.stdout == "".join(WORDS) + "\n"
        generate = [str(installed / "splitserve"), "generate", "Where?", "--quiet", "--target", router.target]
        done = subprocess.run(generate, check=True, capture_output=True, text=True, cwd=installed)
        assert done.stdout == "".join(WORDS) + "\n"


@pytest.mark.cluster
def test_commands_needed_what_the_wheel_does_not_bring(installed: Path) -> None:
    command = str(installed / "splitserve")
    assert "generate" in subprocess.run([command, "--help"], check=True, capture_output=True, text=True).stdout
    env = os.environ | {"SPLITSERVE_GRPC_PORT": "0", "SPLITSERVE_HTTP_PORT": "0", "SPLITSERVE_INTERNAL_PORT": "0"}
    done = subprocess.run([command, "up"], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1
    assert "pip install 'splitserve[serve]'" in done.stderr
