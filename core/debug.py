"""Which collectives an expression ran, how many bytes each rank sent, from which line, and how much was hidden."""

import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Message:
    """One collective of this rank.

    Attributes:
        kind: its name.
        bytes: what this rank sends to others.
        site: the line that caused it.
        marks: when it was sent, when somebody began to wait for it, and when it was there.
    """

    kind: str
    bytes: int
    site: str
    marks: list = field(default_factory=list, repr=False)

    def mark(self, device):
        """The present moment: of the CPU, or of the GPU's stream."""
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self):
        """Between sending and waiting, when other work was done; and while waiting."""
        if len(self.marks) < 3:
            return 0.0, 0.0
        if isinstance(self.marks[0], float):
            sent, waits, there = self.marks
            return waits - sent, there - waits
        self.marks[2].synchronize()
        return tuple(a.elapsed_time(b) / 1e3 for a, b in zip(self.marks, self.marks[1:]))


@dataclass
class Trace:
    messages: list[Message] = field(default_factory=list)

    def count(self, kind=None):
        return sum(kind is None or m.kind == kind for m in self.messages)

    def bytes(self, kind=None):
        return sum(m.bytes for m in self.messages if kind is None or m.kind == kind)

    def kinds(self):
        return [m.kind for m in self.messages]

    def overlap(self):
        """Share of the time that messages were under way in which this rank did other work: 0 waits, 1 never waits."""
        return _overlap(self.messages)

    def __str__(self):
        """A line for each call site and kind."""
        sites = {}
        for m in self.messages:
            sites.setdefault((m.site, m.kind), []).append(m)
        rows = [
            f"{kind:<16}x{len(ms):<5}{sum(m.bytes for m in ms):>14,} B  {_overlap(ms):>4.0%} hidden  {site}"
            for (site, kind), ms in sites.items()
        ]
        return "\n".join(rows) or "no collective"


def _overlap(messages):
    seconds = [m.seconds() for m in messages]
    hidden, waited = (sum(s[i] for s in seconds) for i in range(2))
    return hidden / (hidden + waited) if hidden + waited > 0 else 0.0


_traces: list[Trace] = []


@contextmanager
def trace():
    """Records every collective of core on this rank, forward and backward, while the context is open."""
    recorded = Trace()
    _traces.append(recorded)
    try:
        yield recorded
    finally:
        _traces.remove(recorded)


def record(kind, nbytes):
    """Called by ``core.collectives`` for each message; costs nothing, and gives None, unless a trace is open."""
    if not _traces:
        return None
    message = Message(kind, int(nbytes), call_site())
    for t in _traces:
        t.messages.append(message)
    return message


def call_site():
    """The innermost frame outside core and torch."""
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename.replace("\\", "/")
        if "/core/" not in path and "/torch/" not in path:
            return f"{frame.f_code.co_filename}:{line}"
    return "backward"
