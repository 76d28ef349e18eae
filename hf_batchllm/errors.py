"""What can go wrong, in the user's words.

Every error of the library derives from ``BatchLLMError``; those about a value that was passed in
are ``ValueError`` as well, so that code which guards ``model.generate`` guards this library too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHOWN = 8  # problems spelled out in a message; the rest are counted


class BatchLLMError(Exception):
    """Base of every error that this library raises on purpose."""


class PromptError(BatchLLMError, ValueError):
    """Some prompts cannot be run. ``problems`` maps each bad index to the reason."""

    def __init__(self, problems: Mapping[int, str]) -> None:
        self.problems = dict(sorted(problems.items()))
        lines = [f"prompt {index}: {why}" for index, why in self.problems.items()]
        hidden = len(lines) - _SHOWN
        if len(lines) == 1:
            message = lines[0]
        else:
            shown = [f"  {line}" for line in lines[:_SHOWN]]
            if hidden > 0:
                shown.append(f"  ... and {hidden} more (all of them in .problems)")
            message = "\n".join([f"{len(lines)} prompts cannot be run:", *shown])
        super().__init__(message)


class UnsupportedModelError(BatchLLMError, ValueError):
    """The architecture would not run correctly here; the message names what is missing."""


class UnsupportedOptionError(BatchLLMError, ValueError):
    """An option of ``generate`` that cannot be honoured; ``option`` is its name."""

    def __init__(self, option: str, why: str) -> None:
        self.option = option
        super().__init__(f"`{option}` {why}")


class ConfigError(BatchLLMError, ValueError):
    """A field of ``BatchConfig`` has a value that cannot be used."""


class GeneratorBusyError(BatchLLMError, RuntimeError):
    """A call was made on a generator that is running another one, or that is closed."""


class CacheMemoryError(BatchLLMError, MemoryError):
    """The memory for the KV cache does not hold a single page."""


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during a call. ``result`` holds what had finished by then."""

    def __init__(self, result: Any, finished: int, total: int) -> None:
        self.result = result
        super().__init__(f"interrupted: {finished} of {total} sequences had finished; they are in .result")
