"""What is different in a notebook. It is imported there before transformers is."""

from __future__ import annotations

import sys
import warnings

with warnings.catch_warnings():
    # Whoever imports tqdm.auto first is told to install ipywidgets. Bars are text without, and do as well.
    warnings.filterwarnings("ignore", "IProgress not found")
    import tqdm.auto  # noqa: F401


def in_notebook() -> bool:
    """Whether this is a kernel, and what is printed goes to a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
