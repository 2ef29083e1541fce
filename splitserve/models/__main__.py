"""`python -P -m splitserve.models fetch MODEL`: brings a model onto this machine before anything serves it.

For images and hosts without a network. Prints the model's directory, which `--model` of every role accepts.
"""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from splitserve.models.locate import locate_model
from splitserve.models.progress import progress_bar
from splitserve.service.errors import SplitserveError

app = App(name="python -P -m splitserve.models", help="Models on this machine.", version_flags=[])


@app.command
def fetch(
    model: str | None = None,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    trust_remote_code: Annotated[bool, Parameter(negative="")] = False,
    allow_pickle: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Download and convert a model, and print its directory.

    Parameters
    ----------
    model
        Repository id, directory or .gguf file; the default model when left out.
    revision
        Branch, tag or commit of a repository.
    cache_dir
        Where converted models lie (SPLITSERVE_CACHE).
    trust_remote_code
        Allow a model that brings its own code.
    allow_pickle
        Allow pickled weights, which can run code when loaded.
    """
    try:
        with progress_bar() as progress:
            found = locate_model(
                model,
                revision=revision,
                cache_dir=cache_dir,
                progress=progress,
                trust_remote_code=trust_remote_code,
                allow_pickle=allow_pickle,
            )
    except SplitserveError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    sys.stdout.write(f"{found.directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(app())
