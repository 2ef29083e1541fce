"""What of a model's directory may be run: by default nothing. Decided by whoever starts the worker."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Trust:
    """`remote_code`: Python files beside the weights may run. `pickle`: weights may come from pickle files."""

    remote_code: bool = False
    pickle: bool = False


SAFE = Trust()
