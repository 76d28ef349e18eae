"""Adjustments for notebooks. Imported before transformers, which imports tqdm."""

from __future__ import annotations

import sys
import warnings

__all__ = ["in_notebook", "tqdm"]

with warnings.catch_warnings():
    # Its first import advises to install ipywidgets. Without them bars are text, which does as well.
    warnings.filterwarnings("ignore", "IProgress not found")
    from tqdm.auto import tqdm


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
