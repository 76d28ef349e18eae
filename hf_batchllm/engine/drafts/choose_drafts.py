"""Whether tokens are guessed in a call, and by what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ...inputs.base_model import base_model
from ...notices import Notices
from ...planning.base_scheduler import BaseScheduler, lengthens, scheduler_name
from ...planning.requests_and_prefixes import Request
from ...wording import counted
from ..at_once import AtOnce
from ..device_loop.run_ahead import RunAhead
from ..job import Job
from ..loop import Launcher
from ..parts import Parts
from ..picking import picking_of
from .assistant import MOST_GUESSED
from .assistant_pick import AssistantPick
from .assisted import AssistedAhead, AssistedDrafts
from .drafts import Drafts
from .drafts_ahead import DraftsAhead

_GPU_LOOKS_BACK = "the GPU looks back at an answer's tokens for a penalty, or for n-grams that may not come again"
_LOOKED_FOR = 3  # tokens in a row, for a guess at what follows them


def drafts_for(parts: Parts, scheduler: BaseScheduler, launcher: Launcher) -> Drafts | None:
    job, use, requests, assistant, notices = parts.job, parts.use, parts.requests, parts.assistant, parts.notices
    configs = [each.config for each in job.options]
    if job.assistant is None and not any(each.prompt_lookup_num_tokens for each in configs):
        return None
    looks_back = launcher.pick.looks_back if isinstance(launcher, RunAhead) else None
    why_not = _why_none(parts, scheduler, launcher, looks_back)
    if why_not or not isinstance(launcher, AtOnce | RunAhead):
        say_no_drafts(job, use.model, why_not, notices)
        if assistant is not None:
            assistant.close()
        return None
    if job.assistant is not None and assistant is None:
        return None  # why has been said

    without = {request for request in requests if looks_back is not None and looks_back(request)}

    def most(request: Request) -> int:
        config = configs[request.index]
        if request in without:
            return 0
        if assistant is not None:
            return min(config.num_assistant_tokens or MOST_GUESSED, MOST_GUESSED)
        return config.prompt_lookup_num_tokens or 0

    def longest(request: Request) -> int:
        return configs[request.index].max_matching_ngram_size or _LOOKED_FOR

    asking = {request.index for request in without}
    if assistant is None:
        asking = {index for index in asking if configs[index].prompt_lookup_num_tokens}
    if asking:
        notices("some drafts", f"no tokens are guessed for {counted(len(asking), 'prompt')}: {_GPU_LOOKS_BACK}")
    given: tuple[Any, ...] = most, longest, requests, scheduler.lengthen
    named: dict[str, Any] = {}
    if assistant is not None:
        pick = AssistantPick.of(picking_of(job, use), requests, isinstance(launcher, RunAhead), notices)
        assistant.begin(pick, len(requests), use.put_back)
        named = {"assistant": assistant, "ratio": _parameters(assistant.model) / max(_parameters(use.model), 1)}
    if isinstance(launcher, AtOnce):
        host: Any = Drafts if assistant is None else AssistedDrafts
        drafts: Drafts = host(*given, parts.step_tokens, parts.earlier, **named)
        return drafts
    named["has_rooms"] = all(each.prompt_keys is each.prompt_ids for each in requests)  # none has images
    named["share"] = use.architecture.kv_bytes_per_token / max(_bytes(use.model), 1)
    if launcher.graphs is not None:
        named["ready"] = launcher.graphs.ready_for_drafts
    ahead: Any = DraftsAhead if assistant is None else AssistedAhead
    drafts = ahead(*given, parts.step_tokens, parts.earlier, **named)
    return drafts


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in base_model(model).parameters())


def _bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in base_model(model).parameters())


def _why_none(
    parts: Parts, scheduler: BaseScheduler, launcher: Launcher, looks_back: Callable[[Request], bool] | None
) -> str:
    """``looks_back``: where the device picks tokens, whether it does so for a request."""
    requests = parts.requests
    if parts.use.architecture.states:
        return "its layers carry a state from token to token, which would have moved on over wrong guesses"
    if parts.use.architecture.parts > 1 and (parts.job.assistant is not None or parts.use.device.type == "cuda"):
        return "several processes run the model together"
    if requests and all(each.prompt_keys is not each.prompt_ids for each in requests):
        return "no tokens are guessed for prompts with images"
    if not lengthens(scheduler):
        return f"{scheduler_name(scheduler)} has no room for guesses: see `lengthen` in hf_batchllm.BaseScheduler"
    if isinstance(launcher, AtOnce):
        return ""
    if looks_back is None:
        return "on a GPU tokens are guessed where it picks them, and here the host does"
    if parts.outputs.tensors is not None:
        return "on a GPU none are guessed where scores or logits of each step are asked for"
    if requests and all(map(looks_back, requests)):
        return _GPU_LOOKS_BACK
    return ""


def say_no_drafts(job: Job, model: nn.Module, why_not: str, notices: Notices) -> None:
    """Where the call asks for them; what a checkpoint asks for is nobody's mistake."""
    own = getattr(getattr(model, "generation_config", None), "prompt_lookup_num_tokens", None)
    lookup = {each.config.prompt_lookup_num_tokens for each in job.options} - {own, None, 0}
    if lookup or job.assistant is not None:
        name = "prompt_lookup_num_tokens" if lookup else "assistant_model"
        notices("drafts", f"`{name}` has no effect here: {why_not}")
