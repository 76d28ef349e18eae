"""What the kernels that edit single logits read: tokens by kind of row, and the tokens that each row has had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .work_lists import sent

AT_ANY_LENGTH = -1


@dataclass(frozen=True)
class Target:
    """A token whose logit is changed, by adding to it. An addition of -inf forbids the token."""

    token: int
    bias: float = 0.0
    at: int = AT_ANY_LENGTH  # only where a row has so many new tokens
    sequences: Mapping[tuple[int, ...], float] | None = None  # added too where the row ends with these tokens


@dataclass(frozen=True)
class TargetLists:
    """The targets of several kinds of rows, on a device: each list is a stretch of the one that it points into."""

    begin: torch.Tensor  # [kinds + 1] int32  into the targets
    token: torch.Tensor  # [targets] int32
    bias: torch.Tensor  # [targets] float32
    at: torch.Tensor  # [targets] int32
    sequences: torch.Tensor  # [targets + 1] int32  into the sequences
    added: torch.Tensor  # [sequences] float32
    prefix: torch.Tensor  # [sequences + 1] int32  into the tokens of prefixes
    prefix_token: torch.Tensor  # [any] int32
    most: int  # targets of one kind
    looks_back: bool  # whether there are sequences
    spare: int  # tokens that a row must have before those of a sequence

    @classmethod
    def of(cls, kinds: Sequence[Sequence[Target]], device: torch.device | str, spare: int = 0) -> TargetLists:
        every = [target for kind in kinds for target in kind]
        pairs = [list((target.sequences or {}).items()) for target in every]
        found = [pair for some in pairs for pair in some]
        columns: dict[str, Any] = {
            "begin": _edges(kinds),
            "token": [target.token for target in every],
            "bias": np.array([target.bias for target in every], dtype=np.float32),
            "at": [target.at for target in every],
            "sequences": _edges(pairs),
            "added": np.array([added for _, added in found], dtype=np.float32),
            "prefix": _edges([tokens for tokens, _ in found]),
            "prefix_token": [token for tokens, _ in found for token in tokens],
        }
        return cls(
            **{name: _on(values, device) for name, values in columns.items()},
            most=max(map(len, kinds), default=0),
            looks_back=bool(found),
            spare=spare,
        )


def _edges(lists: Sequence[Any]) -> list[int]:
    return [0, *np.cumsum([len(each) for each in lists], dtype=np.int64).tolist()]


def _on(values: Any, device: torch.device | str) -> torch.Tensor:
    array = np.asarray(values, dtype=None if isinstance(values, np.ndarray) else np.int32)
    if not array.size:
        array = np.zeros(1, dtype=array.dtype)  # nothing points there, and no kernel gets an empty tensor
    with torch.inference_mode(False):  # steps may run outside of inference mode
        return sent(torch.from_numpy(array), device)


@dataclass(frozen=True)
class History:
    """The tokens of rows, or the last of them, in one tensor."""

    tokens: torch.Tensor  # [any] int32
    begin: torch.Tensor  # [rows] int32  where a row's own begin; -1: it has none here
    of_prompt: torch.Tensor  # [rows] int32  how many of them are its prompt's
    made: torch.Tensor  # [rows] int32 or int64  new tokens, which follow the prompt's
    most: int  # tokens of the longest row

    def known(self) -> torch.Tensor:  # [rows] int64
        return self.of_prompt.long() + self.made.long()


@dataclass(frozen=True)
class Forced:
    """Tokens without which a row has no choice, at its first or its last token."""

    first: torch.Tensor  # [kinds] int32  -1: none
    last: TargetLists  # of each kind


@dataclass(frozen=True)
class Decays:
    """How the logits of tokens that end an answer grow with its length."""

    ends: TargetLists  # of each kind
    start: torch.Tensor  # [kinds] int32  new tokens, from which on they grow
    growth: torch.Tensor  # [kinds, lengths] float32  by which share of their size, of each length beyond
