"""One pool of worker processes for the whole session."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.close()
