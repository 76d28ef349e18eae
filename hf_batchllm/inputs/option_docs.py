"""``docs/generate.md``, made of the table: ``python -m hf_batchllm.inputs.option_docs > docs/generate.md``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from .option_row import Fate, OptionKind, OptionRow, Subject, Where, With
from .option_table import TABLE

_INTRODUCTION = """\
# Options of `generate`

<!-- Made by `python -m hf_batchllm.inputs.option_docs > docs/generate.md`: change inputs/option_table.py instead. -->

`gen.generate(...)` takes what `model.generate(...)` takes, and means the same by it. Defaults come from
`model.generation_config`; `generation_config` wins over them, and keyword arguments win over both. What cannot be
honoured is refused by name before any work, and so is a wrong value. What `model.generate` would pass over in silence
is said once.

What is different, on purpose:

- **A prompt is on its own.** Whatever counts, penalises, forbids or stops looks at one sequence, without padding, as if
  its prompt had been passed alone. `max_length` in a list counts each prompt's own length.
- **A list gives a list.** Strings, token ids and chats in a list give a `BatchResult`, in the order of the prompts. A
  padded tensor gives the tensor, or the `ModelOutput`, that `model.generate` gives.
- **Sampling is reproducible whatever else runs.** Tokens are drawn from the same distribution, with noise of their own
  that depends on `seed`, the prompt's index, the sample's index and the position.
- **Prompts may have different settings.** `generation_config` may be a list, one for each prompt.
- **Time is the call's.** `max_time` is for all prompts together.

Under `accelerated(model)`, a call with something that is refused goes to the model's own `generate`; so does one with
processors or criteria of your own for several rows, which `generate` would call with all of them at once, and one with
`prefix_allowed_tokens_fn` or processors of your own for rows that are padded, which `generate` would show them.

## How to read the tables

| how | |
|---|---|
| device | It is seen to where the model is, and costs next to nothing. |
| each step | By transformers' own code, or yours, after each step: steps of the call are not launched ahead. |
| late | By the host, while later steps run. What a sequence has run beyond its end is cut off. |
| no effect | Accepted; results do not depend on it. |
| refused | An error, before any work, with what to do instead. |

What is called *added* is not in `model.generate`. An option without a word means what it means there.
"""

WORDS = {
    Subject.ENDS: """\
If no length is given anywhere, there are 20 new tokens, as with `generate`, and a warning. `finish_reason` says what
ended a sequence: "stop" (EOS, a stop string, a criterion), "length", "time" or "error".""",
    Subject.SCORES: """\
A processor that remembers what it saw (a grammar, say) must not be shared by sequences. Pass a function that makes the
processors of one of them:

```python
def factory(index, prompt_token_ids):       # the prompt's place in the list, and its tokens
    return [GrammarProcessor(schemas[index])]

gen.generate(prompts, logits_processor=factory)
```

[constrained.md](constrained.md) goes on from there. Settings such as `sequence_bias` may differ between prompts, too:
pass a list of `GenerationConfig`s.""",
    Subject.SPECULATION: """\
Drafting tokens with an assistant model, by looking up the prompt or with heads of the model's own makes `generate`
faster and gives what the model alone would give. Here these options are accepted and change nothing; if the call itself
asks for one, that is said once.""",
    Subject.RUNNING: "They choose how `generate` runs, not what comes of it.",
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
    return ", ".join(f"`{row.name}`{' *added*' if row.kind is OptionKind.OURS else ''}" for row in rows)


def _how(row: OptionRow) -> str:
    where: Where | None = row.where
    return _HOW.get(row.fate) or ("" if where is None else where.value)


def _text(row: OptionRow) -> str:
    text = row.doc
    if row.fate is Fate.REFUSED:  # there it goes on after the option's name, in an error
        text = text.removeprefix("is ")
        text = f"{text[0].upper()}{text[1:]}."
    only = f"With {row.goes_with.value} only. " if row.goes_with is not With.BOTH and row.instead else ""
    return (only + text).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
