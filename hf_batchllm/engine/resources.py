"""What a generator keeps from call to call: its model, the KV cache, merged weights, and what calls have learned."""

from __future__ import annotations

from torch import nn

from ..config import BatchConfig
from ..inputs.base_model import base_model
from ..model.attention.choose_backend import check_backend
from ..model.inspection.architecture import inspect_model, look_again
from ..model.inspection.invariance import refuse_what_varies
from ..model.inspection.user_warnings import warn_of_compiled
from ..model.model_in_use import ModelInUse
from ..notices import Notices
from ..patches.fusion import Fusion
from ..sampling.text_lookup import EarlierAnswers
from .devices import Devices
from .drafts.assistant_model import Assistants
from .kv_memory import KVMemory


class Resources:
    """Every call takes them from here, and gives them back in order."""

    def __init__(self, model: nn.Module, config: BatchConfig, notices: Notices, devices: Devices) -> None:
        self.model = model
        self.config = config
        self.notices = notices
        self.devices = devices
        self.architecture = inspect_model(model)
        self.kv = KVMemory(model, self.architecture, config, devices, notices)
        self.fusion = Fusion(model)
        self.earlier = EarlierAnswers()
        self.assistants = Assistants(notices)

    def check(self, is_compiled: bool) -> None:
        """Refuse settings that this model cannot be used with. ``is_compiled``: its ``torch.compile`` is left out."""
        if is_compiled:
            warn_of_compiled(base_model(self.model), self.notices)
        refuse_what_varies(self.model, self.architecture, self.config)
        check_backend(self.config, self.architecture.device, self.notices)

    def look_again(self) -> None:
        """A call begins: the user may have changed the model since the last one."""
        self.architecture = self.kv.architecture = look_again(self.architecture, self.model)

    def model_in_use(self) -> ModelInUse:
        """The model for the length of a call."""
        return self.devices.model_in_use(self.model, self.architecture, self.config, self.fusion, self.notices)

    def close(self) -> None:
        """Give all of it back."""
        self.kv.close()
        self.earlier.forget()
        self.fusion.unmerge()
        self.assistants.close()
        self.devices.close()
