"""The memory of one call: the size of its steps, what they take beside the KV cache, and the cache itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ..config import BatchConfig
from ..inputs.prompts import longest_uncut
from ..model.image_features import ImageFeatures
from ..model.kv_storage import KVStorage
from ..model.model_in_use import ModelInUse
from ..model.state_storage import COPIED_AT_ONCE
from ..planning.call_plan import CallPlan
from ..planning.paged_cache import PagedCache
from .call_outputs import CallOutputs
from .drafts.assistant import MOST_GUESSED
from .drafts.drafts import Drafts
from .drafts.drafts_ahead import DraftsAhead
from .job import Job
from .kv_memory import KVMemory, Room
from .memory_rehearsal import LargestStep, cannot_rehearse, largest_step, picking_bytes, stage
from .step_size import tokens_in_a_step
from .wiring import picking_of, why_by_host


class CallMemory:
    def __init__(
        self,
        job: Job,
        plan: CallPlan,
        outputs: CallOutputs,
        use: ModelInUse,
        kv: KVMemory,
        config: BatchConfig,
        images: ImageFeatures | None,
    ) -> None:
        self._job = job
        self._plan = plan
        self._outputs = outputs
        self._use = use
        self._kv = kv
        self._config = config
        self._images = images
        self._vocabulary = use.architecture.vocab_size

    @cached_property
    def step_tokens(self) -> int:
        """The most tokens of a step."""
        budget = self._config.max_batch_tokens
        if budget is None:
            ranks = self._use.architecture.ranks
            budget = tokens_in_a_step(self._use.model, self._use.device, self._kv.within_reach())
            budget = ranks.least("tokens in a step", budget)
        config, job = self._config, self._job
        in_order = config.scheduler == "groups" and not config.keep_prefixes and job.adapters is None
        most = self._outputs.most_tokens(budget, self._vocabulary, self._plan.sharing if in_order else None)
        return max(most, longest_uncut(self._plan.prompts))

    def open(self) -> tuple[PagedCache, KVStorage]:
        """The cache of the call, as large as the call can use and as memory allows."""
        plan, wanted = self._plan, self._plan.pages_at_once
        states = bool(self._use.architecture.states)
        longest = max(self._plan.new_tokens, default=0)
        self._outputs.fit_into(self._kv.free_beside_the_cache(), longest, self._vocabulary)
        return self._kv.open(
            Room(max(wanted, 1), plan.slots_at_once if states else 0),
            Room(plan.pages_needed, plan.slots_needed if states else 0),
            depth=plan.sharing.depth if states else 0,
            beside=lambda most: self._beside_the_cache(wanted, most),
            results=self._outputs.results_bytes(longest, self._vocabulary),
        )

    def _beside_the_cache(self, wanted: int, most: int) -> int | None:
        """Bytes that the call takes beside a cache of at most ``most`` pages; None where that cannot be found out.

        wanted: pages that the whole list takes at the same time.
        """
        use, plan = self._use, self._plan
        if cannot_rehearse(use.model):
            return None
        step = largest_step(plan.prompts, plan.sharing, self.step_tokens, self._config, (wanted, most))
        if self._job.widths is not None:
            step = replace(step, samples=min(step.tokens, step.samples * max(self._job.widths)))
        elif guessed := self._most_guessed():
            largest = DraftsAhead.largest_step if use.device.type == "cuda" else Drafts.largest_step
            rows = min(largest, step.samples * (1 + guessed))  # of which the logits are looked at
            step = replace(step, samples=min(step.tokens, max(step.samples, rows)))
        step, picking, in_graphs = self._with_picking(step)
        picking += self._outputs.step_bytes(step.tokens, self._vocabulary)
        if use.architecture.states and self._job.widths is not None:
            picking += COPIED_AT_ONCE  # states, where beams part
        storage = stage(step, self._config.page_size)
        try:
            runner = use.run_over(storage)
            if self._images is not None:
                with runner.surroundings():
                    picking += self._images.bytes_beside(step.tokens, self._kv.memory)
            graphs = self._config.cuda_graphs and in_graphs
            return self._kv.rehearsals.beside_the_cache(runner, step, graphs, picking, self._kv.memory)
        finally:
            storage.release()
            use.drop_runner()

    def _most_guessed(self) -> int:
        """Tokens of an answer that may be guessed at a time."""
        if self._job.assistant is not None:
            return MOST_GUESSED
        return max((each.config.prompt_lookup_num_tokens or 0 for each in self._job.options), default=0)

    def _with_picking(self, step: LargestStep) -> tuple[LargestStep, int, bool]:
        """The step, the bytes that picking its tokens takes beside it, and whether decode steps may be graphs."""
        rows = self._outputs.most_rows(self._vocabulary)
        if rows is not None:  # no token is picked, and all logits are the step's own
            return replace(step, samples=min(step.tokens, rows)), 0, False
        picking = picking_of(self._job, self._use)
        by_host = why_by_host(self._job, self._outputs, picking) is not None
        copies = picking.changes_logits + self._outputs.copies_of_logits
        taken = picking_bytes(step.samples, self._vocabulary, picking.kept_bytes, copies=copies, by_host=by_host)
        return step, taken, self._job.widths is not None or picking.in_graphs or not by_host
