"""Whether the kernels of a group may run on a device: on a card that nobody has tried they are checked first.

The answer is asked for often and found once: kernels that the project's own tests have run on such a card, the answer
of this process, a verdict on disk, or a check in a child process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache

import torch

from ..errors import ConfigError
from ..kernels.cards import OLDEST
from ..notices import warn_user
from ..python_child import CannotStart
from . import verdicts
from .comparing import is_interpreted
from .outcomes import NO_ROOM, UNKNOWN, first_failure, in_a_line
from .run_in_child import CHECKING, outcomes

# Compute capability, and versions of Triton with which all tests of the kernels have passed on such a card.
PROVEN = {(9, 0): ((3, 6),)}
# What each group of kernels does, in the words of messages.
WORK = {
    "attention": "attention",
    "layers": "fused layers",
    "sampling": "picking tokens",
    "experts": "mixtures of experts",
    "states": "layers that carry a state",
    "parts": "attention with the same bits in any list",
}
_REPORT = "This is remembered; `hf-batchllm check` checks anew, and prints a table for a report"
_FIRST = "the kernels have to be checked on this card first, and"
_BEFORE = "run `hf-batchllm check` before the model is loaded"
_answers: dict[tuple[str, ...], str | None] = {}
_no_checks: dict[tuple[str, ...], str] = {}  # cards on which nothing can be checked by this process, and why


def refusal(group: str, device: torch.device, *, amd: bool = False) -> str | None:
    """Why the kernels of a group cannot be used on a device, in the user's words; None if they can.

    ``amd``: whether they are asked for by name, without which they do not run on AMD's cards.
    """
    if (reason := unusable(device, amd=amd)) is not None:
        return reason
    if _asked() == "never":
        return None
    key = verdicts.key_of(device)
    known = (group, *key.values())
    if known not in _answers:
        _answers[known] = _found(group, device, key)
    return _answers[known]


def is_proven(device: torch.device) -> bool:
    """Whether the kernels are trusted on this card without a check."""
    import triton

    from ..kernels import cards

    if device.type != "cuda" or torch.version.hip is not None:
        return device.type == "cpu"  # where they are interpreted
    return tuple(map(int, triton.__version__.split(".")[:2])) in PROVEN.get(cards.capability_on(device) or (0, 0), ())


def failed_check(group: str, device: torch.device, *, amd: bool = False) -> bool:
    """Whether other kernels may run here, and these may not."""
    return unusable(device, amd=amd) is None and refusal(group, device, amd=amd) is not None


def is_known_good(group: str, device: torch.device) -> bool:
    """Whether the kernels may run, as far as is known in this process: nothing is checked for this question."""
    if unusable(device, amd=True) is not None:
        return False
    if not is_checked(device):
        return torch.version.hip is None and refusal(group, device) is None
    return _answers.get((group, *verdicts.key_of(device).values()), "") is None


def unusable(device: torch.device, *, amd: bool = False) -> str | None:
    """Why no kernel can be used on a device."""
    if device.type != "cuda" and not is_interpreted():
        return f"the Triton kernels need a CUDA GPU, and the model is on {device}"
    hip = torch.version.hip is not None
    if device.type == "cuda" and not hip and torch.cuda.get_device_capability(device) < OLDEST:
        name = torch.cuda.get_device_properties(device).name
        return f"the Triton kernels need compute capability 8.0 (an A100 or RTX 30) or later, and {name} is older"
    if (reason := _no_triton()) is not None:
        return reason
    if device.type != "cuda":
        return None
    if is_interpreted():
        return "TRITON_INTERPRET is set, so kernels would be interpreted: unset it and start anew"
    if hip and not amd:
        return 'on AMD\'s GPUs nobody has tried the Triton kernels yet: `backend="triton"` checks and uses them'
    return None


def _no_triton() -> str | None:
    """Why Triton cannot be used here, whatever the card is."""
    try:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed (`pip install triton`)"
        if importlib.util.find_spec("triton.tools.tensor_descriptor") is None:
            return "this Triton is too old (`pip install -U triton`)"
    except (ImportError, OSError, ValueError) as error:
        return f"Triton cannot be imported: {in_a_line(error)}"
    if is_interpreted() or _asked() == "never" or _has_compiler(os.environ.get("CC") or "gcc", os.environ.get("PATH")):
        return None
    return "Triton needs a C compiler, and there is none here (install gcc, or have CC name one)"


@cache
def _has_compiler(compiler: str, path: str | None) -> bool:
    """Triton compiles a part of each launch in C."""
    return any(shutil.which(each, path=path) for each in (compiler, "clang"))


def is_checked(device: torch.device) -> bool:
    """Whether kernels are to be checked on this device: HF_BATCHLLM_CHECK may say `always` or `never`."""
    asked = _asked()
    return asked == "always" or (not asked and not is_proven(device))


def _asked() -> str:
    asked = os.environ.get("HF_BATCHLLM_CHECK", "")
    if asked not in ("", "always", "never"):
        raise ConfigError(f"HF_BATCHLLM_CHECK is {asked!r}; it may be `always` or `never`")
    return asked


def _found(group: str, device: torch.device, key: dict[str, str]) -> str | None:
    """What the verdict on disk says, or that of a check, which is written there.

    A card that is trusted may have a verdict, too: somebody has had it checked by hand.
    """
    failed = verdicts.read(key, group)
    if failed is None and is_checked(device):
        if os.environ.get(CHECKING):
            return f"{_FIRST} this process was started by such a check: `sys.executable` is not Python"
        card = tuple(key.values())
        if card in _no_checks:
            return _no_checks[card]
        warn_user(
            f"the kernels for {WORK[group]} are tried on {key['card']} for the first time: this may take a minute"
        )
        try:
            with verdicts.alone(key, group):
                failed = verdicts.read(key, group)  # another process may have found it meanwhile
                if failed is None:
                    failed = _checked(group, device, key)
        except CannotStart as error:
            # The same would come of the check of every other group.
            _no_checks[card] = f"{_FIRST} that cannot be done: {error}"
            return _no_checks[card]
    return f"on this card ({key['card']}) a kernel failed its check: {failed}. {_REPORT}" if failed else None


def _checked(group: str, device: torch.device, key: dict[str, str]) -> str:
    """The first case that failed, in a line; empty: all passed. Raises where nothing is known of the kernels."""
    failure = first_failure(list(outcomes(group, device)))
    if failure is not None and failure.verdict == NO_ROOM:
        raise CannotStart(f"there is no memory for it ({failure.detail}): {_BEFORE}")
    if failure is not None and failure.verdict in UNKNOWN:
        busy = "busy or unavailable" in failure.detail
        raise CannotStart(failure.detail + (f". {_BEFORE.capitalize()}" if busy else ""))
    failed = "" if failure is None else str(failure)
    try:
        verdicts.write(key, group, failed)
    except OSError as error:
        warn_user(
            f"the outcome of the check cannot be remembered, so each process checks anew: {error}. HF_BATCHLLM_CACHE "
            "may name another folder"
        )
    return failed
