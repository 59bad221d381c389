"""A public S3 bucket over plain https, listed by prefix.

Source: Amazon S3 API reference, ListObjectsV2.
"""

import urllib.parse
import xml.etree.ElementTree as ET
from dataclasses import dataclass

from core.errors import InputError
from data.download import Remote, get, retry, stated


@dataclass(frozen=True)
class Object(Remote):
    """A file in a bucket, by its key."""

    key: str


def address(base, key):
    """URL of a key."""
    return f"{base.rstrip('/')}/{urllib.parse.quote(key)}"


def list_objects(base, prefix):
    """All `Object` of ``base`` (such as https://noaa-goes19.s3.amazonaws.com) under a prefix, page after page.

    Raises `InputError` when the server cannot be reached or answers something else.
    """
    token, found = None, []
    while True:
        query = {"list-type": "2", "prefix": prefix} | ({"continuation-token": token} if token else {})
        url = f"{base.rstrip('/')}/?{urllib.parse.urlencode(query)}"
        page = retry(lambda url=url: get(url), url)
        try:
            objects, token = _parse(page, base)
        except (ET.ParseError, AttributeError, ValueError) as error:
            raise InputError(f"is no S3 listing ({error})", file=url, remedy="Check the base address") from error
        found += objects
        if not token:
            return found


def _parse(page, base):
    root = ET.fromstring(page)
    space = root.tag[: root.tag.index("}") + 1] if root.tag.startswith("{") else ""
    if root.tag != f"{space}ListBucketResult":
        raise ValueError(f"the root is {root.tag}")
    objects = []
    for item in root.iter(f"{space}Contents"):
        key, size, tag = (item.find(space + name).text for name in ("Key", "Size", "ETag"))
        objects.append(Object(address(base, key), int(size), stated(tag), key))
    return objects, root.findtext(f"{space}NextContinuationToken")
