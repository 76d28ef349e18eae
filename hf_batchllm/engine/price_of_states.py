"""What a shared prefix must save to be worth the place of its state, where layers carry one and memory is short."""

from __future__ import annotations

from statistics import fmean

from ..planning.call_plan import CallPlan
from .cost import STEP_ON_CPU, STEP_ON_GPU
from .kv_memory import KVMemory, Room


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
