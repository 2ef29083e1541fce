"""`splitserve secret`: what the parts of a cluster will know one another by."""

import sys
from pathlib import Path

from cyclopts import App, Parameter

from splitserve.service.errors import InvalidRequest
from splitserve.service.secret import init_secret

app = App(
    name="secret",
    help="The secret that the parts of a cluster share.",
    default_parameter=Parameter(negative=""),
    result_action="return_value",
)


@app.command
def init(directory: Path) -> None:
    """Make a cluster's secret where there is none, and keep the one that is there; prints its file.

    Parameters
    ----------
    directory
        Folder of the file, which only its user may read.
    """
    try:
        path, is_new = init_secret(directory)
    except OSError as error:
        raise InvalidRequest(f"no secret can be kept in {directory}: {error.strerror}") from error
    sys.stdout.write(f"{path}: {'made' if is_new else 'kept'}\n")
