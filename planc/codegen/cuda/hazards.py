"""Dependencies of launches: in go the bytes that each reads and writes, in order, out come the launches it waits for.

A launch waits for the last that wrote what it reads (RAW), and for the last that wrote and all that read since what it
writes (WAW, WAR). What another dependency already waits for is left out.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

Span = tuple[str, int, int]  # what it lies in, its first byte, the byte after its last


@dataclass
class _Piece:
    """Bytes from `start` to the next piece's start, with the same history."""

    start: int
    writer: int | None = None
    readers: list[int] = field(default_factory=list)


@dataclass
class Hazards:
    """The history of every byte, one launch after the other."""

    _pieces: dict[str, list[_Piece]] = field(default_factory=dict)
    _before: list[int] = field(default_factory=list)  # of each launch, a bit for every launch that has ended before it

    def add(self, reads: Iterable[Span], writes: Iterable[Span]) -> tuple[int, ...]:
        """The earlier launches that the next one has to wait for, ascending."""
        number = len(self._before)
        found: set[int | None] = set()
        for span in reads:
            for piece in self._cover(span):
                found.add(piece.writer)
                piece.readers.append(number)
        for span in writes:
            for piece in self._cover(span):
                found |= {piece.writer, *piece.readers}
                piece.writer, piece.readers = number, []
        return self._reduced({n for n in found if n is not None and n != number})

    def _reduced(self, found: set[int]) -> tuple[int, ...]:
        """Drops what the others wait for, and notes everything that has then ended."""
        kept, before = [], 0
        for n in sorted(found, reverse=True):
            if not before >> n & 1:
                kept.append(n)
            before |= self._before[n] | 1 << n
        self._before.append(before)
        return tuple(reversed(kept))

    def _cover(self, span: Span) -> list[_Piece]:
        """The pieces that make up a span, cut at its ends."""
        place, start, stop = span
        pieces = self._pieces.setdefault(place, [_Piece(0)])
        first = self._cut(pieces, start)
        last = self._cut(pieces, stop)
        return pieces[first:last]

    @staticmethod
    def _cut(pieces: list[_Piece], at: int) -> int:
        """The index of the piece that starts at `at`, made if need be."""
        i = bisect_right(pieces, at, key=lambda p: p.start) - 1
        if pieces[i].start == at:
            return i
        pieces.insert(i + 1, _Piece(at, pieces[i].writer, list(pieces[i].readers)))
        return i + 1
