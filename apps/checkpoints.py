"""Which checkpoint a command takes, whether it is of the right application, and where its results go."""

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


def beside(path, name):
    """The folder ``name`` of the run whose checkpoint, of `find`, is at ``path``: where its results go by default. Of a
    checkpoint that was put elsewhere, and of any other file, the folder in which it lies counts as the run's."""
    folder = Path(path).parent
    return str((folder.parent if folder.name in ("checkpoints", "best") else folder) / name)


def check_kind(state, kind, path):
    """Refuses a checkpoint of another application or model family."""
    if state.get("kind") != kind:
        raise InputError(
            f"a checkpoint of {state.get('kind')!r}, not of {kind!r}",
            file=path,
            remedy="Give a checkpoint written by the training command of this application.",
        )
