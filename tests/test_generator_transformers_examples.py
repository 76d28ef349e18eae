"""transformers' own examples of generation, out of the docstrings of the one that is installed, run as they stand.

What they load is a tiny model; every call that they make of ``generate`` is made twice, the second time under
``accelerated(model)``. A greedy call must give what it gave; a sampled one, the tokens at which the distributions that
``generate`` would draw from pass our noise.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_accelerated import reasons
from support_families import FAMILIES, gaps
from support_oracle import NEAR_EDGE, Noise
from support_parity import NEAR_TIE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer, PreTrainedModel, PreTrainedTokenizerFast

from hf_batchllm import accelerated

_MODULES = ("logits_process", "stopping_criteria", "streamers", "utils", "watermarking", "configuration_utils")
# What has to do with text and one model on a CPU; beyond it there are speech, images, diffusion and graphs.
_OTHER_KINDS = ("Whisper", "Musicgen", "Seq2Seq", "DiffusionGemma", ".cuda()")
_VOCABULARY = 50_257  # ids that the examples name are in it
_END = "<|endoftext|>"


@dataclass(frozen=True)
class Example:
    name: str
    source: str


def _examples() -> Iterator[Example]:
    for module in (importlib.import_module(f"transformers.generation.{name}") for name in _MODULES):
        for name, found in vars(module).items():
            if getattr(found, "__module__", None) != module.__name__:
                continue
            methods = (
                [each for each in vars(found).values() if inspect.isfunction(each)] if inspect.isclass(found) else []
            )
            for documented in (found, *methods):
                doc = inspect.getdoc(documented) or ""
                parts = doctest.DocTestParser().get_examples(doc)
                source = "".join(part.source for part in parts)
                if "generate(" in source and not any(kind in source for kind in _OTHER_KINDS):
                    yield Example(name if documented is found else f"{name}.{documented.__name__}", source)


EXAMPLES = list(_examples())


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and what the examples' own words merge to."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=[_END])
    # One example constrains a name that should take three tokens, another has twenty for a sentence.
    inner.train_from_iterator([each.source for each in EXAMPLES if "Marley" not in each.source], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=_END, bos_token=_END, pad_token=_END)
    made.model_input_names = ["input_ids", "attention_mask"]
    return made


@cache
def _model() -> PreTrainedModel:
    family = FAMILIES["llama"]
    model = replace(family, config={**family.config, "vocab_size": _VOCABULARY, "eos_token_id": 0, "bos_token_id": 1})()
    with torch.no_grad():  # ids that no token has do not come: they would have no text
        model.lm_head.weight[len(_tokenizer()) :] = 0
    model.generation_config.length_penalty = 1.0  # which an example counts with
    return model


class Twice:
    """The model, but that each call of ``generate`` is made twice and compared."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.said: list[str] = []
        self.calls = self.served = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            plain = self._model.generate(*args, **kwargs)
        with reasons() as said, accelerated(self._model), contextlib.redirect_stdout(io.StringIO()) as printed_again:
            fast = self._model.generate(*args, **kwargs)
            report = self._model.generate.last_report
            self.served += report is not None
        self.said += said
        assert type(fast) is type(plain)
        ours, theirs = (out if isinstance(out, torch.Tensor) else out.sequences for out in (fast, plain))
        if kwargs.get("do_sample"):
            self._check_drawn(ours, report.seed, args, kwargs)
        else:
            assert torch.equal(ours, theirs)
            assert printed_again.getvalue() == printed.getvalue()
        if not isinstance(fast, torch.Tensor) and not kwargs.get("do_sample"):
            for name in ("scores", "logits"):
                mine, others = getattr(fast, name), getattr(plain, name)
                assert (mine is None) == (others is None)
                if mine is not None:
                    torch.testing.assert_close(torch.stack(mine), torch.stack(others), atol=1e-4, rtol=1e-4)
        return fast

    def _check_drawn(self, ours: torch.Tensor, seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        prompt = kwargs.get("input_ids", args[0] if args else None)
        assert prompt is not None
        samples, steps = kwargs.get("num_return_sequences", 1), enumerate(ours[:, prompt.shape[1] :].T)
        ended = torch.zeros(len(ours), dtype=torch.bool)

        def as_ours(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
            step, tokens = next(steps)
            for row in (~ended).nonzero()[:, 0].tolist():
                token = int(tokens[row])
                asked: Any = SimpleNamespace(generated=range(step), sample=row % samples, index=row // samples)
                noise = Noise(seed, asked, probabilities.shape[1])
                assert noise.inside(probabilities[row : row + 1], token) > -NEAR_EDGE
                assert probabilities[row, token] > 0
            ended.logical_or_(tokens == 0)  # the EOS, and what fills up rows after it
            return tokens[:, None]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "multinomial", as_ours)
            again = self._model.generate(*args, **kwargs)
        assert torch.equal(again if isinstance(again, torch.Tensor) else again.sequences, ours)


@pytest.mark.some_cases
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_gives_what_it_gave(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = Twice(_model())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: twice)
    for kind in (AutoTokenizer, GPT2Tokenizer):
        monkeypatch.setattr(kind, "from_pretrained", lambda *_, **__: _tokenizer())
    exec(compile(example.source, example.name, "exec"), {})
    assert twice.calls == len(re.findall(r"model\.generate\(", example.source))
    assert not twice.said  # nothing goes to the model's own ``generate``
    assert twice.calls == twice.served


def test_the_examples_are_there() -> None:
    names = " ".join(example.name for example in EXAMPLES)
    assert len(EXAMPLES) >= 20
    for part in ("RepetitionPenalty", "SequenceBias", "PrefixConstrained", "StopString", "TextStreamer", "transition"):
        assert part in names


def test_what_the_examples_choose_is_not_left_to_rounding() -> None:
    inputs = _tokenizer()(["Today I", "A sequence: 1, 2, 3"][0], return_tensors="pt")
    out = _model().generate(**inputs, max_new_tokens=10, output_logits=True, return_dict_in_generate=True)
    assert gaps(torch.cat(out.logits)).min() > NEAR_TIE
