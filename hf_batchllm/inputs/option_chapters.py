"""The options that people pass by name: each with its type, its row in ``option_table`` and its text for users.

A class is a chapter of docs/generate.md. No torch.
"""

# No ``from __future__ import annotations``: these are read as they are, by ``option_table`` and ``named_options``.
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from .option_row import Alias, OptionKind, PromptForm, Takes, Where, added, argument, honoured, no_effect

if TYPE_CHECKING:
    import torch

_DEVICE, _STEP, _LATE = Where.DEVICE, Where.STEP, Where.LATE
_WHOLE, _NUMBER, _PENALTY, _FLAG = Takes.WHOLE, Takes.NUMBER, Takes.PENALTY, Takes.FLAG
_TOKEN, _TOKENS, _IDS, _TEXTS = Takes.TOKEN, Takes.TOKENS, Takes.IDS, Takes.TEXTS
_PROBABILITY = {"least": 0, "most": 1, "sampling_only": True}
_AT_LEAST_1 = {"least": 1, "strict": True}
# In tokens: longer ones hardly ever come again, and transformers makes a list for each of so many.
_NGRAMS = {"limit": 1000, "remedy": " (0 for none)"}
A_LIST, LISTS = "a list, one for each prompt", "a list of such lists, one for each prompt"
_FOR_CHATS = {"goes_with": PromptForm.LISTS, "instead": "goes with a list of prompts: a tensor holds tokens already"}
_FACTORY = "`factory(index, prompt_token_ids)`, called once for each sequence"
_TENSORS_OF_STEPS = {
    "goes_with": PromptForm.TENSORS,
    "instead": "goes with tensors (`input_ids=`): with a list of prompts pass `logprobs=k`",
    "doc": "With `return_dict_in_generate=True`, as in `generate`; without that nothing comes back. In the steps after "
    "a row's end they are 0, where `generate` has what the model makes of padding.",
}
_LOGPROBS = {
    "goes_with": PromptForm.LISTS,
    "instead": "goes with a list of prompts: with tensors pass `return_dict_in_generate=True` and "
    "`output_scores=True` or `output_logits=True`",
}


class Prompts(TypedDict, total=False):
    """Prompts and settings"""

    inputs: Annotated["torch.Tensor | None", argument(goes_with=PromptForm.TENSORS), "The same as `input_ids`."]
    adapter: Annotated[
        str | Sequence[str | None] | None,
        added(each=A_LIST, called=("lora_request",)),
        "Of a model with PEFT adapters: the name of one, or `None` for the model without any. If it is left out, the "
        "active adapters are used as they are. The model's own state is not touched. Prompts share a prefix only where "
        "they have the same adapter.",
    ]
    tokenizer: Annotated[Any, argument(), "For `stop_strings`, instead of the BatchGenerator's tokenizer."]
    bos_token_id: Annotated[
        int | None, no_effect(_TOKEN), "It only begins an empty input, and every prompt here has tokens."
    ]
    decoder_start_token_id: Annotated[int | Sequence[int] | None, no_effect(), "It is for encoder-decoder models."]


class Chats(TypedDict, total=False):
    """Chats and long prompts"""

    tools: Annotated[
        Sequence[Any] | None,
        added(each=LISTS, **_FOR_CHATS),
        "For chats: a list of what the model may call, each a dict (its JSON schema) or a function with type hints and "
        "a docstring. The chat template shows them to the model. Calls are not carried out, nor read out of `text`.",
    ]
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None,
        added(each=A_LIST, **_FOR_CHATS),
        "For chats: a dict of what else the chat template is given, such as `{'enable_thinking': False}`. A name that "
        "the template does not know is warned of.",
    ]
    continue_final_message: Annotated[
        bool | Sequence[bool | None] | None,
        added(each=A_LIST, **_FOR_CHATS),
        "For chats: True continues the last message, False begins a new one. By default the last message is continued "
        "if it is an assistant's and has a content; `text` is what follows it.",
    ]
    max_prompt_tokens: Annotated[
        int | Sequence[int | None] | None,
        added(
            None,
            _WHOLE,
            each=A_LIST,
            called=("truncate_prompt_tokens", "max_model_len", "max_input_length"),
            **_AT_LEAST_1,
            **_FOR_CHATS,
        ),
        "The most tokens of a prompt; longer ones are cut, with a warning that says which. Special tokens that the "
        "tokenizer puts around every text (BOS) stay.",
    ]
    truncation_side: Annotated[
        str | Sequence[str | None] | None,
        added(each=A_LIST, **_FOR_CHATS),
        'Where `max_prompt_tokens` cuts: "left" (the default, for which the end of a prompt stays) or "right".',
    ]


class Ends(TypedDict, total=False):
    """Lengths and ends"""

    max_new_tokens: Annotated[int | None, honoured(_DEVICE, _WHOLE, called=("max_gen_toks",), **_AT_LEAST_1)]
    max_tokens: Annotated[int | None, Alias("max_new_tokens")]
    max_completion_tokens: Annotated[int | None, Alias("max_new_tokens")]
    max_length: Annotated[
        int | None,
        honoured(_DEVICE, _WHOLE, displaces=("max_new_tokens",)),
        "In a list it counts each prompt's own length; with tensors the padded width, as in `generate`.",
    ]
    min_new_tokens: Annotated[int | None, honoured(_DEVICE, _WHOLE, least=0)]
    min_tokens: Annotated[int | None, Alias("min_new_tokens")]
    min_length: Annotated[
        int | None, honoured(_DEVICE, _WHOLE, least=0, displaces=("min_new_tokens",)), "It counts as `max_length` does."
    ]
    eos_token_id: Annotated[
        "int | Sequence[int] | torch.Tensor | None",
        honoured(_DEVICE, _TOKENS, displaces=("ignore_eos",)),
        "One or several; `eos_token_id=None` in the call means none, whatever the checkpoint says. The EOS that ended "
        "a sequence is its last token.",
    ]
    stop_token_ids: Annotated[
        Sequence[int] | None,
        added(_DEVICE, _IDS, in_config=True, in_requests=True),
        "A list of tokens that end a sequence besides the EOS tokens, as if they stood in `eos_token_id`, too.",
    ]
    ignore_eos: Annotated[
        bool | None,
        added(_DEVICE, _FLAG, in_config=True, in_requests=True, displaces=("eos_token_id",)),
        "True is another name for `eos_token_id=None`.",
    ]
    stop_strings: Annotated[
        str | Sequence[str] | None,
        honoured(_LATE, _TEXTS, called=("stop_words", "stop_sequences")),
        "A string or a list of them. It needs a tokenizer: the BatchGenerator's, or `tokenizer=`.",
    ]
    stop: Annotated[str | Sequence[str] | None, Alias("stop_strings")]
    stopping_criteria: Annotated[
        Any,
        argument(_LATE),
        "A list (`StoppingCriteriaList`) for all prompts, or, for criteria that keep state, a callable that makes one: "
        f"{_FACTORY}. A criterion sees one sequence: without padding where prompts came as a list, its row as it was "
        "passed where they came as a tensor. A criterion in a list replaces the options' own of the same kind, as in "
        "`generate`; criteria of a factory are added.",
    ]
    max_time: Annotated[
        float | None,
        honoured(
            _LATE,
            _NUMBER,
            not_for_files="is not for files: interrupt a run whenever you like, and the same command continues it",
        ),
        "Seconds, for the whole call. Sequences that have finished by then are whole. The others are cut short, with "
        '`finish_reason` "time"; they may have no new token at all.',
    ]


class Choice(TypedDict, total=False):
    """Greedy or sampled"""

    do_sample: Annotated[
        bool | None,
        honoured(_DEVICE, _FLAG),
        "Tokens come from the distribution that `generate` draws from, with other noise: it depends on the seed, the "
        "prompt's index, the sample's index and the position alone.",
    ]
    num_return_sequences: Annotated[
        int | None,
        honoured(_DEVICE, _WHOLE, called=("num_samples",), **_AT_LEAST_1),
        "Prompt `i` has `n` rows, one after the other: `i*n`, `i*n + 1`, ... (`.index`, `.sample`).",
    ]
    n: Annotated[int | None, Alias("num_return_sequences")]
    temperature: Annotated[float | None, honoured(_DEVICE, _NUMBER, sampling_only=True, neutral=1.0, in_requests=True)]
    top_k: Annotated[
        int | None,
        honoured(_DEVICE, _NUMBER, sampling_only=True, neutral=50, least=0, remedy=" (0 for none)", in_requests=True),
        "50 unless you or the checkpoint say otherwise, as in `generate`; 0 for none.",
    ]
    top_p: Annotated[float | None, honoured(_DEVICE, _NUMBER, neutral=1.0, in_requests=True, **_PROBABILITY)]
    min_p: Annotated[float | None, honoured(_DEVICE, _NUMBER, neutral=0.0, in_requests=True, **_PROBABILITY)]
    top_h: Annotated[float | None, honoured(_STEP, _NUMBER, **_PROBABILITY)]
    typical_p: Annotated[float | None, honoured(_STEP, _NUMBER, neutral=1.0, **_PROBABILITY)]
    epsilon_cutoff: Annotated[float | None, honoured(_STEP, _NUMBER, neutral=0.0, **_PROBABILITY)]
    eta_cutoff: Annotated[float | None, honoured(_STEP, _NUMBER, neutral=0.0, **_PROBABILITY)]


class Beams(TypedDict, total=False):
    """Beam search"""

    num_beams: Annotated[
        int | None,
        honoured(_STEP, _WHOLE, neutral=1, called=("use_beam_search",), **_AT_LEAST_1),
        "More than 1 for a beam search. `num_return_sequences`, at most as many, is the number of answers, the best "
        "first; their `score` is the `sequences_scores` of `generate`. Your own processors and criteria see all beams "
        "of a prompt at once, as in `generate`; a factory is called once for each prompt. Prompts of a call may have "
        "different numbers of beams, but not 1 and more than 1. `logprobs`, `prompt_logprobs`, `streamer` and "
        "`negative_prompt_ids` do not go with it.",
    ]
    length_penalty: Annotated[
        float | None, honoured(_STEP, _NUMBER, neutral=1.0, in_requests=True), "Without beams it has no effect."
    ]
    early_stopping: Annotated[
        bool | str | None,
        honoured(_STEP),
        'True, False or "never", as in `generate`. Without beams it has no effect.',
    ]


class Grammars(TypedDict, total=False):
    """Answers of a given form"""

    schema: Annotated[
        Mapping[str, Any] | str | bool | type | Sequence[Any] | None,
        added(_STEP, each=A_LIST, called=("guided_json",)),
        "Answers are JSON of this schema: a dict, a string that holds one, or a class of pydantic's. `True` for any "
        "JSON object.",
    ]
    regex: Annotated[
        str | Sequence[str | None] | None,
        added(_STEP, each=A_LIST, called=("guided_regex",)),
        "Answers match this regular expression as a whole.",
    ]
    grammar: Annotated[
        str | Sequence[str | None] | None,
        added(_STEP, each=A_LIST, called=("guided_grammar",)),
        "Answers are of this grammar, as llguidance takes it: Lark.",
    ]
    choice: Annotated[
        Sequence[str] | Sequence[Sequence[str] | None] | None,
        added(_STEP, each=LISTS, called=("guided_choice",)),
        "Answers are one of these strings. (`score(prompts, choices=[...])` says how likely each choice is.)",
    ]


class Scores(TypedDict, total=False):
    """What changes the scores"""

    repetition_penalty: Annotated[
        float | None,
        honoured(_DEVICE, _PENALTY, in_requests=True, called=("repeat_penalty",)),
        "Counts the prompt's and the new tokens, never padding.",
    ]
    encoder_repetition_penalty: Annotated[
        float | None,
        honoured(_STEP, _PENALTY),
        "The prompt takes the place of the encoder's input, as in `generate`.",
    ]
    no_repeat_ngram_size: Annotated[int | None, honoured(_STEP, _WHOLE, least=0, **_NGRAMS)]
    encoder_no_repeat_ngram_size: Annotated[
        int | None,
        honoured(_STEP, _WHOLE, **_NGRAMS),
        "The prompt takes the place of the encoder's input, as in `generate`.",
    ]
    bad_words_ids: Annotated[Sequence[Sequence[int]] | None, honoured(_STEP, called=("bad_words",))]
    suppress_tokens: Annotated[Sequence[int] | None, honoured(_STEP, _IDS)]
    begin_suppress_tokens: Annotated[Sequence[int] | None, honoured(_STEP, _IDS)]
    sequence_bias: Annotated[
        Mapping[tuple[int, ...], float] | Sequence[Any] | None, honoured(_STEP, called=("logit_bias",))
    ]
    forced_bos_token_id: Annotated[
        int | None, honoured(_STEP, _TOKEN), "After a prompt of one token, as in `generate`."
    ]
    forced_eos_token_id: Annotated[
        int | Sequence[int] | None, honoured(_STEP, _TOKENS), "As the last token that the length allows."
    ]
    exponential_decay_length_penalty: Annotated[tuple[int, float] | None, honoured(_STEP)]
    remove_invalid_values: Annotated[bool | None, honoured(_STEP, _FLAG)]
    renormalize_logits: Annotated[bool | None, honoured(_STEP, _FLAG)]
    watermarking_config: Annotated[Any, honoured(_STEP)]
    guidance_scale: Annotated[
        float | None,
        honoured(_STEP, _NUMBER),
        "Each sequence runs a second time at each step, without its prompt or with the negative prompt.",
    ]
    negative_prompt_ids: Annotated[
        "torch.Tensor | None", argument(_STEP), "For `guidance_scale`: a 2-D tensor, a row for each prompt."
    ]
    negative_prompt_attention_mask: Annotated[
        "torch.Tensor | None", argument(_STEP), "Marks the padding in `negative_prompt_ids`."
    ]
    prefix_allowed_tokens_fn: Annotated[
        "Callable[[int, torch.Tensor], Sequence[int]] | None",
        argument(_STEP),
        "Its `batch_id` is the row in the results, `i*n + j`; its `input_ids` are one sequence, without padding.",
    ]
    logits_processor: Annotated[
        Any,
        argument(_STEP),
        "A list (`LogitsProcessorList`) for all prompts, or, for processors that keep state, a callable that makes "
        f"one: {_FACTORY}. A processor sees a sequence's own prompt and new tokens, without padding.",
    ]


class Results(TypedDict, total=False):
    """What comes back"""

    pad_token_id: Annotated[
        int | None,
        honoured(None, _TOKEN),
        "Fills up the rows of a tensor; by default the first EOS. It is needed where rows of a tensor may end at "
        "different lengths. Results for a list are not padded.",
    ]
    return_dict_in_generate: Annotated[
        bool | None,
        honoured(
            None,
            _FLAG,
            goes_with=PromptForm.TENSORS,
            instead="goes with tensors (`input_ids=`): a list of prompts gives a BatchResult",
        ),
        "A ModelOutput instead of a tensor. Its `past_key_values` are an object that holds no cache, and says so to "
        "whoever goes on from it: pass the whole conversation anew.",
    ]
    output_scores: Annotated[bool | None, honoured(_STEP, _FLAG, **_TENSORS_OF_STEPS)]
    output_logits: Annotated[bool | None, honoured(_STEP, _FLAG, **_TENSORS_OF_STEPS)]
    logprobs: Annotated[
        int | bool | None,
        added(_STEP, **_LOGPROBS),
        "`k`: for each new token its own log-probability and those of the `k` most likely tokens. 0, or True, for its "
        "own alone.",
    ]
    top_logprobs: int | None  # OpenAI's number beside `logprobs=True`: see other_names
    prompt_logprobs: Annotated[
        int | bool | None,
        added(_STEP, not_for_files="is not for files: see BatchGenerator.generate", **_LOGPROBS),
        "`k`: the same for the tokens of the prompt.",
    ]
    streamer: Annotated[
        Any,
        argument(_LATE),
        "For one prompt with one sequence, as in `generate`. For many prompts `stream()` yields each result when it is "
        "finished.",
    ]


class Modes(TypedDict, total=False):
    """Other ways to generate"""

    low_memory: Annotated[bool | None, no_effect(), "It was for contrastive search."]


class Speculation(TypedDict, total=False):
    """Speculation"""

    assistant_model: Annotated[
        Any,
        argument(_LATE),
        "Guesses tokens, where that pays: see [drafts.md](drafts.md). Where it cannot, a warning says so. Beside "
        "`prompt_lookup_num_tokens` it has no effect.",
    ]
    assistant_tokenizer: Annotated[Any, no_effect(kind=OptionKind.ARGUMENT)]
    assistant_early_exit: Annotated[int | None, no_effect()]
    prompt_lookup_num_tokens: Annotated[
        int | None,
        honoured(_LATE, _WHOLE, least=0, strict=True),
        "Up to so many tokens are guessed at a time, where that pays: see [drafts.md](drafts.md). Where there can be "
        "no guesses, a warning says so.",
    ]
    max_matching_ngram_size: Annotated[
        int | None,
        honoured(_LATE, _WHOLE, **_AT_LEAST_1),
        "Tokens that are looked for, at most 3 by default; what has followed them before is the guess.",
    ]
    use_mtp: Annotated[bool | None, no_effect()]
    speculation_type: Annotated[str | None, no_effect()]
    num_assistant_tokens: Annotated[
        int | None,
        honoured(_LATE, _WHOLE, **_AT_LEAST_1),
        "The most tokens that `assistant_model` guesses at a time, up to 8.",
    ]
    num_assistant_tokens_schedule: Annotated[str | None, no_effect()]
    assistant_confidence_threshold: Annotated[float | None, no_effect()]
    assistant_lookbehind: Annotated[int | None, no_effect()]
    target_lookbehind: Annotated[int | None, no_effect()]


class Running(TypedDict, total=False):
    """How transformers would run"""

    use_cache: Annotated[bool | None, no_effect(), "There is always a KV cache."]
    cache_implementation: Annotated[
        str | None,
        no_effect(),
        'The KV cache is paged, in the model\'s dtype: see BatchConfig.kv_memory. "quantized", which changes results '
        "in `generate`, is warned of.",
    ]
    cache_config: Annotated[Any, no_effect()]
    max_cache_len: Annotated[int | None, no_effect()]
    prefill_chunk_size: Annotated[int | None, no_effect(), "See BatchConfig.max_batch_tokens."]
    compile_config: Annotated[Any, no_effect(), "See BatchConfig.fuse and BatchConfig.cuda_graphs."]
    disable_compile: Annotated[bool | None, no_effect()]
    continuous_batching_config: Annotated[Any, no_effect(), "It is an option of `generate_batch`."]
    transformers_version: Annotated[str | None, no_effect(), "A note in a checkpoint."]


CHAPTERS = (Prompts, Chats, Ends, Choice, Beams, Grammars, Scores, Results, Modes, Speculation, Running)
