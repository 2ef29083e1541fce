"""What `splitserve scale` needs of a cluster, whoever runs its processes."""

from collections.abc import Callable
from typing import Protocol

from splitserve.cli.scale.target import Target

Say = Callable[[str], None]
"""Takes a line about what is done."""


class Scalable(Protocol):
    """`str()` names it in a sentence."""

    def scale(self, target: Target, *, timeout_s: float, is_waited_for: bool, say: Say) -> None:
        """Returns when the roles of `target` have that many workers, each ready, or unless `is_waited_for` as soon as
        that is under way. Raises SplitserveError: refused, or not reached within `timeout_s`."""
