"""Empties the frames of a traceback that hold the KV cache, or weights that were merged for a call.

A notebook keeps the last traceback, and with it the locals of every frame. Releasing the storage under the tensors
would be shorter, but PyTorch reads such a tensor without a check: looking at one in a debugger would end the process.
"""

from __future__ import annotations

import contextlib
import traceback

_PACKAGE = __name__.partition(".")[0]
_ATTENTION = tuple(
    f"{_PACKAGE}.{name}"
    for name in (
        "kernels",
        "model.attention.attention_backend",
        "model.attention.kv_storage",
        "model.attention.torch_attention",
        "model.attention.triton_attention",
        "patches.attention_interface",
    )
)
_WITH_LOGITS = ("engine.device_loop", "engine.scoring", "model.runner", "sampling.logprobs")
_AROUND_IT = tuple(f"{_PACKAGE}.{name}" for name in (*_WITH_LOGITS, "patches"))


def forget_tensors(error: BaseException | None) -> None:
    """Empty the frames of the engine's step, and of attention and everything that it called.

    The frames of the model, of hooks and of the caller stay: their users may want to look at them.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        waiting += [error.__cause__, error.__context__]
        inside = False
        for frame, _ in traceback.walk_tb(error.__traceback__):
            name = str(frame.f_globals.get("__name__"))  # in generated code it may be anything
            inside = inside or name.startswith(_ATTENTION)
            if inside or name.startswith(_AROUND_IT):
                with contextlib.suppress(RuntimeError):  # a frame that is still running cannot be emptied
                    frame.clear()


def without_frames(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """Without those of the call, and without errors that hold them."""
    interrupt.__context__ = interrupt.__cause__ = None
    return interrupt.with_traceback(None)
