"""How a run went over its time: what its steps ran over, what the KV cache held, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Timeline:
    """A run in at most some hundred stretches of time, each of one step or of several that follow each other.

    begin: seconds from the start of the call to that of the first stretch. Each goes on where the one before ended.
    ends: when each stretch ended, in seconds from the start of the call.
    steps: how many steps there were in it.
    prompt_tokens: tokens of prompts that they ran over, those run over again after a preemption included.
    decode_tokens: tokens of answers that they ran over.
    running: sequences that had begun and not ended, at most.
    cache_bytes: of the KV cache, what held tokens, at most.
    phases: what the seconds of the whole call were spent on, in the order in which a call comes to it. They add up to
        the call's seconds.
    """

    begin: float
    ends: np.ndarray  # [stretches] float64
    steps: np.ndarray  # [stretches] int64
    prompt_tokens: np.ndarray  # [stretches] int64
    decode_tokens: np.ndarray  # [stretches] int64
    running: np.ndarray  # [stretches] int64
    cache_bytes: np.ndarray  # [stretches] int64
    phases: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ends)
