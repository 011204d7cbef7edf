"""The client that measures a server: the rate does not depend on who is heard first at a boundary."""

import pytest

from tests.support.streams import Heard, rate


def test_the_rate_is_that_of_the_boundaries() -> None:
    """Four slots, a canvas of each every half second, heard one after the other within 15 ms."""
    answers = [
        Heard(canvases=[0.5 * (start + n) + 0.005 * (index % 4) for n in range(12)])
        for index, start in enumerate((0, 1, 1, 1, 12, 13, 13, 13))
    ]
    assert rate(answers, 4, 48) == pytest.approx(4 * 256 / 0.5, rel=0.002)
    with pytest.raises(SystemExit, match="only 88 canvases while 4 slots were busy"):
        rate(answers, 4, 100)
