"""Point a model's attention at another implementation for a while, and leave no trace."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .uncompiled import every_module

# Where transformers keeps the name; the public property would also walk (and set) sub-configs on its own.
_FIELD = "_attn_implementation_internal"
_ABSENT = object()
# By the id of a model's first config: a swap waits until a swap in another thread has ended.
_locks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_FORK_WAITS = 1.0  # seconds at most in all, for steps in other threads


class AttentionSwap:
    """The swap for one model. ``restore`` may be called again and again: an interrupt may come in the midst of it."""

    def __init__(self, model: nn.Module) -> None:
        self._configs = attention_configs(model)
        self._lock = steps_lock(self._configs[0])
        self._before: list[Any] | None = None
        self._locked = False  # set before the lock is acquired

    @contextmanager
    def applied(self, name: str) -> Iterator[None]:
        """While the block runs, the model uses the attention registered as ``name``; then the one it used before."""
        self._locked = True
        self._lock.acquire()
        self._before = [config.__dict__.get(_FIELD, _ABSENT) for config in self._configs]
        try:
            for config in self._configs:
                config.__dict__[_FIELD] = name
            yield
        finally:
            self.restore()

    @contextmanager
    def others_wait(self) -> Iterator[str | None]:
        """While the block runs, no other thread swaps. Yields the attention in use: this thread may have swapped it."""
        with self._lock:
            try:
                yield self._configs[0].__dict__.get(_FIELD)
            finally:
                if not self._lock._is_owned():  # an interrupted `applied` released it, without having acquired it
                    self._lock.acquire()

    def restore(self) -> None:
        """Put back the attention that was used before, if that has not been done."""
        for config, value in zip(self._configs, self._before or (), strict=self._before is not None):
            if value is _ABSENT:
                config.__dict__.pop(_FIELD, None)
            else:
                config.__dict__[_FIELD] = value
        if not self._locked:
            return
        # On one line, so that no interrupt comes between the two; `suppress` would run code of its own.
        try:
            self._before, self._locked = None, False; self._lock.release()  # noqa: E702 # fmt: skip
        except RuntimeError:
            pass  # it was never acquired: an interrupt came while it waited


def steps_lock(model_config: PreTrainedConfig) -> Any:
    """Held by each step of a model: whoever holds it sees the model as its owner left it, unless in a step itself."""
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


# -- fork ------------------------------------------------------------------------------------------------------


class _Fork(threading.local):  # two threads may fork at a time
    """A forked process has none of the other threads: a step that runs in one of them would never end there.

    So a fork waits until no step runs: the new process then gets models with their own attention. Where a step takes
    longer than that, its lock is made anew for the new process.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []

    def before(self) -> None:
        until = time.monotonic() + _FORK_WAITS
        locks = list(_locks.values())
        self._held = [lock for lock in locks if lock.acquire(timeout=max(until - time.monotonic(), 0))]

    def in_parent(self) -> None:
        held, self._held = self._held, []
        for lock in held:
            lock.release()

    def in_child(self) -> None:
        others = [lock for lock in list(_locks.values()) if lock not in self._held]
        self.in_parent()
        for lock in others:
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    _fork = _Fork()
    os.register_at_fork(before=_fork.before, after_in_parent=_fork.in_parent, after_in_child=_fork.in_child)
