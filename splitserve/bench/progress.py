"""What a benchmark tells whoever waits for it."""

from collections.abc import Callable

Say = Callable[[str], None]
