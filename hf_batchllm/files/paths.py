"""Files that are written beside their place and then take its name; the system's errors in words."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from typing import IO

_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota on this disk is used up",
    errno.EFBIG: "the file has reached the largest size allowed (`ulimit -f`, or the file system's own limit)",
    errno.EPIPE: "its reader has closed it",
    errno.ENOENT: "there is no such file",
}


def reason(error: OSError) -> str:
    return _WORDS.get(error.errno or 0) or error.strerror or str(error) or type(error).__name__


def real_path(path: str | os.PathLike[str]) -> str:
    """The path without links: what stands beside an output stands beside the real one, whichever link names it."""
    return os.path.realpath(os.path.expanduser(path))


def temporary_beside(path: str) -> str:
    """One name for each file, so that what a killed run leaves is found and removed."""
    return f"{path}.hf-batchllm.tmp"


def sync_file(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # a file system without it
            raise


@contextlib.contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """A new file to write to. After the block it is whole, on the disk, and has the name ``path``; it stays open."""
    temporary = temporary_beside(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    file = open(temporary, "x+b")  # noqa: SIM115 (the caller closes it)
    try:
        with contextlib.suppress(OSError):  # a new file: the umask decides
            shutil.copymode(path, temporary)
        yield file
        file.flush()
        sync_file(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(path)


def _sync_folder(path: str) -> None:
    """A folder holds the names of its files: without this, a power cut may lose a new or replaced file."""
    with contextlib.suppress(OSError):  # Windows, and file systems without it
        descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
