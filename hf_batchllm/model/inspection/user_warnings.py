"""What is said once of a model whose user set something on it that works differently here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...inputs.base_model import base_model
from ...notices import Notices
from ...patches.uncompiled import Uncompiled, every_module
from .batch_dependent import depends_on_batch
from .code_in_use import plain_function
from .custom_code import KNOWN_LIBRARIES
from .generation_methods import own_methods


def warn_of_user_state(model: nn.Module, notices: Notices) -> None:
    """Each kind once for each generator."""
    inner = base_model(model)
    name = type(inner).__name__
    modules = every_module(model)
    if (place := place_of_hooks(model, modules)) is not None:
        notices(
            "hooks",
            f"there are hooks on {place}, and they see other tensors than in model.generate: the tokens of many "
            "prompts packed into one row [1, tokens, dim], and a shared prefix only once. A hook that does the same to "
            "every token works. One that picks a place, such as h[:, -1], or reads the batch dimension gets another "
            "prompt's tokens: what it records is wrong here, and answers are if it changes anything. Use "
            "model.generate with it",
        )
    if any(module.training and module.__dict__.get("gradient_checkpointing") for module in modules):
        notices(
            "gradient-checkpointing",
            f"{name} is in training mode with gradient checkpointing: model.generate then runs without its cache, and "
            "a new token sees nothing of what came before. Here it sees all of it, so results differ. Call "
            "model.eval() first",
        )
    if Uncompiled(modules):
        warn_of_compiled(inner, notices)
    if methods := own_methods(inner):
        notices(
            "methods",
            f"{name} has its own {' and '.join(f'`{method}`' for method in methods)}, which are not called here. "
            "On made-up tokens they gave the forward pass nothing unusual, so the results should not differ",
        )
    if (why := depends_on_batch(inner, modules)) is not None:
        notices(
            "batch-dependent",
            f"{name} {why}: its answers depend on which other prompts are computed in the same step, as in a batch of "
            "model.generate. They will differ a little from those for one prompt at a time",
        )


def warn_of_random_parts(model: nn.Module, notices: Notices) -> None:
    if not model.training:
        return
    # Lists, not generators: an interrupt that comes while a generator closes is lost.
    modules = list(model.modules())
    drops = [module.p for module in modules if isinstance(module, nn.Dropout)]
    config = base_model(model).config.get_text_config(decoder=True)
    in_attention: float = getattr(config, "attention_dropout", 0.0)
    if any(drops) or in_attention:
        notices(
            "dropout",
            "the model is in training mode and has dropout: results are random, and no seed repeats them "
            "(and dropout inside attention is left out). Call model.eval() first",
        )
    # Of routers and experts: Mixtral's `jitter_noise`, DBRX's `moe_jitter_eps`.
    noise = [name for module in modules for name, value in vars(module).items() if "jitter" in name and value]
    if noise:
        notices(
            "jitter",
            f"the model is in training mode and has noise in its routers (`{noise[0]}`): results are random, and "
            "no seed repeats them. Call model.eval() first",
        )


def warn_of_compiled(model: nn.Module, notices: Notices) -> None:
    notices(
        "compiled",
        f"{type(model).__name__} is compiled with torch.compile, in whole or in part. Here its modules run as they "
        "were before that: steps differ in size, and nearly each would be compiled anew",
    )


def has_user_hooks(model: nn.Module) -> bool:
    """Whether hooks are on it, or on all modules, that may do anything."""
    return place_of_hooks(model, every_module(model)) is not None


def place_of_hooks(model: nn.Module, modules: Sequence[nn.Module]) -> str | None:
    """The first place with a hook of its user's."""
    everywhere = nn.modules.module
    if any(
        map(_is_users, (*everywhere._global_forward_hooks.values(), *everywhere._global_forward_pre_hooks.values()))
    ):
        return "all modules"
    noted = "_hf_hook"  # accelerate's, which a module's forward calls
    hooked = [each for each in modules if each._forward_hooks or each._forward_pre_hooks or noted in each.__dict__]
    if any(any(map(_is_users, _hooks_of(module))) for module in hooked):
        paths = [path for path, module in model.named_modules() if any(map(_is_users, _hooks_of(module)))]
        return f"`{paths[0]}`" if paths[0] else "the model"
    return None


def _hooks_of(module: nn.Module) -> list[Any]:
    accelerates = module.__dict__.get("_hf_hook")
    several = getattr(accelerates, "hooks", [accelerates] if accelerates is not None else [])
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *several]


def _is_users(hook: Any) -> bool:
    hook = plain_function(hook)
    home: str = getattr(hook, "__module__", None) or type(hook).__module__
    return home.partition(".")[0] not in KNOWN_LIBRARIES
