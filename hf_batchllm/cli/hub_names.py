"""Names of models that are no folders here: whether the hub can be asked, before transformers tries many times."""

from __future__ import annotations

import os

from ..wording import first_line
from .messages import UsageError

_SECONDS = 10  # for an answer of the hub


def check_hub_name(name: str, option: str) -> None:
    """UsageError for a name that is neither a folder nor cached, where the hub cannot be asked or does not have it.

    ``option``: the command's option that has the name. Whatever else is wrong, loading says.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    if os.path.isdir(os.path.expanduser(name)) or _is_cached(name):
        return
    folder = "" if "/" in name else f"there is no folder {name}, and as a name on the hub: "
    lacking = f"and {name} is not in the cache: give a folder"
    offline = f"{option} {name}: {folder}the hub is switched off (HF_HUB_OFFLINE), {lacking}"
    if constants.HF_HUB_OFFLINE:
        raise UsageError(offline)
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_SECONDS)
    except OfflineModeIsEnabled as error:
        raise UsageError(offline) from error
    except RepositoryNotFoundError as error:
        if folder:
            why = f"there is no folder {name}, and the hub has no model of this name that you may read"
            raise UsageError(f"{option} {name}: {why}") from error
    except (HfHubHTTPError, HFValidationError):
        return
    except Exception as error:
        if not _is_of_the_network(error):
            raise
        why = f"the hub cannot be reached ({first_line(error)}), {lacking}"
        raise UsageError(f"{option} {name}: {folder}{why}") from error


def _is_cached(name: str) -> bool:
    """Whether any version of it was loaded from the hub before."""
    from huggingface_hub import constants

    snapshots = os.path.join(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    return os.path.isdir(snapshots) and bool(os.listdir(snapshots))


def _is_of_the_network(error: Exception) -> bool:
    # By name: the hub's library has changed the library of its requests more than once.
    return isinstance(error, OSError) or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
