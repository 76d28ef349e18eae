"""``docs/generate.md``, made from the table: ``python -m hf_batchllm.inputs.option_docs > docs/generate.md``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from .option_row import Fate, OptionKind, OptionRow, PromptForm, Subject, Where
from .option_table import TABLE

_INTRODUCTION = """\
# Options of `generate`

<!-- Made by `python -m hf_batchllm.inputs.option_docs > docs/generate.md`: change inputs/option_table.py instead. -->

`gen.generate(...)` takes what `model.generate(...)` takes, and means the same by it. Defaults come from
`model.generation_config`; `generation_config` wins over them, and keyword arguments win over both. An option that
cannot be honoured is refused by name before any work, and so is a wrong value. An option that `model.generate` would
silently ignore is named in one warning.

What is different, on purpose:

- **Each prompt stands alone.** Limits, penalties, bans and stops look at one sequence, without padding, as if its
  prompt had been passed alone. `max_length` in a list counts each prompt's own length.
- **A list gives a list.** Strings, token ids and chats in a list give a `BatchResult`, in the order of the prompts. A
  padded tensor gives the tensor, or the `ModelOutput`, that `model.generate` gives.
- **Sampling is reproducible whatever else runs.** Tokens are drawn from the same distribution as in `model.generate`,
  with other noise: it depends on `seed`, the prompt's index, the sample's index and the position. Logits may differ in
  their last digits: [`invariant=True`](invariant.md) makes them the same to the last bit.
- **Prompts may have different settings.** `generation_config` may be a list, one for each prompt.
- **Time counts for the whole call.** `max_time` is for all prompts together.

**Names of other libraries.** These mean the same here, in `run_file`, in [files](files.md) and in the command:
`max_tokens` and `max_completion_tokens` (`max_new_tokens`), `min_tokens` (`min_new_tokens`), `n`
(`num_return_sequences`), `stop` (`stop_strings`), and `logprobs=True` with `top_logprobs` (a number as `logprobs`).
Other names are refused everywhere in the same words, which say what to do instead. One name differs: a `temperature`
without `do_sample` has no effect here, as in `model.generate`, and a warning says so. In files and in the command it
asks for sampling. A `text` ends with the token that completed the stop string, as in transformers: the string, and what
else that token holds. vLLM and OpenAI leave both out, as `text.split(stop)[0]` does, and so do the responses of
OpenAI's batches here. In a `GenerationConfig` these names, `stop_token_ids` and `ignore_eos` mean the same; any other
option of `generate` there is refused, and a name that nobody knows is warned of. See also
[coming from vLLM](from-vllm.md).

Under `accelerated(model)`, a call with a refused option goes to the model's own `generate`. So do two other calls: one
with your own processors or criteria for several rows, as `generate` calls them with all rows at once; and one with
`prefix_allowed_tokens_fn` or your own processors for padded rows, as `generate` shows them the padding.

## How to read the tables

| how | |
|---|---|
| device | Applied on the model's device; costs next to nothing. |
| each step | Applied by transformers' own code, or yours, after each step: no step of the call is launched ahead. |
| late | Applied by the host, while later steps run. Tokens beyond the end of a sequence are cut off. |
| no effect | Accepted; results do not depend on it. |
| refused | An error, before any work, with what to do instead. |

An option called *added* is not in `model.generate`. An option without a text means what it means there.
"""

WORDS = {
    Subject.CHATS: """\
A chat is a list of messages, `{"role": ..., "content": ...}`. The tokenizer's chat template makes tokens of it, and
adds the beginning of an answer. **A chat that ends with an assistant's message is continued**, as by transformers'
pipelines: in `generate`, `stream`, `score` and `plan`, in files, in OpenAI's batches and in both pipelines.

```python
begun = [{"role": "user", "content": "Name a prime."}, {"role": "assistant", "content": "A prime is"}]
gen.generate([begun], max_new_tokens=20)[0].text       # what follows "A prime is"
gen.generate(chats, tools=[get_weather], chat_template_kwargs={"enable_thinking": False}, max_new_tokens=200)
```

transformers' own pipeline, with `accelerated(pipe)` or without, takes `tools` and `continue_final_message`, too. It has
another name for the rest: `tokenizer_encode_kwargs={"enable_thinking": False}`.

A prompt that is longer than the model's context (`max_position_embeddings`), or may become so with its answer, runs.
One warning says how many there are, which they are and what the limit is. A model with learned positions has none
beyond them: there it is an error.""",
    Subject.ENDS: """\
If no length is given anywhere, there are 20 new tokens, as with `generate`, and a warning. `finish_reason` says what
ended a sequence: "stop" (EOS, a stop string, a criterion), "length", "time" or "error".""",
    Subject.GRAMMARS: """\
One for all prompts, or a list with one for each, in which `None` leaves an answer free. They need the extra `json`
([llguidance](https://github.com/guidance-ai/llguidance)) and a tokenizer. [constrained.md](constrained.md) tells more.

```python
gen.generate(prompts, schema={"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})
gen.generate(prompts, choice=[["yes", "no"], None, ["red", "green"]])
```

They do not go with `num_beams`, `min_new_tokens`, `min_length`, `forced_bos_token_id`, `forced_eos_token_id` and
`ignore_eos`.""",
    Subject.SCORES: """\
A processor that keeps state must not be shared by sequences. Pass a function that makes the processors of one sequence:

```python
def factory(index, prompt_token_ids):       # the prompt's place in the list, and its tokens
    return [Follow(rules[index])]

gen.generate(prompts, logits_processor=factory)
```

[constrained.md](constrained.md) tells more. Settings such as `sequence_bias` may differ between prompts, too:
pass a list of `GenerationConfig`s.""",
    Subject.RESULTS: """\
Log-probabilities have three forms, each with an entry for each token:

```python
gen.generate(prompts, logprobs=2)[0].logprobs[0]    # {5: -0.2, 9: -1.8}: the token itself, and the likeliest
gen.score(contexts, continuations)[0].logprobs[0]   # -0.2: of a token of the continuation
json.loads(line_of_a_file)["logprobs"][0]           # {"token_id": 5, "token": " yes", "logprob": -0.2, "top": ...}
```""",
    Subject.SPECULATION: """\
Speculation drafts tokens (with an assistant model, by looking up the prompt, or with heads of the model's own). It
makes `generate` faster and gives what the model alone would give. Here `prompt_lookup_num_tokens` and
`assistant_model` do so: [drafts.md](drafts.md) tells more. The other options are accepted and change nothing; one that
the call itself sets is named in one warning.""",
    Subject.RUNNING: "They choose how `generate` runs, not what it gives.",
}

_HOW = {Fate.NO_EFFECT: "no effect", Fate.REFUSED: "refused"}


def page() -> str:
    return "\n".join([_INTRODUCTION, *(_chapter(subject) for subject in Subject)])


def _chapter(subject: Subject) -> str:
    rows = [row for row in TABLE.values() if row.subject is subject]
    lines = [f"## {subject.value}", ""]
    if subject in WORDS:
        lines += [WORDS[subject], ""]
    lines += ["| option | how | |", "|---|---|---|"]
    for (how, text), alike in groupby(rows, key=lambda row: (_how(row), _text(row))):
        lines.append(f"| {_names(alike)} | {how} | {text} |")
    return "\n".join([*lines, ""])


def _names(rows: Iterable[OptionRow]) -> str:
    return ", ".join(f"`{row.name}`{' *added*' if row.kind is OptionKind.ADDED else ''}" for row in rows)


def _how(row: OptionRow) -> str:
    where: Where | None = row.where
    return _HOW.get(row.fate) or ("" if where is None else where.value)


def _text(row: OptionRow) -> str:
    text = row.doc
    if row.fate is Fate.REFUSED:  # written to follow the option's name in an error
        text = text.removeprefix("is ")
        text = f"{text[0].upper()}{text[1:]}."
    only = f"With {row.goes_with.value} only. " if row.goes_with is not PromptForm.ANY and row.instead else ""
    return (only + text).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
