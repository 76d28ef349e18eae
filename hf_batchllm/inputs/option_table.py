"""The table of all options: checks, files, the command, Ray, docs/generate.md and tests are made from it. No torch.

Options that people pass by name stand in ``option_chapters``, with their types. Here are the arguments that signatures
name, and what is refused. After a change: ``python -m hf_batchllm.inputs.option_docs docs/generate.md``.
"""

from __future__ import annotations

from dataclasses import replace

from .option_chapters import A_LIST, CHAPTERS
from .option_row import Alias, Fate, OptionKind, OptionRow, PromptForm, Where, added, argument, refused

_ARGUMENT = OptionKind.ARGUMENT
_OWN_GENERATE = "leave it out, or call the model's own `generate`"
_MOVED = f"which transformers has moved to a repository of its own, run by `custom_generate`: {_OWN_GENERATE}"

_IN_SIGNATURES = {
    "Prompts and settings": {
        "prompts": added(
            in_lines=False,
            doc="The first argument: a list of strings, lists of token ids, 1-D tensors, chats and what a processor "
            "makes of a prompt with images, mixed as you like; or a single prompt. A BatchResult comes back. (A 2-D "
            "tensor in its place is taken for `input_ids`.)",
        ),
        "input_ids": argument(
            goes_with=PromptForm.TENSORS,
            doc="Rows padded on either side. A tensor or a ModelOutput comes back, padded as by `generate`. Pixels "
            "that a processor makes go beside it: `generate(**inputs)` (docs/images.md).",
        ),
        "attention_mask": argument(
            goes_with=PromptForm.TENSORS,
            doc="Marks the padding; without it, the mask is the one that `generate` would infer. Each row is computed "
            "as if it stood alone.",
        ),
        "generation_config": argument(
            each=A_LIST,
            doc="Keyword arguments win over it, and it wins over `model.generation_config`.",
        ),
    },
    "Greedy or sampled": {
        "seed": added(
            Where.DEVICE,
            each=A_LIST,
            in_requests=True,
            doc="The seed of the noise. By default it is drawn from torch's generator, so that a call repeats after "
            "`set_seed`; the report names it.",
        ),
    },
    "What comes back": {
        "on_error": added(
            in_lines=False, doc='"record" runs the good prompts and puts the reason into `error` of the others.'
        ),
        "progress": added(
            in_lines=False, called=("use_tqdm",), doc="A progress bar: True, False, or None for long lists only."
        ),
    },
}
_REFUSED = {
    "Prompts and settings": {
        "token_type_ids": refused(
            "is not supported. All zeros, which some tokenizers add, are accepted beside tensors if the model has no "
            "token types. Otherwise leave it out",
            kind=_ARGUMENT,
        ),
        "inputs_embeds": refused(
            "is not supported: prompts are text or token ids. For prompts that exist as embeddings alone call the "
            "model's own `generate`",
            kind=_ARGUMENT,
        ),
        "position_ids": refused(
            "is not supported: positions follow from the prompt and its padding. Leave it out", kind=_ARGUMENT
        ),
        "past_key_values": refused(
            "is not supported: pass whole prompts, with their images, and their shared prefixes are computed once "
            "(from call to call, too, with BatchConfig.keep_prefixes)",
            kind=_ARGUMENT,
        ),
    },
    "What comes back": {
        "output_attentions": refused(
            "is not supported: attention is not computed as a matrix here. Run the model over the results, "
            "model(ids, output_attentions=True)"
        ),
        "output_hidden_states": refused(
            "is not supported. Run the model over the results, model(ids, output_hidden_states=True)"
        ),
    },
    "Other ways to generate": {
        "num_beam_groups": refused(f"is not supported: group beam search, {_MOVED}", neutral=1),
        "diversity_penalty": refused(f"is not supported: group beam search, {_MOVED}", neutral=0),
        "constraints": refused(f"is not supported: constrained beam search, {_MOVED}"),
        "force_words_ids": refused(f"is not supported: constrained beam search, {_MOVED}"),
        "penalty_alpha": refused(f"is not supported: contrastive search, {_MOVED}", neutral=0),
        "dola_layers": refused(f"is not supported: DoLa, {_MOVED}"),
        "token_healing": refused(
            "is not supported: heal the prompts first, and pass what model.heal_tokens(input_ids, tokenizer) returns"
        ),
        "custom_generate": refused(
            f"is not supported: it would run instead of this library. {_OWN_GENERATE.capitalize()}", kind=_ARGUMENT
        ),
        "trust_remote_code": refused("has no meaning here: no code is loaded. Leave it out", kind=_ARGUMENT),
        "synced_gpus": refused(
            "is not supported: it keeps the processes of a sharded model (FSDP, DeepSpeed ZeRO-3) in step, and the "
            "model must be whole, on a single device. Gather the weights first, or call the model's own `generate`",
            kind=_ARGUMENT,
        ),
    },
    "Speculation": {
        "assistant_ensemble_weight": refused(
            "is not supported: it mixes the assistant's scores in, which changes the results. Leave it out"
        ),
        "is_assistant": refused(
            "is not supported: it ends a sequence where the model is unsure, and is meant for the assistant that "
            "`generate` runs itself. Leave it out"
        ),
    },
}

TABLE: dict[str, OptionRow] = {}
ALIASES: dict[str, str] = {}  # other libraries' names of options, understood everywhere
for _of_chapter in CHAPTERS:
    _chapter = _of_chapter.__doc__ or ""
    _rows = dict(_IN_SIGNATURES.get(_chapter, {}))
    for _name, _annotation in _of_chapter.__annotations__.items():
        _row, *_doc = getattr(_annotation, "__metadata__", (None,))
        if isinstance(_row, OptionRow):
            _rows[_name] = replace(_row, doc="".join(_doc) or _row.doc)
        elif isinstance(_row, Alias):
            ALIASES[_name] = _row.name
    _rows |= _REFUSED.get(_chapter, {})
    TABLE |= {_name: replace(_row, name=_name, chapter=_chapter) for _name, _row in _rows.items()}

PROMPT_OPTIONS = tuple(row.name for row in TABLE.values() if row.chapter == "Chats and long prompts")
GRAMMAR_OPTIONS = tuple(row.name for row in TABLE.values() if row.chapter == "Answers of a given form")
CALLED = {name: row.name for row in TABLE.values() for name in row.called}  # these names are refused, with a hint


def names(fate: Fate | None = None, kind: OptionKind | None = None, chapter: str | None = None) -> frozenset[str]:
    """The names of the options for which all that is given is true."""
    return frozenset(
        row.name
        for row in TABLE.values()
        if (fate is None or row.fate is fate)
        and (kind is None or row.kind is kind)
        and (chapter is None or row.chapter == chapter)
    )
