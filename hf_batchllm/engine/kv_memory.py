"""The size of the KV cache, and what of it is kept between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from ..config import BatchConfig
from ..errors import CacheMemoryError
from ..model.attention.kv_storage import KVStorage, kv_dtype
from ..model.device_memory import DeviceMemory, is_out_of_memory
from ..model.inspection.architecture import Architecture
from ..model.inspection.user_warnings import has_user_hooks
from ..notices import Notices
from ..planning.paged_cache import PagedCache
from ..planning.state_slots import StateSlots
from ..wording import shown_size
from .computed_with import ComputedWith
from .devices import Devices
from .memory_rehearsal import Rehearsals

_SMALLER = 0.9  # of a size that could not be allocated: the next one to try
_MUCH = 10  # leaving more than a tenth of the memory to steps is worth a closer look


class Room(NamedTuple):
    """What a cache has room for: pages of keys and values, and slots for states of layers that carry one."""

    pages: int
    slots: int = 0


class KVMemory:
    """Owns the cache and its tensors: made for a call, dropped after it unless prefixes are kept in them."""

    def __init__(
        self, model: nn.Module, architecture: Architecture, config: BatchConfig, devices: Devices, notices: Notices
    ) -> None:
        self._model = model
        self.architecture = architecture  # the generator sets it before each call
        self._config = config
        self._devices = devices
        self._notices = notices
        self._computed_with: ComputedWith | None = None  # what the cache holds; only where prefixes are kept
        self._may_change = False  # whether custom code runs, which may compute something else in the next call
        self.memory: DeviceMemory = self._devices.memory(architecture.device)
        self.rehearsals = Rehearsals(model, config)
        self._beside: int | None = None  # bytes to leave to the call's steps, if known
        self._results = 0  # bytes to leave to tensors that the call hands out
        self._depth = 0  # the most prefixes below a sequence of the call, where layers carry states
        self.cache: PagedCache | None = None
        self.storage: KVStorage | None = None

    @property
    def page_bytes(self) -> int:
        return self.architecture.kv_bytes_per_token * self._config.page_size

    def bytes_of(self, room: Room) -> int:
        return room.pages * self.page_bytes + room.slots * self.architecture.slot_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that held tokens, or states, at the same time."""
        cache = self.cache
        assert cache is not None
        return self.bytes_of(Room(cache.peak_pages, 0 if cache.slots is None else cache.slots.most))

    @property
    def whole_bytes(self) -> int:
        cache = self.cache
        assert cache is not None
        return self.bytes_of(Room(cache.num_pages, 0 if cache.slots is None else cache.slots.count))

    def start(self) -> None:
        """A call begins."""
        self.memory = self._devices.memory(self.architecture.device)
        self.memory.start()

    def open(
        self, wanted: Room, needed: Room, beside: Callable[[int], int | None], results: int = 0, depth: int = 0
    ) -> tuple[PagedCache, KVStorage]:
        """A cache for a call that could use the ``wanted`` room beside that of kept prefixes.

        needed: the room that the longest sequence takes.
        beside: from the most pages that the cache may have to the bytes that the call takes beside it; None where that
            cannot be found out. It is asked only where memory may run short.
        results: bytes on the device that the call hands out in the end.
        depth: the most prefixes below a sequence, each of which keeps a state; without room for these it has none.
        """
        self._beside = None
        self._depth = depth
        self._results = 0
        free = self._free() + (self.storage.bytes if self.storage is not None else 0)
        if results > free // 2:
            self._notices(
                "results",
                f"the scores and logits of this call take {shown_size(results)} if all rows become as long as they "
                f"may, more than half of what is free on {self.architecture.device}: if memory runs out, pass fewer "
                "rows at a time, or a smaller `max_new_tokens`",
            )
        self._results = min(results, free // 2)
        if self._config.keep_prefixes:
            self._drop_what_another_model_computed()
        if self.cache is None or self.storage is None:
            self._make(self._affordable(wanted, needed, beside), needed)
        else:
            slots = self.cache.slots
            kept = Room(self.cache.num_pages - self.cache.free_pages, 0 if slots is None else slots.taken)
            more = Room(wanted.pages + kept.pages, wanted.slots + kept.slots)
            room = self._affordable(more, needed, beside, self.storage.bytes)
            present = Room(self.cache.num_pages, 0 if slots is None else slots.count)
            grown = Room(max(room.pages, present.pages), max(room.slots, present.slots))
            if grown != present and self.bytes_of(grown) <= self.bytes_of(room):
                self._grow(grown, needed)
            elif grown != present:  # pages and slots are there in another proportion than this call needs
                self.cache.forget_kept()
                self.clear()
                self._make(self._affordable(wanted, needed, beside), needed)
        assert self.cache is not None and self.storage is not None
        self.cache.start_counting()
        return self.cache, self.storage

    def settle(self) -> None:
        """A call has ended well: keep the pages of kept prefixes, free the others."""
        if self.cache is None or self.storage is None or not self.cache.kept_prefixes:
            self.clear()
            return
        if self._computed_with is None:  # memory ran out when the model was looked at, or it runs custom code
            self._keep_nothing()
            return
        try:
            slots = self.cache.compact_slots()
            self.storage.keep_only(self.cache.compact(), slots)
        except BaseException as error:
            self.clear()
            if not is_out_of_memory(error):
                raise
            self._keep_nothing()

    def _keep_nothing(self) -> None:
        self.clear()
        if self._may_change:
            self._notices(
                "custom",
                f"no prefixes are kept for the next call: {self.architecture.name} runs code or hooks of your own, "
                "which may compute something else by then",
            )
            return
        self._notices(
            "settle",
            f"no prefixes are kept for the next call: {self.architecture.device} had no memory to put them together. "
            "Set a smaller `kv_memory`",
        )

    def _drop_what_another_model_computed(self) -> None:
        now, holds = None, False
        self._may_change = self.architecture.own_code.found.may_change or has_user_hooks(self._model)
        try:
            now = None if self._may_change else self._devices.computed_with(self._model, self.architecture)
            holds = now is not None and self._computed_with is not None and self._computed_with.holds_for(now)
        except Exception as error:  # copies of weights that do not lie in order
            if not is_out_of_memory(error):
                raise
        if self.cache is not None and not holds:
            self.cache.forget_kept()
            self.clear()
        self._computed_with = now

    def clear(self) -> None:
        if self.storage is not None:
            self.storage.release()
        self.cache = self.storage = None

    def within_reach(self) -> int:
        """Bytes for the cache and for steps: free ones, and those that the cache holds already."""
        return self.memory.free() + (0 if self.storage is None else self.storage.bytes)

    def free_beside_the_cache(self) -> int:
        """Free bytes that the cache will not take, where its size was asked for."""
        asked = 0
        if not isinstance(self._config.kv_memory, float):  # which is a share of what results leave
            asked = self._config.kv_bytes(self.within_reach()) or 0
        held = 0 if self.storage is None else self.storage.bytes
        return max(self.memory.free() - max(asked - held, 0), 0)

    def part_of(self, wanted: Room) -> float:
        """About how much of the ``wanted`` room memory has; more than 1 where all of it fits."""
        free = self.within_reach()
        size = self._config.kv_bytes(free)
        return (int(free * self.memory.share) if size is None else size) / max(1, self.bytes_of(wanted))

    def _free(self) -> int:
        """Free bytes, without those that results will take."""
        return max(self.memory.free() - self._results, 0)

    def close(self) -> None:
        """No call will follow: give the memory back to other processes, too."""
        self.clear()
        self._computed_with = None
        self.memory.trim()

    def _affordable(self, wanted: Room, needed: Room, beside: Callable[[int], int | None], held: int = 0) -> Room:
        """The part of the ``wanted`` room that fits into memory. ``held``: bytes that the cache has already."""
        free = held + self._free()
        size = None if self._config.kv_memory is None else self._config.kv_bytes(free)
        if size is None:
            size = int(free * self.memory.share)
            if self.memory.taken_at_once and self.bytes_of(wanted) > free // 2:
                size = self._left_over(size, needed, beside, held)
        room = self._within(size, wanted, needed)
        if room.pages <= 0:
            states = self.bytes_of(Room(0, needed.slots))
            if states and not self.page_bytes:
                raise CacheMemoryError(
                    f"the states of a sequence take {shown_size(states)}, and the KV cache may have "
                    f"{shown_size(size)}: set a larger `kv_memory`"
                )
            beside_states = f", the states of a sequence take {shown_size(states)}" if states else ""
            raise CacheMemoryError(
                f"a single page of {self._config.page_size:,} tokens takes {shown_size(self.page_bytes)}"
                f"{beside_states}, and the KV cache may have {shown_size(size)}: set a smaller `page_size`, or a "
                "larger `kv_memory`"
            )
        return room

    def _within(self, size: int, wanted: Room, needed: Room) -> Room:
        """The part of the ``wanted`` room that ``size`` bytes hold: pages and slots in proportion, as they run out.

        But for the ``needed`` room: neither takes what the other lacks for a single sequence.
        """
        if self.bytes_of(wanted) <= size:
            return wanted
        slots = wanted.slots
        if slots:
            share = max(int(slots * size / self.bytes_of(wanted)), needed.slots + self._depth)
            beside_pages = (size - self.bytes_of(Room(needed.pages))) // self.architecture.slot_bytes
            slots = min(slots, max(needed.slots, min(share, beside_pages)))
        left = size - self.bytes_of(Room(0, slots))
        if not self.page_bytes:  # no layer attends: pages take no memory
            return Room(wanted.pages if left >= 0 else 0, slots)
        return Room(min(wanted.pages, left // self.page_bytes), slots)

    def _left_over(self, share: int, needed: Room, beside: Callable[[int], int | None], held: int) -> int:
        """Bytes that the call's steps leave to the cache; ``share`` where that cannot be found out."""
        self.memory.trim()
        try:
            self._beside = self._found(beside, held)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._notices(
                "step",
                "the largest step that this call may come to does not fit into the memory that is free on "
                f"{self.architecture.device}, even without a KV cache: set a smaller `max_batch_tokens`",
            )
            return share // 2  # fewer sequences at a time make smaller steps, which may fit
        finally:
            self.memory.trim()
        room, enough = self._room(held + self._free()), max(share // 2, self.bytes_of(needed))
        if enough > share:  # a sequence that does not fit anyway
            enough = share // 2
        if room >= enough:
            return room
        # The largest possible step was assumed, which hardly ever comes.
        self._notices(
            "step",
            f"steps of this call may take most of the memory that is free on {self.architecture.device}, beside a KV "
            f"cache of {shown_size(enough)}. If it runs out, set a smaller `max_batch_tokens`",
        )
        return enough

    def _found(self, beside: Callable[[int], int | None], held: int) -> int | None:
        """Bytes to leave to steps. A larger cache holds more sequences, and they make larger steps."""
        most = beside(self._most_pages(held + self._free()))
        self.memory.trim()
        free = held + self._free()  # less what the first step allocated for good
        if most is None or most < free // _MUCH:
            return most
        # `most` leaves room for few sequences, whose steps need less. Reserving only that lets more in, and is too
        # little. Try half-way.
        least = beside(self._most_pages(max(free - most, 0)))
        between = (most + (most if least is None else least)) // 2
        taken = beside(self._most_pages(max(free - between, 0)))
        return between if taken is not None and taken <= between else most

    def _most_pages(self, size: int) -> int:
        return size // max(self.page_bytes, 1)

    def _room(self, free: int) -> int:
        """The part of ``free`` bytes that the cache may take."""
        return int(free * self.memory.share) if self._beside is None else free - self._beside

    def _make(self, planned: Room, needed: Room) -> None:
        """Make a cache of ``planned`` size, or a smaller one if there is no memory for so much by now."""
        # A sequence that needs more pages than the whole cache is refused later, by name.
        size, room = self._config.page_size, planned
        least = Room(needed.pages if needed.pages <= planned.pages else 1, min(needed.slots, planned.slots))
        while True:
            self.storage = self._devices.storage(room.pages, size, room.slots)
            try:
                self._reserve(self.storage)
                break
            except Exception as error:
                self.clear()
                if not is_out_of_memory(error):
                    raise
                if self.bytes_of(room) <= self.bytes_of(least):
                    raise CacheMemoryError(
                        f"there is no memory for the KV cache on {self.architecture.device}: "
                        f"{self._shown(planned)} were planned, and {self._shown(least)}, which the longest sequence "
                        "needs, were not to be had either. Free what else is on the device, or shorten the prompts "
                        "or `max_new_tokens`"
                    ) from error
            self.memory.trim()
            fits = min(int(self.bytes_of(room) * _SMALLER), self._room(self._free()))
            room = self._within(fits, room, least)
            room = Room(max(room.pages, least.pages), max(room.slots, least.slots))
        slots = StateSlots(room.slots) if self.architecture.states else None
        self.cache = PagedCache(room.pages, size, self._config.keep_prefixes, slots)
        if room != planned:
            self._notices(
                "smaller",
                f"the KV cache has {self._shown(room)} instead of the {self._shown(planned)} that were planned: "
                f"{self.architecture.device} had no more to give. The call goes on with fewer sequences at a time. "
                "If something else takes memory there, set a smaller `kv_memory`",
            )

    def _reserve(self, storage: KVStorage) -> None:
        if not self.memory.taken_at_once:
            return  # a CPU hands out memory only when it is written to
        device = self.architecture.device
        dtype, architecture = kv_dtype(self._model, device), self.architecture
        storage.reserve(architecture.attention, dtype, device, architecture.states)

    def _grow(self, room: Room, needed: Room) -> None:
        assert self.cache is not None and self.storage is not None
        try:
            self.storage.grow(*room)  # first: it may run out of memory
        except Exception as error:
            if not (self.memory.taken_at_once and is_out_of_memory(error)):
                raise
        else:
            self.cache.grow(*room)
            return
        self._notices(
            "kept",
            f"prefixes kept from earlier calls are computed again: {self.architecture.device} had no memory to grow "
            "the KV cache around them. If something else takes memory there, set a smaller `kv_memory`",
        )
        self.cache.forget_kept()
        self.clear()
        self.memory.trim()
        self._make(room, needed)

    def _shown(self, room: Room) -> str:
        return shown_size(self.bytes_of(room))
