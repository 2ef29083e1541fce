"""`splitserve up` with fake roles, no model and short times; takes UpConfig's fields as one JSON object."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from splitserve.cli import main, up
from splitserve.cli.keeper import Policy
from splitserve.cli.roles import Model, Roles


def locate(config: up.UpConfig) -> Model:
    if os.environ.get("FAKE_LOCATE") == "slow":
        print("locating", file=sys.stderr, flush=True)
        time.sleep(600)
    return Model(directory=Path("/models/fake"), served_name=config.served_model_name or "fake")


def command() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who runs the tests may have it ignored, as nohup does
    settings = json.loads(sys.argv[1])
    if "log_dir" in settings:
        settings["log_dir"] = Path(settings["log_dir"])
    grace_s = float(os.environ.get("FAKE_GRACE", "3"))
    return up.run_up(
        up.UpConfig(**settings),
        roles=Roles(router="fake_router", prefill_worker="fake_prefill", decode_worker="fake_decode"),
        policy=Policy(first_delay_s=0.05, longest_delay_s=0.2, grace_s=grace_s, give_up_after=3, poll_s=0.05),
        locate=locate,
    )


main.make_app = lambda: command
main.run()
