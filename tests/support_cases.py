"""How much of a test is run: with CASES=some in the environment, as in `make test`, a part of its cases."""

from __future__ import annotations

import os

SOME = os.environ.get("CASES") == "some"


def share(cases: int) -> int:
    """So many of the cases of a test marked ``some_cases``: a quarter, of 24 or more a sixth, and one at least."""
    return -(-cases // (6 if cases >= 24 else 4))


def up_to(number: int) -> int:
    """For a test that draws cases by itself: so many of them, or with CASES=some a third."""
    return -(-number // 3) if SOME else number
