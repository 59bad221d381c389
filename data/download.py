"""One file over HTTP, whole or absent: gone on with after a break, and checked against the hash that the server states.

Bytes go to ``name.partial`` until length and hash are right. Hugging Face states the SHA-256 of large files in
``X-Linked-Etag``, on the answer before it redirects to its storage; S3 states the MD5 of files uploaded in one piece
as ``ETag``. Where neither is there, lengths are compared.
"""

import hashlib
import os
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from core.errors import InputError

TIMEOUT, PIECE, PAUSE, TRIES = 60, 1 << 20, 0.5, 4  # s; bytes; s
BROKEN = (OSError, HTTPException, EOFError)  # of the line or of the server: worth another try


@dataclass(frozen=True)
class Remote:
    """A file on a server: its address, its bytes, and {"sha256" or "md5": hex}, empty where none is stated."""

    url: str
    size: int
    hashes: dict


class _Noting(urllib.request.HTTPRedirectHandler):
    """Follows redirects and keeps the hash that an answer on the way states."""

    def __init__(self):
        self.stated = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        self.stated = headers.get("X-Linked-Etag") or self.stated
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        if found is not None and req.get_method() == "HEAD":
            found.method = "HEAD"
        return found


def ask(url):
    """Remote of an address, or None where the server has no such file (404).

    Raises InputError where the server does not answer, refuses, or states no length.
    """

    def head():
        noting = _Noting()
        request = urllib.request.Request(url, method="HEAD")
        try:
            with urllib.request.build_opener(noting).open(request, timeout=TIMEOUT) as answer:
                return answer.headers.get("Content-Length"), noting.stated or answer.headers.get("ETag") or ""
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    found = retry(head, url)
    if found is None:
        return None
    size, tag = found
    if size is None:
        raise InputError("the server states no length", file=url, remedy="Choose another --base")
    return Remote(url, int(size), stated(tag))


def stated(tag):
    """{"sha256" or "md5": hex} of an ETag; empty for one that is no hash, as of files stored in several pieces."""
    tag = tag.removeprefix("W/").strip('"').lower()
    kind = {64: "sha256", 32: "md5"}.get(len(tag)) if re.fullmatch("[0-9a-f]+", tag) else None
    return {kind: tag} if kind else {}


def get(url, span=None):
    """The bytes of an address, all or those of a span ``bytes=first-last``."""
    request = urllib.request.Request(url, headers={"Range": span} if span else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        return answer.read()


def download(remote, path, *, tries=TRIES, advance=lambda count: None):
    """Bring ``remote`` to ``path``; returns its SHA-256 in hex. ``advance(n)`` is told of every n bytes that came.

    What came before a break stays in ``path``.partial and is gone on with. Raises InputError naming the address after
    ``tries`` breaks or answers of another length or hash than the server states.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    found = retry(lambda: _complete(remote, partial, advance), remote.url, tries)
    os.replace(partial, path)
    return found["sha256"]


def digests(path):
    """{"sha256": hex, "md5": hex} of a file, read once."""
    both = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as stream:
        while piece := stream.read(PIECE):
            for one in both:
                one.update(piece)
    return dict(zip(("sha256", "md5"), (one.hexdigest() for one in both)))


def _complete(remote, partial, advance):
    """Digests of ``partial`` once it is whole; a damaged one is removed, so that the next try begins anew."""
    have = partial.stat().st_size if partial.exists() else 0
    if have < remote.size or not partial.exists():
        request = urllib.request.Request(remote.url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, open(partial, "ab") as stream:
            if answer.status != 206:  # the whole comes, not what is missing
                stream.truncate(0)
            while piece := answer.read(PIECE):
                stream.write(piece)
                advance(len(piece))
    size = partial.stat().st_size
    if size < remote.size:
        raise EOFError(f"{size} of {remote.size} bytes came")
    found = digests(partial)
    wrong = [kind for kind, value in remote.hashes.items() if found[kind] != value]
    if size > remote.size or wrong:
        partial.unlink()
        what = f"do not have the {wrong[0]} that the server states" if wrong else f"are {size}, not {remote.size}"
        raise OSError(f"the bytes that came {what}: damaged on the way, or changed")
    return found


def retry(action, url, tries=TRIES):
    """The result of ``action``, tried again after breaks with growing pauses; a plain refusal (4xx) is final."""
    for turn in range(1, tries + 1):
        try:
            return action()
        except BROKEN as error:
            if turn == tries or 400 <= getattr(error, "code", 0) < 500:
                raise InputError(
                    f"cannot be fetched ({error})",
                    file=url,
                    remedy="Check the address and the network, then run it again",
                ) from error
            time.sleep(PAUSE * 2 ** (turn - 1))
