"""TRL's trainers run unchanged under ``accelerated``: rollouts are served, and each sees the weights of its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import FAMILIES
from support_fused import fusing as fusing  # a fixture
from support_fused import new_model
from support_kernels import INTERPRETED
from support_trl import PROMPTS, STEPS, EachStep, greedy, odd, train, trainer

from hf_batchllm import accelerated
from hf_batchllm.patches.merged_weights import merged

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


def test_greedy_rollouts_train_as_those_of_generate_do(tmp_path: Path) -> None:
    """The optimizer has nothing to learn from equal samples, so weights are changed between the steps."""

    def run(faster: bool, **options: Any) -> tuple[list[Any], list[float]]:
        def reward(completion_ids: Any, **rest: Any) -> list[float]:
            seen.append(completion_ids)
            return odd(completion_ids)

        def change() -> None:
            with torch.no_grad():
                made.model.lm_head.weight.copy_(made.model.lm_head.weight.roll(1, 0))

        seen: list[Any] = []
        options |= {"generation_kwargs": {"do_sample": False}, "callbacks": [EachStep(change)]}
        made = trainer("GRPO", tmp_path, reward, **options)
        if faster:
            with accelerated(made.model):
                logged = train(made)
            assert made.model.last_report is not None
        else:
            logged = train(made)
        return seen, [entry["reward"] for entry in logged]

    expected = run(faster=False)
    assert run(faster=True) == run(faster=True, use_transformers_continuous_batching=True) == expected
    assert len(set(map(str, expected[0]))) == STEPS


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
