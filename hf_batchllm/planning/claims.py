"""Which requests of a call this process runs, where several processes run the call together."""

from __future__ import annotations

from typing import Protocol


class Claims(Protocol):
    """Asked by the scheduler just before it lets a request in.

    Processes that run a call together may take work from each other. What has begun stays where it is.
    """

    def take(self, index: int) -> bool:
        """Whether this process is to run the prompt of this number. From then on no other process does."""
