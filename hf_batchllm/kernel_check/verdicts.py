"""Verdicts on disk: what a check found, for as long as nothing changes that it depends on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from .._version import __version__
from ..kernels import cards
from .comparing import card_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_SOURCES = tuple(Path(str(path)).resolve().parent for path in (cards.__file__, __file__))


def key_of(device: torch.device) -> dict[str, str]:
    """All that a verdict depends on."""
    import triton

    return {
        "card": card_of(device),
        "driver": driver(),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "compiled for": os.environ.get("TRITON_OVERRIDE_ARCH", ""),
        "interpreted": os.environ.get("TRITON_INTERPRET", ""),
        "library": __version__,
        "sources": sources(),
    }


@cache
def driver() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text("utf-8").splitlines()[0].strip()
    if torch.version.hip is not None:
        return f"HIP {torch.version.hip}"
    if not torch.version.cuda:
        return ""
    asked = getattr(torch._C, "_cuda_getDriverVersion", None)  # under WSL there is no such file
    newest = asked() if asked is not None and torch.cuda.is_available() else "unknown"
    return f"CUDA {torch.version.cuda}, driver for {newest}"


@cache
def sources() -> str:
    """A hash of the kernels and of the check."""
    found = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted(folder.rglob("*.py")):
            found.update(path.name.encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def path_of(key: dict[str, str], group: str) -> Path:
    """A file for each key and group: whoever writes one takes no other verdict away."""
    text = json.dumps([key, group], sort_keys=True)
    return _folder() / f"{group}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def read(key: dict[str, str], group: str) -> str | None:
    """What failed, in a line; empty: all passed. None: there is no verdict. A damaged file counts as none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path_of(key, group).read_text("utf-8"))
        if found["key"] == key and isinstance(found["failed"], str):
            return str(found["failed"])
    return None


def write(key: dict[str, str], group: str, failed: str) -> None:
    """Other processes see all of it or nothing."""
    path = path_of(key, group)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
        json.dump({"key": key, "group": group, "failed": failed}, file, indent=1)
    with contextlib.suppress(OSError):
        os.chmod(file.name, 0o644)  # the folder may be one that several people share
    os.replace(file.name, path)


@contextlib.contextmanager
def alone(key: dict[str, str], group: str) -> Iterator[None]:
    """Processes that begin at the same time wait for the first one's verdict. Where that cannot be, each checks."""
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                path = path_of(key, group).with_suffix(".lock")
                path.parent.mkdir(parents=True, exist_ok=True)
                fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


def _folder() -> Path:
    if given := os.environ.get("HF_BATCHLLM_CACHE"):
        return Path(given).expanduser() / "kernel-checks"
    home = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # where there is no home
        return (Path(home) if home else Path.home() / ".cache") / "hf-batchllm" / "kernel-checks"
    return Path(tempfile.gettempdir()) / "hf-batchllm" / "kernel-checks"
