"""One call of several ranks, each with a model of its own: who runs which pieces, until all results are there.

Each rank begins with its share. It claims a piece in the common store when it lets the first prompt in. A rank that has
run its share goes on with pieces that no other has claimed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import PoolError
from ..planning.pieces import Split
from ..wording import first_line
from .messages import Parcel, parcel_of_error
from .part_generator import PartGenerator
from .piece_claims import PieceClaims
from .ranks import Ranks
from .share import Share
from .work import Work

_WORDS_EVERY = 0.3  # seconds between looks at what the others say, and words of how far this rank is


class RankClaims(PieceClaims):
    """A piece is begun by the rank that first asks for it."""

    def __init__(self, piece_of: Mapping[int, int], is_mine: Callable[[int], bool]) -> None:
        super().__init__(piece_of)
        self._is_mine = is_mine

    def take(self, index: int) -> bool:
        piece = self._piece_of[index]
        if piece in self._begun:
            return True
        if piece in self._gone:
            return False
        (self._begun if (mine := self._is_mine(piece)) else self._gone).add(piece)
        return mine


class RankCall:
    """``name``: of the call, the same on all ranks, and of no other call."""

    def __init__(
        self, name: str, ranks: Ranks, generator: PartGenerator, work: Work, split: Split, strict: bool, expected: int
    ) -> None:
        self._name = name
        self._ranks = ranks
        self._generator = generator
        self._work = work
        self._split = split
        self._strict = strict  # units that do not fit are an error of the call, not of theirs alone
        self._expected = expected
        self._began, self._clock = time.time(), time.perf_counter()
        self._units = [[work.unit(place) for place in piece.prompts] for piece in split.pieces]
        self.share = Share()
        self.results: list[Any] = []
        self.problems: dict[Any, str] = {}
        self._told = [0, 0, 0]  # tokens read, tokens written and results, that the others know of
        self._all = [0, 0, 0]  # of all ranks
        self._looked = 0.0
        ranks.forget([self._key("piece", number) for number in range(len(self._units))])
        ranks.forget([self._key("sum", number) for number in range(3)])

    def _key(self, *what: Any) -> str:
        return "/".join(map(str, (self._name, *what)))

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self, show: Callable[[RankCall, int], None]) -> None:
        """Until no piece is left on any rank. An error of one rank is raised on all of them."""
        self._show = show
        try:
            pieces = self._split.shares[self._ranks.rank]
            while pieces:
                self._run_pieces(pieces)
                pieces = self._unclaimed()
        except BaseException as error:
            if not isinstance(error, _OfAnotherRankError):
                stopped = PoolError(f"rank {self._ranks.rank} was interrupted")
                told = error if isinstance(error, Exception) else stopped
                text = f"{type(told).__name__}: {first_line(told)}"
                self._ranks.say(self._key("failed"), (self._ranks.rank, parcel_of_error(told, text)))
            raise
        self._tell()
        self._ranks.exchange(self._key("ended"), True, self._look)
        self._tell()
        show(self, self._all[2])

    def _run_pieces(self, pieces: Sequence[int]) -> None:
        units = {piece: self._units[piece] for piece in pieces}
        part = self._work.part(sorted(unit for some in units.values() for unit in some))
        claims = RankClaims(part.piece_of(units), self._is_mine)
        self.share.began = time.perf_counter()
        try:
            report, interrupt = self._generator.run_part(
                lambda call: part.begin(self._generator, call), claims, self._began, self._deliver, self._watch
            )
        finally:
            self.share.end_part(self.share.read_now, self.share.written_now)
            self.share.running_seconds = self.share.seconds
        self.share.ran.update(claims.begun)
        if interrupt is None:
            for piece in pieces:
                self._is_mine(piece)  # those of which nothing fits into the memory: no other rank is to try
        if report is not None:
            self.share.reports.append(report)
        if interrupt is not None:
            raise self._failure or interrupt
        if part.problems:
            self.problems.update(part.problems)
            if self._strict:
                self._work.problems.update(part.problems)
                raise self._work.error()

    def _is_mine(self, piece: int) -> bool:
        return self._ranks.first_to_say(self._key("piece", piece)) == self._ranks.rank

    def _unclaimed(self) -> list[int]:
        """Of the rank that has most left, as many as it takes to end at the same time."""
        most: list[int] = []
        most_cost = 0.0
        for rank, share in enumerate(self._split.shares):
            left = [piece for piece in share if not self._ranks.is_said(self._key("piece", piece))]
            cost = sum(map(self._split.cost, left))
            if left and rank != self._ranks.rank and cost > most_cost:
                most, most_cost = left, cost
        return sorted(self._split.half_of(most, most_cost) or most[-1:])

    # -- what it tells and hears -----------------------------------------------------------------------------------

    _failure: BaseException | None = None

    def _deliver(self, results: list[Any]) -> None:
        self.results += results

    def _watch(self, step: Any, new_tokens: int) -> None:
        self.share.read_now += step.tokens - len(step.rows)
        self.share.written_now += new_tokens
        if time.perf_counter() - self._looked > _WORDS_EVERY:
            self._tell()
            try:
                self._look()
            except _OfAnotherRankError as failure:
                self._failure = failure
                raise KeyboardInterrupt from None  # which breaks a part off

    def _tell(self) -> None:
        self._looked = time.perf_counter()
        now = [self.share.read + self.share.read_now, self.share.written + self.share.written_now, len(self.results)]
        for number, (have, told) in enumerate(zip(now, self._told, strict=True)):
            self._all[number] = self._ranks.add(self._key("sum", number), have - told)
        self._told = now

    def _look(self) -> None:
        """Raises what another rank has failed with."""
        if time.perf_counter() - self._looked > _WORDS_EVERY:
            self._tell()
        failed = self._ranks.heard(self._key("failed"))
        if failed is not None:
            rank, parcel = failed
            raise _OfAnotherRankError(rank, parcel)
        self._show(self, self._all[2])

    # -- how far it is -------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._clock

    @property
    def tokens(self) -> tuple[int, int]:
        return self._all[0], self._all[1]

    @property
    def share_done(self) -> float:
        return self._all[2] / max(self._expected, 1)


class _OfAnotherRankError(Exception):
    def __init__(self, rank: int, parcel: Parcel) -> None:
        super().__init__(rank)
        self.rank = rank
        self.parcel = parcel

    def opened(self) -> BaseException:
        try:
            error = self.parcel.open()
        except Exception:
            error = None
        if not isinstance(error, Exception):
            return PoolError(f"rank {self.rank} has failed")
        error.add_note(f"it happened on rank {self.rank}")
        return error


def as_error(error: BaseException) -> BaseException:
    """An error of another rank as it is there."""
    return error.opened() if isinstance(error, _OfAnotherRankError) else error
