"""Which collectives an expression ran, and how many bytes each rank put on the wire."""

import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Message:
    """One collective of this rank: its kind, the bytes this rank sends to others, and the line that caused it."""

    kind: str
    bytes: int
    site: str


@dataclass
class Trace:
    messages: list[Message] = field(default_factory=list)

    def count(self, kind=None):
        return sum(kind is None or m.kind == kind for m in self.messages)

    def bytes(self, kind=None):
        return sum(m.bytes for m in self.messages if kind is None or m.kind == kind)

    def kinds(self):
        return [m.kind for m in self.messages]

    def __str__(self):
        return "\n".join(f"{m.kind:<16}{m.bytes:>14,} B  {m.site}" for m in self.messages) or "no collective"


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
    """Called by ``core.collectives`` for each message; costs nothing unless a trace is open."""
    if _traces:
        message = Message(kind, int(nbytes), call_site())
        for t in _traces:
            t.messages.append(message)


def call_site():
    """The innermost frame outside core and torch."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename.replace("\\", "/")
        if "/core/" not in path and "/torch/" not in path:
            return f"{frame.filename}:{frame.lineno}"
    return "backward"
