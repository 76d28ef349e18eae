"""A notebook keeps the last traceback, and with it the locals of every frame: those must not keep the KV cache alive,
nor weights that were merged for a call.

Releasing the storage under the tensors instead would be shorter, and end the process of whoever looks at one of them
in a debugger: PyTorch reads such a tensor without asking whether there is anything.
"""

from __future__ import annotations

import contextlib
import traceback

_PACKAGE = __name__.partition(".")[0]
_ATTENTION = tuple(
    f"{_PACKAGE}.{name}"
    for name in (
        "kernels",
        "model.attention_backend",
        "model.kv_storage",
        "model.torch_attention",
        "model.triton_attention",
        "patches.attention_interface",
    )
)
_WITH_LOGITS = ("engine.device_loop", "engine.scoring", "model.runner", "sampling.logprobs")
_AROUND_IT = tuple(f"{_PACKAGE}.{name}" for name in (*_WITH_LOGITS, "patches"))


def forget_tensors(error: BaseException | None) -> None:
    """Empty the frames of the step that an error came through, and of whatever attention called in it.

    The frames of the model, of hooks and of the caller stay as they are: their owners may want to look at them.
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
            name = str(frame.f_globals.get("__name__"))  # of code that was made up, it may be anything
            inside = inside or name.startswith(_ATTENTION)
            if inside or name.startswith(_AROUND_IT):
                with contextlib.suppress(RuntimeError):  # it is still running: an error on its way through
                    frame.clear()
