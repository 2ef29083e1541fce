"""Encoding long text leaves the other threads alone, whatever the library holds on to meanwhile."""

import threading
import time
from pathlib import Path

from splitserve.models.tokenizer import Tokenizer
from tests.tiny_models import add_tokenizer


def test_encoding_a_long_text_stops_every_other_thread(tmp_path: Path) -> None:
    """C53: the library's `encode` holds the interpreter's lock all the while; `encode_batch_fast` does not."""
    add_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    thread = threading.Thread(target=tokenizer.encode, args=("the thing and 42 more " * 100_000,))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20
