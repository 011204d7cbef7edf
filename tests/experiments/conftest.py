"""What tests of several experiments share."""

from collections.abc import Generator

import pytest
import torch


@pytest.fixture
def one_core() -> Generator[None]:
    """Compute on one thread, as the experiments do that compare bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
