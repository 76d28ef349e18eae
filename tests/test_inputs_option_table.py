"""Every option of ``model.generate`` has a fate: what the table says is what happens, and is what the docs say."""

from __future__ import annotations

import copy
import inspect
import pydoc
import re
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from support_families import FAMILIES, build
from support_untouched import never_runs as never_runs  # a fixture
from support_word_tokenizer import word_tokenizer
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    TextStreamer,
    WatermarkingConfig,
)

import hf_batchllm
from hf_batchllm import BatchGenerator, UnsupportedOptionError, run_file
from hf_batchllm.errors import OptionValueError
from hf_batchllm.inputs import option_docs
from hf_batchllm.inputs import resolve_options as resolving
from hf_batchllm.inputs.call_arguments import CALL_ARGUMENTS
from hf_batchllm.inputs.named_options import GenerateOptions
from hf_batchllm.inputs.option_row import Fate, OptionKind, OptionRow, PromptForm
from hf_batchllm.inputs.option_table import ALIASES, GRAMMAR_OPTIONS, PROMPT_OPTIONS, TABLE, names
from hf_batchllm.inputs.options import Options
from hf_batchllm.inputs.resolve_options import resolve_each, resolve_options
from hf_batchllm.notices import Notices

FAMILY = "llama"
IDS = [5, 6, 7]
TENSOR = torch.tensor([[5, 6, 7], [8, 9, 10]])

# A value of each option that is refused, and of each that does not go with every kind of prompts.
REFUSED: dict[str, Any] = {
    "assistant_ensemble_weight": 0.5,
    "constraints": [object()],
    "custom_generate": "transformers-community/dola",
    "diversity_penalty": 0.5,
    "dola_layers": "high",
    "force_words_ids": [[5]],
    "inputs_embeds": torch.zeros(1, 2, 4),
    "is_assistant": True,
    "num_beam_groups": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "past_key_values": object(),
    "penalty_alpha": 0.6,
    "position_ids": TENSOR,
    "synced_gpus": True,
    "token_healing": True,
    "token_type_ids": torch.ones(2, 3),
    "trust_remote_code": True,
}
FOR_TENSORS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
FOR_LISTS: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
    "logprobs": 0,
    "max_prompt_tokens": 5,
    "prompt_logprobs": 3,
    "tools": [],
    "truncation_side": "left",
}
IDLE: dict[str, Any] = {
    "assistant_confidence_threshold": 0.5,
    "assistant_early_exit": 1,
    "assistant_lookbehind": 5,
    "assistant_tokenizer": object(),
    "bos_token_id": 5,
    "cache_config": {"backend": "quanto"},
    "cache_implementation": "offloaded",
    "compile_config": None,
    "continuous_batching_config": {},
    "decoder_start_token_id": 5,
    "disable_compile": True,
    "low_memory": True,
    "max_cache_len": 100,
    "num_assistant_tokens_schedule": "heuristic",
    "prefill_chunk_size": 2,
    "speculation_type": "dflash",
    "target_lookbehind": 5,
    "transformers_version": "4.0",
    "use_cache": False,
    "use_mtp": True,
}


@pytest.fixture(scope="module")
def generator() -> BatchGenerator:
    return BatchGenerator(build(FAMILY))


def resolve(config: Any = None, notices: Notices | None = None, **asked: Any) -> Options:
    return resolve_options(build(FAMILY), config, {"max_new_tokens": 2, **asked}, notices=notices)


def every(fate: Fate) -> list[str]:
    return sorted(names(fate=fate))


# -- the table is whole ----------------------------------------------------------------------------------------


def test_every_option_of_transformers_is_in_the_table() -> None:
    """If this fails, transformers has grown: look at what is new in its source, then give it a row."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields == names(kind=OptionKind.FIELD)
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    model: Any = build(FAMILY)
    arguments |= set(model._extract_generation_mode_kwargs(None, {"tokenizer": 1, "assistant_tokenizer": 1}, 1, 1, 1))
    assert arguments <= names(kind=OptionKind.ARGUMENT)
    popped = re.findall(r"kwargs\.pop\(\"(\w+)\"", inspect.getsource(GenerationMixin.generate))
    assert "trust_remote_code" in popped and set(popped) <= names(kind=OptionKind.ARGUMENT)


def test_our_own_arguments_are_in_the_table_too() -> None:
    written = inspect.signature(BatchGenerator.generate).parameters
    named = set(written) - {"self", "generate_kwargs"} - names(kind=OptionKind.FIELD)
    settled = {row.name for row in TABLE.values() if row.in_config}
    taken = named | settled | {*CALL_ARGUMENTS, *PROMPT_OPTIONS, *GRAMMAR_OPTIONS}
    tensors = {"inputs", "input_ids", "attention_mask"}
    assert taken | tensors == names(fate=Fate.HONOURED) - names(kind=OptionKind.FIELD)
    transformers_own = {*inspect.signature(GenerationMixin.generate).parameters, *CALL_ARGUMENTS, "generation_config"}
    ours = {"prompts", "seed", "on_error", "progress", "adapter", "logprobs", "prompt_logprobs"}
    assert names(kind=OptionKind.ADDED) == (taken - tensors - transformers_own) | ours


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_a_row_says_what_its_fate_needs(row: OptionRow) -> None:
    assert row == TABLE[row.name]
    assert row.fate in Fate and row.chapter
    assert (row.where is None) or row.fate is Fate.HONOURED
    if row.fate is Fate.REFUSED:  # it goes on after the name, and ends in what can be done
        assert row.doc.split()[0] in ("is", "has") and not row.doc.endswith(".")
        assert any(what in row.doc.lower() for what in ("leave it out", "pass ", "call the model's", "run the model"))
    if row.fate is Fate.NO_EFFECT:
        assert row.doc or row.chapter in ("Speculation", "How transformers would run")  # which say it of all
    if row.goes_with is not PromptForm.ANY and row.chapter != "Prompts and settings":
        assert row.instead.startswith("goes with ")


def test_every_fate_has_examples() -> None:
    assert set(REFUSED) == names(fate=Fate.REFUSED)
    assert set(IDLE) == names(fate=Fate.NO_EFFECT)
    assert set(FOR_TENSORS) | set(FOR_LISTS) == {row.name for row in TABLE.values() if row.instead}


# -- what editors complete and ``help`` shows --------------------------------------------------------------------

BY_HAND = {"prompts", "generation_config", "input_ids", "attention_mask", "seed", "on_error", "progress"}


def test_every_option_has_a_type() -> None:
    taken = names(fate=Fate.HONOURED) | names(fate=Fate.NO_EFFECT) | set(ALIASES) | {"top_logprobs"}
    assert set(GenerateOptions.__annotations__) == taken - BY_HAND, "give a new option its type in option_chapters.py"
    assert get_type_hints(GenerateOptions)["inputs"] == torch.Tensor | None  # as checkers of types at run time ask


@pytest.mark.parametrize("function", [BatchGenerator.generate, BatchGenerator.stream, run_file])
def test_a_signature_names_what_people_type_most(function: object) -> None:
    assert callable(function)
    parameters = inspect.signature(function).parameters
    for name in ("max_new_tokens", "do_sample", "temperature", "num_return_sequences", "logprobs", "adapter"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert repr(parameters[name].default) == "<left out>"
    assert set(parameters) - {"self", "gen", "source", "target", "settings", "generate_kwargs"} <= {
        *TABLE,
        *inspect.getfullargspec(inspect.unwrap(function)).kwonlyargs,
    }


def test_an_option_that_is_left_out_is_not_passed_on() -> None:
    model = build("llama")
    before = model.generation_config
    model.generation_config = type(before)(max_new_tokens=3, eos_token_id=before.eos_token_id)
    try:
        assert len(BatchGenerator(model).generate([[5, 6]], eos_token_id=None)[0].token_ids) == 3
    finally:
        model.generation_config = before


@pytest.mark.parametrize("name", sorted(set(hf_batchllm.__all__) - {"__version__"}))
def test_help_shows_nothing_that_nobody_could_type(name: str) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(hf_batchllm, name)))
    assert "object at 0x" not in text


# -- refused ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize("name", every(Fate.REFUSED))
@pytest.mark.parametrize("prompts", [[IDS], TENSOR], ids=["list", "tensors"])
def test_what_is_refused_says_why_and_what_to_do(generator: BatchGenerator, name: str, prompts: Any) -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        generator.generate(prompts, max_new_tokens=2, **{name: REFUSED[name]})
    assert caught.value.option == name
    assert not isinstance(caught.value, OptionValueError)  # it is no mistake
    if name != "token_type_ids":  # of which it depends on the model and the values
        assert str(caught.value).startswith(f"`{name}` {TABLE[name].doc}")


@pytest.mark.parametrize("name", sorted(set(REFUSED) & names(kind=OptionKind.FIELD)))
def test_what_is_refused_is_refused_in_a_config_and_in_a_checkpoint_too(name: str) -> None:
    says = rf"`{name}` .*\(it is set to "
    with pytest.raises(UnsupportedOptionError, match=says):
        resolve(GenerationConfig(**{name: REFUSED[name]}))
    model = FAMILIES[FAMILY]()
    setattr(model.generation_config, name, REFUSED[name])
    with pytest.raises(UnsupportedOptionError, match=says):
        resolve_options(model, None, {"max_new_tokens": 2})


@pytest.mark.parametrize("name", every(Fate.REFUSED))
def test_what_is_refused_may_be_set_to_nothing(name: str) -> None:
    nothing = [None, TABLE[name].neutral]
    if name not in ("assistant_ensemble_weight", "token_type_ids"):  # a number, and tensors
        nothing.append(False)
    if name in ("constraints", "force_words_ids", "past_key_values"):
        nothing += [[], ()]
    for value in nothing:
        resolve(**{name: value})


@pytest.mark.usefixtures("never_runs")
def test_what_goes_with_one_kind_of_prompts_alone_points_to_the_other(generator: BatchGenerator) -> None:
    wrong: list[tuple[Any, dict[str, Any]]] = [([IDS], FOR_TENSORS), (TENSOR, FOR_LISTS)]
    for prompts, given in wrong:
        for name, value in given.items():
            with pytest.raises(UnsupportedOptionError) as caught:
                generator.generate(prompts, max_new_tokens=2, **{name: value})
            assert str(caught.value) == f"`{name}` {TABLE[name].instead}"
    with pytest.raises(
        UnsupportedOptionError, match="`generation_config` is a list, which goes with a list of prompts"
    ):
        generator.generate(TENSOR, [GenerationConfig(), GenerationConfig()])


def test_a_checkpoints_own_kind_of_output_does_not_concern_a_list() -> None:
    model = FAMILIES[FAMILY]()
    for name in FOR_TENSORS:
        setattr(model.generation_config, name, True)
    resolved = resolve_options(model, GenerationConfig(return_dict_in_generate=True), {"max_new_tokens": 2})
    assert not any(getattr(resolved.config, name) for name in FOR_TENSORS)


def test_an_option_that_is_newer_than_the_table_is_refused_unless_it_asks_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = GenerationConfig.__init__

    def grown(self: Any, **given: Any) -> None:
        self.wisdom = given.pop("wisdom", None)
        before(self, **given)

    monkeypatch.setattr(GenerationConfig, "__init__", grown)
    monkeypatch.setattr(resolving, "_FIELDS", [*resolving._FIELDS, "wisdom"])
    resolve()
    resolve(wisdom=None)
    with pytest.raises(UnsupportedOptionError, match=r"`wisdom` is an option of transformers 5\..* \(it is set to 3\)"):
        resolve(wisdom=3)
    default = GenerationConfig._get_default_generation_params
    monkeypatch.setattr(GenerationConfig, "_get_default_generation_params", lambda *_: {**default(), "wisdom": 3})
    resolve(wisdom=3)


def test_an_argument_that_is_newer_than_the_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(self: Any, inputs: Any = None, oracle: Any = None, **given: Any) -> None: ...

    monkeypatch.setattr(type(build(FAMILY)), "generate", generate)
    resolve(oracle=None)
    with pytest.raises(UnsupportedOptionError, match=r"`oracle` is an option of transformers 5\..*: leave it out, or"):
        resolve(oracle=object())


# -- without effect --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_effect_is_accepted_and_has_none(generator: BatchGenerator) -> None:
    for name, value in IDLE.items():
        resolve(**{name: value})
    plain = generator.generate([IDS, [8, 9]], max_new_tokens=3).token_ids
    assert generator.generate([IDS, [8, 9]], max_new_tokens=3, **IDLE).token_ids == plain


def test_speculation_that_a_call_asks_for_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    generator = BatchGenerator(build(FAMILY))
    for _ in range(2):
        generator.generate([IDS], max_new_tokens=2, assistant_lookbehind=3, assistant_tokenizer=object())
    (said,) = [str(each.message) for each in recwarn if "speculation" in str(each.message)]
    assert said.startswith("`assistant_lookbehind` and `assistant_tokenizer` have no effect")
    with pytest.warns(UserWarning, match="`use_mtp` has no effect: speculation"):
        resolve(GenerationConfig(use_mtp=True))


@pytest.mark.filterwarnings("ignore")
def test_speculation_gives_what_generate_gives_with_it() -> None:
    model: Any = build(FAMILY)
    ids = torch.tensor([[5, 6, 5, 6, 5]])
    for asked in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}, {"assistant_early_exit": 1}):
        call = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **asked}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **call)
        assert torch.equal(BatchGenerator(model).generate(ids, **call), expected)


def test_speculation_that_a_checkpoint_asks_for_is_nobodys_mistake(recwarn: pytest.WarningsRecorder) -> None:
    model = FAMILIES[FAMILY]()
    model.generation_config.num_assistant_tokens = 3
    for config in (None, copy.deepcopy(model.generation_config)):
        resolve_options(model, config, {"max_new_tokens": 2, "use_mtp": False, "assistant_model": None})
    assert not [each for each in recwarn if "speculation" in str(each.message)]


def test_a_flag_that_is_0_asks_for_nothing(recwarn: pytest.WarningsRecorder) -> None:
    resolve(output_scores=0, output_logits=0, return_dict_in_generate=0)
    assert not [each for each in recwarn if "no effect" in str(each.message)]


def test_scores_without_a_dict_to_put_them_in_are_said_to_have_no_effect(generator: BatchGenerator) -> None:
    with pytest.warns(UserWarning, match="`output_scores` and `output_logits` have no effect without"):
        got = generator.generate(TENSOR, max_new_tokens=2, output_scores=True, output_logits=True)
    assert isinstance(got, torch.Tensor)


@pytest.mark.parametrize("name", [row.name for row in TABLE.values() if row.sampling_only])
def test_settings_of_sampling_are_said_to_have_no_effect_on_greedy_decoding(name: str) -> None:
    with pytest.warns(UserWarning, match=f"`{name}` has no effect on greedy decoding"):
        resolve(**{name: 0.25 if name != "top_k" else 5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(**{name: TABLE[name].neutral})


@pytest.mark.parametrize("name", ["top_p", "typical_p", "epsilon_cutoff", "eta_cutoff"])
def test_a_probability_beyond_one_is_said_to_have_no_effect(name: str) -> None:
    with pytest.warns(UserWarning, match=f"`{name}` is 1.5, and has no effect: it is a probability"):
        resolve(do_sample=True, **{name: 1.5})


# -- values ----------------------------------------------------------------------------------------------------


WARPER = TemperatureLogitsWarper(2.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "given",
    [
        {"stop_strings": "w5", "tokenizer": word_tokenizer()},
        {"stop_strings": ("w5", "w6"), "max_time": 5},
        {"logprobs": 0, "prompt_logprobs": 2},
        {"logits_processor": LogitsProcessorList([WARPER]), "stopping_criteria": StoppingCriteriaList()},
        {"logits_processor": (WARPER, lambda ids, scores: scores), "stopping_criteria": [lambda ids, scores: True]},
        {"logits_processor": lambda index, prompt_token_ids: [], "stopping_criteria": lambda index, ids: []},
        {"prefix_allowed_tokens_fn": lambda batch_id, ids: [5], "streamer": TextStreamer(word_tokenizer())},
        {"negative_prompt_ids": TENSOR, "negative_prompt_attention_mask": TENSOR, "guidance_scale": 1.5},
        {"suppress_tokens": (7, 8), "begin_suppress_tokens": torch.tensor([5]), "forced_eos_token_id": [5, 6]},
        {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 5, "remove_invalid_values": True},
        {"watermarking_config": {"bias": 2.5}, "encoder_repetition_penalty": 1},
        {"watermarking_config": WatermarkingConfig(), "no_repeat_ngram_size": 0},
        {"do_sample": True, "top_h": 0.5, "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 1e-3},
    ],
    ids=" ".join,
)
def test_right_values_are_taken(given: dict[str, Any]) -> None:
    resolved = resolve(**given)
    for name, value in given.items():
        if name in CALL_ARGUMENTS:
            assert getattr(resolved.arguments, name) is value


# -- a config for each prompt ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eos_token_id", "suppress_tokens", "begin_suppress_tokens"])
@pytest.mark.parametrize("of", [np.array, torch.tensor])
def test_a_config_may_hold_ids_in_an_array(name: str, of: Any, generator: BatchGenerator) -> None:
    expected = generator.generate([IDS], GenerationConfig(max_new_tokens=4, **{name: [5, 17]}))
    configs = [GenerationConfig(max_new_tokens=4, **{name: of([5, 17])}) for _ in range(2)]
    assert generator.generate([IDS], configs[0]).token_ids == expected.token_ids
    first, second = resolve_each(build(FAMILY), configs, {})
    assert first is second


def test_prompts_with_equal_configs_share_their_options() -> None:
    def config(temperature: float) -> GenerationConfig:
        keys = {"ngram_len": 3, "keys": [1, 2, 3]}
        return GenerationConfig(
            max_new_tokens=5,
            do_sample=True,
            temperature=temperature,
            watermarking_config=SynthIDTextWatermarkingConfig(**keys),
            sequence_bias={(5, 6): 1.0},
            eos_token_id=torch.tensor([2, 3]),
        )

    resolved = resolve_each(build(FAMILY), [config((0.5, 0.7, 0.9)[place % 3]) for place in range(30)], {})
    assert len(resolved) == 30 and len(set(resolved)) == 3
    assert [each.config.temperature for each in resolved[:4]] == [0.5, 0.7, 0.9, 0.5]
    assert resolved[0] is resolved[3]


def test_values_that_are_equal_but_not_the_same_are_told_apart() -> None:
    with pytest.raises(OptionValueError, match=r"generation_config\[1\]: `repetition_penalty` must be a float.*not 2"):
        resolve_each(build(FAMILY), [GenerationConfig(max_length=9, repetition_penalty=each) for each in (2.0, 2)], {})
    biases = [{(5,): 1.0}, {(5,): 2.0}, {(6,): 1.0}]
    configs = [GenerationConfig(max_new_tokens=2, sequence_bias=each) for each in biases]
    assert len(set(resolve_each(build(FAMILY), configs, {}))) == 3


@pytest.mark.parametrize(
    ("configs", "asked", "says"),
    [
        ([GenerationConfig(), None], {}, "`generation_config[1]` must be a transformers.GenerationConfig, not None"),
        ([GenerationConfig(), {}], {}, "`generation_config[1]` must be a transformers.GenerationConfig, not a dict"),
        ([GenerationConfig(), GenerationConfig(token_healing=True)], {}, "generation_config[1]: `token_healing`"),
        ([GenerationConfig(do_sample=True, top_k=-1)], {}, "generation_config[0]: `top_k` must be at least 0"),
        ([GenerationConfig()], {"max_new_token": 3}, "`max_new_token` is not an option of generate; did you mean"),
        ([GenerationConfig()], {"logprobs": -1}, "`logprobs` must be a whole number"),
        ([GenerationConfig()] * 2, {"token_healing": True}, "`token_healing` is not supported"),
    ],
)
@pytest.mark.filterwarnings("ignore:no length")
def test_the_config_that_is_wrong_is_named(configs: list[Any], asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        resolve_each(build(FAMILY), configs, asked)


# -- the documentation -----------------------------------------------------------------------------------------


PAGE = (Path(__file__).parent.parent / "docs" / "generate.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    """If this fails: python -m hf_batchllm.inputs.option_docs docs/generate.md"""
    assert option_docs.renewed(PAGE) == PAGE
    for alias, name in ALIASES.items():
        assert f"`{alias}`" in PAGE and f"(`{name}`)" in PAGE, alias


def test_every_option_is_on_the_page_once() -> None:
    cells = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `")]
    named = [name.split("`")[1] for cell in cells for name in cell.split(", ")]
    assert sorted(named) == sorted(TABLE)
