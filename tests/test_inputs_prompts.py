"""What people pass in becomes checked ids; what cannot run is named with its index and the reason.

test_inputs_odd_prompts.py has more of both, as ``generate`` takes and names them.
"""

import gc
import subprocess
import sys

import numpy as np
import pytest
import torch

from hf_batchllm.errors import PromptError
from hf_batchllm.inputs.prompts import Prompt, check_prompts, prepare_prompts


class WordTokenizer:
    """Three ids for any text: enough to see what was encoded, how, and in how many calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, texts):
        self.calls += 1
        assert isinstance(texts, list)
        if "unreadable" in texts:
            raise ValueError("cannot read this\nbecause of that")
        return {"input_ids": [[1, len(text), 2] if text else [] for text in texts]}

    def apply_chat_template(self, chats, add_generation_prompt, tokenize, return_dict, continue_final_message=False):
        assert add_generation_prompt is not continue_final_message and tokenize and not return_dict
        self.calls += 1
        if any(chat[0]["role"] == "alien" for chat in chats):
            raise ValueError("Unknown role")
        return [[7] * len(chat) for chat in chats]


def ids_of(prompts, **options):
    return [prompt.ids.tolist() for prompt in prepare_prompts(prompts, **options)]


def reason(prompt, **options):
    """Why a prompt is refused, as the second of a list."""
    with pytest.raises(PromptError) as refused:
        prepare_prompts([[1], prompt], **options)
    assert list(refused.value.problems) == [1]
    return refused.value.problems[1]


CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 0, 7],
        (5, 0, 7),
        [np.int64(5), 0, np.uint8(7)],
        list(torch.tensor([5, 0, 7])),
        np.array([5, 0, 7]),
        np.array([5, 0, 7], np.uint16),
        np.array([5, 9, 0, 9, 7])[::2],
        torch.tensor([5, 0, 7]),
        torch.tensor([5, 0, 7], dtype=torch.int32),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_token_ids_of_every_kind_alone_and_in_a_list(prompt):
    assert ids_of(prompt) == [[5, 0, 7]]
    assert ids_of([prompt, [3]]) == [[5, 0, 7], [3]]
    assert ids_of((prompt, prompt)) == [[5, 0, 7]] * 2
    assert ids_of(iter([prompt, prompt])) == [[5, 0, 7]] * 2


def test_kinds_mix_and_strings_are_encoded_in_one_call():
    tokenizer = WordTokenizer()
    given = ["one", [4, 5], CHAT, torch.tensor([6]), "three", tuple(CHAT)]
    assert ids_of(given, tokenizer=lambda: tokenizer) == [[1, 3, 2], [4, 5], [7, 7], [6], [1, 5, 2], [7, 7]]
    assert tokenizer.calls == 2


def test_prompt_ids_are_read_only_int32_and_carry_the_key():
    source = np.array([5, 6], np.int32)
    for prompt in prepare_prompts([[5, 6], source, torch.tensor([5, 6])], key="adapter"):
        assert isinstance(prompt, Prompt) and prompt.key == "adapter" and len(prompt) == 2
        assert prompt.ids.dtype == np.int32
        assert not prompt.ids.flags.writeable
    source[0] = 9
    assert prepare_prompts([[5, 6]])[0].key is None


def test_tokenizer_is_loaded_once_and_only_for_text():
    loaded = []

    def load():
        loaded.append(True)
        return WordTokenizer()

    prepare_prompts([[1, 2]], tokenizer=load)
    assert not loaded
    prepare_prompts(["a", CHAT], tokenizer=load)
    assert loaded == [True]


def test_a_tokenizer_that_cannot_be_loaded_says_so_itself():
    def load():
        raise OSError("no tokenizer beside the model")

    with pytest.raises(OSError, match="beside the model"):
        prepare_prompts(["a"], tokenizer=load)


def test_many_strings_go_in_bounded_batches():
    tokenizer = WordTokenizer()
    assert len(prepare_prompts(["x"] * 2500, tokenizer=lambda: tokenizer)) == 2500
    assert tokenizer.calls == 3


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ({"role": "user", "content": "hello"}, "is a dict; a chat is a list of such messages"),
        (1.5, "is a float; a prompt is"),
        ((), "is empty"),
        (np.array([], np.int64), "is empty"),
        (torch.tensor([], dtype=torch.long), "is empty"),
        ([1, np.float32(2)], "at position 1, a float32; token ids are integers"),
        ([1, np.bool_(True)], "at position 1, a bool"),
        ([1, [2, 3]], "holds a list at position 1; the token ids of a prompt are a flat list"),
        ([torch.tensor([1, 2])], "holds a tensor at position 0; the token ids of a prompt are a flat list"),
        ([object()], "at position 0, an object; token ids are integers"),
        (np.array([1, -100]), "has token id -100 at position 1; token ids are not negative"),
        (torch.tensor([1, -100]), "has token id -100 at position 1; token ids are not negative"),
        ([1, 2**31], "has token id 2147483648 at position 1, which does not fit in 32 bits"),
        ([1, 2**80], "at position 1, which does not fit in 32 bits"),
        (np.array([2**40]), "at position 0, which does not fit in 32 bits"),
        (np.array([1.0, 2.0]), "is a NumPy array of float64; token ids are integers"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "is a tensor of torch.bfloat16; token ids are integers"),
        (torch.tensor([True]), "is a tensor of torch.bool; token ids are integers"),
        (np.array([[1, 2]]), "is a 2-D NumPy array; a padded tensor goes to generate"),
        ("text", "is a string, and there is no tokenizer: pass `tokenizer=`"),
        (CHAT, "is a chat, and there is no tokenizer: pass `tokenizer=`"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bad_prompt_is_named_with_the_reason(prompt, why):
    assert why in reason(prompt)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_ids_outside_the_vocabulary(kind):
    given = kind([1, 2, 3, 50300])
    assert reason(given, vocab_size=50257) == (
        "has token id 50300 at position 3, outside the model's vocabulary of 50257"
    )
    assert ids_of([given], vocab_size=50301) == [[1, 2, 3, 50300]]


def test_prompt_that_is_too_long():
    assert reason([1, 2, 3, 4], max_length=3) == "has 4 tokens, more than the 3 that fit"
    assert ids_of([[1, 2, 3]], max_length=3) == [[1, 2, 3]]


def test_a_tokenizer_whose_template_takes_no_options_says_so():
    class OldTokenizer(WordTokenizer):
        def apply_chat_template(self, chats, add_generation_prompt, tokenize, return_dict):
            return [[7] * len(chat) for chat in chats]

    assert ids_of([CHAT[:1]], tokenizer=OldTokenizer) == [[7]]
    why = reason(CHAT, tokenizer=OldTokenizer)
    assert "is a chat that the tokenizer refused" in why and "unexpected keyword argument 'continue_final" in why


def test_text_that_gives_no_ids_or_cannot_be_encoded_spares_the_others():
    alien = [{"role": "alien", "content": "?"}]
    checked, problems = check_prompts(["a", "", "unreadable", alien, "b"], tokenizer=WordTokenizer)
    assert [prompt is None for prompt in checked] == [False, True, True, True, False]
    assert problems == {
        1: "is an empty string, of which the tokenizer makes no tokens",
        2: "is a string that the tokenizer refused: cannot read this",
        3: "is a chat that the tokenizer refused: Unknown role",
    }


def test_every_bad_prompt_is_reported_at_once():
    checked, problems = check_prompts([[1], None, [2], [], [-1]])
    assert sorted(problems) == [1, 3, 4]
    assert [prompt is None for prompt in checked] == [False, True, False, True, True]
    with pytest.raises(ValueError, match="3 prompts cannot be run") as refused:
        prepare_prompts([[1], None, [2], [], [-1]])
    assert refused.value.problems == problems


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        (torch.zeros(2, 3, dtype=torch.long), "2-D tensor; a padded tensor goes to generate"),
        (np.zeros((2, 3), np.int64), "2-D NumPy array; a padded tensor goes to generate"),
        (torch.tensor(3), "0-D tensor"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_list_of_prompts_is_a_type_error(prompts, why):
    with pytest.raises(TypeError, match=why):
        prepare_prompts(prompts)


def test_garbage_collection_is_as_it_was():
    assert gc.isenabled()
    check_prompts([[1], None])
    assert gc.isenabled()
    gc.disable()
    try:
        check_prompts([[1]])
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_planning_does_not_import_torch():
    code = "import sys; from hf_batchllm import plan_prompts; plan_prompts([[1, 2]]); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "False"
