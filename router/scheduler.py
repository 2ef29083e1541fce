"""Which queued request goes to which pair of workers: a pure decision over plain data.

Late binding: a request leaves the queue only when a decode worker has room for its whole prompt plus the first decoded
token, and a prefill worker that can reach it has token budget and blocks. A decode worker that computes a prompt itself
is both: it reaches itself alone.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from router.config import Routing
from router.links import OVER_THE_NETWORK, SAME_HOST, SAME_TOPOLOGY_GROUP, LinkView, best_links
from splitserve.worker.admission import blocks_for, decode_blocks

EVERY_LENGTH = range(1, sys.maxsize)


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode worker with what is promised but not yet visible in its reports already taken off."""

    worker: str
    available_blocks: int
    total_blocks: int
    block_size: int
    num_seqs: int
    max_num_seqs: int
    max_model_len: int
    numerics: str
    host: str = ""
    topology_group: str = ""


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill worker likewise, or a decode worker that computes prompts. `waiting_tokens` are handed over and not yet
    computed; it is given prompts of the lengths in `takes`. `bytes_per_s`, by decode worker, is how fast its blocks
    have travelled there, where enough have.

    A prompt with more than `long_threshold` tokens left is long: while others wait it gets that many tokens of a step.
    `tokens_ahead` counts it with these alone, because a short prompt waits for no more.
    """

    worker: str
    available_blocks: int
    total_blocks: int
    block_size: int
    waiting_tokens: int
    tokens_ahead: int
    long_threshold: int
    max_waiting_tokens: int
    max_model_len: int
    numerics: str
    reachable: frozenset[str]
    takes: range = EVERY_LENGTH
    host: str = ""
    topology_group: str = ""
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the next attempt of a request needs: its tokens so far, and where it would rather not go again.

    One that `was_preempted` goes where it can stay for a while: with one more block for each sequence that is there.
    """

    num_tokens: int
    num_samples: int = 1
    was_preempted: bool = False
    avoid: frozenset[str] = frozenset()
    numerics: str = ""

    def differs_from(self, numerics: str) -> bool:
        """Whether what has been computed so far comes out otherwise on a worker of these `numerics`."""
        return self.numerics not in ("", numerics)

    def needs_no_less(self, other: "Demand") -> bool:
        """Whether this one finds no room wherever `other` finds none."""
        return (
            self.num_tokens >= other.num_tokens
            and self.num_samples >= other.num_samples
            and self.was_preempted >= other.was_preempted
        )


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: str
    decode: str

    @property
    def is_local(self) -> bool:
        """The decode worker computes the prompt itself."""
        return self.prefill == self.decode


Pair = tuple[PrefillView, DecodeView]


def _blocks_to_decode(view: DecodeView, demand: Demand) -> int:
    spare = view.num_seqs if demand.was_preempted else 0
    return decode_blocks(demand.num_tokens, demand.num_samples, view.block_size) + spare


def can_decode(view: DecodeView, demand: Demand) -> bool:
    """Room for the tokens so far and the first decoded one of every sample, now."""
    return (
        _blocks_to_decode(view, demand) <= view.available_blocks
        and view.num_seqs + demand.num_samples <= view.max_num_seqs
        and demand.num_tokens < view.max_model_len
    )


def can_prefill(view: PrefillView, num_tokens: int) -> bool:
    """Blocks for the whole prompt, and a queue short enough that waiting here beats waiting at the router.

    A giant prompt fills the queue for its like only: others get a part of every step beside it, and it beside them.
    """
    if blocks_for(num_tokens, view.block_size) > view.available_blocks or num_tokens >= view.max_model_len:
        return False
    has_long = view.waiting_tokens > view.tokens_ahead
    counted = num_tokens if has_long else min(num_tokens, view.long_threshold)
    return view.waiting_tokens == 0 or view.tokens_ahead + counted <= view.max_waiting_tokens


def could_place(demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]) -> bool:
    """Whether some pair that is here would have room for the request if it were idle."""
    return bool(_pairs_if_idle(demand, prefills, decodes))


def _pairs_if_idle(demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]) -> list[Pair]:
    return [
        (prefill, decode)
        for decode in decodes
        if decode_blocks(demand.num_tokens, demand.num_samples, decode.block_size) <= decode.total_blocks
        and demand.num_samples <= decode.max_num_seqs
        and demand.num_tokens < decode.max_model_len
        for prefill in prefills
        if decode.worker in prefill.reachable and could_prefill(prefill, demand.num_tokens)
    ]


def could_prefill(view: PrefillView, num_tokens: int) -> bool:
    """Whether it is given such prompts, and would have room for this one if it were idle."""
    return (
        num_tokens in view.takes
        and blocks_for(num_tokens, view.block_size) <= view.total_blocks
        and num_tokens < view.max_model_len
    )


def keep_room(
    demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
) -> tuple[list[PrefillView], list[DecodeView]]:
    """The views as those behind `demand` see them, once room is kept for it: as if it were placed already.

    It is kept on the pair that lacks least, so nobody takes there what comes free; nowhere if no pair could ever hold
    it.
    """

    def lacking(pair: Pair) -> tuple[int, ...]:
        prefill, decode = pair
        return (
            max(_blocks_to_decode(decode, demand) - decode.available_blocks, 0),
            max(decode.num_seqs + demand.num_samples - decode.max_num_seqs, 0),
            max(blocks_for(demand.num_tokens, prefill.block_size) - prefill.available_blocks, 0),
            prefill.waiting_tokens,
        )

    pairs = _pairs_if_idle(demand, prefills, decodes)
    if not pairs:
        return list(prefills), list(decodes)
    prefill, decode = min(pairs, key=lacking)
    fuller_prefill = replace(
        prefill,
        available_blocks=prefill.available_blocks - blocks_for(demand.num_tokens, prefill.block_size),
        waiting_tokens=prefill.waiting_tokens + demand.num_tokens,
        tokens_ahead=prefill.tokens_ahead + min(demand.num_tokens, prefill.long_threshold),
    )
    fuller_decode = replace(
        decode,
        available_blocks=decode.available_blocks - _blocks_to_decode(decode, demand),
        num_seqs=decode.num_seqs + demand.num_samples,
    )
    return (
        [fuller_prefill if view is prefill else view for view in prefills],
        [fuller_decode if view is decode else view for view in decodes],
    )


def max_prefill_tokens(total_blocks: int, block_size: int, max_model_len: int) -> int:
    """The most that an idle prefill worker can compute; the context has room for one token more, the pool need not."""
    return min(total_blocks * block_size, max_model_len - 1)


def max_decode_tokens(total_blocks: int, block_size: int, max_model_len: int) -> int:
    """The largest prompt that an idle decode worker can take: beside it lies the first token that it decodes."""
    return min(total_blocks * block_size, max_model_len) - 1


def place(
    demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView], routing: Routing, turn: int
) -> Placement | None:
    """The pair for one request, or None while no pair has room.

    Workers of equal numerics come before all else, because only there is recomputation exact; then workers that the
    request has not failed on; then `routing`: turns, or the least load and, where that is equal, the better link, see
    `links`. `turn` counts placements and drives round robin.
    """
    prefills = [view for view in prefills if demand.num_tokens in view.takes]
    pairs = [
        (prefill, decode)
        for decode in decodes
        if can_decode(decode, demand)
        for prefill in prefills
        if decode.worker in prefill.reachable and can_prefill(prefill, demand.num_tokens)
    ]
    if not pairs:
        return None
    prefill_order = _order([p.worker for p in prefills], turn)
    decode_order = _order([d.worker for d in decodes], turn)

    def cost(pair: Pair) -> tuple[float, ...]:
        prefill, decode = pair
        preference = (
            float(demand.differs_from(decode.numerics) + demand.differs_from(prefill.numerics)),
            float(len({prefill.worker, decode.worker} & demand.avoid)),
        )
        if routing == "round_robin":
            return preference
        used = 1 - decode.available_blocks / decode.total_blocks
        return (*preference, used, float(prefill.waiting_tokens))

    def turns(pair: Pair) -> tuple[int, int]:
        prefill, decode = pair
        return decode_order(decode.worker), prefill_order(prefill.worker)

    equal = _cheapest(pairs, cost)
    if routing != "round_robin":
        equal = _best_linked(equal, turn)
    prefill, decode = min(equal, key=turns)
    return Placement(prefill.worker, decode.worker)


def choose_prefill(prefills: Sequence[PrefillView], decode: DecodeView, turn: int) -> PrefillView:
    """Which of these, all with room, computes anew what `decode` keeps a reservation for."""
    equal = _cheapest(
        [(prefill, decode) for prefill in prefills],
        lambda pair: (float(pair[0].numerics != decode.numerics), float(pair[0].waiting_tokens)),
    )
    return _best_linked(equal, turn)[0][0]


def _cheapest(pairs: Sequence[Pair], cost: Callable[[Pair], tuple[float, ...]]) -> list[Pair]:
    """All of those that cost least."""
    costs = list(map(cost, pairs))
    least = min(costs)
    return [pair for pair, its_cost in zip(pairs, costs, strict=True) if its_cost == least]


def _best_linked(pairs: Sequence[Pair], turn: int) -> list[Pair]:
    """Those between whose workers blocks travel best."""
    if len(pairs) == 1:
        return list(pairs)
    return [pairs[index] for index in best_links(list(map(_link, pairs)), turn)]


def _link(pair: Pair) -> LinkView:
    prefill, decode = pair
    if prefill.topology_group and prefill.topology_group == decode.topology_group:
        distance = SAME_TOPOLOGY_GROUP
    else:
        distance = SAME_HOST if prefill.host == decode.host else OVER_THE_NETWORK
    return LinkView(distance, prefill.bytes_per_s.get(decode.worker, 0.0))


def _order(workers: list[str], turn: int) -> Callable[[str], int]:
    """Each worker's distance from the one whose turn it is."""
    ranks = {worker: (index - turn) % len(workers) for index, worker in enumerate(workers)}
    return ranks.__getitem__
