"""Options and settings that several scripts have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def add_attention_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--dim", type=int, default=128, help="of a head (default: %(default)s)")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")


def write_json(path: Path | None, figures: object) -> None:
    """``path``: what was given as --json, if anything was."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


def add_tune_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tune", nargs="+", default=[], metavar="NAME=VALUE", help="other values for constants of the kernels"
    )


def set_constants(settings: Iterable[str], modules: Iterable[ModuleType]) -> None:
    """Sets each ``NAME=VALUE`` in the first module that has such a constant."""
    for setting in settings:
        name, _, value = setting.partition("=")
        module = next((module for module in modules if isinstance(getattr(module, name, None), int)), None)
        if module is None:
            raise SystemExit(f"{name} is no constant of the kernels")
        setattr(module, name, int(value))
