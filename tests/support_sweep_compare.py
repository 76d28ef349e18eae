"""One class held against ``model.generate``: the same greedy tokens, and the same log-probabilities for them."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support_families import gaps, logits_of_rows, random_prompts, reference_steps
from support_parity import NEAR_TIE
from support_sweep_models import PATTERNS, STRAYS, Case, NothingToChange, tiny_model
from transformers import PreTrainedModel

from hf_batchllm import BatchGenerator, UnsupportedModelError
from hf_batchllm.patches.state_functions import mixers

EXACT, REFUSED, LATE, WRONG, NOT_BUILT = "exact", "refused", "refused late", "wrong", "not built"
BAD = (WRONG, LATE, NOT_BUILT)  # the worst first
CLOSE = 1e-3  # of log-probabilities
NEW_TOKENS = 6
_TOP_LOGPROBS = 4  # tokens whose log-probabilities are compared at each place, besides the chosen one
_FIRST_ID, _IDS = 3, 94  # what prompts are made of: no special token

# Classes whose own ``generate`` does not run on text alone, or not at all, though nothing is wrong with the tiny model.
_IMAGE = "it asks for an image"
NOT_ALONE = {
    "Blip2ForConditionalGeneration": _IMAGE,
    "BlipForConditionalGeneration": _IMAGE,
    "InstructBlipForConditionalGeneration": _IMAGE,
    "InstructBlipVideoForConditionalGeneration": _IMAGE,
    "IdeficsForVisionText2Text": _IMAGE,
    "MusicgenForCausalLM": "each of its tokens is one of several codebooks",
    "MusicgenMelodyForCausalLM": "each of its tokens is one of several codebooks",
    "PI0ForConditionalGeneration": "it has no generate: it writes actions",
    "Kosmos2ForConditionalGeneration": _IMAGE,
    "Llama4ForConditionalGeneration": "its forward asks the output of its text model for `image_outputs` (5.24)",
    "BltForCausalLM": "its config has no num_hidden_layers, for which its cache asks",
    "DiffusionGemmaForBlockDiffusion": "it writes by diffusion, with a GenerationConfig of its own",
}

# How the engine runs: with steps of any size, with pages and chunks that fit no window, as it comes.
ENGINE: dict[str, dict[str, Any]] = {
    "default": {"page_size": 16, "min_shared_tokens": 1},
    "other": {"page_size": 3, "max_batch_tokens": 11, "min_shared_tokens": 0},
}


@dataclass(frozen=True)
class Outcome:
    """What became of a class with one pattern. ``why``: the reason, or where it went wrong."""

    kind: str
    why: str = ""
    worst: float = 0.0  # difference of a log-probability
    places: int = 0  # tokens compared


def outcomes(case: Case) -> dict[str, Outcome]:
    """By pattern. Fields that a class does not know are tried only where it is served without them."""
    found: dict[str, Outcome] = {}
    for pattern in (*PATTERNS, *STRAYS):
        if pattern in STRAYS and found["default"].kind != EXACT:
            continue
        with contextlib.suppress(NothingToChange):
            outcome = outcome_of(case, pattern)
            if pattern in PATTERNS or outcome.kind != NOT_BUILT:  # transformers itself does not run with such a field
                found[pattern] = outcome
    return found


def outcome_of(case: Case, pattern: str) -> Outcome:
    try:
        model = tiny_model(case, pattern)
    except NothingToChange:
        raise
    except Exception as error:
        return Outcome(NOT_BUILT, in_short(error))
    try:
        generator = BatchGenerator(model, **ENGINE.get(pattern, {}))
    except UnsupportedModelError as error:
        alone = not model.config.is_encoder_decoder and case.class_name not in NOT_ALONE
        broken = _does_not_run(model) if alone else ""
        return Outcome(NOT_BUILT, broken) if broken else Outcome(REFUSED, in_short(error, case))
    except Exception as error:
        return Outcome(LATE, f"BatchGenerator(model) raises {in_short(error)}")
    brief = pattern in STRAYS
    return compared(model, generator, prompts(brief), NEW_TOKENS // 2 if brief else NEW_TOKENS)


def prompts(brief: bool = False) -> list[list[int]]:
    """Shared, nested, equal, of one token, and longer than a window or a chunk."""
    rng = random.Random(7)
    kinds = {"prefix": 2} if brief else {"prefix": 2, "nested": 3, "equal": 2, "one_token": 1, "window": 2}
    each = [prompt for kind, count in kinds.items() for prompt in random_prompts(rng, _IDS, kind, count)]
    return [[_FIRST_ID + token for token in prompt] for prompt in each]


def compared(
    model: PreTrainedModel, generator: BatchGenerator, rows: Sequence[Sequence[int]], new_tokens: int
) -> Outcome:
    error: Exception | None = None
    try:
        ours = generator.generate([list(row) for row in rows], max_new_tokens=new_tokens, logprobs=_TOP_LOGPROBS)
    except Exception as raised:
        error = raised
    finally:
        generator.close()
    try:
        theirs = {tuple(row): reference_steps(model, row, max_new_tokens=new_tokens) for row in rows}
        weak = _unfit(model, theirs)
    except Exception as raised:
        return Outcome(NOT_BUILT, f"model.generate raises {in_short(raised)}")
    if weak:
        return Outcome(NOT_BUILT, weak)
    if error is not None:
        return Outcome(LATE, f"generate() raises {in_short(error)}")
    worst, places, of_their_steps = 0.0, 0, 0.0
    for number, (row, answer) in enumerate(zip(rows, ours, strict=True)):
        tokens, logits = theirs[tuple(row)]
        steps = _difference_of_steps(model, row, tokens, logits)
        if steps > CLOSE / 10:  # the steps of generate() are not as exact as we are: one pass over its text is
            of_their_steps = max(of_their_steps, steps)
            logits = _in_one_pass(model, row, tokens)
        expected = logits.float().log_softmax(dim=-1)
        apart = gaps(logits) >= NEAR_TIE
        for place, token in enumerate(tokens):
            assert answer.logprobs is not None
            known = answer.logprobs[place] if place < len(answer.logprobs) else {}
            where = f"prompt {number} of {len(row)} tokens, new token {place}"
            difference = max((abs(value - float(expected[place, at])) for at, value in known.items()), default=0.0)
            worst, places = max(worst, difference), places + 1
            if not difference <= CLOSE:
                return Outcome(WRONG, f"a log-probability differs by {difference:.2g} ({where})", worst, places)
            if answer.token_ids[place : place + 1] != [token]:
                if apart[place]:
                    return Outcome(WRONG, f"another token ({where})", worst, places)
                break  # rounding decides, and all that follows is another text
    why = f"generate()'s own steps differ by {of_their_steps:.1g} from its pass over the text" if of_their_steps else ""
    return Outcome(EXACT, why, worst, places)


def _in_one_pass(model: PreTrainedModel, row: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """The logits of each new token, [tokens, vocabulary], without a cache."""
    return logits_of_rows(model, [[*row, *tokens]])[0][len(row) - 1 : -1]


def _difference_of_steps(
    model: PreTrainedModel, row: Sequence[int], tokens: Sequence[int], logits: torch.Tensor
) -> float:
    """By how much a log-probability of a likely token differs from one pass over all of the text.

    Asked of models whose layers carry a state alone: there ``generate`` runs another function for each token.
    """
    if not any(mixers(model)):
        return 0.0
    steps, whole = (each.float().log_softmax(dim=-1) for each in (logits, _in_one_pass(model, row, tokens)))
    likely = steps.topk(_TOP_LOGPROBS).indices
    return float((steps.gather(1, likely) - whole.gather(1, likely)).abs().max())


def _does_not_run(model: PreTrainedModel) -> str:
    """Why its own ``generate`` fails. The refusal of such a model may speak of its config alone."""
    try:
        reference_steps(model, prompts(brief=True)[0], max_new_tokens=2)
    except Exception as error:
        return f"model.generate raises {in_short(error)}"
    return ""


def _unfit(model: PreTrainedModel, theirs: dict[tuple[int, ...], tuple[list[int], torch.Tensor]]) -> str:
    """Why a comparison with these would prove nothing, if so."""
    row = max(theirs, key=len)
    logits = theirs[row][1]
    if not all(bool(each.isfinite().all()) for _, each in theirs.values()):
        return "its own logits are not finite"
    changed = [row[0], *(_FIRST_ID + (token + 11) % _IDS for token in row[1:-1]), row[-1]]
    moved = (reference_steps(model, changed, max_new_tokens=1)[1][0] - logits[0]).abs().max()
    if float(moved) < 10 * CLOSE:
        return f"its answers hardly depend on the prompt: the logits move by {float(moved):.2g}"
    close = sum(int((gaps(each) < NEAR_TIE).sum()) for _, each in theirs.values())
    if close > sum(map(len, (each for _, each in theirs.values()))) // 4:
        return "its best logits are too close to each other"
    return ""


def in_short(error: BaseException, case: Case | None = None) -> str:
    """On one line. A refusal without the class's name, which stands beside it."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    if case is not None:
        return text.replace(case.class_name, "it", 1)
    text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 200 else f"{text[:197]}..."
