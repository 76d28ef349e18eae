"""The keyword arguments of ``generate``, by name and type: for editors, type checkers, notebooks and ``help``.

``option_table`` says what becomes of each. Nothing here changes a call: an option that is left out is not passed on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


class LeftOut:
    """The default of an argument for which None has a meaning of its own."""

    def __repr__(self) -> str:
        return "<left out>"

    def __reduce__(self) -> str:
        return "LEFT_OUT"  # there is one, in another process too


LEFT_OUT: Any = LeftOut()


class MostTyped(TypedDict, total=False):
    """The options that a signature shows."""

    max_new_tokens: int | None
    do_sample: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    num_return_sequences: int | None
    stop_strings: str | Sequence[str] | None
    num_beams: int | None
    repetition_penalty: float | None
    eos_token_id: int | Sequence[int] | torch.Tensor | None


class GenerateOptions(MostTyped, total=False):
    """Every option that ``generate`` takes, beside the arguments that its signature names."""

    # Names of other libraries for some of these.
    max_tokens: int | None
    max_completion_tokens: int | None
    min_tokens: int | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    top_logprobs: int | None
    # What comes back, and with which adapter.
    adapter: str | Sequence[str | None] | None
    logprobs: int | bool | None
    prompt_logprobs: int | bool | None
    return_dict_in_generate: bool | None
    output_scores: bool | None
    output_logits: bool | None
    streamer: Any
    inputs: torch.Tensor | None
    tokenizer: Any
    # How prompts become tokens: one for all prompts, or a list with one for each.
    chat_template_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    tools: Sequence[Any] | None
    continue_final_message: bool | Sequence[bool | None] | None
    max_prompt_tokens: int | Sequence[int | None] | None
    truncation_side: str | Sequence[str | None] | None
    # The form of answers: one for all prompts, or a list with one for each.
    schema: Mapping[str, Any] | str | bool | type | Sequence[Any] | None
    regex: str | Sequence[str | None] | None
    grammar: str | Sequence[str | None] | None
    choice: Sequence[str] | Sequence[Sequence[str] | None] | None
    # Lengths and ends.
    max_length: int | None
    min_new_tokens: int | None
    min_length: int | None
    stopping_criteria: Any
    max_time: float | None
    pad_token_id: int | None
    bos_token_id: int | None
    decoder_start_token_id: int | Sequence[int] | None
    # Choice.
    min_p: float | None
    top_h: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    length_penalty: float | None
    early_stopping: bool | str | None
    # What changes the scores.
    encoder_repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Any] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | Sequence[int] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    remove_invalid_values: bool | None
    renormalize_logits: bool | None
    watermarking_config: Any
    guidance_scale: float | None
    negative_prompt_ids: torch.Tensor | None
    negative_prompt_attention_mask: torch.Tensor | None
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], Sequence[int]] | None
    logits_processor: Any
    # Without effect on results.
    low_memory: bool | None
    assistant_model: Any
    assistant_tokenizer: Any
    assistant_early_exit: int | None
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
    use_mtp: bool | None
    speculation_type: str | None
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: str | None
    assistant_confidence_threshold: float | None
    assistant_lookbehind: int | None
    target_lookbehind: int | None
    use_cache: bool | None
    cache_implementation: str | None
    cache_config: Any
    max_cache_len: int | None
    prefill_chunk_size: int | None
    compile_config: Any
    disable_compile: bool | None
    continuous_batching_config: Any
    transformers_version: str | None


_ADDED = ("adapter", "logprobs")  # are typed as often


def shows_options(function: Function) -> Function:
    """Names the options that people type most in the signature that notebooks and ``help`` show, before ``**rest``."""
    written = inspect.signature(function)
    given = list(written.parameters.values())
    places = [at for at, each in enumerate(given) if each.kind is inspect.Parameter.KEYWORD_ONLY]
    first = places[0] if places else len(given) - 1
    types = {**MostTyped.__annotations__, **{name: GenerateOptions.__annotations__[name] for name in _ADDED}}
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=LEFT_OUT, annotation=_plain(of))
        for name, of in types.items()
        if name not in written.parameters
    ]
    function.__signature__ = written.replace(parameters=[*given[:first], *named, *given[first:]])  # type: ignore[attr-defined]
    return function


def _plain(annotation: Any) -> Any:
    """The annotation as it is written above."""
    return getattr(annotation, "__forward_arg__", annotation)
