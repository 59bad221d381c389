"""Which checkpoint a command takes, and whether it is of the right application."""

from pathlib import Path

from core import InputError, checkpoint


def find(path):
    """The checkpoint at ``path``; of the folder of a run the last complete one of its training.

    Raises:
        InputError: there is none.
    """
    found = checkpoint.latest(Path(path) / "checkpoints") or checkpoint.latest(path)
    if found is None and not (Path(path) / "state.json").is_file():
        problem = "no checkpoint in it" if Path(path).exists() else "no checkpoint: there is no such folder"
        raise InputError(problem, file=path, remedy="Give a run's folder, the --out of a training, or a step of it")
    return str(found or path)


def check_kind(state, kind, path):
    """Refuses a checkpoint of another application or model family."""
    if state.get("kind") != kind:
        raise InputError(
            f"a checkpoint of {state.get('kind')!r}, not of {kind!r}",
            file=path,
            remedy="Give a checkpoint written by the training command of this application.",
        )
