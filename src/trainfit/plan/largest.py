"""largest_within(): the largest number that fits, in few questions. Numbers in, numbers out; no torch."""

from __future__ import annotations

from collections.abc import Callable

_GROWTH = 64  # how far beyond what is known a straight line is followed


def largest_within(needed: Callable[[int], int], allowed: int, *, highest: int, start: int = 1) -> int:
    """The largest number from 1 to highest whose needed bytes stay within allowed; 0 if not even 1.

    needed must not fall, and is asked for no number twice. Of a straight line it is asked for four: the start, twice as
    much, what the line then says, and the next. Elsewhere every third question halves what is left.
    """
    known: dict[int, int] = {}

    def ask(number: int) -> int:
        if number not in known:
            known[number] = needed(number)
        return known[number]

    start = min(start, highest)
    if ask(start) > allowed and ask(1) > allowed:
        return 0
    low = _climb(ask, allowed, start, highest) if ask(start) <= allowed else 1
    if low == highest:
        return highest
    high = min(number for number, size in known.items() if size > allowed)
    turn = 0
    while high - low > 1:
        turn += 1
        slope = (ask(high) - ask(low)) / (high - low)
        guess = (low + high) // 2 if turn % 3 == 0 else low + int((allowed - ask(low)) / slope)
        guess = min(max(guess, low + 1), high - 1)
        if ask(guess) <= allowed:
            low = guess
        else:
            high = guess
    return low


def _climb(ask: Callable[[int], int], allowed: int, start: int, highest: int) -> int:
    """Up along the line through the two largest numbers known; the last that fits, once one does not or all do."""
    before, low = start, start
    while low < highest:
        rise = ask(low) - ask(before)
        step = low if rise <= 0 else int((allowed - ask(low)) * (low - before) / rise)
        guess = min(low + max(1, min(step, _GROWTH * low)), highest)
        if ask(guess) > allowed:
            return low
        before, low = low, guess
    return low
