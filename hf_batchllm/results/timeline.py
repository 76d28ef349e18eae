"""Timeline: what the steps of a run ran over, what the KV cache held, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# The phases of a call, in the order in which it comes to them, in words that a picture shows.
PHASES = {
    "prompts": "options and prompts are checked, and text becomes tokens",
    "loading": "only once, not in later calls: the tokenizer is loaded, stop strings are looked up in its vocabulary",
    "planning": "what the prompts share is found, and the order in which they run",
    "setup": "the KV cache is allocated; on a GPU, weights are merged and a step is rehearsed",
    "scheduling": "the next step is chosen and laid out for the model; requests and pages are kept track of",
    "launching": "on a GPU: the host hands steps over to the device, which works meanwhile",
    "capture": "on a GPU: decode steps are captured as CUDA graphs",
    "model": "the model runs; on a GPU: the host waits for the device, which runs it and picks tokens",
    "tokens": "the host picks tokens and looks for the ends of answers; on a GPU, it first waits for the model",
    "results": "results are put together, and tokens become text",
    "outside": "code outside the engine runs: the loop over a stream, a streamer, the progress bar",
}

_PHASES_SHOWN = 5
_LEAST_SHARE_SHOWN = 0.01  # of the time


@dataclass(frozen=True, eq=False)
class Timeline:
    """A run as a few hundred stretches of time at most. Each stretch is one step, or several consecutive ones.

    A step counts when its tokens have come back. Steps still under way when a call broke off count at its end.

    begin: when the first stretch began, in seconds from the start of the call. Each stretch begins where the one before
        it ended.
    ends: when each stretch ended, in seconds from the start of the call.
    steps: the number of steps in each stretch.
    prompt_tokens: prompt tokens that the steps ran over. What a preemption makes them run over again counts, too, the
        answer so far included.
    decode_tokens: answer tokens that the steps ran over, one at a time.
    running: the most sequences that had begun and not ended; preempted ones begin anew.
    cache_bytes: the most bytes of the KV cache that held tokens.
    phases: the seconds of each phase of the call, in the order in which a call comes to them. They add up to the call's
        seconds. ``PHASES`` says what they mean.
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
        """Where most of the time went, in one line; empty if no time was spent."""
        total = sum(self.phases.values())
        shares = {phase: seconds / total for phase, seconds in self.phases.items()} if total > 0 else {}
        longest = sorted(shares.items(), key=lambda item: -item[1])[:_PHASES_SHOWN]
        return ", ".join(f"{phase} {share:.0%}" for phase, share in longest if share >= _LEAST_SHARE_SHOWN)
