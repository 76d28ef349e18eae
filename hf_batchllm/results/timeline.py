"""How a run went over its time: what its steps ran over, what the KV cache held, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# What the time of a call goes to, in the order in which a call comes to it.
PHASES = {
    "checks": "options and prompts are checked, text becomes tokens, stop strings are looked up in the vocabulary",
    "planning": "it is found out what the prompts share, and in which order they run",
    "setup": "the KV cache is made, and what else steps need (on a GPU: weights are merged, a step rehearsed)",
    "scheduling": "the next step is chosen and laid out for the model, and the books of requests and pages are kept",
    "launching": "on a GPU: the host hands steps over to the device, which is at work meanwhile",
    "capture": "on a GPU: decode steps are captured as CUDA graphs",
    "model": "the model runs; on a GPU: the host waits for the device, which runs it and picks tokens",
    "tokens": "the host picks tokens and looks for ends of answers (on a GPU, it waits for the model before it picks)",
    "results": "results are put together, and tokens become text",
    "outside": "others are at work: who takes results out of a stream, a streamer, the progress bar",
}

_SHOWN, _LEAST = 5, 0.01  # phases that a line names, and their share of the time


@dataclass(frozen=True, eq=False)
class Timeline:
    """A run in at most some hundred stretches of time, each of one step or of several that follow each other.

    A step counts when its tokens have come back. What was still on its way when a call broke off counts at its end.

    begin: seconds from the start of the call to that of the first stretch. Each goes on where the one before ended.
    ends: when each stretch ended, in seconds from the start of the call.
    steps: how many steps there were in it.
    prompt_tokens: tokens of pieces of prompts that they ran over. Pieces that are run again after a preemption count,
        with what there is of the answer.
    decode_tokens: tokens of answers that they ran over, one at a time.
    running: sequences that had begun and not ended, at most; those that were preempted begin anew.
    cache_bytes: of the KV cache, what held tokens, at most.
    phases: what the seconds of the whole call were spent on, in the order in which a call comes to it. They add up to
        the call's seconds. ``PHASES`` says what they mean.
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

    @property
    def longest_phases(self) -> str:
        """Where most of the time went, in a line; empty if there was none."""
        total = sum(self.phases.values())
        shares = {phase: seconds / total for phase, seconds in self.phases.items()} if total > 0 else {}
        longest = sorted(shares.items(), key=lambda item: -item[1])[:_SHOWN]
        return ", ".join(f"{phase} {share:.0%}" for phase, share in longest if share >= _LEAST)
