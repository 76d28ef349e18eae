"""The adapters of a call take turns: the requests of one adapter run after those of another."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property

from ..inputs.prompts import Prompt
from ..model.model_in_use import ModelInUse
from ..planning.requests_and_prefixes import Request


class AdapterTurns:
    """The adapters of a call. ``adapters``: of each prompt, as Job has them; None: the model is used as it is."""

    def __init__(self, use: ModelInUse, adapters: Sequence[str | None] | None) -> None:
        self._use = use
        self._adapters = adapters
        self._active = use.active_adapters()
        self.swap = None if adapters is None else use.adapter_swap()

    def keyed(self, prompts: Sequence[Prompt], places: Sequence[int]) -> list[Prompt]:
        """The prompts with their adapter as the key: keys and values of one adapter are of no use to another."""
        if self._adapters is None or self.swap is None:
            return [prompt.with_key(self._active) for prompt in prompts]
        names = [self._adapters[place] for place in places]
        keys: dict[str | None, Hashable] = self.swap.learn(dict.fromkeys(names))
        return [prompt.with_key(keys[name]) for prompt, name in zip(prompts, names, strict=True)]

    def turns(self, requests: list[Request]) -> Iterator[list[Request]]:
        """The requests of each adapter, in the order of the plan. Steps run with that adapter until the next turn."""
        if self._adapters is None or self.swap is None or not requests:
            yield requests
            return
        groups: dict[str | None, list[Request]] = {}
        for request in sorted(requests, key=lambda request: request.rank):
            groups.setdefault(self._adapters[request.index], []).append(request)
        for self.swap.name, group in groups.items():
            yield group

    def name_for(self, place: int) -> str | None:
        """Which adapter answers a prompt; several that are active together are joined by "+"."""
        return self._active_names if self._adapters is None or self.swap is None else self._adapters[place]

    @cached_property
    def _active_names(self) -> str | None:
        if self._active is None:
            return None
        states = ast.literal_eval(str(self._active))  # of all layers, or one for each
        names = dict.fromkeys(name for state in ([states] if isinstance(states, tuple) else states) for name in state)
        return "+".join(names) or None

    @property
    def were_switched(self) -> bool:
        """Whether the user has switched adapters meanwhile, on a model that is used as it is."""
        return self.swap is None and self._active != self._use.active_adapters()
