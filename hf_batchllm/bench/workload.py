"""The workload of vLLM's RFC #12080: groups of prompts, each with a prefix of its own that its members share."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """``requests`` prompts in groups of ``degree``: ``shared`` tokens in common and ``own`` each; ``new`` to come."""

    requests: int
    shared: int
    own: int
    new: int
    degree: int
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "new", "degree"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1")
        if self.shared < 0 or self.own < 1:
            raise ValueError("--shared must be at least 0, and --own at least 1")

    @property
    def groups(self) -> int:
        return -(-self.requests // self.degree)

    def grouped(self, vocabulary: int) -> list[list[int]]:
        """The prompts, members of a group side by side. Different text in each group, no special tokens."""
        dice = random.Random(self.seed)
        lowest = min(1000, vocabulary // 10)  # special tokens and bytes stand at the beginning, as a rule

        def text(length: int) -> list[int]:
            return [dice.randrange(lowest, vocabulary) for _ in range(length)]

        prompts: list[list[int]] = []
        for _ in range(self.groups):
            prefix = text(self.shared)
            prompts += [prefix + text(self.own) for _ in range(self.degree)]
        return prompts[: self.requests]

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """As they are handed over."""
        prompts = self.grouped(vocabulary)
        if self.shuffle:
            random.Random(self.seed + 1).shuffle(prompts)
        return prompts

    def first(self, requests: int) -> Workload:
        """A part of it, for those that would take too long: whole groups as far as possible."""
        return Workload(**{**self.as_dict(), "requests": min(requests, self.requests)})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        order = "shuffled" if self.shuffle else "sorted"
        return (
            f"{self.requests:,} prompts, {order}: {self.groups:,} prefixes of {self.shared:,} tokens, each shared by "
            f"{self.degree:,}; {self.own:,} tokens of their own; {self.new:,} new tokens, EOS ignored"
        )
