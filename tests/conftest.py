"""What many tests share for the whole session: the pool of worker processes and the archive of the real bodies."""

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


@pytest.fixture(scope="session")
def ahmed(tmp_path_factory):
    """Archive of both Ahmed runs: trained on the slanted one, tested on the square back."""
    from data.aero import build

    folder, path = Path(__file__).parent / "data" / "aero", tmp_path_factory.mktemp("ahmed") / "a.zarr"
    runs = ["--run", str(folder / "ahmed25"), "--run", str(folder / "ahmed00")]
    assert build.main([*runs, "--train", "ahmed25", "--test", "ahmed00", "--out", str(path)]) == 0
    return path
