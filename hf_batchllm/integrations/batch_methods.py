"""Transformers' continuous batching under ``accelerated(model)``: ``generate_batch``, and its manager's plain use."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import GenerationConfig
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..errors import GeneratorBusyError, UnsupportedModelError, UnsupportedOptionError
from ..generator import BatchGenerator
from ..inputs.base_model import base_model
from ..notices import Notices, warn_user
from ..patches.attention_interface import ATTENTION_NAME
from ..patches.attention_swap import AttentionSwap
from .batch_requests import BatchRequest, RequestConfigs, outputs_of
from .fallbacks import Fallback
from .method_stand_in import MethodStandIn
from .request_manager import RequestManager

_BATCH, _MANAGER, _CONTEXT = "generate_batch", "init_continuous_batching", "continuous_batching_context_manager"
_SIGNATURES = {name: inspect.signature(getattr(ContinuousMixin, name)) for name in (_BATCH, _MANAGER, _CONTEXT)}


class _Method(MethodStandIn):
    """``served`` gets the arguments by their names, and the original call as ``call``."""

    def __init__(self, methods: BatchMethods, model: nn.Module, name: str, served: Callable[..., Any]) -> None:
        super().__init__(model, name)
        self._methods = methods
        self._served = served

    def serve(self, *args: Any, **kwargs: Any) -> Any:
        if self._methods.is_aside:
            return self.original(*args, **kwargs)
        try:
            named = dict(_SIGNATURES[self.name].bind(self.model, *args, **kwargs).arguments)
        except TypeError:
            return self.original(*args, **kwargs)  # which raises its own error
        named.pop("self")
        named["call"] = lambda: self._run_aside(args, kwargs)
        return self._served(named)

    def _run_aside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._methods.aside():
            return self.original(*args, **kwargs)


class BatchMethods(Fallback):
    """Takes the place of the methods of a model that are about continuous batching.

    ``generator`` is that of ``generate``, too; None if ``refusal`` says why there is none. ``note_report`` is called
    after each call.
    """

    instead = "transformers' own continuous batching runs instead"
    item = "request"

    def __init__(
        self,
        model: nn.Module,
        generator: BatchGenerator | None,
        refusal: UnsupportedModelError | None,
        note_report: Callable[[], None],
    ) -> None:
        super().__init__()
        self._model = model
        self._generator = generator
        self._refusal = refusal
        self._note_report = note_report
        self._notices = Notices()
        self._managers: list[RequestManager] = []
        served = {_BATCH: self._batch, _MANAGER: self._manager, _CONTEXT: self._context}
        self._aside_in: int | None = None  # the thread that runs transformers' own generate
        self._methods = [
            _Method(self, model, name, serve) for name, serve in served.items() if callable(getattr(model, name, None))
        ]

    def enter(self) -> None:
        for method in self._methods:
            method.put_in_place()

    def leave(self) -> None:
        for method in reversed(self._methods):
            method.put_back()
        if self._managers:
            with AttentionSwap(self._model).others_wait():
                for manager in self._managers:
                    manager.give_up("accelerated(model) has ended, and this request had not")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While the block runs, this thread gets the original methods: transformers' own ``generate`` calls them."""
        before, self._aside_in = self._aside_in, threading.get_ident()
        try:
            yield
        finally:
            self._aside_in = before

    @contextmanager
    def turn(self, manager: RequestManager | None = None) -> Iterator[None]:
        """One call at a time: while another thread is in a step, the model's attention is swapped.

        ``manager``: whose requests run; the requests of others that have begun are finished first.
        """
        with AttentionSwap(self._model).others_wait() as attention:
            if attention == ATTENTION_NAME:
                raise GeneratorBusyError(
                    "model.generate was called from within a step of a running call (by a hook?), while the model's "
                    "attention is swapped: make the outer call without accelerated(model), or the inner call later"
                )
            for other in self._managers:
                if other is not manager:
                    other.finish_round()
            yield

    @property
    def is_aside(self) -> bool:
        return self._aside_in == threading.get_ident()

    @property
    def busy(self) -> GeneratorBusyError | None:
        """Why no call can be served now."""
        if any(manager.is_handed_over and manager.is_running() for manager in self._managers):
            return GeneratorBusyError("transformers' own manager runs on the model: stop() it first")
        return None

    # -- generate_batch ----------------------------------------------------------------------------------------

    def _batch(self, named: dict[str, Any]) -> Any:
        original = named["call"]
        if self._generator is None:
            return self._run_original(self._refusal, original)
        inputs = [] if named["inputs"] is None else list(named["inputs"])
        if not inputs:
            return {}
        more = dict(named.get("kwargs", {}))
        max_new_tokens = more.pop("max_new_tokens", None)
        for name in more:
            self._notices(
                name,
                f"`{name}` has no effect: of its keyword arguments, generate_batch reads `max_new_tokens` alone. Put "
                "others into the generation_config",
            )
        with self.turn():
            self._generator.last_report = None
            reason: Exception | None = self._refusal or self.busy
            if reason is None and named.get("record_timestamps"):
                reason = UnsupportedOptionError("record_timestamps", "is not supported: tokens come in bursts here")

            def serve() -> dict[str, GenerationOutput]:
                configs, batching = self.configs(named)
                requests = [
                    BatchRequest(f"req_{index}", ids, configs.samples, max_new_tokens)
                    for index, ids in enumerate(inputs)
                ]
                made = self.run(requests, configs, batching, bool(named.get("progress_bar")))
                outputs = {output.request_id: output for output in made}
                self._warn_of_failed([output for output in outputs.values() if output.error is not None])
                return {name: outputs[name] for request in requests for name in request.output_ids}

            try:
                return self._run_original(reason, original) if reason else self._attempt(serve, original)
            finally:
                self._note_report()

    def _warn_of_failed(self, failed: Sequence[GenerationOutput]) -> None:
        if failed:
            first, more = failed[0], f" (and {len(failed) - 1:,} more, each in its `error`)" if len(failed) > 1 else ""
            warn_user(f"generate_batch: {first.request_id} failed: {first.error}{more}")

    def configs(self, named: dict[str, Any]) -> tuple[RequestConfigs, Any]:
        """What the requests of a call or a manager are generated with, and its ContinuousBatchingConfig, if any."""
        inner = base_model(self._model)
        given = named.get("generation_config")
        given = inner.generation_config if given is None else given
        if not isinstance(given, GenerationConfig):
            raise TypeError(f"generation_config must be a GenerationConfig, not {type(given).__name__}")
        batching = named.get("continuous_batching_config") or getattr(given, "continuous_batching_config", None)
        if given.eos_token_id is None:
            self._notices(
                "eos",
                "the generation_config has no `eos_token_id`, so no token ends an answer, as in transformers' "
                "generate_batch, which does not look for one in the model's own",
            )
        positions = getattr(inner.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return RequestConfigs(given, positions, bool(getattr(batching, "per_request_processors", False))), batching

    # -- requests ----------------------------------------------------------------------------------------------

    def run(
        self, requests: Sequence[BatchRequest], configs: RequestConfigs, batching: Any, progress: bool = False
    ) -> Generator[GenerationOutput, None, None]:
        """An output for each sample of each request, as it finishes. Call it within ``turn``, and so each ``next``.

        What is refused is raised before any work. An error of the work goes into the outputs that it left open.
        """
        assert self._generator is not None
        began = time.perf_counter()
        good, open_outputs = [], {name: request for request in requests for name in request.output_ids}
        for request in requests:
            why = configs.problem(request)
            if why is None:
                good.append(request)
                continue
            for name in request.output_ids:
                yield open_outputs.pop(name).failed(name, why)
        if not good:
            return
        with _in_eval_mode(self._model):
            results = self._generator.stream(
                [request.ids for request in good],
                [configs.of(request) for request in good],
                seed=getattr(batching, "seed", None) if configs.given.do_sample else None,
                on_error="record",
                progress=progress,
                logprobs=0 if getattr(batching, "return_logprobs", False) else None,
            )
        outputs = outputs_of(results, good, configs, began)
        try:
            while True:
                with _in_eval_mode(self._model):
                    try:
                        output = next(outputs)
                    except StopIteration:
                        break
                open_outputs.pop(output.request_id, None)
                yield output
        except Exception as error:
            if not self._work_had_begun(error):
                raise
            for name, request in open_outputs.items():
                yield request.failed(name, str(error) or type(error).__name__, began)
        finally:
            results.close()  # type: ignore[attr-defined]  # a generator
            self._note_report()

    # -- the manager -------------------------------------------------------------------------------------------

    def _manager(self, named: dict[str, Any]) -> Any:
        original = named["call"]
        reason = self._refusal or self.busy
        if self._generator is None or reason is not None:
            return self._run_original(reason, original)
        configs, batching = self.configs(named)
        self._managers = [manager for manager in self._managers if not manager.is_over]
        manager = RequestManager(self, configs, batching, original)
        self._managers.append(manager)
        return manager

    def _context(self, named: dict[str, Any]) -> Any:
        reason = self._refusal or self.busy
        if self._generator is None or reason is not None:
            return self._run_original(reason, named["call"])
        return self._context_of(named)

    @contextmanager
    def _context_of(self, named: dict[str, Any]) -> Iterator[RequestManager]:
        wanted = {name: named[name] for name in _SIGNATURES[_MANAGER].parameters if name in named}
        init = next(each for each in self._methods if each.name == _MANAGER)
        manager = self._manager({**wanted, "call": lambda: init.original(**wanted)})
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=named.get("block", True), timeout=named.get("timeout"))
            manager.destroy()


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """As the original leaves it; here each module is put back."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
