"""The table of all options of ``model.generate``: checks, documentation and tests are made from it.

``docs/generate.md`` is made of it: ``python -m hf_batchllm.inputs.option_docs > docs/generate.md``.
"""

from __future__ import annotations

from .grammar_options import ROWS as GRAMMAR_ROWS
from .option_row import Fate, OptionKind, OptionRow, PromptForm, Subject, Takes, Where
from .option_row import added as _added
from .option_row import argument as _argument
from .option_row import chapter as _chapter
from .option_row import honoured as _honoured
from .option_row import no_effect as _no_effect
from .option_row import refused as _refused
from .prompt_options import ROWS

_TENSORS_ONLY = {"kind": OptionKind.ARGUMENT, "goes_with": PromptForm.TENSORS}
_OWN_GENERATE = "leave it out, or call the model's own `generate`"
_MOVED = f"which transformers has moved to a repository of its own, run by `custom_generate`: {_OWN_GENERATE}"
_FACTORY = "`factory(index, prompt_token_ids)`, called once for each sequence"
_BATCH_RESULT = "goes with tensors (`input_ids=`): a list of prompts gives a BatchResult"
_TENSORS_OF_STEPS = (
    "With `return_dict_in_generate=True`, as in `generate`; without that nothing comes back. In the steps after a "
    "row's end they are 0, where `generate` has what the model makes of padding."
)
_WITH_LOGPROBS = "goes with tensors (`input_ids=`): with a list of prompts pass `logprobs=k`"
_NO_LOGPROBS = (
    "goes with a list of prompts: with tensors pass `return_dict_in_generate=True` and `output_scores=True` or "
    "`output_logits=True`"
)

TABLE: dict[str, OptionRow] = {
    **_chapter(
        Subject.PROMPTS,
        _added(
            "prompts",
            None,
            "The first argument: a list of strings, lists of token ids, 1-D tensors, chats and what a processor makes "
            "of a prompt with images, mixed as you like; or a single prompt. A BatchResult comes back. (A 2-D tensor "
            "in its place is taken for `input_ids`.)",
        ),
        _honoured(
            "input_ids",
            None,
            "Rows padded on either side. A tensor or a ModelOutput comes back, padded as by `generate`. Pixels that a "
            "processor makes go beside it: `generate(**inputs)` (docs/images.md).",
            **_TENSORS_ONLY,
        ),
        _honoured("inputs", None, "The same as `input_ids`.", **_TENSORS_ONLY),
        _honoured(
            "attention_mask",
            None,
            "Marks the padding; without it, the mask is the one that `generate` would infer. Each row is computed as "
            "if it stood alone.",
            **_TENSORS_ONLY,
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
        _added(
            "adapter",
            None,
            "Of a model with PEFT adapters: the name of one, or `None` for the model without any; or a list, one for "
            "each prompt. If it is left out, the active adapters are used as they are. The model's own state is not "
            "touched. Prompts share a prefix only where they have the same adapter.",
        ),
        _argument("tokenizer", None, "For `stop_strings`, instead of the BatchGenerator's tokenizer."),
        _refused(
            "inputs_embeds",
            "is not supported: prompts are text or token ids. For prompts that exist as embeddings alone call the "
            "model's own `generate`",
            kind=OptionKind.ARGUMENT,
        ),
        _refused(
            "position_ids",
            "is not supported: positions follow from the prompt and its padding. Leave it out",
            kind=OptionKind.ARGUMENT,
        ),
        _refused(
            "past_key_values",
            "is not supported: pass whole prompts, with their images, and their shared prefixes are computed once "
            "(from call to call, too, with BatchConfig.keep_prefixes)",
            kind=OptionKind.ARGUMENT,
        ),
        _no_effect(
            "bos_token_id", "It only begins an empty input, and every prompt here has tokens.", takes=Takes.TOKEN
        ),
        _no_effect("decoder_start_token_id", "It is for encoder-decoder models."),
    ),
    **_chapter(Subject.CHATS, *ROWS),
    **_chapter(
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
        _added(
            "stop_token_ids",
            Where.DEVICE,
            "A list of tokens that end a sequence besides the EOS tokens, as if they stood in `eos_token_id`, too.",
            takes=Takes.IDS,
        ),
        _added("ignore_eos", Where.DEVICE, "True is another name for `eos_token_id=None`.", takes=Takes.FLAG),
        _honoured(
            "stop_strings",
            Where.LATE,
            "A string or a list of them. It needs a tokenizer: the BatchGenerator's, or `tokenizer=`.",
        ),
        _argument(
            "stopping_criteria",
            Where.LATE,
            "A list (`StoppingCriteriaList`) for all prompts, or, for criteria that keep state, a callable that makes "
            f"one: {_FACTORY}. A criterion sees one sequence: without padding where prompts came as a list, its row as "
            "it was passed where they came as a tensor. A criterion in a list replaces the options' own of the same "
            "kind, as in `generate`; criteria of a factory are added.",
        ),
        _honoured(
            "max_time",
            Where.LATE,
            "Seconds, for the whole call. Sequences that have finished by then are whole. The others are cut short, "
            'with `finish_reason` "time"; they may have no new token at all.',
            takes=Takes.NUMBER,
        ),
    ),
    **_chapter(
        Subject.CHOICE,
        _honoured(
            "do_sample",
            Where.DEVICE,
            "Tokens come from the distribution that `generate` draws from, with other noise: it depends on the seed, "
            "the prompt's index, the sample's index and the position alone.",
            takes=Takes.FLAG,
        ),
        _added(
            "seed",
            Where.DEVICE,
            "The seed of the noise: one for all prompts, or a list with one for each. By default it is drawn from "
            "torch's generator, so that a call repeats after `set_seed`; the report names it.",
        ),
        _honoured(
            "num_return_sequences",
            Where.DEVICE,
            "Prompt `i` has `n` rows, one after the other: `i*n`, `i*n + 1`, ... (`.index`, `.sample`).",
            takes=Takes.WHOLE,
        ),
        _honoured("temperature", Where.DEVICE, takes=Takes.NUMBER, sampling_only=True, neutral=1.0),
        _honoured(
            "top_k",
            Where.DEVICE,
            "50 unless you or the checkpoint say otherwise, as in `generate`; 0 for none.",
            takes=Takes.NUMBER,
            sampling_only=True,
            neutral=50,
        ),
        _honoured("top_p", Where.DEVICE, takes=Takes.NUMBER, sampling_only=True, neutral=1.0),
        _honoured("min_p", Where.DEVICE, takes=Takes.NUMBER, sampling_only=True, neutral=0.0),
        _honoured("top_h", Where.STEP, takes=Takes.NUMBER, sampling_only=True),
        _honoured("typical_p", Where.STEP, takes=Takes.NUMBER, sampling_only=True, neutral=1.0),
        _honoured("epsilon_cutoff", Where.STEP, takes=Takes.NUMBER, sampling_only=True, neutral=0.0),
        _honoured("eta_cutoff", Where.STEP, takes=Takes.NUMBER, sampling_only=True, neutral=0.0),
    ),
    **_chapter(
        Subject.BEAMS,
        _honoured(
            "num_beams",
            Where.STEP,
            "More than 1 for a beam search. `num_return_sequences`, at most as many, is the number of answers, the "
            "best first; their `score` is the `sequences_scores` of `generate`. Your own processors and criteria see "
            "all beams of a prompt at once, as in `generate`; a factory is called once for each prompt. Prompts of a "
            "call may have different numbers of beams, but not 1 and more than 1. `logprobs`, `prompt_logprobs`, "
            "`streamer` and `negative_prompt_ids` do not go with it.",
            takes=Takes.WHOLE,
            neutral=1,
        ),
        _honoured("length_penalty", Where.STEP, "Without beams it has no effect.", takes=Takes.NUMBER, neutral=1.0),
        _honoured(
            "early_stopping",
            Where.STEP,
            'True, False or "never", as in `generate`. Without beams it has no effect.',
        ),
    ),
    **_chapter(Subject.GRAMMARS, *GRAMMAR_ROWS),
    **_chapter(
        Subject.SCORES,
        _honoured(
            "repetition_penalty",
            Where.DEVICE,
            "Counts the prompt's and the new tokens, never padding.",
            takes=Takes.NUMBER,
        ),
        _honoured(
            "encoder_repetition_penalty",
            Where.STEP,
            "The prompt takes the place of the encoder's input, as in `generate`.",
            takes=Takes.NUMBER,
        ),
        _honoured("no_repeat_ngram_size", Where.STEP, takes=Takes.WHOLE),
        _honoured(
            "encoder_no_repeat_ngram_size",
            Where.STEP,
            "The prompt takes the place of the encoder's input, as in `generate`.",
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
            "Each sequence runs a second time at each step, without its prompt or with the negative prompt.",
            takes=Takes.NUMBER,
        ),
        _argument("negative_prompt_ids", Where.STEP, "For `guidance_scale`: a 2-D tensor, a row for each prompt."),
        _argument("negative_prompt_attention_mask", Where.STEP, "Marks the padding in `negative_prompt_ids`."),
        _argument(
            "prefix_allowed_tokens_fn",
            Where.STEP,
            "Its `batch_id` is the row in the results, `i*n + j`; its `input_ids` are one sequence, without padding.",
        ),
        _argument(
            "logits_processor",
            Where.STEP,
            "A list (`LogitsProcessorList`) for all prompts, or, for processors that keep state, a callable that makes "
            f"one: {_FACTORY}. A processor sees a sequence's own prompt and new tokens, without padding.",
        ),
    ),
    **_chapter(
        Subject.RESULTS,
        _honoured(
            "pad_token_id",
            None,
            "Fills up the rows of a tensor; by default the first EOS. It is needed where rows of a tensor may end at "
            "different lengths. Results for a list are not padded.",
            takes=Takes.TOKEN,
        ),
        _honoured(
            "return_dict_in_generate",
            None,
            "A ModelOutput instead of a tensor. Its `past_key_values` are an object that holds no cache, and says so "
            "to whoever goes on from it: pass the whole conversation anew.",
            goes_with=PromptForm.TENSORS,
            instead=_BATCH_RESULT,
            takes=Takes.FLAG,
        ),
        _honoured(
            "output_scores",
            Where.STEP,
            _TENSORS_OF_STEPS,
            goes_with=PromptForm.TENSORS,
            instead=_WITH_LOGPROBS,
            takes=Takes.FLAG,
        ),
        _honoured(
            "output_logits",
            Where.STEP,
            _TENSORS_OF_STEPS,
            goes_with=PromptForm.TENSORS,
            instead=_WITH_LOGPROBS,
            takes=Takes.FLAG,
        ),
        _added(
            "logprobs",
            Where.STEP,
            "`k`: for each new token its own log-probability and those of the `k` likeliest tokens. 0, or True, for "
            "its own alone.",
            goes_with=PromptForm.LISTS,
            instead=_NO_LOGPROBS,
        ),
        _added(
            "prompt_logprobs",
            Where.STEP,
            "`k`: the same for the tokens of the prompt.",
            goes_with=PromptForm.LISTS,
            instead=_NO_LOGPROBS,
        ),
        _refused(
            "output_attentions",
            "is not supported: attention is not computed as a matrix here. Run the model over the results, "
            "model(ids, output_attentions=True)",
        ),
        _refused(
            "output_hidden_states",
            "is not supported. Run the model over the results, model(ids, output_hidden_states=True)",
        ),
        _argument(
            "streamer",
            Where.LATE,
            "For one prompt with one sequence, as in `generate`. For many prompts `stream()` yields each result when "
            "it is finished.",
        ),
        _added("on_error", None, '"record" runs the good prompts and puts the reason into `error` of the others.'),
        _added("progress", None, "A progress bar: True, False, or None for long lists only."),
    ),
    **_chapter(
        Subject.MODES,
        _refused("num_beam_groups", f"is not supported: group beam search, {_MOVED}", neutral=1),
        _refused("diversity_penalty", f"is not supported: group beam search, {_MOVED}", neutral=0),
        _refused("constraints", f"is not supported: constrained beam search, {_MOVED}"),
        _refused("force_words_ids", f"is not supported: constrained beam search, {_MOVED}"),
        _refused("penalty_alpha", f"is not supported: contrastive search, {_MOVED}", neutral=0),
        _refused("dola_layers", f"is not supported: DoLa, {_MOVED}"),
        _no_effect("low_memory", "It was for contrastive search."),
        _refused(
            "token_healing",
            "is not supported: heal the prompts first, and pass what model.heal_tokens(input_ids, tokenizer) returns",
        ),
        _refused(
            "custom_generate",
            "is not supported: it would run instead of this library. Leave it out, or call the model's own `generate`",
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
    **_chapter(
        Subject.SPECULATION,
        _argument(
            "assistant_model",
            Where.LATE,
            "Guesses tokens, where that pays: see [drafts.md](drafts.md). Where it cannot, a warning says so. Beside "
            "`prompt_lookup_num_tokens` it has no effect.",
        ),
        _no_effect("assistant_tokenizer", "", kind=OptionKind.ARGUMENT),
        _no_effect("assistant_early_exit", ""),
        _honoured(
            "prompt_lookup_num_tokens",
            Where.LATE,
            "Up to so many tokens are guessed at a time, where that pays: see [drafts.md](drafts.md). Where there "
            "can be no guesses, a warning says so.",
            takes=Takes.WHOLE,
        ),
        _honoured(
            "max_matching_ngram_size",
            Where.LATE,
            "Tokens that are looked for, at most 3 by default; what has followed them before is the guess.",
            takes=Takes.WHOLE,
        ),
        _no_effect("use_mtp", ""),
        _no_effect("speculation_type", ""),
        _honoured(
            "num_assistant_tokens",
            Where.LATE,
            "The most tokens that `assistant_model` guesses at a time, up to 8.",
            takes=Takes.WHOLE,
        ),
        _no_effect("num_assistant_tokens_schedule", ""),
        _no_effect("assistant_confidence_threshold", ""),
        _no_effect("assistant_lookbehind", ""),
        _no_effect("target_lookbehind", ""),
        _refused(
            "assistant_ensemble_weight",
            "is not supported: it mixes the assistant's scores in, which changes the results. Leave it out",
        ),
        _refused(
            "is_assistant",
            "is not supported: it ends a sequence where the model is unsure, and is meant for the assistant that "
            "`generate` runs itself. Leave it out",
        ),
    ),
    **_chapter(
        Subject.RUNNING,
        _no_effect("use_cache", "There is always a KV cache."),
        _no_effect(
            "cache_implementation",
            'The KV cache is paged, in the model\'s dtype: see BatchConfig.kv_memory. "quantized", which changes '
            "results in `generate`, is warned of.",
        ),
        _no_effect("cache_config", ""),
        _no_effect("max_cache_len", ""),
        _no_effect("prefill_chunk_size", "See BatchConfig.max_batch_tokens."),
        _no_effect("compile_config", "See BatchConfig.fuse and BatchConfig.cuda_graphs."),
        _no_effect("disable_compile", ""),
        _no_effect("continuous_batching_config", "It is an option of `generate_batch`."),
        _no_effect("transformers_version", "A note in a checkpoint."),
    ),
}


def names(fate: Fate | None = None, kind: OptionKind | None = None, subject: Subject | None = None) -> frozenset[str]:
    """The names of the options for which all that is given is true."""
    return frozenset(
        row.name
        for row in TABLE.values()
        if (fate is None or row.fate is fate)
        and (kind is None or row.kind is kind)
        and (subject is None or row.subject is subject)
    )
