"""Starts a worker for which the routers' name has several addresses, as that of a headless service has.

No such name exists on every machine that runs tests. `python many_addresses.py MODULE FLAGS...`, with the addresses in
ROUTER_ADDRESSES.
"""

import os
import runpy
import sys

from splitserve.worker.join import Joiner


async def _addresses(joiner: Joiner) -> list[str]:
    return os.environ["ROUTER_ADDRESSES"].split()


if __name__ == "__main__":
    Joiner._resolve = _addresses  # type: ignore[method-assign]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
