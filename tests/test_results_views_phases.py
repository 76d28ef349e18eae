"""The picture of where the time of a run went."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from hf_batchllm.results.timeline import PHASES
from hf_batchllm.results.views.timeline import phases_bar


def test_each_phase_has_a_colour_of_its_own() -> None:
    timeline: Any = SimpleNamespace(phases=dict.fromkeys(PHASES, 1.0))
    assert len(set(re.findall(r'<span class="(hfb-c\d+)"', phases_bar(timeline)))) == len(PHASES)
