"""Puts what two workers say of an attempt's samples into order: each position once. Owned by `attempt`."""

from collections.abc import Iterable, Iterator, Mapping

from router.events import TokenArrived


class TokenOrder:
    """Lets each position of one sample through once and in order, and keeps what comes early."""

    def __init__(self, next_position: int) -> None:
        self._next = next_position
        self._early: dict[int, TokenArrived] = {}

    def take(self, token: TokenArrived) -> list[TokenArrived]:
        if token.position >= self._next:
            self._early[token.position] = token
        ready = []
        while (following := self._early.pop(self._next, None)) is not None:
            ready.append(following)
            self._next += 1
        return ready


class TokenOrders:
    """One order for each sample that is unfinished, given what each has put out so far; true while there are any."""

    def __init__(self, outputs: Mapping[int, tuple[int, ...]]) -> None:
        self._orders = {index: TokenOrder(len(output)) for index, output in outputs.items()}

    def __bool__(self) -> bool:
        return bool(self._orders)

    @property
    def samples(self) -> frozenset[int]:
        return frozenset(self._orders)

    def drop(self, sample: int) -> None:
        """It is over, whatever still comes of it; unknown ones are ignored."""
        self._orders.pop(sample, None)

    def take(self, tokens: Iterable[TokenArrived]) -> Iterator[TokenArrived]:
        """A sample is finished as soon as its last token is given."""
        for token in tokens:
            for ordered in self._orders[token.sample].take(token) if token.sample in self._orders else ():
                if ordered.finish_reason is not None:
                    del self._orders[ordered.sample]
                yield ordered
