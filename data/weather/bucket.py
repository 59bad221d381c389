"""A public S3 bucket over plain https: list by prefix, fetch a file so that what lies under its name is whole.

Bytes go to ``name.part`` and go on from there after a break; length and MD5 (the ETag of an object that was stored in
one piece) are checked before the name is given. Only the standard library.
Source: Amazon S3 API reference, ListObjectsV2 and GetObject.
"""

import hashlib
import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
from dataclasses import dataclass

from core.errors import InputError

TIMEOUT, PIECE = 60, 2**20  # s; bytes
_BROKEN = (OSError, EOFError, http.client.HTTPException)  # of the line or of the server: worth another try


@dataclass(frozen=True)
class Object:
    """A file in a bucket: its key, size in bytes, and MD5 in hex or "" where the bucket does not tell."""

    key: str
    size: int
    md5: str


def list_objects(base, prefix, tries=4):
    """All `Object` of ``base`` (such as https://noaa-goes19.s3.amazonaws.com) under a prefix, page after page.

    Raises `InputError` when the server cannot be reached or answers something else.
    """
    token, found = None, []
    while True:
        query = {"list-type": "2", "prefix": prefix} | ({"continuation-token": token} if token else {})
        url = f"{base.rstrip('/')}/?{urllib.parse.urlencode(query)}"
        page = retry(lambda url=url: _get(url), tries, url)
        try:
            objects, token = _parse(page)
        except (ET.ParseError, AttributeError, ValueError) as error:
            raise InputError(f"is no S3 listing ({error})", file=url, remedy="Check the base address") from error
        found += objects
        if not token:
            return found


def _parse(page):
    root = ET.fromstring(page)
    space = root.tag[: root.tag.index("}") + 1] if root.tag.startswith("{") else ""
    if root.tag != f"{space}ListBucketResult":
        raise ValueError(f"the root is {root.tag}")
    objects = []
    for item in root.iter(f"{space}Contents"):
        key, size, tag = (item.find(space + name).text for name in ("Key", "Size", "ETag"))
        tag = tag.strip('"')
        objects.append(Object(key, int(size), tag if "-" not in tag else ""))  # a dash: stored in several pieces
    return objects, root.findtext(f"{space}NextContinuationToken")


def fetch_object(base, item, path, tries=4, advance=lambda n: None):
    """Bring one `Object` to ``path``; returns its SHA-256 in hex. ``advance(n)`` is told of every n bytes.

    Raises `InputError` naming the address after ``tries`` breaks; what came so far stays in ``path``.part.
    """
    url = f"{base.rstrip('/')}/{urllib.parse.quote(item.key)}"
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    retry(lambda: _complete(url, item, part, advance), tries, url)
    with open(part, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    part.replace(path)
    return digest


def _complete(url, item, part, advance):
    have = part.stat().st_size if part.exists() else 0
    if have < item.size:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, open(part, "ab") as file:
            if answer.status != 206:  # the whole comes, not what is missing
                file.truncate(0)
            while piece := answer.read(PIECE):
                file.write(piece)
                advance(len(piece))
    size = part.stat().st_size
    if size < item.size:
        raise EOFError(f"{size} of {item.size} bytes came")  # go on from there
    if size > item.size or not matches(part, item):
        part.unlink()
        raise OSError("the bytes that came are not those that the bucket lists")


def matches(path, item):
    """Whether a file has the size, and the MD5 where one is known, of an `Object`."""
    if path.stat().st_size != item.size:
        return False
    return not item.md5 or hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() == item.md5


def _get(url):
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
        return answer.read()


def retry(action, tries, url, pause=0.5):
    """The result of ``action``, tried again after breaks with growing pauses; a plain refusal (4xx) is final."""
    for turn in range(1, tries + 1):
        try:
            return action()
        except _BROKEN as error:
            final = isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500
            if final or turn == tries:
                raise InputError(f"cannot be fetched ({error})", file=url,
                                 remedy="Check network, address and time, and run it again") from error  # fmt: skip
            time.sleep(pause * 2**turn)
