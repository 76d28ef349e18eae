"""``hf-batchllm check``: the kernels against their PyTorch twins on this GPU, as a table for a report."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .exits import DONE, STOPPED
from .messages import PROGRAM, UsageError
from .parser import Parser

if TYPE_CHECKING:
    import torch

_ABOUT = f"""\
Holds the library's kernels against plain PyTorch on this GPU: each in a process
of its own, so that one that crashes or hangs harms nothing. What is found is
remembered, and later calls go by it. On a card that the project has no figures
for, please send the table along with the report, passed or not.

Nothing is downloaded, and no model is loaded. It takes a minute or two.
Exit codes: 0 all passed, 1 some failed, 2 there is nothing to check here.
`{PROGRAM} check | tee check.txt` keeps a copy.
"""


def main(arguments: Sequence[str]) -> int:
    asked = _parser().parse_args(arguments)
    if asked.help:
        _parser().print_help()
        return DONE
    from ..kernel_check.comparing import is_interpreted
    from ..kernel_check.groups import GROUPS
    from ..kernel_check.trust import unusable

    wanted = asked.only or list(GROUPS)
    unknown = [name for name in wanted if name not in GROUPS]
    if unknown:
        raise UsageError(f"there is no group {unknown[0]!r}; groups are {', '.join(GROUPS)}")
    device = _device(asked.device, is_interpreted())
    reason = unusable(device, amd=True)
    if reason is not None:
        raise UsageError(f"there is nothing to check: {reason}")
    return _check(device, wanted)


def _check(device: torch.device, groups: Sequence[str]) -> int:
    from ..kernel_check.outcomes import NO_ROOM, PASSED, UNKNOWN, first_failure
    from ..kernel_check.run_in_child import outcomes
    from ..kernel_check.verdicts import Verdicts, key_of
    from ..python_child import CannotStart

    key, verdicts = key_of(device), Verdicts()
    for name, value in (key | {"python": platform.python_version(), "system": platform.platform()}).items():
        if value:
            print(f"{name + ':':14}{value}")
    failed = no_room = not_tried = 0
    for group in groups:
        print(f"\n{group}", flush=True)
        found = []
        try:
            for outcome in outcomes(group, device, to_the_end=True):
                found.append(outcome)
                detail = f"  {outcome.detail}" if outcome.detail else ""
                print(f"  {outcome.case:42} {outcome.verdict:16} {outcome.seconds:6.1f} s{detail}", flush=True)
        except CannotStart as error:
            raise UsageError(str(error)) from error
        failure = first_failure(found)
        no_room += sum(each.verdict == NO_ROOM for each in found)
        not_tried += sum(each.verdict in UNKNOWN and each.verdict != NO_ROOM for each in found)
        if failure is not None and failure.verdict in UNKNOWN:
            continue  # it says nothing of the kernels
        failed += sum(each.verdict not in (PASSED, *UNKNOWN) for each in found)
        try:
            verdicts.write(key, group, "" if failure is None else str(failure))
        except OSError as error:
            print(f"  (not remembered: {error})")
    if failed:
        print(f"\n{failed} failed: the library does without these kernels")
    elif not_tried:
        print("\nnone failed, but not all could be tried: the lines above say why")
    elif no_room:
        print("\nnone failed, but the GPU's memory was too full to try them all: free some, and ask again")
    else:
        print("\nall passed")
    return STOPPED if failed or no_room or not_tried else DONE


def _device(name: str | None, interpreted: bool) -> torch.device:
    import torch

    if name is None:
        name = "cpu" if interpreted else "cuda"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device is {name!r}; it is a device of torch, such as cuda or cuda:1") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("there is nothing to check: torch finds no GPU here")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        elif device.index >= torch.cuda.device_count():
            raise UsageError(f"there is no {device}: torch finds {torch.cuda.device_count()} GPUs here")
    return device


def _parser() -> Parser:
    parser = Parser("check", description=_ABOUT)
    parser.add_argument("--device", metavar="D", help="the GPU, such as cuda:1 (default: the current one)")
    parser.add_argument(
        "--only", nargs="+", metavar="GROUP", help="attention, layers, sampling, experts, states, parts"
    )
    parser.add_argument("--help", "-h", action="store_true", help="this page")
    return parser
