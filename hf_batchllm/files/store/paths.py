"""Names of files, the operating system's errors in plain words, and writing that is never half done."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota on this disk is used up",
    errno.EFBIG: "the file has reached the largest size allowed (`ulimit -f`, or the file system's own limit)",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "the operation is not permitted",
    errno.EPIPE: "its reader has closed it",
    errno.EIO: "the disk reports an error",
    errno.ESTALE: "the network file system has lost it (stale file handle)",
    errno.ENOENT: "there is no such file",
    errno.ENOTDIR: "a part of the path is no folder",
    errno.EISDIR: "it is a folder",
    errno.ELOOP: "its links lead in a circle",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EBADF: "it is closed",
    errno.EMFILE: "this process has too many files open (`ulimit -n`)",
}


def reason(error: OSError) -> str:
    known = _REASONS.get(error.errno or 0)
    return known or error.strerror or str(error) or type(error).__name__


def real_path(path: str | os.PathLike[str]) -> str:
    """Without links: files that stand beside an output stand beside the real one, whichever link names it."""
    return os.path.realpath(os.path.expanduser(path))


def sync_folder(path: str) -> None:
    """A folder holds the names of its files: without this, a power cut may lose a new or replaced file."""
    try:
        descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return  # Windows, and file systems without it
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def sync_file(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # a file system without it
            raise


def temporary_beside(path: str) -> str:
    """One name for each output, so that a file left by a killed run is found and removed. Its lock guards it."""
    return f"{path}.hf-batchllm.tmp"


@contextlib.contextmanager
def replacing(path: str, temporary: str | None = None) -> Iterator[int]:
    """A descriptor to write to. After the block its file, whole and on the disk, takes the name ``path`` (no link)."""
    temporary = temporary or temporary_beside(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(temporary, flags, 0o666)
    try:
        _copy_mode(descriptor, path)
        yield descriptor
        sync_file(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path)


def _copy_mode(descriptor: int, path: str) -> None:
    if not hasattr(os, "fchmod"):
        return
    try:
        old = os.stat(path)
    except OSError:
        return  # a new file: the umask decides
    with contextlib.suppress(OSError):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_atomically(path: str, data: bytes, temporary: str | None = None) -> None:
    with replacing(path, temporary) as descriptor:
        write_all(descriptor, data)
    os.close(descriptor)
