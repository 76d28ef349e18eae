"""A progress bar where nothing can be drawn over: in a pipe or a log file. It prints whole lines, few of them."""

from __future__ import annotations

from typing import Any

from tqdm.std import tqdm

_SECONDS = 30.0  # between two lines
_SHARE = 0.05  # of the time that has passed: a run of a day prints no more than some hundred lines
_BAR = "|{bar}|"


class LogBar(tqdm):
    """The first line comes at once, the last one when the bar is closed, with what it had come to."""

    disable: bool
    monitor_interval = 0  # no thread: nothing waits for a line
    _due = 0.0
    _printed = ""

    def __init__(self, *, bar_format: str, **options: Any) -> None:
        super().__init__(bar_format=bar_format.replace(_BAR, ""), mininterval=1.0, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        now = self._time()
        if now < self._due:
            return False
        self._print_line()
        passed = now - getattr(self, "start_t", now)  # tqdm sets it after the first line
        self._due = now + max(_SECONDS, _SHARE * passed)
        return True

    def close(self) -> None:
        if self.disable:
            return
        if self.leave:
            self._print_line()
        self.disable = True
        self._decr_instances(self)

    def _print_line(self) -> None:
        line = str(self).rstrip()
        if line != self._printed:
            self._printed = line
            self.fp.write(f"{line}\n")
            self.fp.flush()
