"""What an archive tells of the files that it was made from."""

import hashlib


def sha256(path):
    """Hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
