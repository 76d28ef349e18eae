"""The parts of a file that independent jobs run: every job finds the same ones, from the file alone."""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FilesError, OutputFileError
from ..wording import shown
from .paths import real_path, reason
from .sources import LEVELS, PromptOf, Source, cut, fingerprints, sharing_order

ANSWER_COST = 1024  # an answer takes about as long as so many bytes of a prompt
MOST_PARTS = 100_000
_WRITTEN = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*", re.ASCII)
_OF_A_PART = re.compile(r"(.+)\.shard-([1-9]\d*)-of-([1-9]\d*)\.jsonl", re.ASCII | re.DOTALL)


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
    seed: int  # of sampling, where none is given: the same in all jobs, which do not talk to each other

    def summary(self) -> dict[str, Any]:
        """The part's entry in a run record."""
        return {"part": self.shard.part, "of": self.shard.of, "results": len(self.numbers), "records": self.records}


def read_shard(text: str) -> Shard:
    found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
    part, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part <= of <= MOST_PARTS:
        raise FilesError(
            f"`shard` says which part of how many, counted from 1 up to {MOST_PARTS:,}, as in 2/8 for the second of "
            f"eight, not {shown(text)} (in a Slurm script of eight jobs: #SBATCH --array=1-8)"
        )
    return Shard(part, of)


def shards_beside(output: str) -> list[Shard]:
    """The parts of an output whose files are there."""
    folder, name = os.path.split(real_path(output))
    try:
        found = [match for match in map(_OF_A_PART.fullmatch, os.listdir(folder)) if match and match[1] == name]
    except OSError as error:
        raise OutputFileError(f"{folder} cannot be read: {reason(error)}") from error
    return sorted((Shard(int(each[2]), int(each[3])) for each in found), key=lambda shard: (shard.of, shard.part))


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

    prints = fingerprints((raw for _, raw in source.read(range(count))), measured)
    order, shared = sharing_order(prints)
    # A record costs what it adds to the one before it, and its answer.
    known = np.array([0, *LEVELS], dtype=np.int64)[shared]
    cost = np.maximum(np.array(sizes, dtype=np.int64)[order] - known, 0) + ANSWER_COST
    edges = cut(cost, shard.of)
    return Part(
        shard,
        numbers=np.sort(order[edges[shard.part - 1] : edges[shard.part]]),
        records=count,
        seed=int.from_bytes(hashlib.blake2b(source.digest.encode(), digest_size=4).digest(), "little"),
    )
