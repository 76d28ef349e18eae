"""A mixin for TRL's GRPOTrainer: every turn of its rollouts, those between calls of tools included."""

from __future__ import annotations

from typing import Any

from ..notices import Notices
from .rollout_func import Rollouts
from .trl_package import has_images


class RolloutMixin:
    """Put before GRPOTrainer, it makes completions where the trainer would call ``model.generate``.

        class Trainer(RolloutMixin, GRPOTrainer):
            rollouts = Rollouts(kv_memory="20GiB", logprobs=False)      # if other settings are wanted

        Trainer(model, tools=[...], environment_factory=...)

    Prompts with images go the trainer's own way, with a warning.
    """

    rollouts = Rollouts(logprobs=False)  # TRL looks at them beside vLLM alone
    _notices = Notices()

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not has_images(images, multimodal_fields):
            return self.rollouts.complete(prompt_ids, self)
        self._notices("images", "prompts with images are not supported: the trainer's own generation runs instead")
        own: Any = super()
        return own._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
