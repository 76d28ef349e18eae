"""Point a model's attention at another implementation for a while, and leave no trace."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..interrupts import act_on_interrupts, held_back
from .swap import Swap
from .uncompiled import every_module

# Where transformers keeps the name; the public property would also walk (and set) sub-configs on its own.
_FIELD = "_attn_implementation_internal"
# By the id of a model's first config: a swap waits until a swap in another thread has ended.
_locks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class AttentionSwap:
    """The swap for one model. ``restore`` may be called again and again."""

    def __init__(self, model: nn.Module) -> None:
        self._configs = attention_configs(model)
        self._lock = steps_lock(self._configs[0])
        self._names = Swap()
        self._locked = False

    def apply(self, name: str) -> None:
        """Until ``restore``, the model uses the attention registered as ``name``, and other threads wait."""
        while not self._locked:
            with held_back():
                self._locked = self._lock.acquire(timeout=0.2)
            if not self._locked:  # a call of another thread runs: an interrupt need not wait for its end
                act_on_interrupts()
        self._names.put((config.__dict__, _FIELD, name) for config in self._configs)

    @contextmanager
    def applied(self, name: str) -> Iterator[None]:
        try:
            self.apply(name)
            yield
        finally:
            self.restore()

    @contextmanager
    def others_wait(self) -> Iterator[str | None]:
        """While the block runs, no other thread swaps. Yields the attention in use: this thread may have swapped it."""
        with self._lock:
            yield self._configs[0].__dict__.get(_FIELD)

    def restore(self) -> None:
        """Put back the attention that was used before, if that has not been done."""
        self._names.restore()
        if self._locked:
            self._locked = False
            self._lock.release()


def steps_lock(model_config: PreTrainedConfig) -> Any:
    """Held while steps of a model run: who else holds it sees the model as its user left it."""
    return _locks.setdefault(id(model_config), threading.RLock())


def attention_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config that a layer of ``model`` may ask for its attention implementation, each once."""
    found: dict[int, PreTrainedConfig] = {}
    classes: dict[type, bool] = {}  # whether an instance may have a config that is not in its ``__dict__``
    owners: list[Any] = [getattr(model, "config", None)]  # comes first: its lock is the model's
    for module in every_module(model):
        cls = type(module)
        if cls not in classes:
            classes[cls] = hasattr(cls, "config") or cls.__getattr__ is not nn.Module.__getattr__
        owners.append(getattr(module, "config", None) if classes[cls] else module.__dict__.get("config"))
    waiting = [config for config in owners if isinstance(config, PreTrainedConfig)]
    waiting.reverse()  # taken from the end
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            below = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
            waiting.extend(sub for sub in below if isinstance(sub, PreTrainedConfig))
    return list(found.values())


def _after_a_fork() -> None:
    """A forked process has none of the other threads: what they have locked would stay so."""
    for lock in list(_locks.values()):
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_a_fork)
