"""What becomes of every option of ``model.generate``: the one list that checks, documentation and tests come from.

``docs/generate.md`` is made of it: ``python -m hf_batchllm.inputs.option_docs > docs/generate.md``.
"""

from __future__ import annotations

from typing import Any

from .option_row import Fate, OptionKind, OptionRow, Subject, Takes, Where, With


def _honoured(name: str, where: Where | None, doc: str = "", **more: Any) -> OptionRow:
    return OptionRow(name, Fate.HONOURED, doc, where, **more)


def _argument(name: str, where: Where | None, doc: str, **more: Any) -> OptionRow:
    return OptionRow(name, Fate.HONOURED, doc, where, OptionKind.ARGUMENT, **more)


def _ours(name: str, where: Where | None, doc: str, **more: Any) -> OptionRow:
    return OptionRow(name, Fate.HONOURED, doc, where, OptionKind.OURS, **more)


def _idle(name: str, doc: str, **more: Any) -> OptionRow:
    return OptionRow(name, Fate.NO_EFFECT, doc, **more)


def _refused(name: str, doc: str, **more: Any) -> OptionRow:
    return OptionRow(name, Fate.REFUSED, doc, **more)


def _of(subject: Subject, *rows: OptionRow) -> dict[str, OptionRow]:
    return {row.name: OptionRow(**{**vars(row), "subject": subject}) for row in rows}


_TENSORS = {"kind": OptionKind.ARGUMENT, "goes_with": With.TENSORS}
_OWN_GENERATE = "leave it out, or call the model's own `generate`"
_MOVED = f"which transformers has moved to a repository of its own, run by `custom_generate`: {_OWN_GENERATE}"
_FACTORY = "`factory(index, prompt_token_ids)`, called once for each sequence"
_BATCH_RESULT = "goes with tensors (`input_ids=`): a list of prompts gives a BatchResult"
_WITH_LOGPROBS = "goes with tensors (`input_ids=`): with a list of prompts pass `logprobs=k`"
_NO_LOGPROBS = (
    "goes with a list of prompts: with tensors pass `return_dict_in_generate=True` and `output_scores=True` or "
    "`output_logits=True`"
)

TABLE: dict[str, OptionRow] = {
    **_of(
        Subject.PROMPTS,
        _ours(
            "prompts",
            None,
            "The first argument: strings, lists of token ids, 1-D tensors and chats, mixed as you like, or a single "
            "one. A BatchResult comes back. (A 2-D tensor in its place is taken for `input_ids`.)",
        ),
        _honoured(
            "input_ids",
            None,
            "Rows padded on either side. What `generate` gives back for tensors comes back, padded as it pads.",
            **_TENSORS,
        ),
        _honoured("inputs", None, "The same as `input_ids`.", **_TENSORS),
        _honoured(
            "attention_mask",
            None,
            "Says what is padding; without it, the mask is the one that `generate` would infer. Each row is computed "
            "as if it stood alone.",
            **_TENSORS,
        ),
        _refused(
            "token_type_ids",
            "is not supported. All zeros, which some tokenizers add, are accepted beside tensors if the model has no "
            "token types. Otherwise leave it out",
            kind=OptionKind.ARGUMENT,
        ),
        _argument(
            "generation_config",
            None,
            "One for all prompts; or, with a list of prompts, a list with one for each. Keyword arguments win over "
            "it, and it wins over `model.generation_config`.",
        ),
        _ours(
            "adapter",
            None,
            "Of a model with PEFT adapters: the name of one, or `None` for the model without any; or a list, one for "
            "each prompt. Left out, the adapters that are active are used as they are. The model's own state is not "
            "touched, and prompts share what they begin with only where they have the same adapter.",
        ),
        _argument("tokenizer", None, "For `stop_strings`, where it is not to be the one that the BatchGenerator has."),
        _refused(
            "inputs_embeds",
            "is not supported: prompts are text or token ids. For what exists as embeddings alone call the model's own "
            "`generate`",
            kind=OptionKind.ARGUMENT,
        ),
        _refused(
            "position_ids",
            "is not supported: positions follow from the prompt and its padding. Leave it out",
            kind=OptionKind.ARGUMENT,
        ),
        _refused(
            "past_key_values",
            "is not supported: pass whole prompts, and what they share is computed once (also from call to call, with "
            "BatchConfig.keep_prefixes)",
            kind=OptionKind.ARGUMENT,
        ),
        _idle("bos_token_id", "It only begins an empty input, and every prompt here has tokens.", takes=Takes.TOKEN),
        _idle("decoder_start_token_id", "It is for encoder-decoder models."),
    ),
    **_of(
        Subject.ENDS,
        _honoured("max_new_tokens", Where.DEVICE, takes=Takes.WHOLE),
        _honoured(
            "max_length",
            Where.DEVICE,
            "In a list it counts each prompt's own length; with tensors the padded width, as in `generate`.",
            takes=Takes.WHOLE,
        ),
        _honoured("min_new_tokens", Where.DEVICE, takes=Takes.WHOLE),
        _honoured("min_length", Where.DEVICE, "It counts as `max_length` does.", takes=Takes.WHOLE),
        _honoured(
            "eos_token_id",
            Where.DEVICE,
            "One or several; `eos_token_id=None` in the call means none, whatever the checkpoint says. The EOS that "
            "ended a sequence is its last token.",
            takes=Takes.TOKENS,
        ),
        _honoured(
            "stop_strings",
            Where.LATE,
            "A string or a list of them. It needs a tokenizer: the BatchGenerator's, or `tokenizer=`.",
        ),
        _argument(
            "stopping_criteria",
            Where.LATE,
            "A list (`StoppingCriteriaList`) for all prompts, or, for criteria that remember what they saw, a "
            f"callable that makes one: {_FACTORY}. A criterion sees one sequence: in a list without padding, of a "
            "tensor its row as it was passed. Those of a list take the place of the options' own of the same kind, as "
            "in `generate`; those of a factory come on top.",
        ),
        _honoured(
            "max_time",
            Where.LATE,
            "Seconds, for the call as a whole. What has finished by then is whole, the rest is cut where it is, with "
            '`finish_reason` "time", and may have no new token at all.',
            takes=Takes.NUMBER,
        ),
    ),
    **_of(
        Subject.CHOICE,
        _honoured(
            "do_sample",
            Where.DEVICE,
            "Tokens come from the distribution that `generate` draws from, with other noise: it depends on the seed, "
            "the prompt's index, the sample's index and the position alone.",
            takes=Takes.FLAG,
        ),
        _ours(
            "seed",
            Where.DEVICE,
            "Of the noise. By default it is drawn from torch's generator, so that `set_seed` makes a call repeat; it "
            "stands in the report.",
        ),
        _honoured(
            "num_return_sequences",
            Where.DEVICE,
            "For prompt `i`, `n` rows one after the other: `i*n`, `i*n + 1`, ... (`.index`, `.sample`).",
            takes=Takes.WHOLE,
        ),
        _honoured("temperature", Where.DEVICE, takes=Takes.NUMBER, sampling=True, nothing=1.0),
        _honoured(
            "top_k",
            Where.DEVICE,
            "50 unless you or the checkpoint say otherwise, as in `generate`; 0 for none.",
            takes=Takes.NUMBER,
            sampling=True,
            nothing=50,
        ),
        _honoured("top_p", Where.DEVICE, takes=Takes.NUMBER, sampling=True, nothing=1.0),
        _honoured("min_p", Where.DEVICE, takes=Takes.NUMBER, sampling=True),
        _honoured("top_h", Where.STEP, takes=Takes.NUMBER, sampling=True),
        _honoured("typical_p", Where.STEP, takes=Takes.NUMBER, sampling=True, nothing=1.0),
        _honoured("epsilon_cutoff", Where.STEP, takes=Takes.NUMBER, sampling=True, nothing=0.0),
        _honoured("eta_cutoff", Where.STEP, takes=Takes.NUMBER, sampling=True, nothing=0.0),
    ),
    **_of(
        Subject.BEAMS,
        _honoured(
            "num_beams",
            Where.STEP,
            "More than 1 for a beam search. `num_return_sequences`, up to as many, says how many answers there are, "
            "the best first; their `score` is the `sequences_scores` of `generate`. Processors and criteria of your "
            "own see all beams of a prompt at once, as in `generate`; a factory makes them for a prompt. Prompts of a "
            "call may have different widths, but not 1 beside others. `logprobs`, `prompt_logprobs`, `streamer` and "
            "`negative_prompt_ids` do not go with it.",
            takes=Takes.WHOLE,
            nothing=1,
        ),
        _honoured("length_penalty", Where.STEP, "Without beams it has no effect.", takes=Takes.NUMBER, nothing=1.0),
        _honoured(
            "early_stopping",
            Where.STEP,
            'True, False or "never", as in `generate`. Without beams it has no effect.',
        ),
    ),
    **_of(
        Subject.SCORES,
        _honoured(
            "repetition_penalty",
            Where.DEVICE,
            "Of the prompt's and the new tokens, never of padding.",
            takes=Takes.NUMBER,
        ),
        _honoured(
            "encoder_repetition_penalty",
            Where.STEP,
            "The prompt stands for the encoder's input, as in `generate`.",
            takes=Takes.NUMBER,
        ),
        _honoured("no_repeat_ngram_size", Where.STEP, takes=Takes.WHOLE),
        _honoured(
            "encoder_no_repeat_ngram_size",
            Where.STEP,
            "The prompt stands for the encoder's input, as in `generate`.",
            takes=Takes.WHOLE,
        ),
        _honoured("bad_words_ids", Where.STEP),
        _honoured("suppress_tokens", Where.STEP, takes=Takes.IDS),
        _honoured("begin_suppress_tokens", Where.STEP, takes=Takes.IDS),
        _honoured("sequence_bias", Where.STEP),
        _honoured(
            "forced_bos_token_id", Where.STEP, "After a prompt of one token, as in `generate`.", takes=Takes.TOKEN
        ),
        _honoured("forced_eos_token_id", Where.STEP, "As the last token that the length allows.", takes=Takes.TOKENS),
        _honoured("exponential_decay_length_penalty", Where.STEP),
        _honoured("remove_invalid_values", Where.STEP, takes=Takes.FLAG),
        _honoured("renormalize_logits", Where.STEP, takes=Takes.FLAG),
        _honoured("watermarking_config", Where.STEP),
        _honoured(
            "guidance_scale",
            Where.STEP,
            "Each sequence runs a second time at each step, without its prompt or with the negative one.",
            takes=Takes.NUMBER,
        ),
        _argument("negative_prompt_ids", Where.STEP, "For `guidance_scale`: a 2-D tensor, a row for each prompt."),
        _argument("negative_prompt_attention_mask", Where.STEP, "Says what of `negative_prompt_ids` is padding."),
        _argument(
            "prefix_allowed_tokens_fn",
            Where.STEP,
            "Its `batch_id` is the row in the results, `i*n + j`; its `input_ids` are one sequence, without padding.",
        ),
        _argument(
            "logits_processor",
            Where.STEP,
            "A list (`LogitsProcessorList`) for all prompts, or, for processors that remember what they saw, a "
            f"callable that makes one: {_FACTORY}. A processor sees a sequence's own prompt and new tokens, without "
            "padding.",
        ),
    ),
    **_of(
        Subject.RESULTS,
        _honoured(
            "pad_token_id",
            None,
            "It fills up the rows of a tensor; by default the first EOS. Where rows of a tensor may end at different "
            "lengths there must be one. What a list gives is not padded.",
            takes=Takes.TOKEN,
        ),
        _honoured(
            "return_dict_in_generate",
            None,
            "A ModelOutput instead of a tensor, without `past_key_values`.",
            goes_with=With.TENSORS,
            instead=_BATCH_RESULT,
            takes=Takes.FLAG,
        ),
        _honoured(
            "output_scores",
            Where.STEP,
            "With `return_dict_in_generate=True`, as in `generate`; without it nothing would come back.",
            goes_with=With.TENSORS,
            instead=_WITH_LOGPROBS,
            takes=Takes.FLAG,
        ),
        _honoured(
            "output_logits",
            Where.STEP,
            "With `return_dict_in_generate=True`, as in `generate`; without it nothing would come back.",
            goes_with=With.TENSORS,
            instead=_WITH_LOGPROBS,
            takes=Takes.FLAG,
        ),
        _ours(
            "logprobs",
            Where.STEP,
            "`k`: for each new token its log-probability and those of the `k` likeliest. 0 for the token's own alone.",
            goes_with=With.LISTS,
            instead=_NO_LOGPROBS,
        ),
        _ours(
            "prompt_logprobs",
            Where.STEP,
            "`k`: the same for the tokens of the prompt.",
            goes_with=With.LISTS,
            instead=_NO_LOGPROBS,
        ),
        _refused(
            "output_attentions",
            "is not supported: attention is not computed as a matrix here. Run the model over what comes back, "
            "model(ids, output_attentions=True)",
        ),
        _refused(
            "output_hidden_states",
            "is not supported. Run the model over what comes back, model(ids, output_hidden_states=True)",
        ),
        _argument(
            "streamer",
            Where.LATE,
            "With one prompt and one sequence, as in `generate`. For many prompts `stream()` hands out each result "
            "when it is finished.",
        ),
        _ours("on_error", None, '"record" runs the good prompts and puts the reason into `error` of the others.'),
        _ours("progress", None, "A bar: True, False, or None for long lists only."),
    ),
    **_of(
        Subject.MODES,
        _refused("num_beam_groups", f"is not supported: group beam search, {_MOVED}", nothing=1),
        _refused("diversity_penalty", f"is not supported: group beam search, {_MOVED}", nothing=0),
        _refused("constraints", f"is not supported: constrained beam search, {_MOVED}"),
        _refused("force_words_ids", f"is not supported: constrained beam search, {_MOVED}"),
        _refused("penalty_alpha", f"is not supported: contrastive search, {_MOVED}", nothing=0),
        _refused("dola_layers", f"is not supported: DoLa, {_MOVED}"),
        _idle("low_memory", "It was for contrastive search."),
        _refused(
            "token_healing",
            "is not supported: heal the prompts first, and pass what model.heal_tokens(input_ids, tokenizer) gives",
        ),
        _refused(
            "custom_generate",
            "is not supported: it would run instead of what this library does. Leave it out, or call the model's own "
            "`generate`",
            kind=OptionKind.ARGUMENT,
        ),
        _refused(
            "trust_remote_code",
            "has no meaning here: no code is loaded. Leave it out",
            kind=OptionKind.ARGUMENT,
        ),
        _refused(
            "synced_gpus",
            "is not supported: it keeps the processes of a sharded model (FSDP, DeepSpeed ZeRO-3) in step, and the "
            "model must be whole, on a single device. Gather the weights first, or call the model's own `generate`",
            kind=OptionKind.ARGUMENT,
        ),
    ),
    **_of(
        Subject.SPECULATION,
        _idle("assistant_model", "", kind=OptionKind.ARGUMENT),
        _idle("assistant_tokenizer", "", kind=OptionKind.ARGUMENT),
        _idle("assistant_early_exit", ""),
        _idle("prompt_lookup_num_tokens", ""),
        _idle("max_matching_ngram_size", ""),
        _idle("use_mtp", ""),
        _idle("speculation_type", ""),
        _idle("num_assistant_tokens", ""),
        _idle("num_assistant_tokens_schedule", ""),
        _idle("assistant_confidence_threshold", ""),
        _idle("assistant_lookbehind", ""),
        _idle("target_lookbehind", ""),
        _refused(
            "assistant_ensemble_weight",
            "is not supported: it lets the assistant's opinion count, which changes the results. Leave it out",
        ),
        _refused(
            "is_assistant",
            "is not supported: it ends a sequence where the model is in doubt, which is for the assistant that "
            "`generate` runs itself. Leave it out",
        ),
    ),
    **_of(
        Subject.RUNNING,
        _idle("use_cache", "There is always a KV cache; results do not depend on it."),
        _idle("cache_implementation", "The KV cache is in pages, with the model's dtype: see BatchConfig.kv_memory."),
        _idle("cache_config", ""),
        _idle("max_cache_len", ""),
        _idle("prefill_chunk_size", "See BatchConfig.max_batch_tokens."),
        _idle("compile_config", "See BatchConfig.fuse and BatchConfig.cuda_graphs."),
        _idle("disable_compile", ""),
        _idle("continuous_batching_config", "It is for `generate_batch`."),
        _idle("transformers_version", "A note in a checkpoint."),
    ),
}


def names(fate: Fate | None = None, kind: OptionKind | None = None, subject: Subject | None = None) -> frozenset[str]:
    """Of those options for which all of it is true."""
    return frozenset(
        row.name
        for row in TABLE.values()
        if (fate is None or row.fate is fate)
        and (kind is None or row.kind is kind)
        and (subject is None or row.subject is subject)
    )
