"""The front door: checks what comes in, runs one call at a time, hands the results out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from .config import BatchConfig
from .engine.beams.outputs import beam_output, filling
from .engine.call import Call
from .engine.extra_outputs import ExtraOutputs
from .engine.job import Job, JobChecks
from .engine.kv_memory import KVMemory
from .engine.scoring.score_call import ScoreJob, ScoreOutputs
from .errors import GenerationInterrupted, GeneratorBusyError, OptionValueError, PromptError
from .inputs.adapters import AS_IT_IS, adapter_of_each
from .inputs.base_model import base_model
from .inputs.options import Options
from .inputs.padded_batch import PaddedBatch, take_padded
from .inputs.prompts import Prompt
from .inputs.seeds import Seeds
from .inputs.tokenizer import TokenizerLoader
from .model.architecture import inspect_model, look_again
from .model.choose_backend import check_backend
from .notices import Notices
from .patches.fusion import Fusion
from .planning.sharing import make_plan
from .planning.units import FinishReason, Request
from .results.generations import BatchResult, Generation
from .results.run_report import RunReport
from .results.scores import Score, ScoreResult
from .results.sharing_plan import SharingPlan
from .wording import a_kind

_STILL_RUNNING = "a call is running already, or a stream is still open: let it end (a stream also by its close())"


@dataclass
class _Turn:
    """Who has the generator."""

    call: Call | None = None


class BatchGenerator:
    """Generates for a whole list of prompts at once, with the transformers model that you already hold.

        gen = BatchGenerator(model, tokenizer)
        out = gen.generate(prompts, max_new_tokens=100)
        out[0].text

    What prompts have in common is found beforehand and computed once. ``config`` is a BatchConfig, or its fields are
    given as keyword arguments. The tokenizer is the one given, else the one saved beside the model; it is needed for
    prompts that are text, and for ``text`` in the results.

    ``last_report`` says how the last call went (a RunReport); None before it, and if it was refused before any work.
    ``interrupted`` has what had finished in it, if it was a ``generate`` that was interrupted (a BatchResult): it stays
    until a call begins, whereas a notebook knows the exception, with its ``result``, only until there is another.
    """

    checks = JobChecks  # what says of a call whether it can be served

    def __init__(
        self, model: nn.Module, tokenizer: Any = None, config: BatchConfig | None = None, **fields: Any
    ) -> None:
        self.config = BatchConfig.of(config, fields)
        self._notices = Notices()
        self._tokenizer = TokenizerLoader(tokenizer, base_model(model))
        self._checks = self.checks(model, self._tokenizer, self._notices)
        self.model = model
        self.architecture = inspect_model(model)
        check_backend(self.config, self.architecture.device, self._notices)
        self._home = KVMemory(model, self.architecture, self.config, self._notices)
        self._fusion = Fusion(model)
        self.last_report: RunReport | None = None
        self.interrupted: BatchResult | ScoreResult | None = None
        self._running: _Turn | None = None
        self._closed = False

    @property
    def tokenizer(self) -> Any:
        """The one that was given, else the one saved beside the model; None if there is none to be had."""
        return self._tokenizer.found()

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
        **generate_kwargs: Any,
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
        **generate_kwargs: Any,
    ) -> Any: ...
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
            ModelOutput are 0 in rows that had ended, and its ``past_key_values`` are None.
        adapter: of a model with PEFT adapters, the name of one, or None for the model without any; or a list, one for
            each prompt. Left out, the active adapters are used as they are.
        logprobs, prompt_logprobs: of a list of prompts, how many of the likeliest tokens are told at each place; see
            Generation.
        seed: of the sampling noise; by default one is drawn from torch's generator. Or a list with one for each prompt,
            whose samples then do not depend on where it stands in the list, nor on what else is in it.
        on_error: "raise", or "record" to run the good prompts and put the reason into ``error`` of the others.
        progress: whether to show a bar; by default for long lists, if transformers' bars are on.
        """
        done: dict[tuple[int, int], Generation] = {}
        sequences, report, turn = 0, None, None
        try:  # everything: an interrupt may come at any moment
            turn = _Turn()
            _check_progress(progress)
            with self._busy(turn) as call:
                padded = take_padded(prompts, generate_kwargs)
                given = prompts if padded is None else padded
                job = self._checks.job(self.architecture, given, generation_config, seed, on_error, generate_kwargs)
                sequences, self.interrupted = job.sequences, None
                call.begin(job, strict=on_error == "raise")
                try:
                    with call.progress(progress) as bar:
                        for request in call.run(bar.step):
                            generation = self._generation(request, call.extras, decode=padded is None)
                            done[request.index, request.sample] = generation
                            bar.finish(request)
                finally:
                    self.last_report = report = self._report(call)
            rows = done | {(failure.index, failure.sample): failure for failure in self._failures(job)}
            result = BatchResult([rows[key] for key in sorted(rows)], report, self._tokenizer.decode_if_loaded)
            return result if padded is None else _as_tensors(padded, result, job.options[0], call)
        except KeyboardInterrupt:
            self._end(turn)
        # Out here the interrupt is gone, and with it the frames that it came through: they hold the KV cache.
        call = turn = None
        self.interrupted = BatchResult([done[key] for key in sorted(done)], report, self._tokenizer.decode_if_loaded)
        raise GenerationInterrupted(self.interrupted, len(done), sequences)

    def stream(
        self,
        prompts: Any = None,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        seed: Seeds | None = None,
        on_error: str = "raise",
        progress: bool | None = None,
        **generate_kwargs: Any,
    ) -> Iterator[Generation]:
        """As ``generate``, but each result as soon as it is finished. Prompts and options are checked at once.

        Whether each prompt fits into the KV cache is known when the first result is asked for. An interrupt comes out
        as a plain KeyboardInterrupt: what had finished has been handed out already. A bar is shown with
        ``progress=True`` only.
        """
        turn = _Turn()
        try:
            with self._busy(turn):
                if take_padded(prompts, generate_kwargs) is not None:
                    raise ValueError("stream() takes a list of prompts; padded tensors go to generate()")
                job = self._checks.job(self.architecture, prompts, generation_config, seed, on_error, generate_kwargs)
        except KeyboardInterrupt:
            self._end(turn)
            raise
        return self._results(job, on_error == "raise", progress or False)

    def score(
        self,
        contexts: Any,
        continuations: Any = None,
        *,
        choices: Any = None,
        adapter: Any = AS_IT_IS,
        on_error: str = "raise",
        progress: bool | None = None,
    ) -> ScoreResult:
        """How likely continuations are: their tokens' log-probabilities, each given its context and those before it.

        contexts: as the prompts of ``generate``; or None to score whole texts, from their second token on (the first
            stands for nothing but itself, and is BOS where the tokenizer begins with one).
        continuations: one for each context, a string or token ids, or a list of several; or the texts.
        choices: instead of continuations, a list of those that all contexts have.
        adapter: as for ``generate``; a list has one for each context (or text).
        on_error, progress: as for ``generate``.

        What contexts have in common is computed once, and so is each context, however many continuations it has. The
        LM head runs where a continuation is looked up and nowhere else.

        A string after a string is encoded together with it, as one text, and is scored from the first token on that
        the context by itself does not begin with: a token that goes over the end of the context belongs to the
        continuation. After token ids and chats, continuations are encoded by themselves, without special tokens.
        """
        done: list[Score] = []
        total, report, turn = 0, None, None
        try:  # everything: an interrupt may come at any moment
            turn = _Turn()
            _check_progress(progress)
            with self._busy(turn) as call:
                inputs = self._checks.scores(self.architecture, contexts, continuations, choices, on_error, adapter)
                job = ScoreJob.of(inputs)
                total, self.interrupted = len(inputs.items), None
                extras = ScoreOutputs(job)
                with job.problems_named():
                    call.begin(job.job, on_error == "raise", extras)
                try:
                    with call.progress(progress) as bar:
                        for request in call.run(bar.step):
                            scores = list(extras.lookups.scores(request, self._tokenizer.decode))
                            done += scores
                            bar.finish(request, len(scores))
                finally:
                    self.last_report = report = self._report(call)
            return ScoreResult([*done, *job.failures()], report)
        except KeyboardInterrupt:
            self._end(turn)
        call = turn = job = extras = None  # out here, for the same reason as in `generate`
        self.interrupted = ScoreResult(done, report, complete=False)
        raise GenerationInterrupted(self.interrupted, len(done), total)

    def plan(self, prompts: Any, *, adapter: Any = AS_IT_IS) -> SharingPlan:
        """What sharing these prompts would save. Runs no model. ``adapter``: as in ``generate``."""
        self._refuse_if_closed()
        checked, problems = self._checks.prompts(prompts, self.architecture)
        if problems:
            raise PromptError(problems)
        adapters = adapter_of_each(self.model, adapter, len(checked)) or [None] * len(checked)
        prepared = [Prompt(prompt.ids, name) for prompt, name in zip(checked, adapters, strict=True) if prompt]
        plan = make_plan(prepared, self.config, 1)
        plan.add_labels(prepared, self._tokenizer.decode_if_loaded)
        return plan

    def close(self) -> None:
        """Give back what is kept between calls. The generator cannot be used afterwards; the model can."""
        if self._running is not None:
            raise GeneratorBusyError(f"{_STILL_RUNNING}, then close()")
        self._home.close()
        self._fusion.unmerge()
        self._closed = True

    def forget_prefixes(self) -> None:
        """Drop the prefixes kept from earlier calls, after a change that is not to be seen: a hook that steers, say."""
        if self._running is not None:
            raise GeneratorBusyError(f"{_STILL_RUNNING}, then forget_prefixes()")
        self._home.clear()

    def __enter__(self) -> BatchGenerator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except GeneratorBusyError:
            if kind is None:  # else an error is on its way that says more
                raise

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.architecture.layers} layers on {self.architecture.device}"
        return f"BatchGenerator({self.architecture.name}, {state})"

    # -- checks ------------------------------------------------------------------------------------------------

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise GeneratorBusyError("this BatchGenerator is closed: make a new one for the model")

    @contextmanager
    def _busy(self, turn: _Turn) -> Iterator[Call]:
        self._refuse_if_closed()
        if self._running is not None:
            raise GeneratorBusyError(f"{_STILL_RUNNING}. One call at a time")
        try:
            # A plain flag: between acquiring a lock and noting that one has it, an interrupt could leave it locked.
            # Neither an interrupt nor another thread comes between the test above and this.
            self._running = turn
            self.last_report = None
            self.architecture = self._home.architecture = look_again(self.architecture, self.model)
            turn.call = Call(self.model, self.architecture, self.config, self._home, self._notices, self._fusion)
            with turn.call:
                yield turn.call
        finally:
            self._end(turn)

    def _end(self, turn: _Turn | None) -> None:
        """After a call; and once more after an interrupt, which may have come in the way of the first time."""
        if turn is None or self._running is not turn:
            return
        try:
            if turn.call is not None:
                turn.call.make_sure()
        finally:
            self._running = None

    # -- results -----------------------------------------------------------------------------------------------

    def _results(self, job: Job, strict: bool, progress: bool) -> Iterator[Generation]:
        turn = _Turn()
        try:
            with self._busy(turn) as call:
                self.interrupted = None
                call.begin(job, strict)
                yield from self._failures(job)
                try:
                    with call.progress(progress) as bar:
                        for request in call.run(bar.step):
                            bar.finish(request)
                            generation = self._generation(request, call.extras)
                            call.timekeeper.switch("outside")
                            yield generation
                            call.timekeeper.switch("results")
                finally:
                    self.last_report = self._report(call)
            return
        except KeyboardInterrupt as interrupt:
            self._end(turn)
            kept = interrupt.with_traceback(None)
        call = turn = None  # out here, for the same reason as in `generate`
        raise kept

    def _generation(self, request: Request, extras: ExtraOutputs, decode: bool = True) -> Generation:
        assert request.finish_reason is not None
        return Generation(
            index=request.index,
            sample=request.sample,
            text=self._tokenizer.decode(request.generated) if decode else None,
            token_ids=request.generated,
            prompt_token_ids=request.prompt_ids.tolist(),
            finish_reason=request.finish_reason.value,
            logprobs=extras.logprobs(request),
            prompt_logprobs=extras.prompt_logprobs(request),
            score=request.score,
        )

    def _report(self, call: Call) -> RunReport | None:
        report = call.report()
        if report is not None:
            report.plan.add_labels(call.prompts, self._tokenizer.decode_if_loaded)
        return report

    def _failures(self, job: Job) -> Iterator[Generation]:
        for index, why in sorted(job.problems.items()):
            for sample in range(job.options[index].num_return_sequences):
                yield Generation(index, sample, None, [], [], FinishReason.ERROR.value, error=why)


def _as_tensors(
    padded: PaddedBatch, result: BatchResult, options: Options, call: Call
) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateBeamDecoderOnlyOutput:
    sequences = padded.continued(result.token_ids, filling(options))
    if not options.config.return_dict_in_generate:
        return sequences
    longest, tensors = sequences.shape[1] - padded.width, call.extras.tensors
    if options.num_beams > 1:
        return beam_output(sequences, longest, call.answers, options, tensors)
    beside = {} if tensors is None else tensors.outputs(longest, sequences.device)
    return GenerateDecoderOnlyOutput(sequences=sequences, **beside)


def _check_progress(progress: Any) -> None:
    if progress is not None and not isinstance(progress, bool):
        why = f"must be True, False, or None for long lists only, not {a_kind(progress)}"
        raise OptionValueError("progress", why)
