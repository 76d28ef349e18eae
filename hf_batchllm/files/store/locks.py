"""One process writes to a file at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOCKED_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def lock(descriptor: int, path: str, note: Callable[[str], None] | None = None) -> bool:
    """False: another process holds it. The lock ends with the descriptor, so also when the process is killed."""
    why = "this system has no `fcntl`"
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _LOCKED_BY_ANOTHER:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            why = "its file system has no locks"
    if note is not None:
        note(f"{path} cannot be locked ({why}): make sure that no second run writes to it")
    return True


def has_name(descriptor: int, path: str) -> bool:
    """Whether ``path`` still leads to the open file: a run that ended in between may have put another file there."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
