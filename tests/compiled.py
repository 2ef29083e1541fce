"""Where tests keep compiled kernels: the product's own folder, shared with the worker processes that they start.

So the kernels are compiled once, not once per test process.
"""

from splitserve.models.cache import cache_root

KERNEL_FOLDER = cache_root() / "kernels"
