"""The front door: checks what comes in, runs one call at a time, hands the results out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import torch
from torch import nn
from transformers import GenerationConfig

from .config import BatchConfig
from .engine.call import Call
from .engine.drafts.assistant_model import Assistants
from .engine.extra_outputs import ExtraOutputs
from .engine.job import Job, JobChecks
from .engine.kv_memory import KVMemory
from .engine.scoring.score_call import ScoreJob, ScoreOutputs
from .engine.stream import Stream
from .engine.tensor_results import as_tensors
from .engine.unfinished import Finished, FinishedGenerations, FinishedScores, attach, note_of, with_texts
from .errors import GenerationInterrupted, GeneratorBusyError
from .inputs.adapters import AS_IT_IS
from .inputs.base_model import base_model, without_compile
from .inputs.config_fields import ConfigFields, shows_config_fields
from .inputs.garbage_collection import FullCollectionsPaused
from .inputs.named_options import LEFT_OUT, GenerateOptions, shows_options
from .inputs.option_checks import check_progress
from .inputs.padded_batch import take_padded
from .inputs.preparing import bars_wanted
from .inputs.seeds import Seeds
from .inputs.short_tracebacks import with_short_tracebacks
from .inputs.tokenizer import TokenizerLoader
from .installed_versions import warn_of_versions
from .model.architecture import inspect_model, look_again
from .model.choose_backend import check_backend
from .model.device_memory import is_device_error
from .model.invariance import refuse_what_varies
from .model.owners_warnings import warn_of_compiled
from .notices import Notices
from .patches.first_calls import call_functions_once
from .patches.fusion import Fusion
from .planning.requests_and_prefixes import Request
from .planning.sharing import make_plan
from .results.dataframes import index_of
from .results.generations import BatchResult, Generation
from .results.missing_names import OF_A_GENERATOR, no_such
from .results.run_report import RunReport
from .results.scores import ScoreResult
from .results.sharing_plan import SharingPlan
from .sampling.earlier_answers import EarlierAnswers

T = TypeVar("T")
_STILL_RUNNING = "a call is running already, or a stream is still open: let it end (a stream also by its close())"


class BatchGenerator:
    """Generates for a whole list of prompts at once, with the transformers model that you already hold.

        gen = BatchGenerator(model, tokenizer)
        out = gen.generate(prompts, max_new_tokens=100)
        out[0].text

    Prefixes that prompts share are found beforehand and computed once. ``config`` is a BatchConfig; its fields may be
    given as keyword arguments instead. The tokenizer is the one given, else the one saved beside the model. Prompts
    that are text need it, and so does ``text`` in the results.

    ``last_report``: how the last call went (a RunReport); None before it, and if the call was refused before any work.
    ``interrupted``: the finished results of the last call, if an interrupt or an error broke it off (a BatchResult, or
    a ScoreResult). It stays until the next call begins. An error has them in ``error.result``, too.
    ``architecture``: what was read off the model: its layers, heads and attention.
    """

    _kind_of_checks = JobChecks  # decides whether a call can be served
    _logprobs_of_scores = False  # True: `logprobs` are of what tokens are drawn from, after processors
    _at_hand = True  # False behind a pipeline or ``accelerated``: no BatchGenerator is in the user's hands

    @shows_config_fields
    @with_short_tracebacks
    def __init__(
        self, model: nn.Module, tokenizer: Any = None, config: BatchConfig | None = None, **fields: Unpack[ConfigFields]
    ) -> None:
        self._config = BatchConfig.of(config, dict(fields))
        warn_of_versions()
        call_functions_once()
        self._notices = Notices()
        given, model = model, without_compile(model)
        self._tokenizer = TokenizerLoader(tokenizer, base_model(model))
        self._checks = self._kind_of_checks(model, self._tokenizer, self._notices)
        self._model = model
        self.architecture = inspect_model(model)
        if model is not given:
            warn_of_compiled(base_model(model), self._notices)
        refuse_what_varies(model, self.architecture, self.config)
        check_backend(self.config, self.architecture.device, self._notices)
        self._earlier = EarlierAnswers()
        self._assistants = Assistants(self._notices)
        self._kv = KVMemory(model, self.architecture, self.config, self._notices)
        self._fusion = Fusion(model)
        self.last_report: RunReport | None = None
        self.interrupted: BatchResult | ScoreResult | None = None
        self._is_running = False
        self._closed = False

    @property
    def model(self) -> nn.Module:
        """The model given, without the wrapper of ``torch.compile``."""
        return self._model

    @property
    def config(self) -> BatchConfig:
        """The settings that it was made with."""
        return self._config

    def __setattr__(self, key: str, value: object) -> None:
        if key in ("model", "config"):
            raise AttributeError(f"a BatchGenerator keeps the {key} it was made with: make a new one for another {key}")
        super().__setattr__(key, value)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the one saved beside the model; None if there is neither."""
        return self._tokenizer.shown()

    if not TYPE_CHECKING:  # a type checker knows all attributes that there are

        def __getattr__(self, name: str) -> Any:
            raise no_such(self, name, OF_A_GENERATOR)

    # -- the public calls --------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Any,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        seed: Seeds | None = None,
        on_error: str = "raise",
        progress: bool | None = None,
        **generate_kwargs: Unpack[GenerateOptions],
    ) -> BatchResult: ...
    @overload
    def generate(
        self,
        prompts: None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        seed: Seeds | None = None,
        progress: bool | None = None,
        **generate_kwargs: Unpack[GenerateOptions],
    ) -> Any: ...
    @shows_options
    @with_short_tracebacks
    def generate(
        self,
        prompts: Any = None,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        seed: Seeds | None = None,
        on_error: str = "raise",
        progress: bool | None = None,
        **generate_kwargs: Any,
    ) -> Any:
        """Generate for every prompt; results in the order of the prompts.

        prompts: strings, lists of token ids, 1-D tensors or chats, mixed as you like; or a single one.
        input_ids, attention_mask: instead of prompts, a padded 2-D tensor; then a tensor (or a ModelOutput) comes back,
            as from ``model.generate``. A 2-D tensor in the place of ``prompts`` is taken for ``input_ids``.
        generation_config and further keyword arguments: as for ``model.generate``. ``scores`` and ``logits`` of a
            ModelOutput are 0 in rows that had ended, and its ``past_key_values`` hold no cache to go on from.
        adapter: the name of a PEFT adapter of the model, or None for the model without any; or a list, one for each
            prompt. Left out, the active adapters are used as they are.
        tools, chat_template_kwargs, continue_final_message: what chats are encoded with. A chat that ends with an
            assistant's message is continued.
        max_prompt_tokens, truncation_side: cut longer prompts, on the "left" or the "right".
        schema, regex, grammar, choice: which form answers have: JSON of a schema, a regular expression, a grammar in
            Lark, or one of some strings. One for all prompts, or a list with one for each, in which None leaves an
            answer free. Needs the extra ``json``.
        logprobs, prompt_logprobs: for a list of prompts, how many of the likeliest tokens to give at each position; see
            Generation.
        seed: of the sampling noise; by default one is drawn from torch's generator. Or a list, one for each prompt: the
            samples of a prompt then depend neither on its place in the list nor on the other prompts.
        on_error: "raise", or "record" to run the good prompts and put the reason into ``error`` of the others.
        progress: whether to show a bar; by default for long lists, if transformers' bars are on.
        """
        finished = FinishedGenerations()
        body = partial(self._generate, finished, prompts, generation_config, seed, on_error, progress, generate_kwargs)
        return self._collected(body, finished)

    def _generate(
        self,
        finished: FinishedGenerations,
        prompts: Any,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        seed: Seeds | None,
        on_error: str,
        progress: bool | None,
        generate_kwargs: dict[str, Any],
    ) -> Any:
        check_progress(progress)
        with self._taking() as call:
            padded = take_padded(prompts, generate_kwargs)
            given = prompts if padded is None else padded
            with bars_wanted(progress, call.timekeeper.during):
                job = self._checks.job(self.architecture, given, generation_config, seed, on_error, generate_kwargs)
            finished.expected, finished.index, self.interrupted = job.sequences, index_of(prompts), None
            outputs = ExtraOutputs(job.options, self._logprobs_of_scores)
            with bars_wanted(progress):
                call.begin(job, outputs, strict=on_error == "raise")
            try:
                with call.progress(progress) as bar:
                    for request in call.run(bar.step):
                        generation = self._generation(request, call, outputs, decode=padded is None)
                        finished.results[request.index, request.sample] = generation
                        bar.finish(request)
            finally:
                self.last_report = finished.report = self._report(call)
        rows = finished.results | {(failure.index, failure.sample): failure for failure in job.failures()}
        result = BatchResult([rows[key] for key in sorted(rows)], finished.report, self._tokenizer.decode_if_loaded)
        result._index = finished.index
        return result if padded is None else as_tensors(padded, result, job.options[0], call)

    @shows_options
    @with_short_tracebacks
    def stream(
        self,
        prompts: Any = None,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        seed: Seeds | None = None,
        on_error: str = "raise",
        progress: bool | None = None,
        **generate_kwargs: Unpack[GenerateOptions],
    ) -> Iterator[Generation]:
        """As ``generate``, but each result as soon as it is finished. Prompts and options are checked at once.

        A prompt that does not fit into the KV cache is found when the first result is asked for. A bar is shown with
        ``progress=True`` only. A stream keeps nothing in ``interrupted``, as each result was handed out: put them into
        a list as they come. An interrupt raises a plain KeyboardInterrupt.
        """
        options = dict(generate_kwargs)
        with self._taking(), bars_wanted(progress or False):
            if take_padded(prompts, options) is not None:
                raise ValueError("stream() takes a list of prompts; padded tensors go to generate()")
            job = self._checks.job(self.architecture, prompts, generation_config, seed, on_error, options)
        return Stream(partial(self._streamed, job, on_error == "raise", progress or False))

    def _streamed(self, job: Job, strict: bool, progress: bool) -> Generator[Generation, None, None]:
        with self._taking() as call:
            self.interrupted = None
            outputs = ExtraOutputs(job.options, self._logprobs_of_scores)
            with bars_wanted(progress):
                call.begin(job, outputs, strict)
            yield from job.failures()
            try:
                with call.progress(progress) as bar:
                    for request in call.run(bar.step):
                        bar.finish(request)
                        generation = self._generation(request, call, outputs)
                        with call.owner_in_control():
                            yield generation
            finally:
                self.last_report = self._report(call)

    @with_short_tracebacks
    def score(
        self,
        contexts: Any = LEFT_OUT,
        continuations: Any = None,
        *,
        choices: Any = None,
        adapter: Any = AS_IT_IS,
        on_error: str = "raise",
        progress: bool | None = None,
        **chat_options: Any,
    ) -> ScoreResult:
        """How likely continuations are: the log-probability of each token, given its context and the tokens before it.

        contexts: as the prompts of ``generate``; or None to score whole texts from their second token on. The first
            token has nothing before it and is not scored; it is BOS where the tokenizer begins with one.
        continuations: one for each context, a string or token ids, or a list of several; or the texts.
        choices: instead of continuations, a list of answers that is the same for every context.
        adapter: as for ``generate``; a list has one for each context (or text).
        on_error, progress: as for ``generate``.
        chat_options: ``tools``, ``chat_template_kwargs`` and ``continue_final_message``, as for ``generate``.

        Each context is computed once, however many continuations it has, and so is a prefix that contexts share. The LM
        head runs only where a token is looked up.

        A string after a string is encoded together with it, as one text. A token that spans both is scored as the
        continuation's first token. After token ids and chats, continuations are encoded by themselves, without special
        tokens.
        """
        finished = FinishedScores()
        given = contexts, continuations, choices, on_error, adapter, chat_options
        body = partial(self._score, finished, given, on_error == "raise", progress)
        return self._collected(body, finished)

    def _score(
        self, finished: FinishedScores, given: tuple[Any, ...], strict: bool, progress: bool | None
    ) -> ScoreResult:
        check_progress(progress)
        with self._taking() as call:
            with bars_wanted(progress, call.timekeeper.during):
                inputs = self._checks.scores(self.architecture, *given)
            job = ScoreJob.of(inputs)
            finished.inputs, finished.expected, self.interrupted = inputs, len(inputs.items), None
            finished.index = index_of(given[1] if given[0] is None else given[0])
            outputs = ScoreOutputs(job)
            with bars_wanted(progress), job.problems_named():
                call.begin(job.job, outputs, strict)
            try:
                with call.progress(progress) as bar:
                    for request in call.run(bar.step):
                        scores = list(outputs.scores(request, self._tokenizer.decode, call.adapter_for(request.index)))
                        finished.results.update({(score.index, score.choice): score for score in scores})
                        bar.finish(request, len(scores))
            finally:
                self.last_report = finished.report = self._report(call)
        result = ScoreResult([*finished.results.values(), *job.failures()], finished.report)
        result._index = finished.index
        return result

    @with_short_tracebacks
    def plan(self, prompts: Any, *, adapter: Any = AS_IT_IS, **prompt_options: Any) -> SharingPlan:
        """What these prompts share, and what that would save. Runs no model.

        ``adapter``, and options of prompts such as ``tools`` and ``max_prompt_tokens``: as for ``generate``.
        """
        self._refuse_if_closed()
        prepared = self._checks.prompts_to_plan(self.architecture, prompts, adapter, prompt_options)
        plan = make_plan(prepared, self.config, 1)
        plan.add_labels(prepared, self._tokenizer.decode_if_loaded)
        return plan

    def close(self) -> None:
        """Give back all memory that is kept between calls. The generator cannot be used afterwards; the model can."""
        if self._is_running:
            raise GeneratorBusyError(f"{_STILL_RUNNING}, then close()")
        self._kv.close()
        self._earlier.forget()
        self._fusion.unmerge()
        self._assistants.close()
        self.architecture.ranks.close()
        self._closed = True

    def forget_prefixes(self) -> None:
        """Drop the prefixes kept from earlier calls.

        Needed after a change that cannot be seen: inside a hook of your own, say, if it does nothing to most tokens.
        """
        if self._is_running:
            raise GeneratorBusyError(f"{_STILL_RUNNING}, then forget_prefixes()")
        self._kv.clear()

    def __enter__(self) -> BatchGenerator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except Exception as error:
            if kind is None or not (isinstance(error, GeneratorBusyError) or is_device_error(error)):
                raise  # otherwise an error is on its way that says more

    def __reduce_ex__(self, protocol: Any) -> Any:  # copy.copy, copy.deepcopy, pickle
        raise TypeError(
            "a BatchGenerator holds the memory of its calls, so it cannot be copied or pickled: "
            "make one of the copied model, with BatchGenerator(model)"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.architecture.layers} layers on {self.architecture.device}"
        return f"BatchGenerator({self.architecture.name}, {state})"

    # -- checks ------------------------------------------------------------------------------------------------

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise GeneratorBusyError("this BatchGenerator is closed: make a new one for the model")

    @contextmanager
    def _taking(self) -> Iterator[Call]:
        """A call, while no other one runs."""
        self._refuse_if_closed()
        own = self.__dict__  # ``__setattr__`` is Python code, in which another thread or an interrupt may come
        if own["_is_running"]:
            raise GeneratorBusyError(f"{_STILL_RUNNING}. One call at a time")
        try:
            own["_is_running"] = True  # nothing comes between the test above and this
            with self._new_call() as call, self.architecture.ranks.failing_together():
                yield call
        finally:
            own["_is_running"] = False

    def _new_call(self, **of_several: Any) -> Call:
        """``of_several``: what a call has that several processes run together."""
        self.last_report = None
        with self.architecture.ranks.failing_together(ends=False):
            self.architecture = self._kv.architecture = look_again(self.architecture, self.model)
        return Call(
            self.model,
            self.architecture,
            self.config,
            self._kv,
            self._notices,
            self._fusion,
            self._earlier,
            self._assistants,
            **of_several,
        )

    # -- results -----------------------------------------------------------------------------------------------

    def _collected(self, body: Callable[[], T], finished: Finished[Any]) -> T:
        """What ``body`` gives; after an interrupt, what has ``finished`` by then is kept."""
        try:
            with FullCollectionsPaused():
                return body()
        except KeyboardInterrupt:
            pass  # what is raised below is without the frames that it came through
        except BaseException as error:
            self._keep(finished, error)
            raise
        self.interrupted = finished.part(self._tokenizer.decode_if_loaded)
        raise GenerationInterrupted(self.interrupted, len(finished.results), finished.expected)

    def _generation(self, request: Request, call: Call, outputs: ExtraOutputs, decode: bool = True) -> Generation:
        text = self._tokenizer.decode(request.generated) if decode else None
        prompt, adapter = call.job.prompt_as_passed(request.index), call.adapter_for(request.index)
        return outputs.generation(request, text, prompt, adapter)

    def _keep(self, finished: Finished[Any], error: BaseException) -> None:
        """An error has broken a call off: what had finished goes with it. Before the first step there is nothing."""
        if finished.report is not None:
            self.interrupted = finished.part(self._tokenizer.decode_if_loaded)
            attach(error, self.interrupted, note_of(len(finished.results), finished.expected, self._at_hand))

    def _report(self, call: Call) -> RunReport | None:
        report = call.report()
        if report is not None:
            report.plan.add_labels(call.plan.prompts, self._tokenizer.decode_if_loaded)
        return report


class DoorGenerator(BatchGenerator):
    """Behind a trainer, a pipeline or ``accelerated``, where nobody holds it, and texts are made by whoever wants them.

    ``logprobs`` are of what tokens are drawn from, after processors. ``checks`` decide whether a call can be served.
    """

    _logprobs_of_scores = True
    _at_hand = False

    def __init__(
        self, model: nn.Module, tokenizer: Any, config: BatchConfig, checks: type[JobChecks] = JobChecks
    ) -> None:
        self._kind_of_checks = checks
        super().__init__(model, tokenizer, config)

    @property
    def checks(self) -> JobChecks:
        return self._checks

    def decoded(self, result: BatchResult) -> BatchResult:
        """With a text for each answer."""
        decode = self._tokenizer.decode_if_loaded
        return BatchResult(with_texts(result, decode), result.report, decode)

    def _generation(self, request: Request, call: Call, outputs: ExtraOutputs, decode: bool = True) -> Generation:
        return super()._generation(request, call, outputs, decode=False)
