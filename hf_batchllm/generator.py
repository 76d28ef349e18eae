"""The front door: what a user calls, and what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torch import nn
from transformers import GenerationConfig

from .config import BatchConfig
from .engine.checks import JobChecks
from .engine.unfinished import with_texts
from .inputs.adapters import AS_IT_IS
from .inputs.config_fields import ConfigFields, shows_config_fields
from .inputs.named_options import LEFT_OUT, GenerateOptions, shows_options
from .inputs.seeds import Seeds
from .inputs.short_tracebacks import with_short_tracebacks
from .installed_versions import warn_of_versions
from .parallel.together import TogetherCalls
from .patches.first_calls import call_functions_once
from .results.generations import BatchResult, Generation
from .results.missing_names import OF_A_GENERATOR, no_such
from .results.scores import ScoreResult
from .results.sharing_plan import SharingPlan


class BatchGenerator(TogetherCalls):
    """Generates for a whole list of prompts at once, with the transformers model that you already hold.

        gen = BatchGenerator(model, tokenizer)
        out = gen.generate(prompts, max_new_tokens=100)
        out[0].text

    Prefixes that prompts share are found beforehand and computed once. ``config`` is a BatchConfig; its fields may be
    given as keyword arguments instead. The tokenizer is the one given, else the one saved beside the model. Prompts
    that are text need it, and so does ``text`` in the results.

    ``last_report``: how the last call went (a RunReport); None before it, and if the call was refused before any work.
    ``interrupted``: the finished results of the last call, if an interrupt or an error broke it off (a BatchResult, or
    a ScoreResult). It stays until the next call has read its prompts. An error has them in ``error.result``, too.
    """

    @shows_config_fields
    @with_short_tracebacks
    def __init__(
        self, model: nn.Module, tokenizer: Any = None, config: BatchConfig | None = None, **fields: Unpack[ConfigFields]
    ) -> None:
        self._config = BatchConfig.of(config, dict(fields))
        warn_of_versions()
        call_functions_once()
        super().__init__(model, tokenizer, self._config)

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
        logprobs, prompt_logprobs: for a list of prompts, how many of the most likely tokens to give at each position;
            see Generation.
        seed: of the sampling noise; by default one is drawn from torch's generator. Or a list, one for each prompt: the
            samples of a prompt then depend neither on its place in the list nor on the other prompts.
        on_error: "raise", or "record" to run the good prompts and put the reason into ``error`` of the others.
        progress: whether to show a bar; by default for long lists, if transformers' bars are on.
        """
        return self._generate(prompts, generation_config, seed, on_error, progress, generate_kwargs)

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
        """Like ``generate``, but gives each result once it is finished. Prompts and options are checked at once.

        A prompt that does not fit into the KV cache is found when the first result is asked for. A bar is shown with
        ``progress=True`` only. A stream keeps nothing in ``interrupted``, as each result was handed out: put them into
        a list as they come. An interrupt raises a plain KeyboardInterrupt.
        """
        return self._stream(prompts, generation_config, seed, on_error, progress or False, dict(generate_kwargs))

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
        given = contexts, continuations, choices, on_error, adapter, chat_options
        return self._score(given, on_error == "raise", progress)

    @with_short_tracebacks
    def plan(self, prompts: Any, *, adapter: Any = AS_IT_IS, **prompt_options: Any) -> SharingPlan:
        """What these prompts share, and what that would save. Runs no model.

        ``adapter``, and options of prompts such as ``tools`` and ``max_prompt_tokens``: as for ``generate``.
        """
        return self._plan(prompts, adapter, prompt_options)

    def __reduce_ex__(self, protocol: Any) -> Any:  # copy.copy, copy.deepcopy, pickle
        raise TypeError(
            "a BatchGenerator holds the memory of its calls, so it cannot be copied or pickled: "
            "make one of the copied model, with BatchGenerator(model)"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.architecture.layers} layers on {self.architecture.device}"
        return f"BatchGenerator({self.architecture.name}, {state})"


class DoorGenerator(BatchGenerator):
    """Behind a trainer, a pipeline or ``accelerated``, where nobody holds it, and texts are made by whoever wants them.

    ``logprobs`` are of what tokens are drawn from, after processors. ``checks`` decide whether a call can be served.
    """

    _logprobs_of_scores = True
    _at_hand = False
    _decodes = False

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
