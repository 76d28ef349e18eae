"""What a model's vision tower makes of the images of a call: once for each image, a few images ahead of the steps.

Features stay on the device until the last unit of tokens that shows the image has been computed.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..inputs.images.image_models import image_model
from ..inputs.images.prompt_images import FIRST_KEY, Image
from ..inputs.prompts import Prompt
from ..patches.tower_attention import TowerAttention
from ..planning.requests_and_prefixes import Prefix, Request, units_below
from ..wording import counted
from .device_memory import DeviceMemory, is_out_of_memory

_MOST_TOKENS_KEPT = 1 << 16  # features of more are dropped, and read again if need be
_VALUES_AT_ONCE = 16 << 20  # numbers that the tower reads in a run, some 7 pictures of a million pixels in patches


class ImageFeatures:
    """``images``: of the call, in the order in which steps need them."""

    def __init__(self, model: nn.Module, images: Iterable[Image]) -> None:
        self._model = image_model(model)
        self._images = {image.first_key: image for image in images}
        self._order = list(self._images)
        self._place = {key: place for place, key in enumerate(self._order)}
        self._firsts = np.array(sorted(self._images), dtype=np.int64)
        self._lasts = np.array([first + self._images[first].tokens - 1 for first in self._firsts.tolist()], np.int64)
        self._features: dict[int, list[torch.Tensor]] = {}  # the features, then those for deeper layers
        self._readers: Counter[int] = Counter()  # units that have yet to be computed to the image's end
        self._seen: set[int] = set()  # images that have been encoded at least once
        self._form: _Form | None = None
        self._attention = TowerAttention(self._model.inner)
        self._adapter: object = None  # under which features were made
        self._read = 0  # images that the tower has read; one that was needed again counts again
        self._runs = 0  # of the tower
        self._of_tower: tuple[int, int] | None = None  # bytes of its largest run, and of the features of a token

    @staticmethod
    def of(model: nn.Module, prompts: Sequence[Prompt], order: Iterable[int]) -> ImageFeatures | None:
        """The features of these prompts, which run in this order; None where none shows an image."""
        if all(prompt.images is None for prompt in prompts):
            return None
        shown = [prompts[place].images for place in order]
        return ImageFeatures(model, [image for each in shown if each is not None for image in each.images])

    @property
    def inner(self) -> Any:
        return self._model.inner

    @property
    def placeholder(self) -> int:
        return self._model.placeholder

    @property
    def two_way(self) -> str | None:
        return self._model.two_way

    def expect(self, requests: Sequence[Request]) -> None:
        """These will be computed, and what they stand on."""
        for unit in units_below(requests):
            if isinstance(unit, Prefix):
                keys = unit.ids[unit.computed : unit.end]
            else:
                assert isinstance(unit, Request)
                keys = unit.prompt_keys[unit.computed :]
            self._readers.update(self._ends_in(keys))
        # Of prompts that cannot run, and of kept prefixes, nothing is read ahead.
        self._order = [first for first in self._order if self._readers[first] > 0 or first in self._features]
        self._place = {key: place for place, key in enumerate(self._order)}

    def read_first(self) -> None:
        """Have the tower run once, so that whatever transformers puts into a model on its first run is there."""
        with torch.no_grad():
            self._encode({self._order[0]})

    def _ends_in(self, keys: np.ndarray) -> list[int]:
        """The first keys of images whose last token is among these."""
        keys = keys[keys >= FIRST_KEY]
        places = np.searchsorted(self._lasts, keys)
        found: list[int] = self._firsts[places[self._lasts[places] == keys]].tolist()
        return found

    def of_step(self, keys: np.ndarray, adapter: object = None) -> Any:
        """The features of a step's placeholders, in their order, in the form in which the model expects them.

        keys: of each, as ``ModelBatch.image_keys``; below the first key it stands for no image.
        adapter: which one is in the model, where prompts name theirs: it may change the tower, too.
        """
        if adapter != self._adapter:
            self._features.clear()
            self._adapter = adapter
        of_images = keys >= FIRST_KEY
        firsts = self._firsts[np.searchsorted(self._firsts, np.where(of_images, keys, FIRST_KEY), "right") - 1]
        firsts = np.where(of_images, firsts, 0)
        self._encode({int(first) for first in np.unique(firsts[of_images])})
        # Runs of tokens that follow each other, in one image or in none.
        offsets = np.where(of_images, keys - firsts, 0)
        breaks = np.flatnonzero((np.diff(firsts) != 0) | (of_images[1:] & (np.diff(offsets) != 1))) + 1
        parts: list[list[torch.Tensor]] = []
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(keys)], strict=True):
            if of_images[begin]:
                run = slice(int(offsets[begin]), int(offsets[begin]) + end - begin)
                parts.append([level[run] for level in self._features[int(firsts[begin])]])
            else:
                parts.append(self._of_text(end - begin))
        packed = [torch.cat(level) for level in zip(*parts, strict=True)]
        for first in self._ends_in(keys):
            self._readers[first] -= 1
            if self._readers[first] <= 0:
                self._features.pop(first, None)
        self._drop_the_oldest()
        assert self._form is not None
        return self._form.filled(packed)

    def _drop_the_oldest(self) -> None:
        kept = sum(self._images[first].tokens for first in self._features)
        for first in [*self._features]:
            if kept <= _MOST_TOKENS_KEPT:
                break
            kept -= self._images[first].tokens
            del self._features[first]

    def _of_text(self, count: int) -> list[torch.Tensor]:
        """For a placeholder that stands for no image, what the model embeds in its place: as in a text."""
        known = next(iter(self._features.values()))
        embedding = self.inner.get_input_embeddings()
        token = torch.full((count,), self._model.in_text, dtype=torch.long, device=known[0].device)
        return [embedding(token).to(known[0].dtype), *(level.new_zeros(count, level.shape[1]) for level in known[1:])]

    @property
    def summary(self) -> str:
        """For the report."""
        shown, again = len(self._images), self._read - len(self._seen)
        said = f"{counted(shown, 'image')}, read by the vision tower in {counted(self._runs, 'run')}"
        return f"{said}; {again:,} were read again" if again else said

    def bytes_beside(self, step_tokens: int, memory: DeviceMemory) -> int:
        """Bytes that the tower and its features take beside a step of so many tokens. Reads the first images."""
        if self._of_tower is None:
            memory.trim()
            before = memory.used()
            memory.mark()
            self.read_first()
            peak = max(memory.peak().allocated - before.allocated, 0)
            read = sum(self._images[first].values for first in self._features)
            values = [image.values for image in self._images.values()]
            most = max(*values, min(_VALUES_AT_ONCE, sum(values)))
            per_token = sum(level.shape[1] * level.dtype.itemsize for level in next(iter(self._features.values())))
            self._of_tower = int(peak * most / read), per_token
        tower, per_token = self._of_tower
        kept = min(_MOST_TOKENS_KEPT, sum(image.tokens for image in self._images.values()))
        return tower + (kept + 3 * step_tokens) * per_token  # those of a step are packed, and scattered over its tokens

    # -- the tower -------------------------------------------------------------------------------------------------

    def _encode(self, needed: set[int]) -> None:
        missing = sorted(
            (first for first in needed if first not in self._features), key=lambda f: self._place.get(f, 0)
        )
        while missing:
            some, values = [missing.pop(0)], 0
            values += self._images[some[0]].values
            following = self._order[self._place.get((missing or some)[-1], len(self._order)) + 1 :]
            for first in [*missing, *(each for each in following if each not in self._seen)]:
                image = self._images[first]
                values += image.values
                if values > _VALUES_AT_ONCE or not _alike(image, self._images[some[0]]):
                    break
                some.append(first)
            missing = [first for first in missing if first not in some]
            self._run([self._images[first] for first in some])

    def _run(self, images: Sequence[Image]) -> None:
        try:
            self._run_at_once(images)
        except Exception as error:
            if not is_out_of_memory(error) or len(images) == 1:
                raise
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            for part in (images[: len(images) // 2], images[len(images) // 2 :]):
                self._run(part)

    def _run_at_once(self, images: Sequence[Image]) -> None:
        inner = self.inner
        weight = next(inner.parameters())
        if sum(image.tokens for image in images) == 1:  # Mistral 3 loses a dimension where there is a single token
            images = [*images, *images]
        inputs: dict[str, torch.Tensor] = {}
        for name in images[0].inputs:
            tensor = torch.cat([image.inputs[name] for image in images]).to(weight.device)
            inputs[name] = tensor.to(inner.dtype) if tensor.is_floating_point() else tensor
        with self._attention.applied():
            found: Any = inner.get_image_features(**inputs, return_dict=True)
        levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        counts = [image.tokens for image in images]
        parts = []
        for level in levels:
            whole = torch.cat([*level]) if isinstance(level, (list, tuple)) else level
            whole = whole.reshape(-1, whole.shape[-1])
            if len(whole) != sum(counts):
                raise UnsupportedModelError(
                    f"{type(inner).__name__} makes {len(whole):,} features of images that take {sum(counts):,} tokens: "
                    "is the processor another model's?"
                )
            parts.append(whole.split(counts))
        for image, *features in zip(images, *parts, strict=True):
            # Copies, so that each is freed by itself.
            self._features[image.first_key] = [each.clone() for each in features]
            self._seen.add(image.first_key)
        self._form = _Form(found)
        self._read += len(set(images))
        self._runs += 1


def _alike(image: Image, other: Image) -> bool:
    """Whether both can be read in one run: inputs are put behind each other."""
    return {name: tensor.shape[1:] for name, tensor in image.inputs.items()} == {
        name: tensor.shape[1:] for name, tensor in other.inputs.items()
    }


class _Form:
    """In which form the tower gives its features."""

    def __init__(self, found: Any) -> None:
        self._output = type(found)  # of transformers, which asks the whole of it for a tuple since 5.24
        self._pooled = _kind_of(found.pooler_output)
        deeper = getattr(found, "deepstack_features", None)
        self._deeper = None if deeper is None else [_kind_of(level) for level in deeper]

    def filled(self, packed: Sequence[torch.Tensor]) -> Any:
        """With ``packed`` [tokens, dim], of each level."""
        output = self._output()
        output.pooler_output = _in_form(self._pooled, packed[0])  # no field of some of transformers' classes
        if self._deeper is not None:
            levels = zip(self._deeper, packed[1:], strict=True)
            output.deepstack_features = [_in_form(kind, level) for kind, level in levels]
        return output


def _kind_of(level: Any) -> type | int:
    """The kind of list of an image each, or the number of dimensions."""
    return type(level) if isinstance(level, (list, tuple)) else int(level.ndim)


def _in_form(kind: type | int, packed: torch.Tensor) -> Any:
    if isinstance(kind, type):
        return kind([packed])
    return packed[:, None] if kind == 3 else packed  # blocks of one token each
