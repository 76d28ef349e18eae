"""RankGenerator: one list over the ranks of torchrun or accelerate launch, each of which holds its model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from torch import nn

from ..config import BatchConfig
from ..engine.unfinished import Finished, FinishedGenerations, results_kept
from ..errors import UnsupportedModelError
from ..inputs.config_fields import ConfigFields, shows_config_fields
from ..inputs.short_tracebacks import with_short_tracebacks
from ..results.missing_names import OF_A_GENERATOR
from .list_calls import PATIENCE, ListCalls, checked_patience
from .part_generator import PartGenerator
from .rank_call import RankCalls
from .ranks import Ranks
from .work import Work

_NO_STREAM = "results come in the end. A BatchGenerator has it, and a GeneratorPool"


class RankGenerator(ListCalls):
    """One list of prompts on the ranks of torchrun or accelerate launch: as BatchGenerator, called by all of them.

        gen = RankGenerator(model, tokenizer)               # on each rank, with the rank's own copy of the model
        out = gen.generate(prompts, max_new_tokens=100)     # on each rank, with the same prompts

    everywhere: whether each rank gets all results. Otherwise the first rank (0) does, and the others get none.
    patience: seconds after which a rank whose step does not end is taken to hang.
    model, tokenizer, config: as for BatchGenerator. ``config`` holds for each rank.

    The list is planned as a whole, and each rank runs a part of it that is expected to take as long as the others.
    Prompts that share a prefix stay together where that pays. Answers are those of one process, in the order of the
    prompts, and so are samples. Where no seed is given, the first rank draws one for all. An error of one rank is
    raised on all of them.
    """

    _instead = OF_A_GENERATOR | {"stream": _NO_STREAM}
    _still_running = "a call is running already: let it end"

    @shows_config_fields
    @with_short_tracebacks
    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        config: BatchConfig | None = None,
        *,
        everywhere: bool = True,
        patience: float = PATIENCE,
        **fields: Unpack[ConfigFields],
    ) -> None:
        self._generator = PartGenerator(model, tokenizer, config, **fields)
        if self._generator.architecture.parts > 1:
            raise UnsupportedModelError(
                f"{self._generator.architecture.name} is spread over {self._generator.architecture.parts} ranks, "
                "which run one list together, and a RankGenerator gives each rank a part of the list: use "
                "BatchGenerator(model) on each of them, with the whole list"
            )
        super().__init__(self._generator.config, self._generator._notices)
        self._ranks = Ranks(checked_patience(patience), self._notices)
        self._calls = RankCalls(self._generator, self._ranks, everywhere)

    @property
    def tokenizer(self) -> Any:
        return self._generator.tokenizer

    @property
    def model(self) -> nn.Module:
        """This rank's own."""
        return self._generator.model

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def __len__(self) -> int:
        """How many ranks there are."""
        return self._ranks.count

    def __repr__(self) -> str:
        return f"RankGenerator({self._generator.architecture.name}, rank {self.rank} of {len(self)})"

    def close(self) -> None:
        """Give this rank's memory back."""
        self._closed = True
        self._ranks.close()
        self._generator.close()

    def __exit__(self, *rest: object) -> None:
        self.close()

    # -- a call --------------------------------------------------------------------------------------------------

    @contextmanager
    def _together(self) -> Iterator[Callable[[str, Any], list[Any]]]:
        """For what all ranks do beside calls: gives a function that tells all ranks what each of them says."""
        with self._taking(), self._ranks.call():
            self._ranks.exchange("here", True, arriving=True)
            yield self._ranks.exchange

    def _found(self, function: Callable[..., Any], *given: Any) -> Any:
        return function(self._generator, *given)

    def _decode(self, ids: list[int]) -> str | None:
        return self._generator._tokenizer.decode(ids)

    def _run(self, make: Callable[[], Work], strict: bool, progress: bool | None, index: Any) -> Finished[Any]:
        """What comes out is the same on all ranks, or, if asked so, on the first one alone."""
        finished: Finished[Any] = FinishedGenerations()
        with self._taking(), results_kept(self, lambda: finished, self._decode), self._ranks.call():
            began = time.perf_counter()
            work, split = self._calls.agreed(make, progress)
            finished = work.finished
            finished.index = index
            self._calls.run(work, split, strict, progress, began)
            self.last_report = finished.report
        return finished
