"""ModelRunner: runs one step of the user's own model, in the mode (train or eval) that it is in."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..kernels.lists.spans import Spans
from ..patches.adapter_swap import AdapterSwap
from ..patches.attention_interface import AttentionContext, attention_context
from ..patches.fusion import FusedLayers
from ..patches.image_features_swap import ImageFeaturesSwap
from ..patches.state_functions import state_context
from ..planning.step import Chunk
from .attention.attention_backend import AttentionBackend
from .batch import ModelBatch, TokenBatch
from .control import ModelControl
from .image_features import ImageFeatures
from .inspection.architecture import Architecture
from .states.state_step import StateKernels, StateStep
from .transfers import current_device

_AutocastState = tuple[bool, torch.dtype]  # whether autocast is on, and its type


class LatestTokens(Protocol):
    """On the device, the latest token of each request."""

    def fill_in(self, tokens: TokenBatch) -> None:
        """Decode rows of a batch on the device go on from them."""


class ModelRunner:
    def __init__(
        self,
        model: nn.Module,
        architecture: Architecture,
        backend: AttentionBackend,
        fused: FusedLayers | None = None,
        state_kernels: StateKernels | None = None,
        adapters: AdapterSwap | None = None,
    ) -> None:
        self.model = model
        self.architecture = architecture
        self.backend = backend
        self.control = ModelControl(model, fused, backend.fixed_forwards(model), adapters)
        self._fused = fused
        self._state_kernels = state_kernels  # for layers that carry states
        self._logits: torch.Tensor | None = None  # [samples or more, vocabulary]
        self._autocast = _KeptAutocast(architecture.device)
        self.record: Callable[[Sequence[Chunk], torch.Tensor], None] | None = None  # is given the logits of ``asked``
        self._selects_rows = architecture.selects_rows
        self.images: ImageFeatures | None = None  # of the call's prompts

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Where steps run and tokens are picked: the model's device, and autocast as the call found it."""
        with current_device(self.architecture.device), self._autocast.applied(), self.backend.products():
            yield

    def step(
        self, batch: ModelBatch, latest: LatestTokens | None = None
    ) -> torch.Tensor:  # [samples + drafted, vocabulary]
        """Run the step's tokens. Gives the logits that are sampled, those of drafts behind them.

        ``record`` is given those asked for beside. ``latest``: where the host may not have seen what rows go on from.
        """
        logits = self.every_row(batch, latest)
        if not batch.asked:
            return logits
        samples = len(batch.tokens.sample_seats) + batch.drafted
        assert self.record is not None
        self.record(batch.asked, logits[samples:])
        return logits[:samples]

    @torch.no_grad()
    def every_row(
        self, batch: ModelBatch, latest: LatestTokens | None = None
    ) -> torch.Tensor:  # [samples + drafted + asked, vocabulary]
        """Run the step's tokens. Gives the logits that are sampled, those of drafts, then those asked for beside."""
        return self.launch(batch, latest)

    def try_step(self, batch: ModelBatch) -> None:
        """Run a step for nothing. What it draws is not taken from the user's random numbers."""
        device = self.architecture.device
        try:
            with current_device(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
                self.step(batch)
        except Exception as error:
            self.restore()
            traceback.clear_frames(error.__traceback__)  # they hold tensors of the step
            raise
        finally:
            self.control.restore()

    @torch.no_grad()
    def rows(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context: AttentionContext,
        states: StateStep | None = None,
    ) -> torch.Tensor:  # [rows, vocabulary]
        """Run decode rows, all of which are sampled. Nothing here waits for the device or copies anything to it."""
        return self.forward(input_ids, position_ids, context, states=states)

    def launch(
        self, batch: ModelBatch, latest: LatestTokens | None
    ) -> torch.Tensor:  # [samples + drafted + asked, vocabulary]
        """Hand the step to the device. ``batch``: on the host."""
        batch = batch.to(self.architecture.device)
        tokens = batch.tokens
        if latest is not None:
            latest.fill_in(tokens)
        images = None
        if batch.image_keys is not None:
            assert self.images is not None
            # Looked for on the device: a decode row may go on from a placeholder that the host has not seen yet.
            at = (tokens.input_ids == self.images.placeholder).nonzero().squeeze(1).cpu().numpy()
            # A name tells adapters apart: where none is swapped in, the same ones are active for the whole call.
            adapters = self.control.adapters
            adapter = None if adapters is None else ("of a prompt", adapters.name)
            with self.control.without_attention():
                images = self.images.of_step(batch.image_keys[at], adapter)
        if (logits := self.backend.in_passes(self.forward, batch)) is not None:
            return logits
        context = self.backend.prepare(batch.attention)
        states = None
        if batch.states is not None:
            self.backend.storage.states.copy(batch.states.copies)
            states = self.over_states(batch.states.spans(self.architecture.device))
        return self.forward(tokens.input_ids, tokens.position_ids, context, tokens.logits_rows, states, images)

    def over_states(self, spans: Spans) -> StateStep:
        """A pass over the states of the call, for layers that carry them."""
        assert self._state_kernels is not None
        return StateStep(spans, self.backend.storage.states, self._state_kernels)

    def forward(
        self,
        input_ids: torch.Tensor,  # [tokens]
        position_ids: torch.Tensor,  # [tokens], or [3, tokens]
        context: AttentionContext,
        logits_rows: torch.Tensor | None = None,  # [samples]; None: all tokens
        states: StateStep | None = None,
        images: Any = None,  # features of the placeholders among the tokens, as the model's vision tower gives them
    ) -> torch.Tensor:  # [samples, vocabulary]
        selects = self._selects_rows and logits_rows is not None
        given: dict[str, Any] = {"logits_to_keep": logits_rows} if selects else {}
        known: AbstractContextManager[object] = nullcontext()
        if images is not None:
            assert self.images is not None
            known = ImageFeaturesSwap(self.images.inner, images).applied()
            given["pixel_values"] = input_ids.new_zeros(1, dtype=self.images.inner.dtype)  # says that there are
        self.control.apply()
        fused = nullcontext() if self._fused is None else self._fused.step()
        with fused, attention_context(context), state_context(states), known:
            output = self.model(
                input_ids=input_ids[None],
                position_ids=position_ids[..., None, :],
                use_cache=False,
                return_dict=True,
                **given,
            )
        if context.calls != self.architecture.layers:
            raise UnsupportedModelError(
                f"{self.architecture.name} has {self.architecture.layers} attention layers, of which {context.calls} "
                "were run by the attention that was put under them: has a module of it been replaced by one with an "
                "attention of its own? That is not supported"
            )
        expected = len(self.architecture.states)
        if (0 if states is None else states.calls) != expected:
            raise UnsupportedModelError(
                f"{self.architecture.name} calls {expected} functions that carry a state from token to token, of which "
                f"{0 if states is None else states.calls} were run by what was put in their place: has a module of it "
                "been replaced? That is not supported"
            )
        logits: torch.Tensor = output.logits[0]
        wanted = logits_rows if selects and logits_rows is not None else input_ids
        if logits.shape[0] != len(wanted):  # a head or a hook of the user's picks rows by itself
            raise UnsupportedModelError(
                f"{self.architecture.name} gave {logits.shape[0]} rows of logits where {len(wanted)} were "
                "asked for: a hook, or a module that was put in, chooses places by itself. Here many prompts stand "
                "side by side in one row, and each needs its own: take that code out, or use model.generate"
            )
        return logits if selects or logits_rows is None else logits[logits_rows]

    @torch.no_grad()
    def in_float32(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits as ``generate`` hands them to its processors. Valid until the next step."""
        if logits.dtype == torch.float32 or logits.device.type != "cpu":
            return logits.float()
        # On a CPU, allocating so much memory takes longer than the conversion.
        if self._logits is None or self._logits.shape[0] < len(logits):
            with torch.inference_mode(False):  # a later step may run outside
                self._logits = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        return self._logits[: len(logits)].copy_(logits)

    def restore(self) -> None:
        """The model is as its user left it, and the memory of steps is freed."""
        self.control.restore()
        self._logits = None
        self.backend.release()


class _KeptAutocast:
    """Notes the state when it is made: steps run under it, whatever the caller enters between two results.

    Under another state, a step would compute keys and values of another type than those in the call's cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._exists = torch.amp.is_autocast_available(device.type)
        self._kept = self._now() if self._exists else None

    def _now(self) -> _AutocastState:
        return torch.is_autocast_enabled(self._kind), torch.get_autocast_dtype(self._kind)

    def _set(self, state: _AutocastState) -> None:
        torch.set_autocast_enabled(self._kind, state[0])
        torch.set_autocast_dtype(self._kind, state[1])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While the block runs, autocast is as it was in the beginning."""
        now = self._now() if self._exists else None
        if now is None or self._kept is None or now == self._kept or not (now[0] or self._kept[0]):
            yield
            return
        cached = torch.is_autocast_cache_enabled()
        try:
            # Autocast looks up copies of weights by the weight alone: the caller's may be of another type.
            torch.set_autocast_cache_enabled(False)
            self._set(self._kept)
            yield
        finally:
            self._set(now)
            torch.set_autocast_cache_enabled(cached)
