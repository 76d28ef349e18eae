"""One call of several ranks, each with a model of its own: who runs which pieces, until all results are there.

Each rank begins with its share. It claims a piece in the common store when it lets the first prompt in. A rank that has
run its share goes on with pieces that no other has claimed.
"""

from __future__ import annotations

import contextlib
import pickle
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
        self, name: str, ranks: Ranks, generator: PartGenerator, work: Work, split: Split, expected: int
    ) -> None:
        self._name = name
        self._ranks = ranks
        self._generator = generator
        self._work = work
        self._split = split
        self._expected = expected
        self._began, self._clock = time.time(), time.perf_counter()
        self._units = [[work.unit(place) for place in piece.prompts] for piece in split.pieces]
        self.share = Share()
        self.results: list[Any] = []
        self.problems: dict[Any, str] = {}  # of units that do not fit into this rank's memory
        self._tried: set[int] = set()  # pieces that this rank need not try again
        self._told = [0, 0, 0]  # tokens read, tokens written and results, that the others know of
        self._all = [0, 0, 0]  # of all ranks
        self._looked = 0.0
        self._failure: OfAnotherRankError | None = None
        if not ranks.rank:
            ranks.forget([self._key("piece", number) for number in range(len(self._units))])
            ranks.forget([self._key("sum", number) for number in range(3)])

    def _key(self, *what: Any) -> str:
        return "/".join(map(str, (self._name, *what)))

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self, show: Callable[[RankCall, int], None]) -> None:
        """This rank's part, until no piece is left that it could run."""
        self._show = show
        try:
            pieces: Sequence[int] = self._split.shares[self._ranks.rank]
            while pieces or (pieces := self._unclaimed()):
                self._run_pieces(pieces)
                pieces = []
        finally:
            self._ranks.moved(False)
        self._tell()

    def _run_pieces(self, pieces: Sequence[int]) -> None:
        units = {piece: self._units[piece] for piece in pieces}
        part = self._work.part(sorted(unit for some in units.values() for unit in some))
        claims = RankClaims(part.piece_of(units), self._is_mine)
        self.share.began = time.perf_counter()
        self._ranks.moved()
        try:
            report, interrupt = self._generator.run_part(
                lambda call: part.begin(self._generator, call), claims, self._began, self._deliver, self._watch
            )
        finally:
            self.share.end_part(self.share.read_now, self.share.written_now)
            self.share.running_seconds = self.share.seconds
            self.problems.update(part.problems)
        self.share.ran.update(claims.begun)
        self._tried.update(pieces)
        if report is not None:
            self.share.reports.append(report)
        if interrupt is not None:
            raise self._failure or interrupt

    def _is_mine(self, piece: int) -> bool:
        return self._ranks.first_to_say(self._key("piece", piece)) == self._ranks.rank

    def _unclaimed(self) -> list[int]:
        """Of the rank that has most left, as many as it takes to end at the same time."""
        most: list[int] = []
        most_cost = 0.0
        for rank, share in enumerate(self._split.shares):
            if rank == self._ranks.rank:
                continue
            untried = [piece for piece in share if piece not in self._tried]
            left = [piece for piece in untried if not self._ranks.is_said(self._key("piece", piece))]
            self._tried.update(set(untried) - set(left))
            cost = sum(map(self._split.cost, left))
            if left and cost > most_cost:
                most, most_cost = left, cost
        return sorted(self._split.half_of(most, most_cost) or most[-1:])

    # -- what it tells and hears -----------------------------------------------------------------------------------

    def _deliver(self, results: list[Any]) -> None:
        self.results += results

    def _watch(self, step: Any, new_tokens: int) -> None:
        self._ranks.moved()
        self.share.read_now += step.tokens - len(step.rows)
        self.share.written_now += new_tokens
        if time.perf_counter() - self._looked > _WORDS_EVERY:
            try:
                self.look()
            except OfAnotherRankError as failure:
                self._failure = failure
                raise KeyboardInterrupt from None  # which breaks a part off

    def _tell(self) -> None:
        self._looked = time.perf_counter()
        now = [self.share.read + self.share.read_now, self.share.written + self.share.written_now, len(self.results)]
        for number, (have, told) in enumerate(zip(now, self._told, strict=True)):
            self._all[number] = self._ranks.add(self._key("sum", number), have - told)
        self._told = now

    def end(self) -> None:
        """All ranks have run their parts."""
        self._tell()
        self._show(self, self._all[2])

    def look(self) -> None:
        """Raises what another rank has failed with."""
        if time.perf_counter() - self._looked > _WORDS_EVERY:
            self._tell()
        raise_failure(self._ranks, self._name)
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


class OfAnotherRankError(Exception):
    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(rank)
        self.error = error
        error.add_note(f"it happened on rank {rank}")


def raise_failure(ranks: Ranks, name: str) -> None:
    """OfAnotherRankError if a rank has ended the call of this name."""
    failed = ranks.heard(f"{name}/failed")
    if failed is not None:
        rank, parcel = failed
        try:
            error = parcel.open()
        except Exception:
            error = None
        raise OfAnotherRankError(rank, error if isinstance(error, Exception) else PoolError(f"rank {rank} has failed"))


def say_failure(ranks: Ranks, name: str, error: BaseException) -> None:
    """To the ranks that are in the call."""
    told = error if isinstance(error, Exception) else PoolError(f"rank {ranks.rank} was interrupted")
    with contextlib.suppress(Exception):  # the error itself is what its own rank raises
        ranks.say(f"{name}/failed", (ranks.rank, _parcel(told)))


def _parcel(error: Exception) -> Parcel:
    """Ranks run the same script, so that they find its classes by their names."""
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)
        return Parcel(data, "an error")
    return parcel_of_error(error, f"{type(error).__name__}: {first_line(error)}")
