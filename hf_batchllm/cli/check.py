"""``hf-batchllm check``: the kernels against their PyTorch references on this GPU, as a table for a report."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .arguments import Parser
from .console import DONE, PROGRAM, STOPPED, UsageError

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
_GROUPS = ("attention", "layers", "sampling", "experts", "states", "parts")


def main(arguments: Sequence[str]) -> int:
    parser = Parser("check", "[--device D] [--only GROUP ...]", description=_ABOUT)
    parser.add_argument("--device", metavar="D", help="the GPU, such as cuda:1 (default: the current one)")
    parser.add_argument("--only", nargs="+", choices=_GROUPS, default=_GROUPS, metavar="GROUP", help=", ".join(_GROUPS))
    parser.add_argument("-h", "--help", action="help", help="show this page")
    asked = parser.parse_args(arguments)

    from ..kernel_check.comparing import is_interpreted
    from ..kernel_check.trust import unusable
    from .loading import device_of

    device = device_of(asked.device or ("cpu" if is_interpreted() else "cuda"))
    if (why := unusable(device, amd=True)) is not None:
        raise UsageError(f"there is nothing to check: {why}")
    return _check(device, asked.only)


def _check(device: torch.device, groups: Sequence[str]) -> int:
    from ..kernel_check import verdicts
    from ..kernel_check.outcomes import PASSED, UNKNOWN, first_failure
    from ..kernel_check.run_in_child import outcomes
    from ..python_child import CannotStart

    key, failed, unknown = verdicts.key_of(device), 0, 0
    for name, value in (key | {"python": platform.python_version(), "system": platform.platform()}).items():
        if value:
            print(f"{name + ':':14}{value}")
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
        unknown += sum(each.verdict in UNKNOWN for each in found)
        failed += sum(each.verdict not in (PASSED, *UNKNOWN) for each in found)
        if failure is not None and failure.verdict in UNKNOWN:
            continue  # it says nothing of the kernels
        try:
            verdicts.write(key, group, "" if failure is None else str(failure))
        except OSError as error:
            print(f"  (not remembered: {error})")
    if failed:
        print(f"\n{failed} failed: the library does without these kernels")
    elif unknown:
        print("\nnone failed, but not all could be tried: the lines above say why")
    else:
        print("\nall passed")
    return STOPPED if failed or unknown else DONE
