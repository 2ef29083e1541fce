"""Puts what two workers say of one sample into order; an attempt owns one per sample."""

from router.worker import TokenArrived


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
