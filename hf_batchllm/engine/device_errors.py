"""What was running when a device failed. Devices report errors late, so the traceback alone may point anywhere."""

from __future__ import annotations

from collections.abc import Sequence

from ..model.device_memory import is_device_error
from ..planning.requests_and_prefixes import Request
from ..planning.step import Step

_MOST_SHOWN = 5  # prompts of a step


def name_what_ran(
    error: Exception, on_their_way: Sequence[tuple[Step, bool]], step: Step | None, replayed: bool = False
) -> None:
    """Have the error of a device say which steps it may be about.

    on_their_way: launched steps that have not been seen to end, and whether each is a CUDA graph. step: the latest one.
    """
    if not is_device_error(error):
        return
    steps = list(on_their_way)
    if step is not None and all(each is not step for each, _ in steps):
        steps.append((step, replayed))
    lines = [f"  {described(each, as_graph)}" for each, as_graph in steps] or ["  no step of this call"]
    error.add_note(
        "\n".join(
            [
                "On their way to the device were, the oldest first:",
                *lines,
                "A device reports errors late: this one may be about any of these steps, or about anything launched "
                "before them. With the environment variable CUDA_LAUNCH_BLOCKING=1 the traceback shows the line that "
                "failed. After such an error this process cannot use the device any more: start a new one.",
            ]
        )
    )


def described(step: Step, as_graph: bool) -> str:
    """A step in words: its size, and the first of its prompts."""
    rows, prompts = len(step.rows), sum(chunk.end - chunk.begin for chunk in step.chunks)
    counts = [(rows, "decode rows"), (prompts, "tokens of prompts")]
    size = " and ".join(f"{count:,} {what}" for count, what in counts if count)
    times = f", {step.times:,} times in a row" if step.times > 1 else ""
    way = "a replayed CUDA graph" if as_graph else "run eagerly"
    units = [*step.rows, *(chunk.unit for chunk in step.chunks)]
    indices = list(dict.fromkeys(unit.index for unit in units if isinstance(unit, Request)))
    shown = ", ".join(str(index) for index in indices[:_MOST_SHOWN])
    more = f" and {len(indices) - _MOST_SHOWN:,} more" if len(indices) > _MOST_SHOWN else ""
    which = f"; of prompts {shown}{more}" if indices else ""
    return f"a step of {size}{times}, {way}{which}"
