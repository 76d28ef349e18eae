"""``RolloutMixin`` before TRL's GRPOTrainer: turns between calls of tools, and environments, are its rollouts, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support_trl import PROMPTS, STEPS, odd, tokenizer, train, trainer, trl

from hf_batchllm.rollouts import RolloutMixin, Rollouts

CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]


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


@pytest.fixture(autouse=True)
def every_first_answer_calls_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model's answers mean nothing, so how they are read is made up."""

    def parsed(made: Any, ids: list[int], prefix: list[int], tools: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": made.decode(ids)}
        if 30 not in prefix:
            message["tool_calls"] = [{"type": "function", "function": {"name": "look_up", "arguments": {}}}]
        return message

    monkeypatch.setattr(trl.trainer.grpo_trainer, "parse_response", parsed)
    for asked in ("is_chat_template_prefix_preserving", "supports_tool_calling"):  # of a real chat template
        monkeypatch.setattr(trl.trainer.grpo_trainer, asked, lambda made: True)


def run(made_of: type, folder: Path, **options: Any) -> tuple[list[Any], list[Any]]:
    def reward(completion_ids: Any, completions: Any, **rest: Any) -> list[float]:
        seen.append((completion_ids, completions))
        return odd(completion_ids)

    seen: list[Any] = []
    encoder = tokenizer()
    encoder.response_template = "made up"
    turns = {"do_sample": False, "max_new_tokens": 4}  # each; with what tools say there are 20 at most
    more = {"generation_kwargs": turns, "max_completion_length": 20, "processing_class": encoder}
    made = trainer("GRPO", folder, reward, made=made_of, prompts=CHATS, **more, **options)
    return seen, train(made)


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options", [{"tools": [look_up]}, {"environment_factory": Library}], ids=["tools", "environment"]
)
def test_every_turn_is_served(options: dict[str, Any], tmp_path: Path) -> None:
    class Trainer(RolloutMixin, trl.GRPOTrainer):
        rollouts = Rollouts(min_shared_tokens=1)

        def _generate_single_turn(self, prompt_ids: Any, *given: Any, **named: Any) -> Any:
            turn = super()._generate_single_turn(prompt_ids, *given, **named)
            reports.append(self.rollouts.last_report)
            return turn

    reports: list[Any] = []
    expected, _ = run(trl.GRPOTrainer, tmp_path, **options)
    seen, logged = run(Trainer, tmp_path, **options)
    assert seen == expected
    assert len(seen) == len(logged) == STEPS and len(reports) == 2 * STEPS
    assert all(entry["tools/call_frequency"] == 1 for entry in logged)
    roles = [message["role"] for message in seen[0][1][0]]
    assert roles == ["assistant", "tool", "assistant"]


def test_prompts_with_images_go_the_trainers_own_way_with_one_warning() -> None:
    class Other:
        def _generate_single_turn(self, prompt_ids: Any, images: Any, fields: Any, count: int, **more: Any) -> Any:
            return "its own", prompt_ids, images, count, more

    class Trainer(RolloutMixin, Other):
        pass

    def turns() -> list[Any]:
        trainer = Trainer()
        return [trainer._generate_single_turn([[5]], [["an image"]], {}, 2, has_tool_images=False) for _ in range(2)]

    with pytest.warns(UserWarning, match="prompts with images are not supported: the trainer's own generation") as said:
        found = turns()
    assert found == [("its own", [[5]], [["an image"]], 2, {"has_tool_images": False})] * 2 and len(said) == 1
