"""The memory of one call: the size of its steps, what they take beside the KV cache, and the cache itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from statistics import fmean

from ..inputs.prompts import longest_uncut
from ..model.attention.kv_storage import KVStorage
from ..model.device_memory import is_out_of_memory
from ..model.image_features import ImageFeatures
from ..model.model_in_use import ModelInUse
from ..model.states.state_storage import COPIED_AT_ONCE
from ..planning.call_plan import CallPlan
from ..planning.paged_cache import PagedCache
from .call_outputs import CallOutputs
from .cost import STEP_ON_CPU, STEP_ON_GPU
from .drafts.assistant import MOST_GUESSED, Assistant
from .drafts.drafts import Drafts
from .drafts.drafts_ahead import DraftsAhead
from .job import Job
from .kv_memory import KVMemory, Room
from .memory_rehearsal import LargestStep, cannot_rehearse, largest_step, pages_of, picking_bytes
from .picking import picking_of, why_by_host
from .resources import Resources
from .step_size import tokens_in_a_step


class CallMemory:
    """What of a call takes memory on the device. ``images``: that prompts show; ``assistant``: guesses tokens."""

    cache: PagedCache
    storage: KVStorage
    assistant: Assistant | None = None

    def __init__(self, job: Job, plan: CallPlan, outputs: CallOutputs, use: ModelInUse, resources: Resources) -> None:
        self._job = job
        self._plan = plan
        self._outputs = outputs
        self._use = use
        self._resources = resources
        self._kv = resources.kv
        self._config = resources.config
        self._vocabulary = use.architecture.vocab_size
        self.images = ImageFeatures.of(use.model, plan.prompts, plan.sharing.order.tolist())
        if use.architecture.states:
            plan.ask_more_of_prefixes(price_of_states(plan, self._kv))

    @cached_property
    def step_tokens(self) -> int:
        """The most tokens of a step."""
        budget = self._config.max_batch_tokens
        if budget is None:
            budget = tokens_in_a_step(self._use.model, self._use.device, self._kv.within_reach())
        config, job = self._config, self._job
        in_order = config.scheduler == "groups" and not config.keep_prefixes and job.adapters is None
        most = self._outputs.most_tokens(budget, self._vocabulary, self._plan.sharing if in_order else None)
        return max(most, longest_uncut(self._plan.prompts))

    def open_assistant(self) -> None:
        """Before the cache, which takes the memory that is left."""
        job, use = self._job, self._use
        given = None if job.widths is not None or use.architecture.parts > 1 else job.assistant
        known = self._resources.assistants.of(given, use.model, use.architecture)
        if known is None:
            return
        sequences = zip(job.prompts, job.max_new_tokens, job.samples, strict=True)
        lengths = [len(prompt.ids) + new for prompt, new, samples in sequences for _ in range(samples)]
        try:
            self.assistant = Assistant(known, self._config, lengths, self._kv.memory.free())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            why = f"`assistant_model` has no effect here: {use.device} has no memory for it"
            self._resources.notices("assistant memory", why)

    def close(self) -> None:
        """The cache stays: what becomes of it depends on how the call has ended."""
        if self.assistant is not None:
            self.assistant.close()

    def user_had_control(self) -> None:
        """Code of the user's has run."""
        if self.assistant is not None:
            self.assistant.user_had_control()

    def open(self) -> None:
        """The cache, as large as the call can use and as memory allows."""
        plan, wanted = self._plan, self._plan.pages_at_once
        states = bool(self._use.architecture.states)
        longest = max(self._plan.new_tokens, default=0)
        self._outputs.fit_into(self._kv.free_beside_the_cache(), longest, self._vocabulary)
        self.cache, self.storage = self._kv.open(
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
        storage = self._resources.devices.storage(pages_of(step, page_size := self._config.page_size), page_size)
        try:
            runner = use.run_over(storage)
            if self.images is not None:
                with runner.surroundings():
                    picking += self.images.bytes_beside(step.tokens, self._kv.memory)
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


def price_of_states(plan: CallPlan, kv: KVMemory) -> int:
    """The tokens that a prefix must save beyond ``min_shared_tokens``; 0 where all states fit into memory.

    As long as its readers run, a prefix's state takes memory that sequences could have. So each of their decode steps,
    which costs something by itself, runs fewer of them. Keys and values that are shared give memory back.
    Moving the state costs less than a token.
    """
    wanted = Room(plan.pages_at_once, plan.slots_at_once)
    part = kv.part_of(wanted)
    if part >= 1 or not plan.sharing.segments:
        return 0
    step = STEP_ON_GPU if kv.architecture.device.type == "cuda" else STEP_ON_CPU
    decode_steps = fmean(plan.new_tokens) - 1  # at most: the first new token comes of the prompt
    tokens_per_byte = decode_steps * step / max(1.0, part * kv.bytes_of(wanted))
    kept, spared = kv.architecture.slot_bytes, kv.architecture.kv_bytes_per_token
    return round(kept * tokens_per_byte / (1 + spared * tokens_per_byte))
