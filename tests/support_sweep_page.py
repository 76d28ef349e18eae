"""docs/models.md: what became of each class, and how that was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import transformers
from support_sweep_compare import BAD, CLOSE, EXACT, NOT_BUILT
from support_sweep_models import PATTERNS, STRAYS
from support_sweep_workers import Row

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"

# Classes whose tiny model cannot be compared, each with the reason. All else that is not built fails the sweep.
_DRAFTER = "it drafts for another model, whose K and V it reads: transformers does not build it by itself"
KNOWN_HOLES: dict[str, str] = {
    "Gemma4AssistantForCausalLM": _DRAFTER,
    "Gemma4UnifiedAssistantForCausalLM": _DRAFTER,
}

_HEADER = """# Which models are served

Every class for text, and for text with images, of transformers {version}: {classes} rows, one for each class and
type of config.

{counts}.

`make sweep` makes this page anew: after each release of transformers, and after a change of what is refused.

**exact**: the same greedy tokens as `model.generate`, one prompt at a time, in float32, and log-probabilities that
differ by less than {close:g} (at most {worst:.0e}). A tiny model with random weights is built from the class's config,
with each kind of layer that the class has by default. It is compared again with other layers: windows where there were
none, full attention where there were windows, as a decoder (`is_decoder`) where it is an encoder by default. Prompts
share prefixes, are nested, equal, of one token, and longer than the windows; the second time they are computed in
chunks of 11 tokens on pages of 3. Prompts are text alone here; which classes take images says docs/images.md.

**refused**: `BatchGenerator(model)` raises `UnsupportedModelError`, with this reason, before anything runs. Numbers of
layers are those of the tiny model.

Layers ignore a `sliding_window`, an `attention_chunk_size` or `layer_types` in a config whose class does not know such
a field, and the cache of `model.generate` does not. Each was tried with each class that is exact:
{strays}.

**Code of your own in a model** (a layer, a `forward`, a subclass, code that comes with a checkpoint) is tried on a few
tokens, and refused where tokens depend on their neighbours. Some code passes that trial and may still be wrong here:
code that acts on rare token ids, on certain values alone, or on more than 300 tokens at a time; a count or another
state that acts only after some passes; a mixing of tokens that moves logits by less than 0.2 % (in half precision; 2 %
with experts, where half of the tokens must show it). Nothing tells you: compare a few answers with
`model.generate`.

| class | outcome |
|---|---|
"""


def kind_of(row: Row) -> str:
    """The worst of its outcomes; otherwise whether it is served as its config has it."""
    kinds = [outcome.kind for outcome in row.outcomes.values()]
    return next((bad for bad in BAD if bad in kinds), row.outcomes["default"].kind)


def is_bad(row: Row) -> bool:
    """Whether the sweep fails because of this class."""
    return kind_of(row) in BAD and row.case.class_name not in KNOWN_HOLES


def counts(rows: Sequence[Row]) -> Counter[str]:
    return Counter(map(kind_of, rows))


def worst_difference(rows: Sequence[Row]) -> float:
    """Among what is exact."""
    every = [outcome for row in rows for outcome in row.outcomes.values()]
    return max((outcome.worst for outcome in every if outcome.kind == EXACT), default=0.0)


def page(rows: Sequence[Row]) -> str:
    header = _HEADER.format(
        version=transformers.__version__, classes=len(rows), close=CLOSE, worst=worst_difference(rows),
        counts=", ".join(f"{count} {kind}" for kind, count in counts(rows).most_common()),
        strays=", ".join(f"{count:,} times {kind}" for kind, count in _strays(rows).most_common()),
    )  # fmt: skip
    return header + "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)


def _strays(rows: Sequence[Row]) -> Counter[str]:
    return Counter(row.outcomes[stray].kind for row in rows for stray in STRAYS if stray in row.outcomes)


def _cells(row: Row) -> tuple[str, ...]:
    return f"`{row.case.class_name}` ({row.case.model_type})", described(row, PATTERNS)


def described(row: Row, patterns: Sequence[str]) -> str:
    """The outcomes with these patterns: one if they agree, else each by its name."""
    said: dict[str, list[str]] = {}
    for pattern in patterns:
        if pattern in row.outcomes:
            outcome = row.outcomes[pattern]
            why = KNOWN_HOLES.get(row.case.class_name, outcome.why) if outcome.kind == NOT_BUILT else outcome.why
            text = f"{outcome.kind}: {why}" if why else outcome.kind
            said.setdefault(text.replace("|", "\\|"), []).append(_NAMES.get(pattern, pattern))
    if len(said) < 2:
        return "".join(said)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in said.items())


_NAMES = {"default": "by default", "other": "with other layers"}
_NAMES |= {pattern: f"`{pattern.removeprefix('stray ')}`" for pattern in STRAYS}
