"""A GGUF file as a model directory: converted once per content, in a process of its own.

Called by `splitserve.models.locate` and `default_model`. The cache folder holds `NAME-DIGEST-vN/` directories, each
with a `splitserve.json` that says what it was made from.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from splitserve.models.cache import build_once, prepare_folder
from splitserve.models.progress import Progress, report
from splitserve.service.errors import Internal, InvalidRequest

CONVERT_TIMEOUT_S = 3600.0
# Rises whenever the result of a conversion changes: older results are then made anew.
CONVERSION_VERSION = 1
# The exit status with which the child says that the file cannot be served.
REFUSED = 3
MANIFEST = "splitserve.json"
_HASH_PIECE = 4 << 20
_TAIL_NBYTES = 2000


@dataclass(frozen=True)
class Manifest:
    """What a converted directory was made from: the name it is served under and the digest of its source."""

    name: str
    revision: str


def converted_directory(cache: Path, name: str, digest: str) -> Path:
    """Where the conversion of the file with this hexadecimal digest lies, whether or not it exists yet."""
    return cache / "models" / f"{name}-{digest[:16]}-v{CONVERSION_VERSION}"


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory made here; None for any other directory."""
    path = directory / MANIFEST
    return Manifest(**json.loads(path.read_text())) if path.is_file() else None


def convert_gguf(source: Path, cache: Path, progress: Progress | None = None) -> Path:
    """The directory that holds `source` converted, made now if need be. Errors: see `run_conversion`."""
    digest = file_digest(source, cache, progress)
    target = converted_directory(cache, source.stem, digest)
    build_once(target, lambda staging: run_conversion(source, staging, source.stem, digest, progress), progress)
    return target


def run_conversion(source: Path, directory: Path, name: str, digest: str, progress: Progress | None) -> None:
    """Converts `source` into `directory` in a child process and writes the manifest.

    Raises `InvalidRequest` with the reason for a file that is refused, `Internal` when the child fails.
    """
    command = [sys.executable, "-P", "-m", "splitserve.models.convert", str(source), str(directory)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(  # noqa: S603 - this interpreter, and no shell reads the file's name
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
        ) as child,
    ):
        timer = threading.Timer(CONVERT_TIMEOUT_S, child.kill)
        timer.daemon = True
        timer.start()
        try:
            refused = _follow(child, progress)
            status = child.wait()
        except BaseException:
            child.kill()
            raise
        finally:
            timer.cancel()
        if status == REFUSED:
            raise InvalidRequest(f"{source} cannot be served: {refused}", reason="UNSUPPORTED_MODEL", field="model")
        if status != 0:
            raise Internal(f"converting {source} failed with exit status {status}: {_tail(errors)}")
    (directory / MANIFEST).write_text(json.dumps(asdict(Manifest(name=name, revision=digest[:16])), indent=2) + "\n")


def file_digest(path: Path, cache: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file's content in hexadecimal, remembered for as long as size, time and inode stay."""
    stat = path.stat()
    identity = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    memo = cache / "digests" / hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    try:
        remembered, digest = json.loads(memo.read_text())
        if remembered == identity:
            return str(digest)
    except (OSError, ValueError):
        pass  # nothing remembered: hash it below
    digest = file_sha256(path, progress)
    prepare_folder(memo.parent)
    scratch = memo.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps([identity, digest]))
    scratch.replace(memo)
    return digest


def file_sha256(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file's content in hexadecimal, read now."""
    total = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        while piece := file.read(_HASH_PIECE):
            total.update(piece)
            report(progress, f"hashing {path.name}", file.tell(), size)
    return total.hexdigest()


def _follow(child: subprocess.Popen[str], progress: Progress | None) -> str:
    """Passes the child's steps on; returns the reason it refused for, or an empty string."""
    assert child.stdout is not None
    refused = ""
    for line in child.stdout:
        message = json.loads(line)
        refused = message.get("refused", refused)
        if "stage" in message:
            report(progress, "converting the model", message["done"], message["total"])
    return refused


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read()[-_TAIL_NBYTES:].decode("utf-8", errors="replace").strip()
