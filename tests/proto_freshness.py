"""Keeps the committed stubs equal to what proto/ generates.

python -m tests.proto_freshness           fails when a stub is stale
python -m tests.proto_freshness --write   makes the stubs anew
"""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
STUBS = ROOT / "splitserve" / "v1"


def generate(into: Path) -> dict[str, str]:
    """Generates every stub below `into` and returns file name → content."""
    protos = sorted(str(path) for path in (ROOT / "proto" / "splitserve" / "v1").glob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    options = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # The plugins are beside this interpreter, which need not be on the path.
    programs = Path(sys.executable).parent
    options += [f"--plugin=protoc-gen-{name}={programs / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    status = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}", *options, *protos])
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    return {path.name: path.read_text() for path in (into / "splitserve" / "v1").iterdir()}


def committed() -> dict[str, str]:
    return {path.name: path.read_text() for path in STUBS.glob("*_pb2*")}


def stale() -> list[str]:
    """Names of stubs that differ from what proto/ generates now."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
    present = committed()
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        with tempfile.TemporaryDirectory() as scratch:
            for name, content in generate(Path(scratch)).items():
                (STUBS / name).write_text(content)
        return 0
    names = stale()
    if names:
        print(f"stale stubs, run 'make proto': {', '.join(names)}", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
