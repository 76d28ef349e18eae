"""One dataset of Ray Data on a cluster: ``generate_dataset`` plans it, and actors of Ray's run it block by block.

The import is light: what reads a dataset's rows on some machine of the cluster needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset import generate_dataset

__all__ = ["generate_dataset"]


def __getattr__(name: str) -> Any:
    if name != "generate_dataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .dataset import generate_dataset

    return generate_dataset
