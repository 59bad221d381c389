"""The messages of a step apart from it: the step without its messages, and the messages without the step.

All that core sends goes through ``core.collectives.send``. A :class:`Tape` takes its place. It sends, and keeps what
came; then it hands that out again in the same order and sends nothing, so that the step computes with the same numbers
(a GPU is faster on zeros than on what is real); and it sends messages of the same kinds and sizes alone.
"""

from contextlib import contextmanager
from itertools import cycle
from unittest.mock import patch

import torch

from core import collectives
from core._torch import send, wire


class Tape:
    """What one step of this rank sends and receives. Eager steps only: a compiled one has its messages built in."""

    def __init__(self):
        self._sent, self._came = [], []

    @contextmanager
    def recording(self):
        """One step runs inside, as always."""
        with patch.object(collectives, "send", self._record):
            yield

    def _record(self, operator, x, *rest):
        came = send(operator, x, *rest)
        self._sent.append((operator, x.shape, x.dtype, x.device, rest))
        self._came.append(came.detach())
        return came

    @contextmanager
    def silent(self):
        """Steps run inside without a message."""
        kept = cycle(self._came)
        with patch.object(collectives, "send", lambda *call: next(kept).detach()):
            yield

    def send_again(self):
        """The messages alone, one after the other."""
        for operator, shape, dtype, device, rest in self._sent:
            wire.wait_tensor(send(operator, torch.empty(shape, dtype=dtype, device=device), *rest))
