"""What every source of data offers: shapes without reading, and values of an index range only."""

from typing import Protocol

import numpy as np


class Reader(Protocol):
    """Named arrays of named samples.

    ``bytes_read`` counts the bytes fetched from storage so far, so that a test can show that a rank reads
    only its own part.
    """

    bytes_read: int

    def shape(self, sample: str, name: str) -> tuple[int, ...]:
        """Global shape of one array; reads metadata only."""

    def read(self, sample: str, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Values of ``index`` (one slice a dim); touches only the chunks that ``index`` meets."""
