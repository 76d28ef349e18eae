"""Pixels of a batch, taken apart: which part of the tensors is which image, and how many tokens it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_Tensors = Mapping[str, torch.Tensor]
Share = tuple[int, dict[str, torch.Tensor]]  # the tokens of an image, and its part of the tensors
INSTEAD = "pass chats with images, or a list with what the processor makes of each prompt by itself"


class UnclearImages(Exception):
    """``why``: in words that follow the name of a tensor."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why


@dataclass(frozen=True)
class TokensOfImages:
    """Those that stand for images in the rows, one at least."""

    of_rows: list[int]  # how many there are in each row
    runs: list[int]  # how many stand next to each other, row after row

    @staticmethod
    def of(rows: Sequence[np.ndarray], placeholder: int) -> TokensOfImages:
        runs: list[int] = []
        for row in rows:
            edges = np.flatnonzero(np.diff(np.concatenate([[False], row == placeholder, [False]]).astype(np.int8)))
            runs += (edges[1::2] - edges[::2]).tolist()
        return TokensOfImages([int(np.count_nonzero(row == placeholder)) for row in rows], runs)

    @property
    def total(self) -> int:
        return sum(self.of_rows)


def shares_of_images(kind: str, config: Any, tensors: _Tensors, tokens: TokensOfImages) -> list[Share]:
    """``kind``: of the model, whose config it is."""
    names, split = _OF_KINDS.get(kind, (tuple(tensors), _one_row))
    for name in tensors:
        if name not in names:
            raise UnclearImages(name, f"is not an input of {kind}: leave it out")
    if "pixel_values" not in tensors:
        raise UnclearImages(next(iter(tensors)), "goes with `pixel_values`: pass these, too")
    shares = split(config, tensors, tokens)
    if sum(count for count, _ in shares) != tokens.total:
        raise UnclearImages(
            "pixel_values",
            f"holds images that take {sum(count for count, _ in shares):,} tokens, and in the rows "
            f"{tokens.total:,} tokens stand for images",
        )
    return shares


def _by_grid(config: Any, tensors: _Tensors, tokens: TokensOfImages) -> list[Share]:
    """Patches [patches, values], and how many each image has in height and width."""
    pixels, grids = tensors["pixel_values"], _beside(tensors, "image_grid_thw", 3)
    patches = [int(count) for count in grids.prod(dim=-1)]
    if pixels.ndim != 2 or sum(patches) != len(pixels):
        raise UnclearImages(
            "pixel_values", f"has shape {list(pixels.shape)}, and by `image_grid_thw` it has {sum(patches):,} patches"
        )
    merged = config.vision_config.spatial_merge_size**2
    parts = zip(patches, pixels.split(patches), grids.split(1), strict=True)
    return [(count // merged, {"pixel_values": part, "image_grid_thw": grid}) for count, part, grid in parts]


def _by_positions(config: Any, tensors: _Tensors, tokens: TokensOfImages) -> list[Share]:
    """Patches of each image [images, patches, values], and the place of each patch in it, -1 where there is none."""
    pixels, places = tensors["pixel_values"], tensors.get("image_position_ids")
    if places is None or pixels.ndim != 3 or places.shape != (*pixels.shape[:2], 2):
        raise UnclearImages("pixel_values", "goes with `image_position_ids`, a place for each of its patches")
    merged = config.vision_config.pooling_kernel_size**2
    counts = (places != -1).all(dim=-1).sum(dim=-1) // merged
    parts = zip(counts.tolist(), pixels.split(1), places.split(1), strict=True)
    return [(count, {"pixel_values": part, "image_position_ids": place}) for count, part, place in parts]


def _by_size(config: Any, tensors: _Tensors, tokens: TokensOfImages) -> list[Share]:
    """Pictures [images, channels, height, width], padded to one size, and the size of each."""
    pixels, sizes = tensors["pixel_values"], _beside(tensors, "image_sizes", 2)
    _check_pictures(pixels, len(sizes))
    step = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    return [
        (
            (height // step) * (width // step),
            # Without the padding, which depends on the other images.
            {"pixel_values": pixels[place : place + 1, :, :height, :width], "image_sizes": sizes[place : place + 1]},
        )
        for place, (height, width) in enumerate(sizes.tolist())
    ]


def _all_alike(config: Any, tensors: _Tensors, tokens: TokensOfImages) -> list[Share]:
    """Pictures, or tiles of them, [tiles, channels, height, width]: the tower makes as much of each."""
    if "image_sizes" in tensors:
        return _by_size(config, tensors, tokens)
    pixels = tensors["pixel_values"]
    _check_pictures(pixels, len(pixels))
    each = _of_each(len(pixels), tokens.total)
    return [(each, {"pixel_values": tile}) for tile in pixels.split(1)]


def _tiles_of_rows(config: Any, tensors: _Tensors, tokens: TokensOfImages) -> list[Share]:
    """Tiles [rows, tiles, channels, height, width]; a row with fewer is filled up with tiles of zeros."""
    pixels = tensors["pixel_values"]
    if pixels.ndim != 5:
        raise UnclearImages("pixel_values", f"has shape {list(pixels.shape)}, and five dimensions are expected")
    flat = {name: tensor.flatten(0, 1) for name, tensor in tensors.items()}
    if any(len(tensor) != pixels.shape[0] * pixels.shape[1] for tensor in flat.values()):
        raise UnclearImages("pixel_attention_mask", "has not as many tiles as `pixel_values`")
    real = flat["pixel_values"].flatten(1).any(dim=1).nonzero()[:, 0].tolist()
    each = _of_each(len(real), tokens.total)
    return [(each, {name: tensor[tile : tile + 1][None] for name, tensor in flat.items()}) for tile in real]


def _by_runs(config: Any, tensors: _Tensors, tokens: TokensOfImages) -> list[Share]:
    """Images [images, ...], whose tokens stand next to each other: as many runs as images are one of each."""
    images = len(tensors["pixel_values"])
    if len(tokens.of_rows) == 1 and len(tokens.runs) != images:
        return _one_row(config, tensors, tokens)
    if len(tokens.runs) != images or any(len(tensor) != images for tensor in tensors.values()):
        raise UnclearImages(
            "pixel_values",
            f"holds {images} images, and in the rows tokens stand for images in {len(tokens.runs)} places, so it is "
            f"not known which are of which row: {INSTEAD}",
        )
    return [
        (count, {name: tensor[place : place + 1] for name, tensor in tensors.items()})
        for place, count in enumerate(tokens.runs)
    ]


def _one_row(config: Any, tensors: _Tensors, tokens: TokensOfImages) -> list[Share]:
    """The share of a processor that nothing is known of: all that a single row shows is taken as one."""
    if len(tokens.of_rows) != 1:
        raise UnclearImages(
            "pixel_values", f"is of several rows, and it is not known which images are of which: {INSTEAD}"
        )
    return [(tokens.total, dict(tensors))]


_OF_KINDS: dict[str, tuple[tuple[str, ...], Callable[[Any, _Tensors, TokensOfImages], list[Share]]]] = {
    **dict.fromkeys(
        ("glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
        (("pixel_values", "image_grid_thw"), _by_grid),
    ),
    **dict.fromkeys(("idefics3", "smolvlm"), (("pixel_values", "pixel_attention_mask"), _tiles_of_rows)),
    "gemma3": (("pixel_values",), _all_alike),
    "gemma4": (("pixel_values", "image_position_ids"), _by_positions),
    "internvl": (("pixel_values",), _all_alike),
    "llava": (("pixel_values", "image_sizes"), _all_alike),
    "llava_next": (("pixel_values", "image_sizes"), _by_runs),
    "mistral3": (("pixel_values", "image_sizes"), _by_size),
}


def _beside(tensors: _Tensors, name: str, width: int) -> torch.Tensor:
    if name not in tensors:
        raise UnclearImages("pixel_values", f"goes with `{name}`: pass what the processor makes, with that")
    if tensors[name].ndim != 2 or tensors[name].shape[1] != width:
        raise UnclearImages(name, f"has shape {list(tensors[name].shape)}, and not [images, {width}]")
    return tensors[name]


def _check_pictures(pixels: torch.Tensor, count: int) -> None:
    if pixels.ndim != 4 or len(pixels) != count:
        raise UnclearImages(
            "pixel_values", f"has shape {list(pixels.shape)}, and not [{count}, channels, height, width]"
        )


def _of_each(images: int, total: int) -> int:
    if not images or total % images:
        raise UnclearImages(
            "pixel_values", f"holds {images} images of one size, and in the rows {total:,} tokens stand for images"
        )
    return total // images
