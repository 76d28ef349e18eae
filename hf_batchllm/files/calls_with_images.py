"""Records in several calls, where the pixels of their images do not fit into memory together.

A call has the pixels of all its images in memory, as the processor makes them, and a line that names an image is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..inputs.chats import is_chat
from ..inputs.images.image_parts import sources_of
from ..inputs.images.image_sources import ImageSources
from .records.prompt_records import PromptRecord

ROOM = 16  # bytes of pixels in memory together, for each byte of records
_BYTES_OF_A_PIXEL = 24  # as the processors of Qwen's models make it, twice in float32; others make less


def in_calls(
    records: Sequence[PromptRecord],
    images: ImageSources | None,  # which they may show
    room: int,  # bytes of pixels
    most_of_one: Callable[[], int],  # bytes that are made of an image, however large it is; 0 if that is not known
) -> Iterator[Sequence[PromptRecord]]:
    """Records that show the same image first stand together; otherwise their order is kept."""
    if images is None:
        yield records
        return
    shown = [dict.fromkeys(sources_of(record.prompt)) if is_chat(record.prompt) else {} for record in records]
    costs = {source: _BYTES_OF_A_PIXEL * images.pixels(source) for sources in shown for source in sources}
    if sum(costs.values()) > room:
        most = most_of_one()
        costs = {source: min(cost, most or cost) for source, cost in costs.items()}
    if sum(costs.values()) <= room:
        yield records
        return
    first: dict[str | bytes, int] = {}  # image -> the first record that begins with it
    seats = [first.setdefault(next(iter(sources)), place) if sources else place for place, sources in enumerate(shown)]
    call: list[PromptRecord] = []
    of_call: dict[str | bytes, None] = {}
    taken = 0
    for place in sorted(range(len(records)), key=seats.__getitem__):
        more = sum(costs[source] for source in shown[place] if source not in of_call)
        if call and taken + more > room and more:
            yield call
            call, of_call, taken = [], {}, 0
            more = sum(costs[source] for source in shown[place])
        call.append(records[place])
        of_call |= shown[place]
        taken += more
    yield call
