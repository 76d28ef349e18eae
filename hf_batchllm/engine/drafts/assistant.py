"""The assistant of a call: a smaller model that guesses how answers go on, over a KV cache of its own.

A guess is what the assistant's logits give under the noise that the answer's own token is drawn with: the more alike
the two models, the more often it is that token, sampled or not. It need not be right, so nothing of what `invariant`
asks for is asked of it. What an answer got in place of a wrong guess is run when the next guess is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from ...config import BatchConfig
from ...model.attention.kv_storage import KVStorage, kv_dtype
from ...model.batch import ModelBatch
from ...model.batch_builder import BatchBuilder
from ...model.device_memory import is_out_of_memory
from ...model.model_in_use import ModelInUse
from ...model.runner import ModelRunner
from ...planning.paged_cache import PagedCache
from ...planning.requests_and_prefixes import FinishReason, Request
from ...planning.step import Chunk, Step
from ...sampling.sampling_kernels import sampling_kernels
from ..device_loop.decode_graphs import graphs_for
from ..device_loop.graph_sizes import DRAFT_SIZES, draft_size_of
from ..device_loop.seats import Seats
from ..device_loop.steps_as_graphs import StepsAsGraphs
from .assistant_model import AssistantModel
from .assistant_pick import AssistantPick

MOST_ANSWERS = 64  # that it guesses for at a time: where more run, a guess pays less than another answer's token
MOST_GUESSED = 8  # tokens of an answer at a time
_FEW = 16  # tokens that an answer got since: up to so many are decode rows, more are run as a prompt is
_SHARE = 0.1  # of the free memory, for its KV cache
_MANY = 10**6  # steps to come, that graphs are captured for
_STEP = 4096  # tokens of a step


class Assistant:
    """Takes its memory when it is made, and guesses once it has begun.

    lengths: of each sequence of the call, the tokens that it may have in the end.
    """

    def __init__(
        self,
        known: AssistantModel,
        config: BatchConfig,
        lengths: Sequence[int],
        free: int,  # bytes of the device
    ) -> None:
        self._notices = notices = known.notices
        self.model = known.model
        config = replace(config, invariant=False, keep_prefixes=0)
        device = known.architecture.device
        self._use = use = ModelInUse(known.model, known.architecture, config, known.fusion, notices)
        use.check()
        use.fuse()
        size, page_bytes = config.page_size, known.architecture.kv_bytes_per_token * config.page_size
        longest = sorted(lengths, reverse=True)[:MOST_ANSWERS]
        pages = sum(-(-(length + MOST_GUESSED) // size) for length in longest)
        pages = max(1, min(pages, int(_SHARE * free) // max(page_bytes, 1)))
        self._storage, self._cache = KVStorage(pages, size), PagedCache(pages, size)
        if device.type != "cpu":
            self._storage.reserve(known.architecture.attention, kv_dtype(known.model, device), device)
        self._positions = known.architecture.max_positions
        self._shadows: dict[Request, Request] = {}  # of an answer, what the assistant has of it
        self._guessed: dict[Request, int] = {}  # of a shadow's tokens, how many were the answer's when it guessed last
        self.seconds = 0.0  # that the latest guesses took, without what was run as a prompt
        self.is_steady = True  # whether others will take as long: nothing was captured, or run as a prompt
        self.has_ended = False
        self._config = config
        self._steps: StepsAsGraphs | None = None  # set when it begins, as the next three are
        self._runner: ModelRunner
        self._builder: BatchBuilder
        self._pick: AssistantPick
        self._put_larger_back: Callable[[], None]

    def begin(self, pick: AssistantPick, seats: int, put_larger_back: Callable[[], None]) -> None:
        """``pick``: as for the answers, which have so many seats. The larger model may share modules with this one."""
        use, device = self._use, self._use.device
        self._pick, self._put_larger_back = pick, put_larger_back
        self._runner = use.run_over(self._storage)
        none = Seats.of([frozenset()] * seats, device, keep_tokens=False)
        advance = sampling_kernels(device, use.kernels_by_name).advance
        graphs = graphs_for(
            self._config, self._runner, none, pick.in_graphs, advance, MOST_GUESSED, self._notices, None
        )
        if graphs is not None:
            graphs.size_of = draft_size_of  # few sizes: they are captured while the larger model waits
        self._steps = StepsAsGraphs(self._runner, none, graphs, device)
        self._builder = use.builder(most_times=0 if graphs is None else graphs.most_times)

    def guess(self, requests: Sequence[Request], tokens: int) -> dict[Request, list[int]]:
        """So many tokens of each answer that the cache has room for."""
        assert tokens <= MOST_GUESSED
        if self.has_ended:
            return {}
        self._put_larger_back()
        try:
            return self._guess(requests, tokens)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._notices(
                "assistant memory",
                f"it ran out of memory on {self._use.device}: for the rest of the call it guesses nothing",
            )
            self.close()
            return {}
        finally:
            self._use.put_back()

    def _guess(self, requests: Sequence[Request], tokens: int) -> dict[Request, list[int]]:
        shadows = {request: shadow for request in requests if (shadow := self._shadow(request, tokens)) is not None}
        going = list(shadows.values())
        near: list[Request] = []
        far: list[Request] = []
        rows = 0
        for shadow in going:
            unread = shadow.length - shadow.computed
            is_near = shadow.computed >= shadow.prompt_tokens and unread <= min(_FEW, DRAFT_SIZES[-1] - rows)
            rows += unread if is_near else 0
            (near if is_near else far).append(shadow)
        first = self._as_prompts(far)
        self.is_steady = not far
        began = time.perf_counter()
        if near:
            first |= dict(zip(near, self._up_to_now(near), strict=True))
        for shadow in going:
            shadow.computed = shadow.length
            shadow.generated.append(first[shadow])
        assert self._steps is not None
        made, most_times = 1, self._steps.most_times
        while going and made < tokens:
            step = Step(going, times=min(tokens - made, most_times))
            new_tokens = self._run(self._builder.build(step), going).tolist()
            for shadow, new in zip(going, new_tokens, strict=True):
                shadow.generated += new
                shadow.computed += step.times
            made += step.times
        self.seconds = time.perf_counter() - began
        return {request: shadow.generated[-tokens:] for request, shadow in shadows.items()}

    def unread(self, request: Request) -> int:
        """How many tokens of the prompt and the answer it has to run before it can guess."""
        shadow = self._shadows.get(request)
        return request.seen - (0 if shadow is None else min(shadow.computed, request.seen))

    def forget(self, request: Request) -> None:
        """The answer has ended."""
        shadow = self._shadows.pop(request, None)
        if shadow is not None:
            shadow.end(FinishReason.WITHDRAWN)
            del self._guessed[shadow]
            self._cache.release(shadow)

    def user_had_control(self) -> None:
        if self._steps is not None:
            self._steps.user_had_control()

    def close(self) -> None:
        """It guesses nothing from here on."""
        self.has_ended = True
        self._shadows.clear()
        self._cache = PagedCache(1, self._cache.page_size)
        try:
            if self._steps is not None:
                self._steps.close()
        finally:
            self._use.restore()
            self._use.drop_runner()
            self._use.release()
            self._storage.release()

    # -- what it has of an answer --------------------------------------------------------------------------------

    def _shadow(self, request: Request, tokens: int) -> Request | None:
        """With the answer's tokens, and pages for so many more; None without room, or where it has no positions."""
        shadow = self._shadows.get(request)
        if shadow is None:
            most = request.max_new_tokens + MOST_GUESSED
            shadow = Request(request.index, request.prompt_ids, most, sample=request.sample)
            shadow.seat = request.seat
            self._guessed[shadow] = 0
        same, known = self._guessed[shadow], request.generated
        while same < min(len(known), len(shadow.generated)) and known[same] == shadow.generated[same]:
            same += 1
        upto = shadow.prompt_tokens + len(known) + tokens
        too_long = self._positions is not None and upto > self._positions
        if too_long or self._cache.missing(shadow, upto) > self._cache.free_pages:
            if request not in self._shadows:
                del self._guessed[shadow]
            return None
        self._shadows[request] = shadow
        self._cache.reserve(shadow, upto)
        shadow.generated[same:] = known[same:]
        shadow.computed = min(shadow.computed, shadow.prompt_tokens + same, shadow.length - 1)
        self._guessed[shadow] = len(known)
        return shadow

    # -- steps ---------------------------------------------------------------------------------------------------

    def _as_prompts(self, shadows: Sequence[Request]) -> dict[Request, int]:
        """Run what is not there of them. Gives each its next token."""
        found: dict[Request, int] = {}
        chunks: list[Chunk] = []
        room = _STEP
        for shadow in shadows:
            begin = shadow.computed
            while begin < shadow.length:
                end = min(shadow.length, begin + room)
                chunks.append(Chunk(shadow, begin, end))
                room -= end - begin
                begin = end
                if not room:
                    found |= self._run_chunks(chunks)
                    chunks, room = [], _STEP
        return found | self._run_chunks(chunks)

    def _run_chunks(self, chunks: list[Chunk]) -> dict[Request, int]:
        if not chunks:
            return {}
        step = Step(chunks=chunks)
        shadows = step.sampling()
        return dict(zip(shadows, self._run(self._builder.build(step), shadows)[:, 0].tolist(), strict=True))

    def _up_to_now(self, shadows: Sequence[Request]) -> list[int]:
        """Run their latest tokens as rows of a step. Gives the next token of each."""
        drafts = []
        for shadow in shadows:
            known = shadow.computed + 1 - shadow.prompt_tokens  # with the first that is run
            if later := tuple(shadow.generated[known:]):
                del shadow.generated[known:]
                drafts.append(Chunk(shadow, shadow.length - 1, shadow.length + len(later), later))
        batch = self._builder.build(Step(list(shadows), drafts=drafts))
        for chunk in drafts:
            assert isinstance(chunk.unit, Request)
            chunk.unit.generated += chunk.draft
        tokens: list[int] = self._run(batch, shadows)[:, 0].tolist()
        return tokens

    def _run(self, batch: ModelBatch, shadows: Sequence[Request]) -> np.ndarray:  # [shadows, times]
        """The token behind the last row of each, or behind each chunk's last token."""
        assert self._steps is not None
        last = None if batch.draft_rows is None else np.cumsum(batch.draft_rows.counts) - 1
        with self._steps.surroundings():
            graphs = self._steps.graphs
            if graphs is not None and batch.burst is not None and (produced := graphs.run(batch, _MANY)) is not None:
                places = batch.tokens.made.numpy()[:, None] + np.arange(batch.burst.times)
                places %= produced.tokens.shape[1]
                self.is_steady &= self._steps.is_steady
                tokens: np.ndarray = np.take_along_axis(produced.tokens.cpu().numpy(), places, axis=1)
                return (tokens if last is None else tokens[last]).clip(min=0)
            logits = self._runner.step(batch.to(self._use.device))
            if not shadows:  # parts of prompts, none of which is the last
                return np.empty((0, 1), dtype=np.int64)
            if last is not None:
                logits = logits[torch.from_numpy(last).to(logits.device)]
            # Where its logits are no numbers there is no token: any will do, and be wrong.
            picked: np.ndarray = self._pick.of_requests(logits, shadows).clamp(min=0).cpu().numpy()
            return picked[:, None]
