"""What takes the place of a method of one model object for a while, and leaves no trace."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn

ABSENT = object()


class MethodStandIn(ABC):
    """An entry in the model's ``__dict__``, which hides the method of its class; derived classes say what it does.

    Blocks may be within blocks, and may end in any order.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model = model
        self.name = name
        self.before: Any = vars(model).get(name, ABSENT)
        # Within another block: the original, as the outer stand-in would only refuse the same calls again.
        self.original: Callable[..., Any] = (
            self.before.original if isinstance(self.before, MethodStandIn) else getattr(model, name)
        )
        self.ended = False
        functools.update_wrapper(self, self.original, updated=())

    def __repr__(self) -> str:
        return f"<accelerated {self.name} of {type(self.model).__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles of the model: a copy gets the method of its own class."""
        if self.before is ABSENT and hasattr(type(self.model), self.name):
            return getattr, (self.model, self.name)
        return _itself, (self.original,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.ended else self.serve(*args, **kwargs)

    @abstractmethod
    def serve(self, *args: Any, **kwargs: Any) -> Any:
        """What a call gives while the block runs."""

    def put_in_place(self) -> None:
        vars(self.model)[self.name] = self

    def put_back(self) -> MethodStandIn | None:
        """Restore what was there before; None if the owner has put something else there meanwhile, which stays.

        Otherwise: the first of the stand-ins that end with this one, as others may have ended before it.
        """
        self.ended = True
        attributes = vars(self.model)
        if attributes.get(self.name) is not self:
            return None
        first: MethodStandIn = self
        while isinstance(first.before, MethodStandIn) and first.before.ended:
            first = first.before
        if first.before is ABSENT:
            del attributes[self.name]
        else:
            attributes[self.name] = first.before
        return first


def _itself(value: Any) -> Any:
    return value
