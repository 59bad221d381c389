"""The record of a run: one JSON object a line, and the same numbers for TensorBoard where it is installed."""

import json
import resource
from importlib.util import find_spec

import torch


class Record:
    """``log.jsonl`` in a folder, and ``tensorboard/`` beside it; kept by one rank. A context manager."""

    def __init__(self, folder):
        self.file, self.board = folder / "log.jsonl", None
        if find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(folder / "tensorboard")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.board:
            self.board.close()

    def add(self, step, numbers):
        """Numbers of a step, by name; a dict of them under one name is a group."""
        with open(self.file, "a") as f:
            f.write(json.dumps({"step": step} | numbers) + "\n")
        for name, value in numbers.items() if self.board else ():
            for part, number in value.items() if isinstance(value, dict) else [("", value)]:
                self.board.add_scalar(f"{name}/{part}" if part else name, number, step)


def peak_memory():
    """The most memory that this process has held, GiB: of its GPU, or of the host where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
