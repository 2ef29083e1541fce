"""The router's bench: that it measures what it says, on few streams."""

import json
from pathlib import Path

import pytest

from splitserve.bench.router import EDGES, RouterSettings, run_router_bench
from splitserve.bench.words import Meter, Words
from splitserve.service.errors import Internal
from tests.router.fakes import ByteTokenizer


@pytest.mark.timeout(120)
def test_row_is_missing_or_makes_no_sense(tmp_path: Path) -> None:
    said: list[str] = []
    settings = RouterSettings(edges=EDGES, streams=(1, 300), seconds=0.4)
    report, rows = run_router_bench(settings, said.append)
    assert [(row.edge, row.streams) for row in rows] == [("grpc", 1), ("grpc", 300), ("sse", 1), ("sse", 300)]
    for row in rows:
        assert row.tokens_per_s > 0
        assert row.cpu_us_per_token > 0
        assert row.tokens_per_chunk >= 1
        assert 0 < row.latency_ms_p50 <= row.latency_ms_p99
        assert row.half_load_tokens_per_s > 0
    report.save(tmp_path / "router.json")
    assert len(json.loads((tmp_path / "router.json").read_text())["rows"]) == 4


def test_tokenizer_without_words_is_used() -> None:
    class Bytes(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return bytes([token_id % 256])

    with pytest.raises(Internal, match="0 tokens that are words"):
        Words(Bytes(), 256)  # type: ignore[arg-type]


def test_token_is_counted_twice_or_timed_from_another_step() -> None:
    class Few(Words):
        def __init__(self) -> None:
            self.ids = list(range(5000))
            self.id_of = {f"w{token_id}": token_id for token_id in self.ids}

    meter = Meter(Few())
    first, second = meter.next_word(), meter.next_word()
    meter.take_ids([first])
    assert (meter.num_tokens, meter.num_chunks, meter.latencies) == (1, 1, [])
    meter.is_noting = True
    meter.take_text(f" w{first} w{second}")
    assert (meter.num_tokens, meter.num_chunks) == (3, 2)
    older, newer = meter.latencies
    assert older > newer > 0
