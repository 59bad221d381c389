"""Which checkpoint a command takes, and whether it is of the right application."""

from pathlib import Path

from core import InputError, checkpoint


def find(path):
    """The checkpoint at ``path``; of the folder of a run the last complete one of its training."""
    return str(checkpoint.latest(Path(path) / "checkpoints") or checkpoint.latest(path) or path)


def check_kind(state, kind, path):
    """Refuses a checkpoint of another application or model family."""
    if state.get("kind") != kind:
        raise InputError(
            f"a checkpoint of {state.get('kind')!r}, not of {kind!r}",
            file=path,
            remedy="Give a checkpoint written by the training command of this application.",
        )
