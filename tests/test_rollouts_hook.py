"""``rollout_func`` in TRL's GRPOTrainer: each step's completions, with the log-probabilities they were drawn with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import FAMILIES
from support_trl import COMPLETIONS, LENGTH, PROMPTS, STEPS, EachStep, greedy, odd, tokenizer, train, trainer

from hf_batchllm import UnsupportedModelError, UnsupportedOptionError
from hf_batchllm.rollouts import Rollouts, rollout_func
from hf_batchllm.rollouts.equal_prompts import EqualPrompts


def test_rollouts_come_from_the_weights_of_the_step_and_say_how_likely_they_were(tmp_path: Path) -> None:
    """At a temperature, by which TRL divides logits in its own pass, too. The second step of a batch is off-policy."""

    def watched(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = rollouts(prompts, trainer)
        assert rollouts.last_report.sequences == len(prompts) == COMPLETIONS * len(set(prompts))
        ids = [prompt + new for prompt, new in zip(output["prompt_ids"], output["completion_ids"], strict=True)]
        with torch.no_grad():  # none of them has ended early
            logits = trainer.model(torch.tensor(ids)).logits[:, -LENGTH - 1 : -1] / trainer.temperature
        new = torch.tensor(output["completion_ids"])
        expected = logits.log_softmax(-1).gather(2, new[..., None])[..., 0]
        assert torch.allclose(torch.tensor(output["logprobs"]), expected, atol=1e-4)
        assert greedy(trainer.model, PROMPTS[0], own=True) not in said
        said.append(greedy(trainer.model, PROMPTS[0], own=True))
        return output

    rollouts, said = Rollouts(min_shared_tokens=1), []
    # No token ends a completion here: lengths are equal.
    options = {"temperature": 0.7, "generation_kwargs": {"eos_token_id": -1}, "learning_rate": 3e-2}
    made = trainer("GRPO", tmp_path, rollout_func=watched, **options)
    before = {name: weight.data_ptr() for name, weight in made.model.named_parameters()}
    logged = train(made)
    assert len(said) == len(logged) == STEPS
    assert {name: weight.data_ptr() for name, weight in made.model.named_parameters()} == before


def test_prefixes_are_kept_for_as_long_as_the_weights_stay(tmp_path: Path) -> None:
    """And a prefix of other weights would show."""

    def watched(prompts: list[str], trainer: Any) -> dict[str, Any]:
        first = rollouts(prompts, trainer)
        assert rollouts.last_report.cached_tokens == 0
        again = rollouts(prompts, trainer)
        assert rollouts.last_report.cached_tokens > 0
        prompt, new = first["prompt_ids"][0], again["completion_ids"][0]
        with torch.no_grad():
            logits = trainer.model(torch.tensor([prompt + new])).logits[0, -len(new) - 1 : -1]
            last = trainer.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(new)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(again["logprobs"][0]), expected, atol=1e-4)
        seen.append(last)
        return first

    rollouts, seen = Rollouts(keep_prefixes=16, min_shared_tokens=4, page_size=4), []
    made = trainer("GRPO", tmp_path, rollout_func=watched, learning_rate=3e-2, prompts=PROMPTS[:2])
    train(made)
    assert len(seen) == STEPS and (seen[1] - seen[0]).abs().max() > 0.1


def test_greedy_rollouts_are_those_of_the_trainer_itself(tmp_path: Path) -> None:
    def run(**options: Any) -> list[Any]:
        def reward(completion_ids: Any, **rest: Any) -> list[float]:
            seen.append(completion_ids)
            return odd(completion_ids)

        def change() -> None:
            with torch.no_grad():
                made.model.lm_head.weight.copy_(made.model.lm_head.weight.roll(1, 0))

        seen: list[Any] = []
        more = {"generation_kwargs": {"do_sample": False}, "callbacks": [EachStep(change)]}
        made = trainer("GRPO", tmp_path, reward, **options, **more)
        train(made)
        return seen

    assert run(rollout_func=rollout_func) == run()


def test_chats_are_encoded_as_the_trainer_encodes_them(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    made = trainer("GRPO", tmp_path, rollout_func=rollout_func, prompts=chats)
    output = rollout_func(chats[:2], made)
    encoded = tokenizer().apply_chat_template(chats[:2], add_generation_prompt=True)["input_ids"]
    assert output["prompt_ids"] == encoded
    assert [len(logprobs) for logprobs in output["logprobs"]] == [len(ids) for ids in output["completion_ids"]]
    train(made)


def test_adapters_and_log_probabilities_that_nobody_wants(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    rollouts = Rollouts(logprobs=False)
    made = trainer("GRPO", tmp_path, rollout_func=rollouts, peft_config=lora, gradient_checkpointing=True)
    assert rollouts(PROMPTS[:1], made)["logprobs"] is None
    assert len(train(made)) == STEPS and rollouts.last_report.sequences == 4
    assert made.model.is_gradient_checkpointing  # which was off for the rollouts alone


def test_a_model_that_the_trainer_compiles(tmp_path: Path) -> None:
    made = trainer("GRPO", tmp_path, rollout_func=rollout_func, generation_kwargs={"do_sample": False})
    expected = greedy(made.model, PROMPTS[0], own=True)
    made.model_wrapped = torch.compile(made.model, backend="eager")
    with pytest.warns(UserWarning, match="is compiled with torch.compile"):
        output = rollout_func(PROMPTS[:1], made)
    assert output["completion_ids"] == [expected]


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    model: Any = FAMILIES["llama"]()
    made = trainer("GRPO", tmp_path, model=model, rollout_func=rollout_func)
    made.use_vllm = True
    with pytest.raises(UnsupportedOptionError, match="`use_vllm` is True, and rollouts run on the trainer's own model"):
        rollout_func(PROMPTS[:1], made)
    made.use_vllm = False
    model.get_input_embeddings().weight.ds_id = 0  # as DeepSpeed marks the weights that it has spread
    with pytest.raises(
        UnsupportedModelError, match="several processes, by DeepSpeed's ZeRO-3: generate while they are gathered"
    ):
        rollout_func(PROMPTS[:1], made)
    made._tokenize_prompts = lambda prompts: ([[5]], [["an image"]], {})
    with pytest.raises(UnsupportedOptionError, match="`rollout_func` was given prompts with images"):
        rollout_func(PROMPTS[:1], made)


def test_equal_prompts_are_samples_of_one_wherever_they_stand() -> None:
    equal = EqualPrompts.of([[1, 2], [3], [1, 2], [1, 2], [4]])
    assert equal.prompts == [[1, 2], [3], [4]] and equal.places == [[0, 2, 3], [1], [4]]
