"""What a call gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from .seeds import Seeds
from .sharing import SharingPlan
from .table import as_table
from .timeline import Timeline

if TYPE_CHECKING:
    import pandas

_SHOWN = 3  # generations spelled out in a BatchResult's repr


@dataclass(frozen=True)
class Generation:
    """One generated sequence.

    index: the prompt's place in the list that was passed in.
    sample: which of the prompt's ``num_return_sequences`` this is, from 0.
    text: the new tokens decoded without special tokens; None without a tokenizer.
    token_ids: the new tokens, the EOS that ended them included.
    prompt_token_ids: the prompt as the model saw it.
    finish_reason: "stop" (EOS, a stop string, a criterion), "length" (as long as it was allowed to become), "time"
        (``max_time`` was over; there may be no new token at all), "error".
    logprobs: with ``generate(..., logprobs=k)``, a dict {token id: log-probability} for each of ``token_ids``: of the k
        likeliest tokens, the likeliest first, and of the chosen one (k + 1 of them where it is not among those), so
        that ``g.logprobs[t][g.token_ids[t]]`` is there. k = 0: of the chosen one alone. They are the log-softmax, in
        float32, of the model's own logits, whatever processors, temperature and the like make of them.
    prompt_logprobs: with ``prompt_logprobs=k``, the same for each of ``prompt_token_ids``, given those before it; None
        for the first one, and for those that the model had not come to when ``max_time`` was over. Prompts have the
        dicts of what they share in common: to change one, copy it.
    error: why there is no result, if ``finish_reason`` is "error".
    score: of a beam search, by which its answers are in order: the sum of the tokens' log-probabilities divided by
        their number to the power of ``length_penalty``. It is the ``sequences_scores`` of ``generate``.

    Log-probabilities are None if they were not asked for, and for errors. They take some 300 bytes a token and 75 more
    for each of the k. With them the host picks the tokens and waits for each step; with ``prompt_logprobs`` the LM head
    runs over prompts, too, steps are smaller where the vocabulary is large, and kept prefixes are not made use of.
    """

    index: int
    sample: int
    text: str | None
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    error: str | None = None
    score: float | None = None


@dataclass(frozen=True)
class RunReport:
    """How a call went.

    sequences, finished: how many there were, and how many had ended (fewer only after an interrupt).
    prompt_tokens: tokens of all prompts (each counted once for every sample).
    computed_tokens: prompt tokens that the model ran over, what preemption made it run over again left out.
    recomputed_tokens: tokens run over again after a preemption.
    saving: the share of the prompts' tokens that sharing spares, from 0 to 1.
    cached_tokens: prompt tokens found in prefixes kept from an earlier call.
    new_tokens: tokens generated.
    model_tokens: all tokens that went through the model.
    peak_memory: bytes of KV cache that held tokens at the same time, at most.
    kv_memory: bytes of the whole KV cache.
    device_memory: bytes of the device that PyTorch had given out at the same time, at most: the model, the KV cache and
        what steps take, and whatever else the process has there. 0 on a CPU, where nobody counts. To find it, a call
        sets PyTorch's peaks back (``torch.cuda.reset_peak_memory_stats``).
    seed: of the sampling noise, or a list with that of each prompt; None for greedy decoding.
    fused: what ran on fused kernels, or why it did not; empty where there are none to run on.
    graphs: decode steps replayed as CUDA graphs, and what capturing them took; empty if there were none.
    idle_tokens: tokens run for answers that turned out to have ended before.
    scored_tokens: of a call of ``score``, the tokens whose log-probability was wanted. Its sequences are the
        continuations, each with its context; what counts as its prompt tokens is all of them but the last.
    timeline: what steps ran over in the course of time, and where the time went (a Timeline).
    """

    sequences: int
    finished: int
    prompt_tokens: int
    computed_tokens: int
    saving: float
    recomputed_tokens: int
    cached_tokens: int
    new_tokens: int
    model_tokens: int
    steps: int
    preemptions: int
    seconds: float
    planning_seconds: float
    peak_memory: int
    kv_memory: int
    seed: Seeds | None
    plan: SharingPlan = field(repr=False)
    fused: str = ""
    graphs: str = ""
    idle_tokens: int = 0
    device_memory: int = 0
    scored_tokens: int = 0
    timeline: Timeline | None = field(default=None, repr=False)

    @property
    def tokens_per_second(self) -> float:
        """New ones; of a call of ``score``, those scored."""
        return (self.scored_tokens or self.new_tokens) / self.seconds if self.seconds else 0.0

    def _repr_html_(self) -> str:
        from .views.report import report_html  # only who looks at it needs it

        return report_html(self)

    def __str__(self) -> str:
        seconds = f"{self.seconds:,.2f} s" if self.seconds < 100 else f"{self.seconds:,.0f} s"
        count = f"{self.sequences:,} sequence{'' if self.sequences == 1 else 's'}"
        if self.finished < self.sequences:
            count = f"interrupted: {self.finished:,} of {count}"
        tokens, kind = (self.scored_tokens, "scored") if self.scored_tokens else (self.new_tokens, "new")
        lines = [
            f"{count}, {tokens:,} {kind} tokens in {seconds} ({self.tokens_per_second:,.0f} {kind} tokens/s)",
            f"prompts    {self.prompt_tokens:,} tokens, {self.computed_tokens:,} computed ({self.saving:.1%} saved)",
            f"model      {self.model_tokens:,} tokens in {self.steps:,} steps",
            f"KV cache   {shown_size(self.peak_memory)} used at most, of {shown_size(self.kv_memory)}",
        ]
        if self.timeline is not None and self.timeline.longest_phases:
            lines.insert(3, f"time       {self.timeline.longest_phases}")
        if self.device_memory:
            lines.append(f"memory     {shown_size(self.device_memory)} at most on the device, all in all")
        if self.cached_tokens:
            lines.append(f"kept       {self.cached_tokens:,} prompt tokens came from an earlier call")
        if self.preemptions:
            lines.append(f"preempted  {self.preemptions:,} times, {self.recomputed_tokens:,} tokens computed again")
        if self.fused:
            lines.append(f"fused      {self.fused}")
        if self.graphs:
            lines.append(f"graphs     {self.graphs}")
        if self.idle_tokens:
            lines.append(f"idle       {self.idle_tokens:,} tokens were run for answers that had ended")
        if self.seed is not None:
            said = self.seed if isinstance(self.seed, int) else "one for each prompt"
            lines.append(f"seed       {said}")
        return "\n".join(lines)


class BatchResult(Sequence[Generation]):
    """The generations of a call in the order of the prompts: row ``i * n + j`` is sample ``j`` of prompt ``i``."""

    _decode: Callable[[list[int]], str | None] | None = None  # for the prompts that are shown

    def __init__(
        self,
        generations: Sequence[Generation],
        report: RunReport | None,
        decode: Callable[[list[int]], str | None] | None = None,
    ) -> None:
        self._generations = list(generations)
        self.report = report
        self._decode = decode

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which is to store results and no tokenizer."""
        return {name: value for name, value in self.__dict__.items() if name != "_decode"}

    @overload
    def __getitem__(self, index: int) -> Generation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Generation]: ...
    def __getitem__(self, index: int | slice) -> Generation | list[Generation]:
        return self._generations[index]

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._generations)

    @property
    def texts(self) -> list[str | None]:
        return [generation.text for generation in self._generations]

    @property
    def token_ids(self) -> list[list[int]]:
        return [generation.token_ids for generation in self._generations]

    @property
    def by_prompt(self) -> list[list[Generation]]:
        """The samples of each prompt. After an interrupt, of those prompts that have any."""
        rows: list[list[Generation]] = []
        for generation in self._generations:
            if not rows or rows[-1][0].index != generation.index:
                rows.append([])
            rows[-1].append(generation)
        return rows

    def to_pandas(self) -> pandas.DataFrame:
        """A DataFrame of one row for each generation: the fields of Generation, and how many tokens there were.

        Row ``k`` is ``self[k]``. The columns ``logprobs`` and ``prompt_logprobs`` are there if they were asked for.
        """
        return as_table(self._generations)

    def __repr__(self) -> str:
        shown = [f"  [{place}] {_short(generation)}" for place, generation in enumerate(self._generations[:_SHOWN])]
        hidden = len(self) - len(shown)
        if hidden:
            shown.append(f"  ... and {hidden:,} more")
        return "\n".join([f"BatchResult of {len(self):,} generation{'' if len(self) == 1 else 's'}", *shown])

    def _repr_html_(self) -> str:
        from .views.result import result_html  # only who looks at it needs it

        return result_html(self, self._decode)


def _short(generation: Generation) -> str:
    """One line for a terminal."""
    what = generation.error or (repr(generation.text) if generation.text is not None else str(generation.token_ids))
    line = f"{generation.finish_reason}: {what}"
    return line if len(line) <= 70 else line[:67] + "..."


def shown_size(count: int) -> str:
    """A number of bytes, in words."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError
