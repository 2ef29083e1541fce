"""One patient pair of workers for everything that ends early: nothing in it is given back because time has passed."""

from collections.abc import Iterator

import pytest

from tests.cluster.fault_bench import FaultBench
from tests.tiny_models import add_tokenizer, build

# Of each worker: room for one prompt of 4,000 tokens, or for ten of 500.
NUM_BLOCKS = 384


@pytest.fixture(scope="package")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultBench]:
    directory = build("llama", tmp_path_factory.mktemp("models") / "llama", max_position_embeddings=8192)
    add_tokenizer(directory)
    plans = tmp_path_factory.mktemp("plans")
    made = FaultBench(
        directory, plans, prefill=1, decode=1, prefill_blocks=NUM_BLOCKS, decode_blocks=NUM_BLOCKS, is_patient=True
    )
    yield made
    made.close()
