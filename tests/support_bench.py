"""What tests of benchmarks share: settings of other libraries are put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def settings_of_others() -> Any:
    """The command line sets what belongs to a process."""
    from transformers.utils import logging

    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    yield
    logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)
