"""The library's errors.

Every error of the library derives from ``BatchLLMError``. An error about a value that was passed in is a ``ValueError``
as well, so that code which guards ``model.generate`` guards this library too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .wording import in_ranges

_FEWEST_FRAMES = 3  # IPython's, which it leaves out by itself, the cell's, and the end
_MOST_SHOWN = 8  # reasons in a message, and ranges of prompts for each reason; the rest are counted


class BatchLLMError(Exception):
    """Base of every error that this library raises on purpose."""

    def __reduce__(self) -> Any:
        # By state, not by the arguments of ``__init__``: these differ between classes, and errors cross processes.
        return _revived, (type(self), self.args), self.__dict__

    def _render_traceback_(self) -> list[str]:
        """For IPython, which shows the last frame even if it asks to be hidden: here it is this library's."""
        from IPython.core.getipython import get_ipython

        frames = [self.__traceback__]
        while (last := frames[-1]) is not None:
            frames.append(last.tb_next)
        before = hidden = None
        if (
            len(frames) > _FEWEST_FRAMES
            and (hidden := frames[-2])
            and hidden.tb_frame.f_locals.get("__tracebackhide__")
        ):
            before = frames[-3]
        try:
            if before is not None:
                before.tb_next = None
            shell: Any = get_ipython()
            lines: list[str] = shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__)
            return lines
        finally:
            if before is not None:
                before.tb_next = hidden


def _revived(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = BaseException.__new__(kind)  # MemoryError's own does not make classes derived from it
    error.args = args
    return error


class PromptError(BatchLLMError, ValueError):
    """Some prompts cannot be run. ``problems`` maps the index of each to the reason. ``what``: the noun for one."""

    def __init__(self, problems: Mapping[int, str], what: str = "prompt") -> None:
        self.problems = dict(sorted(problems.items()))
        alike: dict[str, list[int]] = {}
        for index, why in self.problems.items():
            alike.setdefault(why, []).append(index)
        lines = [f"{_numbered(indices, what)} {why}" for why, indices in alike.items()]
        if len(lines) > 1:
            hidden = sum(map(len, list(alike.values())[_MOST_SHOWN:]))
            shown = [f"  {line}" for line in lines[:_MOST_SHOWN]]
            if hidden:
                shown.append(f"  ... and {hidden:,} more (all of them in .problems)")
            lines = [f"{len(self.problems):,} {what}s cannot be run:", *shown]
        super().__init__("\n".join(lines))


def _numbered(indices: list[int], what: str) -> str:
    """``prompt 3``, or ``prompts 0-2, 7: each``."""
    if len(indices) == 1:
        return f"{what} {indices[0]}"
    return f"{what}s {in_ranges(indices, _MOST_SHOWN)}: each"


class PromptsTypeError(BatchLLMError, TypeError):
    """The argument ``prompts`` is not a list of prompts at all."""


class UnsupportedModelError(BatchLLMError, ValueError):
    """The model would not run correctly here; the message says why."""


class UnsupportedOptionError(BatchLLMError, ValueError):
    """An option of ``generate`` that is not supported, or not with this value. ``option`` is its name."""

    def __init__(self, option: str, why: str) -> None:
        self.option = option
        super().__init__(f"`{option}` {why}")


class OptionValueError(UnsupportedOptionError):
    """A value that is wrong for every model."""


class ConfigError(BatchLLMError, ValueError):
    """``BatchGenerator`` cannot use an argument that it was made with: a field of ``BatchConfig``, or a tokenizer."""


class TokenizerError(BatchLLMError, ValueError):
    """Text must be encoded or decoded, and there is no tokenizer for it."""


class GeneratorBusyError(BatchLLMError, RuntimeError):
    """The generator is running another call, or it is closed."""


class PoolError(BatchLLMError, RuntimeError):
    """All processes of a ``GeneratorPool`` are gone, or hold different models; or ranks differ, or one has failed."""


class RanksError(BatchLLMError, RuntimeError):
    """Ranks that run one model together were given different things to do, or one of them has failed."""

    _failure: Any = None  # which rank's it is


class CacheMemoryError(BatchLLMError, MemoryError):
    """Too little memory is free for the smallest useful KV cache."""


class FilesError(BatchLLMError):
    """A run over files cannot begin or go on. The message says which results are kept, and what to do."""


class InputFileError(FilesError, ValueError):
    """The file of prompts cannot be read, or is not in the expected format."""


class OutputFileError(FilesError, ValueError):
    """The output cannot be written, or holds something other than the results of such a run. Nothing was changed."""


class OutputBusyError(OutputFileError):
    """Another process is writing to the same output."""


class RunChangedError(OutputFileError):
    """The output was begun with other settings, another model or another input. ``differences`` names each of them."""

    def __init__(self, message: str, differences: Iterable[str] = ()) -> None:
        self.differences = list(differences)
        super().__init__(message)


class OutputWriteError(FilesError, OSError):
    """A write failed: a full disk, a closed pipe, a broken device. ``kept``: how many results are in the output."""

    def __init__(self, message: str, kept: int = 0, number: int | None = None) -> None:
        super().__init__(message)
        self.kept = kept
        self.errno = number


class NothingToDrawError(RuntimeError):
    """A sequence's scores are no distribution, so its next token cannot be picked.

    ``why``: in place of the usual reasons.
    """

    def __init__(self, why: str | None = None) -> None:
        super().__init__(
            why
            or "there is nothing to draw from: the model gave logits that are not numbers (NaN or infinite), or "
            "processors left no token a chance"
        )


_BY_INDEX = "not aligned with the prompts: use `.index`"


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during a call. ``result`` holds the sequences that had finished by then."""

    caller_has_generator = True  # False behind a pipeline or ``accelerated``: no BatchGenerator is in the user's hands

    def __init__(self, result: Any, finished: int, total: int) -> None:
        self.result = result
        if not total:
            message = "interrupted before the first sequence began"
        elif not finished:
            message = f"interrupted: none of {total:,} sequences had finished"
        else:
            message = f"interrupted: {finished:,} of {total:,} sequences had finished; they are in .result, {_BY_INDEX}"
        super().__init__(message)

    def _render_traceback_(self) -> list[str]:
        """For IPython: the message alone, as the frames down to the interrupted step tell the user nothing."""
        message, _, results = str(self).partition("; ")
        also = "`gen.interrupted` (`gen`: your BatchGenerator) until its next call, and in "
        places = f"{also if self.caller_has_generator else ''}`sys.last_value.result` until the next error"
        where = f"Their results are in {places}. They are {_BY_INDEX}."
        first = f"{type(self).__name__}: {message}"
        return [first, where] if results else [first]

    def __reduce__(self) -> Any:
        return _revived, (type(self), self.args), self.__dict__
