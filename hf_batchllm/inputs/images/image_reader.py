"""From chats with images to prompts: each image is read once, however many chats show it.

The processor is the user's own. Text is made by its chat template and its tokenizer, and pixels by its image processor,
as a call of it does; only that images come from what is known of them already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import ProcessorMixin

from ...errors import UnsupportedModelError
from ...wording import first_line
from ..chats import ChatEncoder
from ..token_ids import BadPrompt
from .image_models import ImageModel, image_model, why_no_images
from .image_parts import UnreadableImage, sources_of, with_bare_parts
from .image_texts import ImageTexts
from .placed_images import OutOfPlace, PlacedImages
from .processed_images import ProcessedImages
from .prompt_images import FIRST_KEY, EncodedChat, Image
from .ready_images import ReadyImage, ReadyImages, name_of

# Their own calls put pixels in order, of which there are none here, before those that all processors have in common.
_SORT_PIXELS = ("InternVLProcessor",)
_COUNT = ("truncation", "max_length", "pad_to_multiple_of")  # options that go by how many tokens there are
_LAST_KEY = 2**31 - 1
_PASS_A_PROCESSOR = "pass BatchGenerator(model, AutoProcessor.from_pretrained(...))"


@dataclass(frozen=True, eq=False)
class _Known:
    """An image, and the text that stands for it in a prompt."""

    image: Image
    text: str
    ids: list[int] | None  # of the text; None: it cannot be left out while the rest is made into tokens


class KnownImages:
    """Those that the chats of a call have shown so far."""

    def __init__(self) -> None:
        # With the source itself: an object that was gone could leave its id to another.
        self.by_source: dict[object, tuple[_Known, Any]] = {}
        self.by_content: dict[bytes, _Known] = {}


class ImageReader:
    """Reads images for one model. Keys of an image stay the same from call to call, as kept prefixes have them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._next_key = FIRST_KEY
        self._keys: dict[bytes, int] = {}  # the first of each image that there has been
        self._same_as_processor = False  # whether our way of making tokens has been compared with the processor's

    @staticmethod
    def none_so_far() -> KnownImages:
        return KnownImages()

    def why_not(self, processor: Any) -> str | None:
        """Why chats with images cannot be run, in words that follow "and"; None if they can.

        ``processor``: what the user passed as tokenizer.
        """
        why = why_no_images(self._model)
        if why is not None:
            return why
        if not isinstance(processor, ProcessorMixin) or getattr(processor, "image_processor", None) is None:
            return f"{type(processor).__name__} makes nothing of images: {_PASS_A_PROCESSOR}"
        return None

    def encoded(
        self, processor: Any, chats: Sequence[Any], encoder: ChatEncoder, known: KnownImages
    ) -> Iterator[EncodedChat | BadPrompt]:
        """The chats, which have the same options. ``known``: the images of the call so far."""
        reading = _Reading(self, processor, encoder, image_model(self._model), known)
        looks_ahead = False
        try:
            for place, chat in enumerate(chats):
                row = reading.encoded(chat)
                if not self._same_as_processor and isinstance(row, EncodedChat):
                    self._same_as_processor = reading.compare(chat, row)
                if self._same_as_processor and not looks_ahead:
                    looks_ahead = True
                    reading.look_ahead(chats[place + 1 :])
                reading.forget_pictures()
                yield row
        finally:
            reading.close()

    def processed(self) -> ProcessedImages:
        """Takes in, for one call, what a processor has made of prompts with images already."""
        return ProcessedImages(self._model, self.key_of)

    def key_of(self, digest: bytes, tokens: int) -> int:
        """The first of so many keys that follow each other."""
        if digest not in self._keys:
            if self._next_key + tokens > _LAST_KEY:
                raise UnreadableImage(
                    "that is one too many to tell apart: make a new BatchGenerator for the rest of the list"
                )
            self._keys[digest] = self._next_key
            self._next_key += tokens
        return self._keys[digest]


class _Reading:
    def __init__(
        self, reader: ImageReader, processor: Any, encoder: ChatEncoder, model: ImageModel, known: KnownImages
    ) -> None:
        self._reader = reader
        self._processor = processor
        self._encoder = encoder
        self._model = model
        self._by_source = known.by_source
        self._by_content = known.by_content
        self._shown: list[_Known] = []  # in the chat at hand
        self._stood_for: dict[int, Any] = {}  # what a small picture that goes through the processor stands for
        self._settings = repr(processor.image_processor.to_dict())
        self._pictures: dict[object, Any] = {}  # that the chat at hand has been the first to show
        self._ready = ReadyImages(processor, known.by_content)
        self._options: dict[str, Any] = {}  # of the processor, for images
        self._texts = ImageTexts(processor.tokenizer, model.placeholder)
        self._leaves_out = False  # texts of images, in the call at hand
        self._placed = PlacedImages(model)
        self._ours = copy.copy(processor)
        self._ours._process_images = self._known_images
        self._ours._merge_kwargs = self._merged

    def encoded(self, chat: Sequence[Any]) -> EncodedChat | BadPrompt:
        try:
            ids = self._ids(chat)
        except UnreadableImage as error:
            return BadPrompt(f"holds an image {error}")
        except Exception as error:
            return BadPrompt(f"is a chat with images that the processor refused: {first_line(error)}")
        standing = ids.count(self._model.placeholder)
        if standing != sum(known.image.tokens for known in self._shown):
            return BadPrompt(
                f"has {standing:,} tokens that stand for images, and its images take "
                f"{sum(known.image.tokens for known in self._shown):,}: is such a token written in a text?"
            )
        try:
            shown = tuple(known.image for known in self._shown)
            return EncodedChat(ids, self._placed.of(ids, shown))
        except OutOfPlace as error:
            return BadPrompt(str(error))

    def _ids(self, chat: Sequence[Any]) -> list[int]:
        self._leaves_out = True
        ids = self._ids_by_processor(chat)
        if not self._leaves_out:
            return ids
        whole = self._texts.put_back(ids, [known.ids or [] for known in self._shown])
        if whole is None:  # a token that stands for images is written in a text
            self._leaves_out = False
            whole = self._ids_by_processor(chat)
        return whole

    def _ids_by_processor(self, chat: Sequence[Any]) -> list[int]:
        """With all of an image's tokens, or with one for each image, as ``_leaves_out`` says afterwards."""
        from PIL import Image as Pictures

        sources = sources_of(chat)
        stand_ins = [Pictures.new("RGB", (1, 1)) for _ in sources]
        self._stood_for = {id(one): source for one, source in zip(stand_ins, sources, strict=True)}
        self._shown = []
        ours: Callable[..., Any] = self._ours
        if type(self._processor).__name__ in _SORT_PIXELS:
            ours = partial(ProcessorMixin.__call__, self._ours)
        return self._called(ours, chat, stand_ins)

    def _called(self, processor: Callable[..., Any], chat: Sequence[Any], images: list[Any]) -> list[int]:
        """The ids of a chat, by the processor's call as its ``apply_chat_template`` makes it."""
        text, given = self._encoder.text(self._processor, with_bare_parts(chat))
        bos = self._processor.tokenizer.bos_token
        if bos is not None and text.startswith(bos):
            given["add_special_tokens"] = False
        (ids,) = processor(text=[text], images=[images], **given)["input_ids"]
        return [int(token) for token in ids]

    def _merged(self, *given: Any, **more: Any) -> dict[str, Any]:
        """In the place of the processor's method of this name, which knows where options can come from."""
        merged: dict[str, Any] = self._processor._merge_kwargs(*given, **more)
        of_text = merged["text_kwargs"]
        if of_text.get("padding") == "max_length" or any(of_text.get(name) for name in _COUNT):
            self._leaves_out = False  # tokens must be counted with all of images
        return merged

    def compare(self, chat: Sequence[Any], ours: EncodedChat) -> bool:
        """The processor's own call must give the same tokens: a class may do more than all others do."""
        named = [name_of(source, self._options) for source in sources_of(chat)]
        if any(name not in self._pictures for name in named):
            return False  # an earlier chat, that could not be encoded, has shown it first
        pictures = [self._pictures[name] for name in named]
        if self._called(self._processor, chat, pictures) != ours.ids:
            raise UnsupportedModelError(
                f"{type(self._processor).__name__} makes other tokens of a chat with images than processors of "
                "transformers do: that is not supported"
            )
        return True

    def look_ahead(self, chats: Sequence[Any]) -> None:
        self._ready.look_ahead(chats, self._options)

    def forget_pictures(self) -> None:
        self._pictures.clear()

    def close(self) -> None:
        self._ready.close()

    # -- images ----------------------------------------------------------------------------------------------------

    def _known_images(self, images: Any, **options: Any) -> tuple[dict[str, Any], list[str]]:
        """In the place of the processor's method of this name: the texts that stand for images."""
        self._options = options
        for stand_in in _flat(images):
            source = self._stood_for[id(stand_in)]
            named = name_of(source, options)
            if named not in self._by_source:
                ready = self._ready.take(source, options)
                self._pictures[named] = ready.picture
                self._by_source[named] = self._known(ready), source
            self._shown.append(self._by_source[named][0])
        self._leaves_out &= all(known.ids is not None for known in self._shown)
        return {}, [self._texts.stand_in if self._leaves_out else known.text for known in self._shown]

    def _known(self, ready: ReadyImage) -> _Known:
        content = ready.content
        if content not in self._by_content:
            made, text = ready.made.result()
            tokens = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            count = sum(token == self._model.placeholder for token in tokens)
            if not count:
                raise UnreadableImage(
                    f"whose text has no token {self._model.placeholder}, which stands for images in this model: is the "
                    "processor another model's?"
                )
            taken = [name for name in self._model.inputs if made.get(name) is not None]
            inputs = {name: self._kept(torch.as_tensor(made[name], device="cpu")) for name in taken}
            # The user may change what the processor makes of an image between two calls.
            digest = ready.digest.copy()
            digest.update(f"{self._settings}{text}".encode())
            first = self._reader.key_of(digest.digest(), count)
            alone = tokens if self._texts.may_be_left_out(text, tokens) else None
            self._by_content[content] = _Known(Image(first, count, inputs), text, alone)
        self._ready.drop(content)
        return self._by_content[content]

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the model's own type, which it would get in any case, and which mostly takes half of the memory."""
        return tensor.to(self._model.inner.dtype) if tensor.is_floating_point() else tensor


def _flat(images: Any) -> list[Any]:
    """Each image of nested lists."""
    if isinstance(images, list):
        return [each for image in images for each in _flat(image)]
    return [images]
