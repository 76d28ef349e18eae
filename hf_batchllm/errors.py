"""What can go wrong, in the user's words.

Every error of the library derives from ``BatchLLMError``; those about a value that was passed in
are ``ValueError`` as well, so that code which guards ``model.generate`` guards this library too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_SHOWN = 8  # reasons spelled out in a message, and stretches of prompts named for each; the rest are counted


class BatchLLMError(Exception):
    """Base of every error that this library raises on purpose."""

    def __reduce__(self) -> Any:
        # By its state rather than by the arguments of the class: errors cross from one process to another.
        return _revived, (type(self), self.args), self.__dict__


def _revived(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    return error


class PromptError(BatchLLMError, ValueError):
    """Some prompts cannot be run. ``problems`` maps each bad index to the reason. ``what``: is counted by the index."""

    def __init__(self, problems: Mapping[int, str], what: str = "prompt") -> None:
        self.problems = dict(sorted(problems.items()))
        alike: dict[str, list[int]] = {}
        for index, why in self.problems.items():
            alike.setdefault(why, []).append(index)
        lines = [f"{_named(indices, what)} {why}" for why, indices in alike.items()]
        if len(lines) > 1:
            hidden = sum(map(len, list(alike.values())[_SHOWN:]))
            shown = [f"  {line}" for line in lines[:_SHOWN]]
            if hidden:
                shown.append(f"  ... and {hidden:,} more (all of them in .problems)")
            lines = [f"{len(self.problems):,} {what}s cannot be run:", *shown]
        super().__init__("\n".join(lines))


def _named(indices: list[int], what: str) -> str:
    """``prompt 3``, or ``prompts 0-2, 7: each``."""
    if len(indices) == 1:
        return f"{what} {indices[0]}"
    stretches: list[list[int]] = []
    for index in indices:
        if stretches and index == stretches[-1][1] + 1:
            stretches[-1][1] = index
        else:
            stretches.append([index, index])
    named = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in stretches[:_SHOWN])
    more = sum(last - first + 1 for first, last in stretches[_SHOWN:])
    return f"{what}s {named}{f' and {more:,} more' if more else ''}: each"


class PromptsTypeError(BatchLLMError, TypeError):
    """What was passed in as ``prompts`` is no list of prompts at all."""


class UnsupportedModelError(BatchLLMError, ValueError):
    """The architecture would not run correctly here; the message names what is missing."""


class UnsupportedOptionError(BatchLLMError, ValueError):
    """An option of ``generate`` that cannot be honoured, or not with this value; ``option`` is its name."""

    def __init__(self, option: str, why: str) -> None:
        self.option = option
        super().__init__(f"`{option}` {why}")


class OptionValueError(UnsupportedOptionError):
    """A value that makes no sense for any model; ``generate`` itself would refuse it."""


class ConfigError(BatchLLMError, ValueError):
    """``BatchGenerator`` was made with something that cannot be used: a field of ``BatchConfig``, or a tokenizer."""


class TokenizerError(BatchLLMError, ValueError):
    """There is text to encode and no tokenizer to do it."""


class GeneratorBusyError(BatchLLMError, RuntimeError):
    """A call was made on a generator that is running another one, or that is closed."""


class CacheMemoryError(BatchLLMError, MemoryError):
    """There is no memory for a KV cache that would hold enough to begin with."""


class FilesError(BatchLLMError):
    """A run from a file to a file cannot go on, or cannot begin; the message says what is kept and what to do."""


class InputFileError(FilesError, ValueError):
    """The file with the prompts cannot be read as what it should be."""


class OutputFileError(FilesError, ValueError):
    """The output cannot be written to, or what is in it was not written by such a run. Nothing was changed."""


class OutputBusyError(OutputFileError):
    """Another process is writing to the same output."""


class RunChangedError(OutputFileError):
    """The output was begun with other settings, or another model, or the input has changed since.

    ``differences`` names each of them.
    """

    def __init__(self, message: str, differences: Iterable[str] = ()) -> None:
        self.differences = list(differences)
        super().__init__(message)


class OutputWriteError(FilesError, OSError):
    """A write failed: no space, a closed pipe, a broken disk. ``kept``: how many results are in the output."""

    def __init__(self, message: str, kept: int = 0, number: int | None = None) -> None:
        super().__init__(message)
        self.kept = kept
        self.errno = number


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during a call. ``result`` holds what had finished by then."""

    of_a_generator = True  # whose caller has it: behind a pipeline, or ``accelerated``, nobody sees it

    def __init__(self, result: Any, finished: int, total: int) -> None:
        self.result = result
        if not total:
            message = "interrupted before the first sequence began"
        elif not finished:
            message = f"interrupted: none of {total:,} sequences had finished"
        else:
            message = f"interrupted: {finished:,} of {total:,} sequences had finished; they are in .result"
        super().__init__(message)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the way down to the step that was interrupted tells nothing to whoever interrupted it."""
        said, _, results = str(self).partition("; ")
        also = "`gen.interrupted` (`gen`: your BatchGenerator) until its next call, and in "
        where = (
            f"Their results are in {also if self.of_a_generator else ''}`sys.last_value.result` until the next error."
        )
        return [f"{type(self).__name__}: {said}", where] if results else [f"{type(self).__name__}: {said}"]

    def __reduce__(self) -> Any:
        return _revived, (type(self), self.args), self.__dict__


def either(names: Iterable[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
