"""The command ``hf-batchllm``: ``main`` picks what was asked for. Nothing here imports torch before it is needed."""

from __future__ import annotations

from .main import main as main
