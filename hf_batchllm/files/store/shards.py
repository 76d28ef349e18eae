"""The parts of a file that independent jobs run: every job finds the same ones, from the file alone."""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import FilesError, OutputFileError
from ...wording import shown
from .paths import real_path, reason
from .sources import Source
from .windows import LEVELS, PromptOf, fingerprints, sharing_order

ANSWER_COST = 1024  # an answer takes about as long as so many bytes of a prompt
MOST_PARTS = 100_000

_WRITTEN = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*", re.ASCII)
_OF_A_PART = re.compile(r"(.+)\.shard-\d+-of-\d+\.jsonl", re.ASCII | re.DOTALL)
_TOLERANCE = 20  # a cut may be this part of a span away from its ideal place


@dataclass(frozen=True)
class Shard:
    """One part of several. ``str`` makes "2/8"."""

    part: int  # from 1
    of: int

    def __str__(self) -> str:
        return f"{self.part}/{self.of}"

    @property
    def words(self) -> str:
        return f"part {self.part:,} of {self.of:,}"

    def place(self, output: str) -> str:
        """The file that this part is written to. It stands beside the real output, also where a link names that."""
        named = real_path(output) if os.path.islink(output) else output
        return f"{named}.shard-{self.part}-of-{self.of}.jsonl"


@dataclass(frozen=True, eq=False)
class Part:
    """What one job runs."""

    shard: Shard
    numbers: np.ndarray  # of its records, ascending
    records: int  # of all parts together
    split: str  # a checksum of which record is in which part
    seed: int  # of sampling, where none is given: the same in all jobs, which do not talk to each other

    def summary(self) -> dict[str, Any]:
        """The part's entry in a run record."""
        return {
            "part": self.shard.part,
            "of": self.shard.of,
            "results": len(self.numbers),
            "records": self.records,
            "split": self.split,
        }


def read_shard(text: str) -> Shard:
    found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise FilesError(f"`shard` says which part of how many, as in 2/8 for the second of eight, not {shown(text)}")
    part, of = int(found[1]), int(found[2])
    if of < 1 or of > MOST_PARTS:
        raise FilesError(f"`shard` is {shown(text)}: a file has at least 1 part, and at most {MOST_PARTS:,}")
    if part < 1:
        raise FilesError(
            f"`shard` is {shown(text)}: parts are counted from 1, so the first is 1/{of} (in a Slurm script: "
            f"#SBATCH --array=1-{of})"
        )
    if part > of:
        raise FilesError(f"`shard` is {shown(text)}: there is no part {part:,} of {of:,}. The last one is {of}/{of}")
    return Shard(part, of)


def shards_beside(output: str) -> list[Shard]:
    """The parts of an output whose files are there."""
    folder, name = os.path.split(real_path(output))
    pattern = re.compile(re.escape(name) + r"\.shard-([1-9]\d*)-of-([1-9]\d*)\.jsonl", re.ASCII)
    try:
        found = [Shard(int(match[1]), int(match[2])) for match in map(pattern.fullmatch, os.listdir(folder)) if match]
    except OSError as error:
        raise OutputFileError(f"{folder} cannot be read: {reason(error)}") from error
    return sorted(found, key=lambda shard: (shard.of, shard.part))


def output_of(path: str) -> str | None:
    """The output of which this is the file of a part, by its name; None if it is none."""
    found = _OF_A_PART.fullmatch(path)
    return found[1] if found else None


def part_of(source: Source, shard: Shard, count: int, prompt_of: PromptOf) -> Part:
    """The part of the first ``count`` records. ``prompt_of``: the text of a record's prompt."""
    sizes = array("q")  # [records] bytes of its prompt

    def measured(raw: bytes) -> bytes:
        text = prompt_of(raw) or b""
        prompt = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        sizes.append(len(prompt))
        return prompt

    raws = (raw for chunk in source.chunks(np.arange(count)) for raw in source.records(chunk))
    prints = fingerprints(raws, measured)
    order, edges = split(prints, np.array(sizes, dtype=np.int64), shard.of)
    homes = np.empty(count, dtype="<u4")  # [records] the part that each is in
    homes[order] = np.repeat(np.arange(shard.of, dtype="<u4"), np.diff(edges))
    return Part(
        shard,
        numbers=np.sort(order[edges[shard.part - 1] : edges[shard.part]]),
        records=count,
        split=hashlib.blake2b(homes.tobytes(), digest_size=16).hexdigest(),
        seed=int.from_bytes(hashlib.blake2b(source.digest.encode(), digest_size=4).digest(), "little"),
    )


def split(prints: np.ndarray, sizes: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """[records] their numbers, those that begin alike side by side; [parts + 1] where each part begins among them.

    ``sizes``: [records] bytes of each prompt. Parts cost about the same. A cut is made where the least is shared,
    within a small distance of the place at which the parts would cost the same.
    """
    order, shared = sharing_order(prints)
    # A record costs what it adds to the one before it, and its answer.
    known = np.array([0, *LEVELS], dtype=np.int64)[shared]
    cost = np.maximum(sizes[order] - known, 0) + ANSWER_COST
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(cost)])  # [records + 1]
    total = int(before[-1])
    if not total:
        return order, np.zeros(parts + 1, dtype=np.int64)
    cuts = (_cut(before, shared, total * each // parts, total // (parts * _TOLERANCE)) for each in range(1, parts))
    edges = np.fromiter([0, *cuts, len(order)], dtype=np.int64)
    return order, np.maximum.accumulate(edges)


def _cut(before: np.ndarray, shared: np.ndarray, ideal: int, tolerance: int) -> int:
    first = int(np.searchsorted(before, ideal - tolerance))
    last = int(np.searchsorted(before, ideal + tolerance, side="right"))
    if first == last:  # a record reaches beyond the tolerance: the nearer one of its ends
        return first - 1 if first and ideal - before[first - 1] <= before[first] - ideal else first
    least = shared[first:last]
    places = first + np.flatnonzero(least == least.min())
    return int(places[np.argmin(np.abs(before[places] - ideal))])
