"""Rollouts of TRL's trainers: unchanged under ``accelerated``, by ``rollout_func`` and by ``RolloutMixin``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import FAMILIES
from support_fused import fusing as fusing  # a fixture
from support_fused import new_model
from support_kernels import INTERPRETED
from support_trl import COMPLETIONS, PROMPTS, STEPS, EachStep, greedy, odd, tokenizer, train, trainer, trl

from hf_batchllm import UnsupportedModelError, UnsupportedOptionError, accelerated
from hf_batchllm.patches.merged_weights import merged
from hf_batchllm.rollouts import RolloutMixin, Rollouts, rollout_func

CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]


def logprobs(trainer: Any, prompts: list[list[int]], answers: list[list[int]], temperature: float = 1.0) -> Any:
    """What the trainer's own forward pass says of answers of equal lengths."""
    ids = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    new = torch.tensor(answers)
    with torch.no_grad():
        logits = trainer.model(ids).logits[:, -new.shape[1] - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(2, new[..., None])[..., 0]


def test_rollouts_come_from_the_weights_of_the_step_and_say_how_likely_they_were(tmp_path: Path) -> None:
    """At a temperature, by which TRL divides logits in its own pass, too. The second step of a batch is off-policy."""

    def watched(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = rollouts(prompts, trainer)
        assert rollouts.last_report.sequences == len(prompts) == COMPLETIONS * len(set(prompts))
        expected = logprobs(trainer, output["prompt_ids"], output["completion_ids"], trainer.temperature)
        assert torch.allclose(torch.tensor(output["logprobs"]), expected, atol=1e-4)
        assert greedy(trainer.model, PROMPTS[0], own=True) not in said
        said.append(greedy(trainer.model, PROMPTS[0], own=True))
        return output

    rollouts, said = Rollouts(min_shared_tokens=1), []
    # No token ends a completion here: lengths are equal.
    options = {"temperature": 0.7, "generation_kwargs": {"eos_token_id": -1}, "learning_rate": 3e-2}
    made = trainer("GRPO", tmp_path, rollout_func=watched, **options)
    before = {name: weight.data_ptr() for name, weight in made.model.named_parameters()}
    assert len(train(made)) == len(said) == STEPS
    assert {name: weight.data_ptr() for name, weight in made.model.named_parameters()} == before


def test_prefixes_are_kept_for_as_long_as_the_weights_stay(tmp_path: Path) -> None:
    """And a prefix of other weights would show."""

    def watched(prompts: list[str], trainer: Any) -> dict[str, Any]:
        first = rollouts(prompts, trainer)
        assert rollouts.last_report.cached_tokens == 0
        again = rollouts(prompts, trainer)
        assert rollouts.last_report.cached_tokens > 0
        expected = logprobs(trainer, first["prompt_ids"][:1], again["completion_ids"][:1])[0]
        assert torch.allclose(torch.tensor(again["logprobs"][0]), expected, atol=1e-4)
        with torch.no_grad():
            seen.append(trainer.model(torch.tensor(first["prompt_ids"][:1])).logits[0, -1].log_softmax(-1))
        return first

    rollouts, seen = Rollouts(keep_prefixes=16, min_shared_tokens=4, page_size=4), []
    train(trainer("GRPO", tmp_path, rollout_func=watched, learning_rate=3e-2, prompts=PROMPTS[:2]))
    assert len(seen) == STEPS and (seen[1] - seen[0]).abs().max() > 0.1


def test_greedy_rollouts_are_those_of_the_trainer_itself_by_each_door(tmp_path: Path) -> None:
    """The optimizer has nothing to learn from equal samples, so weights are changed between the steps."""

    def run(faster: bool = False, **options: Any) -> list[Any]:
        def reward(completion_ids: Any, **rest: Any) -> list[float]:
            seen.append(completion_ids)
            return odd(completion_ids)

        def change() -> None:
            with torch.no_grad():
                made.model.lm_head.weight.copy_(made.model.lm_head.weight.roll(1, 0))

        seen: list[Any] = []
        more = {"generation_kwargs": {"do_sample": False}, "callbacks": [EachStep(change)]}
        made = trainer("GRPO", tmp_path, reward, **options, **more)
        with accelerated(made.model) if faster else nullcontext():
            logged = train(made)
        assert not faster or made.model.last_report is not None
        return [seen, [entry["reward"] for entry in logged]]

    expected = run()
    assert len(set(map(str, expected[0]))) == STEPS
    assert run(faster=True) == run(faster=True, use_transformers_continuous_batching=True) == expected
    assert run(rollout_func=rollout_func) == expected


def test_chats_are_encoded_as_the_trainer_encodes_them_and_equal_prompts_are_samples_of_one(tmp_path: Path) -> None:
    made = trainer("GRPO", tmp_path, rollout_func=rollout_func, prompts=CHATS)
    rollouts, asked = Rollouts(), [CHATS[place] for place in (0, 1, 0, 0, 2)]
    output = rollouts(asked, made)
    assert output["prompt_ids"] == tokenizer().apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    assert rollouts.last_report.sequences == 5
    assert [len(each) for each in output["logprobs"]] == [len(ids) for ids in output["completion_ids"]]
    for prompt, answer, found in zip(output["prompt_ids"], output["completion_ids"], output["logprobs"], strict=True):
        expected = logprobs(made, [prompt], [answer], made.temperature)[0]
        assert torch.allclose(torch.tensor(found), expected, atol=1e-4)
    assert len({tuple(output["completion_ids"][place]) for place in (0, 2, 3)}) > 1
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


def test_what_cannot_be_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = FAMILIES["llama"]()
    made = trainer("GRPO", tmp_path, model=model, rollout_func=rollout_func)
    made.use_vllm = True
    with pytest.raises(UnsupportedOptionError, match="`use_vllm` is True, and rollouts run on the trainer's own model"):
        rollout_func(PROMPTS[:1], made)
    made.use_vllm = False
    model.get_input_embeddings().weight.ds_id = 0  # as DeepSpeed marks the weights that it has spread
    spread = "several processes, by DeepSpeed's ZeRO-3: generate while they are gathered"
    with pytest.raises(UnsupportedModelError, match=spread):
        rollout_func(PROMPTS[:1], made)
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    with pytest.warns(UserWarning, match=r"tried with TRL 1\.16, and 1\.99"), pytest.raises(UnsupportedModelError):
        Rollouts()(PROMPTS[:1], made)
    made._tokenize_prompts = lambda prompts: ([[5]], [["an image"]], {})
    with pytest.raises(UnsupportedOptionError, match="`rollout_func` was given prompts with images"):
        rollout_func(PROMPTS[:1], made)


# -- under ``accelerated`` -------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "GRPO, continuous batching": {"use_transformers_continuous_batching": True},
    "RLOO": {},
    "RLOO, continuous batching": {"use_transformers_continuous_batching": True},
    "OnlineDPO": {},
}


@pytest.mark.some_cases
@pytest.mark.parametrize("name", KINDS)
def test_every_rollout_is_served_with_the_weights_of_its_step(name: str, tmp_path: Path) -> None:
    def reward(completion_ids: Any, **rest: Any) -> list[float]:
        model = made.model
        reports.append(model.last_report)
        ours, theirs = (greedy(model, PROMPTS[0], own) for own in (False, True))
        assert ours == theirs
        said.append(tuple(ours))
        return odd(completion_ids)

    reports: list[Any] = []
    said: list[tuple[int, ...]] = []
    made = trainer(name.split(",")[0], tmp_path, reward, **KINDS[name])
    with accelerated(made.model):
        logged = train(made)
    assert len(reports) == len(logged) == STEPS
    assert all(report is not None and report.finished == report.sequences > 1 for report in reports)
    assert len(set(said)) > 1  # the optimizer has changed the model
    assert not vars(made.model).keys() & {"generate", "generate_batch", "init_continuous_batching"}


def test_weights_that_are_spread_over_processes_go_the_trainers_own_way(tmp_path: Path) -> None:
    made = trainer("GRPO", tmp_path, max_steps=1)
    with accelerated(made.model):
        made.model.get_input_embeddings().weight.ds_id = 0  # as DeepSpeed marks them
        why = "the model's own generate runs instead: .* spread over several processes, by DeepSpeed's ZeRO-3"
        with pytest.warns(UserWarning, match=why):
            made.train()
        assert made.model.last_report is None and made.state.global_step == 1


@pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")
def test_weights_laid_end_to_end_are_trained(fusing: list[int], tmp_path: Path) -> None:
    """As on a GPU, where the weights of several products lie in one piece of memory for as long as the block runs."""

    def reward(completion_ids: Any, **rest: Any) -> list[float]:
        assert merged([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
        ours, theirs = (greedy(made.model, PROMPTS[0], own) for own in (False, True))
        assert ours == theirs
        weights.append(attention.q_proj.weight.detach().clone())
        return odd(completion_ids)

    weights: list[torch.Tensor] = []
    made = trainer("GRPO", tmp_path, reward, new_model())
    attention = made.model.model.layers[1].self_attn
    with accelerated(made.model, page_size=16):
        train(made)
    assert len(weights) == STEPS and not torch.equal(weights[0], weights[1])


def test_adapters_in_training(tmp_path: Path) -> None:
    """Begun on the model that the trainer was given: its adapter comes into that."""
    peft = pytest.importorskip("peft")

    def reward(completion_ids: Any, **rest: Any) -> list[float]:
        reports.append(model.last_report)
        ours, theirs = (greedy(made.model, PROMPTS[0], own) for own in (False, True))
        assert ours == theirs
        said.append(tuple(ours))
        return odd(completion_ids)

    reports: list[Any] = []
    said: list[tuple[int, ...]] = []
    model: Any = FAMILIES["llama"]()
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    options = {"peft_config": lora, "gradient_checkpointing": True, "learning_rate": 0.1}
    with accelerated(model):
        made = trainer("GRPO", tmp_path, reward, model, **options)
        train(made)
    assert len(reports) == STEPS and None not in reports and len(set(said)) > 1
    left = {name.replace(".base_layer", ""): weight for name, weight in model.named_parameters() if "lora" not in name}
    assert all(torch.equal(weight, left[name]) for name, weight in weights.items())
    assert all(weight.dtype is torch.float32 for weight in model.parameters())


# -- turns between calls of tools ------------------------------------------------------------------------------


def look_up() -> str:
    """Looks something up."""
    return "w30 w31 w32"


class Library:
    """An environment."""

    def reset(self, **row: Any) -> str:
        return " w33"

    def look_up(self) -> str:
        """Looks something up."""
        return "w30 w31 w32"


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options", [{"tools": [look_up]}, {"environment_factory": Library}], ids=["tools", "environment"]
)
def test_every_turn_is_served(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(made: Any, ids: list[int], prefix: list[int], tools: Any) -> dict[str, Any]:
        """Every first answer calls a tool: those of the tiny model mean nothing."""
        message = {"role": "assistant", "content": made.decode(ids)}
        if 30 not in prefix:
            message["tool_calls"] = [{"type": "function", "function": {"name": "look_up", "arguments": {}}}]
        return message

    monkeypatch.setattr(trl.trainer.grpo_trainer, "parse_response", parsed)
    for asked in ("is_chat_template_prefix_preserving", "supports_tool_calling"):  # of a real chat template
        monkeypatch.setattr(trl.trainer.grpo_trainer, asked, lambda made: True)

    def run(made_of: type) -> tuple[list[Any], list[Any]]:
        def reward(completion_ids: Any, completions: Any, **rest: Any) -> list[float]:
            seen.append((completion_ids, completions))
            return odd(completion_ids)

        seen: list[Any] = []
        encoder = tokenizer()
        encoder.response_template = "made up"
        turns = {"do_sample": False, "max_new_tokens": 4}  # each; with what tools say there are 20 at most
        more = {"generation_kwargs": turns, "max_completion_length": 20, "processing_class": encoder, "prompts": CHATS}
        return seen, train(trainer("GRPO", tmp_path, reward, made=made_of, **more, **options))

    class Trainer(RolloutMixin, trl.GRPOTrainer):
        rollouts = Rollouts(min_shared_tokens=1)

        def _generate_single_turn(self, prompt_ids: Any, *given: Any, **named: Any) -> Any:
            turn = super()._generate_single_turn(prompt_ids, *given, **named)
            reports.append(self.rollouts.last_report)
            return turn

    reports: list[Any] = []
    expected, _ = run(trl.GRPOTrainer)
    seen, logged = run(Trainer)
    assert seen == expected
    assert len(seen) == len(logged) == STEPS and len(reports) == 2 * STEPS
    assert all(entry["tools/call_frequency"] == 1 for entry in logged)
    assert [message["role"] for message in seen[0][1][0]] == ["assistant", "tool", "assistant"]


def test_prompts_with_images_go_the_trainers_own_way_with_one_warning() -> None:
    class Other:
        def _generate_single_turn(self, prompt_ids: Any, images: Any, fields: Any, count: int, **more: Any) -> Any:
            return "its own", prompt_ids, images, count, more

    class Trainer(RolloutMixin, Other):
        pass

    def turn() -> Any:
        return Trainer()._generate_single_turn([[5]], [["an image"]], {}, 2, has_tool_images=False)

    with pytest.warns(UserWarning, match="prompts with images are not supported: the trainer's own generation") as said:
        found = [turn(), turn()]
    assert found == [("its own", [[5]], [["an image"]], 2, {"has_tool_images": False})] * 2 and len(said) == 1
