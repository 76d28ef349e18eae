"""transformers adds adapters to a model with some versions of PEFT alone."""

from __future__ import annotations

import pytest
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

peft = pytest.importorskip("peft")


def skip_where_transformers_refuses_peft() -> None:
    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers adds no adapters with PEFT {peft.__version__}: it needs {MIN_PEFT_VERSION}")
