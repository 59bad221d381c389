"""One way for a command to fail: bad input ends in one message on standard error and exit status 2."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from core.errors import InputError
from core.mesh import DistributedManager

_OF_FILES = "Check that the file is there, its rights and the room on the disk, and run it again"


def command(main: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``main(argv=None)`` a command: its `InputError` becomes a message and exit status 2, and the process group,
    where there is one, is left. An OSError, which names its file, ends alike."""

    @functools.wraps(main)
    def run(argv=None):
        try:
            return main(argv)
        except (InputError, OSError) as error:
            advice = "" if isinstance(error, InputError) else f". {_OF_FILES}"
            print(f"error: {error}{advice}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None
        finally:
            DistributedManager.cleanup()

    return run
