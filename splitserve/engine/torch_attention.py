"""The reference attention back end: plain torch operators, any device.

Every query row walks the same KV tiles, at fixed absolute positions, one after the other with a running softmax in
float32. The matmul of a tile has at least eight rows. Where a row's bits do not depend from there on on how many there
are, a token's result is the same alone, in a batch, in any chunk and in decode. So it is with MKL on processors with
AVX-512, and not on those with AVX2 alone; the self-test at start finds out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from splitserve.engine.attention import AttentionSpec
from splitserve.engine.batch import Segment
from splitserve.engine.packing import PackedBatch
from splitserve.engine.pool import KVPool

TILE_TOKENS = 256
QUERY_TILE_TOKENS = 64  # scores of one tile stay in the processor's second-level cache
DECODE_GROUP = 32  # sequences whose KV tiles are gathered together; bounds the scratch memory
MIN_MATMUL_ROWS = 8

_NEVER = -1e30  # running maximum of a row that has seen nothing: finite, so that no difference of two is NaN

# exp is some hundred times slower where its result is no normal float32, which half of a causal tile would be.
_LOWEST_EXPONENT = -80.0
_NEGLIGIBLE = 2e-35  # just above exp of that; such weights become exact zeros


@dataclass(frozen=True)
class _QueryGroup:
    """Query rows that walk tiles together: one sequence's rows, or one row of each of several sequences.

    Sequences are ordered by falling length, so those that reach a tile are the first few.
    """

    rows: torch.Tensor  # int64 [sequences, tokens]: rows of the packed batch; repeats where a lone row needs company
    positions: torch.Tensor  # int64 [sequences, tokens]
    first_position: int
    last_positions: tuple[int, ...]  # falling

    def num_reaching(self, position: int) -> int:
        return sum(last >= position for last in self.last_positions)


@dataclass(frozen=True)
class _Span:
    """Sequences whose K and V are gathered together, and the query groups that read them."""

    tables: torch.Tensor  # int64 [sequences, tiles * blocks per tile]
    groups: tuple[_QueryGroup, ...]

    @property
    def last_position(self) -> int:
        return max(group.last_positions[0] for group in self.groups)


@dataclass
class _Running:
    """The running softmax of one group's rows: maximum, sum and weighted values, all float32."""

    query: torch.Tensor  # [sequences, kv_heads, rows, head_dim], scaled
    maximum: torch.Tensor  # [sequences, kv_heads, rows, 1]
    total: torch.Tensor  # [sequences, kv_heads, rows, 1]
    values: torch.Tensor  # [sequences, kv_heads, rows, head_dim]

    def add(self, count: int, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None, cap: float) -> None:
        """Adds one tile to the first `count` sequences.

        `key` is `[count, kv_heads, head_dim, tile]`, `value` `[count, kv_heads, tile, head_dim]`; `hidden` is
        `[count, 1, rows, tile]`, true where a row must not look; `cap` is the soft-cap or 0.
        """
        scores = self.query[:count] @ key
        if cap:
            scores.tanh_().mul_(cap)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        tile_maximum = scores.amax(-1, keepdim=True).clamp_(min=_NEVER)
        weights = torch.threshold_(_exp_(scores.sub_(tile_maximum)), _NEGLIGIBLE, 0.0)
        maximum = torch.maximum(self.maximum[:count], tile_maximum)
        keep = _exp_(self.maximum[:count] - maximum)
        scale = _exp_(tile_maximum - maximum)
        self.total[:count].mul_(keep).add_(weights.sum(-1, keepdim=True).mul_(scale))
        self.values[:count].mul_(keep).add_((weights @ value).mul_(scale))
        self.maximum[:count] = maximum


class TorchAttention:
    """Works on any device and both pool dtypes; arithmetic is float32."""

    name = "torch"

    def plan(self, batch: PackedBatch, pool: KVPool, num_heads: int) -> "TorchAttentionPlan":
        return TorchAttentionPlan(batch, pool, num_heads)


class TorchAttentionPlan:
    """One forward's work list; masks are made once and serve every layer."""

    def __init__(self, batch: PackedBatch, pool: KVPool, num_heads: int) -> None:
        self._batch = batch
        self._pool = pool
        self._per_kv_head = num_heads // pool.layout.num_kv_heads
        block_size = pool.layout.block_size
        self._blocks_per_tile = max(1, TILE_TOKENS // block_size)
        self._tile = self._blocks_per_tile * block_size
        # One row per (block, layer): a gather copies whole contiguous rows.
        self._rows = pool.tensor.view(pool.num_blocks * pool.layout.num_layers, -1)
        self._spans = tuple(self._make_spans())
        self._masks: dict[tuple[int, int, int | None], torch.Tensor | None] = {}

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        self._pool.store(layer, self._batch.slot_blocks, self._batch.slot_offsets, key, value)

    def attend(self, query: torch.Tensor, layer: int, spec: AttentionSpec) -> torch.Tensor:
        layout = self._pool.layout
        num_tokens, num_heads, head_dim = query.shape
        factor = spec.scaling / spec.softcap if spec.softcap else spec.scaling
        grouped = query.reshape(num_tokens, layout.num_kv_heads, self._per_kv_head, head_dim).float() * factor
        output = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
        for span in self._spans:
            running = [_start(grouped, group) for group in span.groups]
            for tile in range(self._first_tile(span, spec.window), span.last_position // self._tile + 1):
                self._add_tile(span, running, tile, layer, spec)
            for group, state in zip(span.groups, running, strict=True):
                result = state.values.div_(state.total)  # [sequences, kv_heads, tokens * per kv_head, head_dim]
                by_token = result.view(*result.shape[:2], -1, self._per_kv_head, head_dim).transpose(1, 2)
                output[group.rows] = by_token.flatten(2, 3).to(output.dtype)
        return output

    def _first_tile(self, span: _Span, window: int | None) -> int:
        if window is None:
            return 0
        first_position = min(group.first_position for group in span.groups)
        return max(0, first_position - window + 1) // self._tile

    def _add_tile(self, span: _Span, running: Sequence[_Running], tile: int, layer: int, spec: AttentionSpec) -> None:
        start = tile * self._tile
        counts = [group.num_reaching(start) for group in span.groups]
        key, value = self._gather(span.tables[: max(counts)], tile, layer)
        for group, state, count in zip(span.groups, running, counts, strict=True):
            is_past = spec.window is not None and start + self._tile <= group.first_position - spec.window + 1
            if count == 0 or is_past:
                continue  # nothing to see: adding such a tile would change no bit
            hidden = self._mask(group, tile, count, spec.window)
            state.add(count, key[:count], value[:count], hidden, spec.softcap or 0.0)

    def _gather(self, tables: torch.Tensor, tile: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one tile in float32, `[sequences, kv_heads]` of `[head_dim, tile]` and `[tile, head_dim]`."""
        layout, per_tile = self._pool.layout, self._blocks_per_tile
        blocks = tables[:, tile * per_tile : (tile + 1) * per_tile]
        rows = self._rows.index_select(0, blocks.flatten() * layout.num_layers + layer)
        by_block = rows.view(*blocks.shape, 2, layout.num_kv_heads, -1)
        keys = by_block[:, :, 0].reshape(*by_block.shape[:2], -1, layout.head_dim, layout.block_size)
        values = by_block[:, :, 1].reshape(*by_block.shape[:2], -1, layout.block_size, layout.head_dim)
        return _to_float(keys.permute(0, 2, 3, 1, 4)).flatten(3, 4), _to_float(values.transpose(1, 2)).flatten(2, 3)

    def _mask(self, group: _QueryGroup, tile: int, count: int, window: int | None) -> torch.Tensor | None:
        """True where a row must not look, `[count, 1, rows, tile tokens]`; None where all may look everywhere."""
        key = (id(group), tile, window)
        if key not in self._masks:
            self._masks[key] = self._make_mask(group, tile, count, window)
        return self._masks[key]

    def _make_mask(self, group: _QueryGroup, tile: int, count: int, window: int | None) -> torch.Tensor | None:
        start, end = tile * self._tile, (tile + 1) * self._tile
        is_causal = group.first_position < end - 1
        is_windowed = window is not None and start <= group.last_positions[0] - window
        if not is_causal and not is_windowed:
            return None
        columns = torch.arange(start, end, device=group.positions.device)
        positions = group.positions[:count, :, None]  # [count, tokens, 1]
        hidden = columns > positions
        if window is not None:
            hidden |= columns <= positions - window
        return hidden.repeat_interleave(self._per_kv_head, dim=1).unsqueeze(1)

    def _make_spans(self) -> Iterator[_Span]:
        numbered = list(enumerate(self._batch.segments))
        for index, segment in numbered:
            if len(segment.token_ids) > 1:
                yield self._chunk_span(index, segment)
        lone = [(index, segment) for index, segment in numbered if len(segment.token_ids) == 1]
        lone.sort(key=lambda item: -item[1].end)
        for first in range(0, len(lone), DECODE_GROUP):
            yield self._decode_span(lone[first : first + DECODE_GROUP])

    def _chunk_span(self, index: int, segment: Segment) -> _Span:
        first_row = self._batch.first_rows[index]
        groups = []
        for first in range(0, len(segment.token_ids), QUERY_TILE_TOKENS):
            last = min(first + QUERY_TILE_TOKENS, len(segment.token_ids)) - 1
            rows = torch.arange(first_row + first, first_row + last + 1).unsqueeze(0)
            groups.append(self._group(rows, segment.start + first, (segment.start + last,)))
        return _Span(self._tables([segment]), tuple(groups))

    def _decode_span(self, numbered: Sequence[tuple[int, Segment]]) -> _Span:
        rows = torch.tensor([[self._batch.first_rows[index]] for index, _ in numbered])
        positions = tuple(segment.start for _, segment in numbered)
        return _Span(self._tables([segment for _, segment in numbered]), (self._group(rows, positions[-1], positions),))

    def _group(self, rows: torch.Tensor, first_position: int, last_positions: tuple[int, ...]) -> _QueryGroup:
        missing = -(-MIN_MATMUL_ROWS // self._per_kv_head) - rows.shape[1]
        if missing > 0:
            rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1)
        rows = rows.to(self._batch.positions.device)
        return _QueryGroup(rows, self._batch.positions[rows], first_position, last_positions)

    def _tables(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Block tables cut to the sequences' lengths and filled up to whole tiles with each one's own first block.

        Filling stands for positions that no row looks at, but zero times what lies there must still be zero.
        """
        block_size = self._pool.layout.block_size
        num_tiles = -(-max(segment.end for segment in segments) // self._tile)
        width = num_tiles * self._blocks_per_tile
        tables = []
        for segment in segments:
            used = list(segment.block_table[: -(-segment.end // block_size)])
            tables.append(used + used[:1] * (width - len(used)))
        return torch.tensor(tables, dtype=torch.int64, device=self._batch.positions.device)


def _to_float(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous float32 copy."""
    return torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device).copy_(tensor)


def _exp_(exponents: torch.Tensor) -> torch.Tensor:
    return exponents.clamp_(min=_LOWEST_EXPONENT).exp_()


def _start(grouped: torch.Tensor, group: _QueryGroup) -> _Running:
    """The softmax of a group before its first tile; `grouped` is `[tokens, kv_heads, heads per kv_head, head_dim]`."""
    query = grouped[group.rows].transpose(1, 2).flatten(2, 3)  # [sequences, kv_heads, tokens * per kv_head, head_dim]
    column = (*query.shape[:3], 1)
    return _Running(
        query=query,
        maximum=query.new_full(column, _NEVER),
        total=query.new_zeros(column),
        values=torch.zeros_like(query),
    )
