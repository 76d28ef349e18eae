"""Workloads: prompts that share prefixes (vLLM's RFC #12080), lengths mixed as in ShareGPT, or both."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

# Log-normal: median, and the spread of the logarithm. Clipped to 2,048 their means are about 220 and 200 tokens, as in
# the samples of ShareGPT that benchmarks of serving engines use. The spreads are this benchmark's own choice.
_PROMPT_LENGTH = 100, 1.3
_ANSWER_LENGTH = 112, 1.1
_SHORTEST = 4
_LONGEST = 2048
# Of groups with mixed lengths: the spreads of the logarithm between groups and, of what is each prompt's own, within
# one. Together they spread answers as above; the median answer is a tenth of the longest.
_PREFIX_SPREAD, _OWN_SPREADS, _ANSWER_SPREADS = 0.5, (0.5, 0.5), (0.8, 0.8)
_SHORTEST_ANSWER, _MEDIAN_OF_LONGEST = 10, 10


@dataclass(frozen=True)
class PromptGroup:
    """The lengths of prompts that share a prefix."""

    shared: int
    own: Sequence[int]  # [members]  tokens after the prefix
    new: Sequence[int]  # [members]  tokens of the answer


@dataclass(frozen=True)
class Workload:
    """Prompts in groups of ``degree`` that share ``shared`` tokens; ``own`` more each, and ``new`` to generate."""

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

    @property
    def answers(self) -> list[int]:
        """How many tokens each prompt gets, in the order of ``prompts``."""
        return [self.new] * self.requests

    @property
    def order_matters(self) -> bool:
        """Whether prompts share something, so that a rival may depend on their order."""
        return self.shared > 0

    def grouped(self, vocabulary: int) -> list[list[int]]:
        """The prompts, group by group. Each group has different text, without special tokens."""
        text = _Text(self.seed, vocabulary)
        prompts: list[list[int]] = []
        for _ in range(self.groups):
            prefix = text(self.shared)
            prompts += [prefix + text(self.own) for _ in range(self.degree)]
        return prompts[: self.requests]

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """The prompts in the order in which they are passed in."""
        prompts = self.grouped(vocabulary)
        if self.shuffle:
            random.Random(self.seed + 1).shuffle(prompts)
        return prompts

    def first(self, requests: int) -> Workload:
        """The first prompts of it, in whole groups as far as possible: for rivals that would take too long."""
        return replace(self, requests=min(requests, self.requests))

    def cut_short(self, new: int) -> Workload:
        return replace(self, new=min(new, self.new))

    def as_groups(self) -> list[PromptGroup]:
        sizes = [min(self.degree, self.requests - begin) for begin in range(0, self.requests, self.degree)]
        return [PromptGroup(self.shared, [self.own] * size, [self.new] * size) for size in sizes]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if not self.shared:
            prompts = f"{self.requests:,} prompts of {self.own:,} tokens, nothing shared"
            return f"{prompts}; {self.new:,} new tokens, EOS ignored"
        order = "shuffled" if self.shuffle else "sorted"
        degree = min(self.degree, self.requests)
        return (
            f"{self.requests:,} prompts, {order}: {_prefixes(self.groups)} of {self.shared:,} tokens, each shared by "
            f"{degree:,}; {self.own:,} tokens of their own; {self.new:,} new tokens, EOS ignored"
        )


@dataclass(frozen=True)
class Mix:
    """Lengths as in people's chats with a model: most are short, a few are very long. Nothing is shared.

    ``own`` and ``new`` are the longest prompt and answer; all other lengths shrink with them.
    """

    requests: int
    own: int = _LONGEST
    new: int = _LONGEST
    seed: int = 0
    ends_at: int | None = None  # longer answers are cut off here
    order_matters = False

    def __post_init__(self) -> None:
        for name in ("requests", "own", "new"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1")

    def lengths(self) -> list[tuple[int, int]]:
        """(tokens of the prompt, tokens of its answer) for each prompt."""
        dice = random.Random(self.seed)

        def draw(median: float, spread: float, most: int) -> int:
            length = dice.lognormvariate(math.log(median), spread) * most / _LONGEST
            return min(max(round(length), _SHORTEST), most)

        lengths = [(draw(*_PROMPT_LENGTH, self.own), draw(*_ANSWER_LENGTH, self.new)) for _ in range(self.requests)]
        return [(prompt, min(answer, self.ends_at or answer)) for prompt, answer in lengths]

    @property
    def answers(self) -> list[int]:
        return [answer for _, answer in self.lengths()]

    def prompts(self, vocabulary: int) -> list[list[int]]:
        text = _Text(self.seed + 1, vocabulary)
        return [text(length) for length, _ in self.lengths()]

    def grouped(self, vocabulary: int) -> list[list[int]]:
        return self.prompts(vocabulary)

    def first(self, requests: int) -> Mix:
        return replace(self, requests=min(requests, self.requests))

    def cut_short(self, new: int) -> Mix:
        return replace(self, ends_at=new)

    def as_groups(self) -> list[PromptGroup]:
        return [PromptGroup(0, [own], [new]) for own, new in self.lengths()]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        own, new = zip(*self.lengths(), strict=True)
        return (
            f"{self.requests:,} prompts, nothing shared: {_spread(own)} tokens each; {_spread(new)} new tokens, "
            "EOS ignored"
        )


@dataclass(frozen=True)
class MixedGroups(Mix):
    """Groups of ``degree`` prompts that share a prefix, with lengths that differ between groups and within them.

    ``shared`` and ``own`` are medians; ``new`` is the longest answer. With ``open_ended`` no lengths of answers are
    drawn: each may become that long.
    """

    own: int = 200
    shared: int = 2000
    degree: int = 8
    shuffle: bool = True
    open_ended: bool = False
    order_matters = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared < 1 or self.degree < 1:
            raise ValueError("--shared and --degree must be at least 1")

    def as_groups(self) -> list[PromptGroup]:
        dice = random.Random(self.seed)

        def draw(median: float, spread: float) -> float:
            return dice.lognormvariate(math.log(median), spread)

        groups = []
        for begin in range(0, self.requests, self.degree):
            shared = round(draw(self.shared, _PREFIX_SPREAD))
            own = draw(self.own, _OWN_SPREADS[0])
            new = draw(self.new / _MEDIAN_OF_LONGEST, _ANSWER_SPREADS[0])
            lengths = []
            for _ in range(min(self.degree, self.requests - begin)):
                answer = max(round(draw(new, _ANSWER_SPREADS[1])), _SHORTEST_ANSWER)
                most = min(self.new, self.ends_at or self.new)
                answer = most if self.open_ended else min(answer, most)
                lengths.append((max(round(draw(own, _OWN_SPREADS[1])), 1), answer))
            groups.append(PromptGroup(shared, *map(list, zip(*lengths, strict=True))))
        return groups

    def _order(self) -> list[int]:
        """For each place of the list, the number of its prompt when counted group by group."""
        order = list(range(self.requests))
        if self.shuffle:
            random.Random(self.seed + 1).shuffle(order)
        return order

    def lengths(self) -> list[tuple[int, int]]:
        grouped = []
        for group in self.as_groups():
            grouped += [(group.shared + own, new) for own, new in zip(group.own, group.new, strict=True)]
        return [grouped[place] for place in self._order()]

    def grouped(self, vocabulary: int) -> list[list[int]]:
        text = _Text(self.seed + 2, vocabulary)
        prompts = []
        for group in self.as_groups():
            prefix = text(group.shared)
            prompts += [prefix + text(own) for own in group.own]
        return prompts

    def prompts(self, vocabulary: int) -> list[list[int]]:
        grouped = self.grouped(vocabulary)
        return [grouped[place] for place in self._order()]

    def __str__(self) -> str:
        groups = self.as_groups()
        own = [length for group in groups for length in group.own]
        new = [length for group in groups for length in group.new]
        order = "shuffled" if self.shuffle else "sorted"
        return (
            f"{self.requests:,} prompts, {order}: {_prefixes(len(groups))} of {_spread([g.shared for g in groups])} "
            f"tokens, each shared by {self.degree:,}; {_spread(own)} tokens of their own; {_spread(new)} new tokens, "
            "EOS ignored"
        )


def _spread(lengths: Sequence[int]) -> str:
    if min(lengths) == max(lengths):
        return f"{lengths[0]:,}"
    return f"{min(lengths):,} to {max(lengths):,} (on average {sum(lengths) / len(lengths):,.0f})"


def _prefixes(count: int) -> str:
    return f"{count:,} prefix{'' if count == 1 else 'es'}"


class _Text:
    """Random token ids."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._dice = random.Random(seed)
        self._lowest = min(1000, vocabulary // 10)  # the lowest ids are mostly special tokens and bytes
        self._vocabulary = vocabulary

    def __call__(self, length: int) -> list[int]:
        return [self._dice.randrange(self._lowest, self._vocabulary) for _ in range(length)]
