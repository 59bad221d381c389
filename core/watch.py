"""A rank that dies ends the others, and they say which one it was; with gloo and NCCL alike.

Every rank holds a line to rank 0. The system breaks it when the process ends, whatever ended it, so nobody polls and a
slow rank is never taken for a dead one. Rank 0 tells all others what it saw; a thread of each prints that and ends its
process, because the main thread may wait in a collective that will never be complete.
"""

import atexit
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist

PATIENCE = 1.0  # seconds in which rank 0 waits for what caused an error: others see it as an error of their collectives
LEFT = "left"


class Watch:
    """Made by every rank at the same time, once the default process group is there; :meth:`leave` ends it.

    Raises:
        OSError: no connection to the address of rank 0, MASTER_ADDR.
    """

    def __init__(self):
        self.rank, self._leaving, self._closed, self._judge = dist.get_rank(), False, False, None
        server = _server() if self.rank == 0 else None
        told = [(server.getsockname()[1], secrets.token_hex(8)) if server else None]
        dist.broadcast_object_list(told)
        port, token = told[0]
        self._line = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=60)
        self._line.settimeout(None)
        self._line.sendall(f"{token}{self.rank:08d}".encode())
        if server:
            lines = _accepted(server, token)
            self._judge = threading.Thread(target=_judge, args=(lines,), daemon=True)
            self._judge.start()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def leave(self, error=None):
        """Says why this rank ends; ``error`` is None at the regular end of a program. Returns when the others know."""
        if self._leaving:
            return
        self._leaving = True
        self._say(LEFT if error is None else _words(error))
        if error is not None:
            self._thread.join(3 * PATIENCE)
        if self._judge:
            self._judge.join(3 * PATIENCE)
        self._closed = True
        self._line.close()

    def _at_exit(self):
        self.leave(getattr(sys, "last_value", None))  # what Python printed on the way out

    def _say(self, words):
        with suppress(ConnectionError):  # rank 0 died, which the thread has heard
            self._line.sendall(words.encode())

    def _listen(self):
        word = _word(self._line)
        verdict = json.loads(word) if word else {"known_to": [], "text": "rank 0 died without a word"}
        if self._closed or verdict == LEFT or self.rank in verdict["known_to"]:
            return
        print(f"error: rank {self.rank} ends because {verdict['text']}", file=sys.stderr, flush=True)
        if not self._leaving:
            os._exit(1)


def _server():
    both = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", 0),
        family=socket.AF_INET6 if both else socket.AF_INET,
        dualstack_ipv6=both,
        backlog=dist.get_world_size(),
    )


def _accepted(server, token):
    """The lines of all ranks, by rank."""
    server.settimeout(60)
    lines = {}
    with server:
        while len(lines) < dist.get_world_size():
            line, _ = server.accept()
            line.settimeout(60)
            hello = line.recv(len(token) + 8, socket.MSG_WAITALL).decode(errors="replace")
            if not hello.startswith(token):
                line.close()
                continue
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):  # a machine that is gone says nothing: ask, and wait for 30 s
                for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                    line.setsockopt(socket.IPPROTO_TCP, option, value)
            lines[int(hello[len(token) :])] = line
    return lines


def _judge(lines):
    """On rank 0: hears all ranks until they have left or one has died, and tells the others."""
    ends, end_by = {}, None
    with selectors.DefaultSelector() as selector:
        for rank, line in lines.items():
            selector.register(line, selectors.EVENT_READ, rank)
        while len(ends) < len(lines) and (end_by is None or time.monotonic() < end_by):
            for key, _ in selector.select(None if end_by is None else max(0, end_by - time.monotonic())):
                ends[key.data] = _word(key.fileobj)
                selector.unregister(key.fileobj)
            if "" in ends.values():  # nothing caused that but itself; others may go the same moment
                end_by = min(end_by or time.monotonic() + PATIENCE / 10, time.monotonic() + PATIENCE / 10)
            elif set(ends.values()) - {LEFT}:
                end_by = end_by or time.monotonic() + PATIENCE
            elif 0 in ends:
                break
    verdict = _verdict(ends, len(lines)) if set(ends.values()) - {LEFT} else LEFT
    for _, line in sorted(lines.items(), reverse=True):  # rank 0, which this thread needs, is told last
        with suppress(OSError):  # it has gone
            line.sendall(json.dumps(verdict).encode())


def _verdict(ends, world):
    """Who is to blame, in words for the others. ``ends``: how ranks ended, in order; nothing where one was killed."""
    blamed = [rank for rank, how in ends.items() if not how]
    if blamed:
        text = f"{_ranks(blamed)} died without a word (killed, out of memory or a crash)"
    else:
        how = next(how for how in ends.values() if how != LEFT)
        blamed = [rank for rank, other in ends.items() if other == how]  # all, where all meet the same
        text = f"{_ranks(blamed)} failed: {how}"
        silent = sorted(set(range(world)) - ends.keys())
        if 0 < len(silent) <= world // 2:
            text += f"; {_ranks(silent)} had not failed {PATIENCE:g} s later"
    left = [rank for rank, how in ends.items() if how == LEFT]
    if left:  # too early, perhaps
        return {"known_to": [], "text": f"{text}; {_ranks(left)} had left before"}
    return {"known_to": blamed, "text": text}


def _ranks(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def _word(line):
    """The one message that comes over a line, or nothing where it breaks."""
    try:
        return line.recv(1 << 16).decode(errors="replace")
    except OSError:
        return ""


def _words(error):
    """An error in one line; that of the command, which ends in the exit status."""
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:500]}"
