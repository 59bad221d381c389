"""What a run finds in its folder: an earlier run, put aside, or its own checkpoints, where torchrun restarted it."""

import os
import sys

from core import checkpoint

WRITTEN = ("checkpoints", "best", "log.jsonl", "tensorboard", "figure.png", "loss.png", "evaluation", "inference")


def put_aside(folder):
    """Moves what an earlier run left in ``folder`` to ``previous_N``, so that neither its checkpoints nor results of
    them are taken for new."""
    old = [folder / name for name in WRITTEN if (folder / name).exists()]
    if old:
        n = 1 + max((int(p.name.split("_")[1]) for p in folder.glob("previous_*")), default=0)
        aside = folder / f"previous_{n}"
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
        print(f"the run that was in {folder} now lies in {aside}", file=sys.stderr, flush=True)


def launch():
    """What the restarts of one torchrun have in common and other launches have not; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"process {os.getppid()}" if name == "none" else name


def restarted(folder):
    """Whether torchrun restarted these processes, and the last checkpoint in ``folder`` is of before the restart."""
    path = (
        checkpoint.latest(folder / "checkpoints") if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else None
    )
    return path is not None and checkpoint.read_state(path).get("launch") == launch()
