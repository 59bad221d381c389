"""What many tests share for the whole session: where random numbers start, the pool of worker processes, and the
archive of the real bodies."""

import os
import random
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: the processes of a test share the cores

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))

from pool import Pool  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="where the random numbers of every test start")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before the fixtures of a test: what they draw does not depend on the tests that ran before."""
    seed = item.config.getoption("seed")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        report.sections.append(("seed", f"pytest '{item.nodeid}' --seed {item.config.getoption('seed')}"))
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``-n 2`` the tests of a file, which share fixtures, stay on one process, and so do those of a row."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFileOrRow(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return nodeid.rsplit("-", 1)[0] if file.endswith("test_cases.py") else file

    return ByFileOrRow(config, log)


@pytest.fixture(scope="session")
def pool(request):
    pool = Pool(seed=request.config.getoption("seed"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ahmed(tmp_path_factory):
    """Archive of both Ahmed runs: trained on the slanted one, tested on the square back."""
    from data.aero import build

    folder, path = Path(__file__).parent / "data" / "aero", tmp_path_factory.mktemp("ahmed") / "a.zarr"
    runs = ["--run", str(folder / "ahmed25"), "--run", str(folder / "ahmed00")]
    build.main([*runs, "--train", "ahmed25", "--test", "ahmed00", "--out", str(path)])
    return path
