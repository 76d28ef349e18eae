"""What a shared prefix must save to be worth the place of its state, where layers carry one and memory is short."""

from __future__ import annotations

from statistics import fmean

from ..planning.call_plan import CallPlan
from .expected_time import STEP_ON_CPU, STEP_ON_GPU
from .kv_memory import KVMemory, Room


def price_of_states(plan: CallPlan, kv: KVMemory) -> int:
    """The tokens that a prefix must save beyond ``min_shared_tokens``; 0 where all states fit into memory.

    As long as its readers run, a prefix's state has the place of a sequence. So each of their decode steps, which costs
    something by itself, runs one sequence less of all that there is room for. Moving the state costs less than a token.
    """
    wanted = Room(plan.pages_at_once, plan.slots_at_once)
    part = kv.part_of(wanted)
    if part >= 1 or not plan.sharing.segments:
        return 0
    step = STEP_ON_GPU if kv.architecture.device.type == "cuda" else STEP_ON_CPU
    at_once = max(1, int(part * wanted.slots))
    return round(fmean(plan.new_tokens) * step / at_once)
