"""Arrays of a VTU file by ranges of rows: what a file of 50 GB needs to pass through a few.

The XML is walked from tag to tag; data is jumped over by its stated length. Reads inline base64 and appended data, raw
or base64, plain or in compressed blocks (zlib, lz4, lzma), with headers of 32 or 64 bits, in either order of bytes,
and a file that comes in parts; also numbers as text (ASCII), which are held in memory whole. Source: VTK's description
of its XML file formats.
"""

import base64
import lzma
import os
import re
import zlib
from dataclasses import dataclass

import numpy as np

from core.errors import InputError

WINDOW = 1 << 16
_ATTRIBUTE = re.compile(r"""([\w:]+)\s*=\s*["']([^"']*)["']""")
_SECTIONS = ("PointData", "CellData", "Points", "Cells", "FieldData")


@dataclass
class _Array:
    section: str
    name: str
    dtype: np.dtype
    components: int
    start: int  # of its header in the file, or in the appended data
    inline: bool
    ascii: bool


class VtuFile:
    """Arrays of the one piece of a VTU file; ``paths``: the file, or its parts in order.

    Raises InputError for files that are missing, cut short, no VTU, or of several pieces.
    """

    def __init__(self, paths):
        self.paths = [os.fspath(path) for path in paths]
        self.bytes = _Joined(self.paths)
        self.arrays, self._loaded = {}, {}
        if not self.bytes.read(max(0, self.bytes.size - 64), 64).rstrip().endswith(b"</VTKFile>"):
            raise self._error("cut short or not a VTK XML file: </VTKFile> is not at its end")
        self._walk()

    def _error(self, problem, variable=None, remedy="Fetch the file again"):
        return InputError(problem, file=self.paths[0], variable=variable, remedy=remedy)

    def names(self, section):
        """Names of the arrays of a section: PointData, CellData, Points, Cells."""
        return [name for part, name in self.arrays if part == section]

    def rows(self, section, name):
        """Number of rows of an array."""
        array, payload = self._payload(section, name)
        return payload.size // (array.dtype.itemsize * array.components)

    def read(self, section, name, first, last):
        """Rows first ... last of an array, (n,) or (n, components), in the file's type. Decodes no other rows, save
        those of the same compressed blocks."""
        array, payload = self._payload(section, name)
        width = array.dtype.itemsize * array.components
        if last * width > payload.size:
            raise self._error(f"{payload.size // width} rows where row {last} is wanted", name)
        try:
            data = payload.read(first * width, last * width)
        except (ValueError, zlib.error, lzma.LZMAError, RuntimeError) as error:
            raise self._error(f"cannot be decoded ({error})", name) from None
        if len(data) != (last - first) * width:
            raise self._error(f"ends within rows {first} to {last}", name)
        values = np.frombuffer(data, array.dtype)
        return values.reshape(-1, array.components) if array.components > 1 else values

    def _payload(self, section, name):
        array = self.arrays.get((section, name))
        if array is None:
            raise self._error(f"no such array in {section}; there are {' '.join(self.names(section))}", name)
        if (section, name) not in self._loaded:
            self._loaded[section, name] = _Text(self, array) if array.ascii else _Payload(self, array)
        return array, self._loaded[section, name]

    def _walk(self):
        """Finds all arrays, the counts of points and cells, and how values are encoded."""
        at, section, pieces = 0, "", 0
        self.appended, self.encoding = None, "raw"
        while (tag := self._tag(at)) is not None:
            name, attributes, at = tag
            if name == "VTKFile":
                self._header(attributes)
            elif name == "Piece":
                pieces += 1
                self.points, self.cells = (int(attributes.get(f"NumberOf{k}", 0)) for k in ("Points", "Cells"))
            elif name in _SECTIONS:
                section = name
            elif name == "DataArray":
                at = self._note(section, attributes, at)
            elif name == "AppendedData":
                self.encoding = attributes.get("encoding", "raw")
                self.appended = at + self.bytes.read(at, WINDOW).index(b"_") + 1
                break
        if pieces != 1:
            raise self._error(f"has {pieces} pieces; one is read", remedy="Export the volume as one VTU file")
        if not self.names("Points"):
            raise self._error("has no points, or is damaged before them")

    def _header(self, attributes):
        if attributes.get("type") != "UnstructuredGrid":
            raise self._error(f"no VTU file (type {attributes.get('type')})")
        self.order = "<" if attributes.get("byte_order", "LittleEndian") == "LittleEndian" else ">"
        self.size_type = np.dtype(self.order + ("u8" if attributes.get("header_type") == "UInt64" else "u4"))
        name = attributes.get("compressor")
        if name is not None and name not in DECOMPRESS:
            raise self._error(f"unknown compressor {name}", remedy="Export it with zlib, lz4 or without compression")
        self.decompress = DECOMPRESS.get(name)

    def _note(self, section, attributes, at):
        """Keeps where an array lies; returns where the walk goes on."""
        kind, form = attributes.get("type", ""), attributes.get("format", "ascii")
        letter = {"Float": "f", "Int": "i", "UInt": "u"}.get(kind.rstrip("0123456789"))
        bits = kind.lstrip("FloatUIn")
        inline, name = form == "binary", attributes.get("Name", section)
        start = int(attributes.get("offset", 0)) if form == "appended" else at
        if letter is not None:
            dtype = np.dtype(f"{self.order}{letter}{int(bits) // 8}")
            components = int(attributes.get("NumberOfComponents") or 1)
            array = _Array(section, name, dtype, components, start, inline, form == "ascii")
            self.arrays.setdefault((section, name), array)
            if inline:
                self._loaded[section, name] = payload = _Payload(self, array)
                return payload.end
        return at

    def _tag(self, at):
        """(name, attributes, position behind it) of the next opening tag at or after ``at``; None at the end."""
        while at < self.bytes.size:
            window = self.bytes.read(at, WINDOW)
            first = window.find(b"<")
            if first < 0:
                at += len(window)
                continue
            last = window.find(b">", first)
            if last < 0 and first == 0:
                return None
            if last < 0:
                at += first
                continue
            text, at = window[first + 1 : last].decode("utf-8", "replace"), at + last + 1
            if text[:1] not in "/?!":
                return text.split()[0].rstrip("/"), dict(_ATTRIBUTE.findall(text)), at
        return None


class _Text:
    """An array that is written as numbers in text: read whole, as text has no ranges of rows."""

    def __init__(self, file, array):
        pieces, at = [], array.start
        while not pieces or b"<" not in pieces[-1]:
            pieces.append(file.bytes.read(at, WINDOW))
            at += len(pieces[-1])
        text = b"".join(pieces).partition(b"<")[0].decode("ascii", "replace").split()
        try:
            self.values = (
                np.array(text, np.float64 if array.dtype.kind == "f" else np.int64).astype(array.dtype).tobytes()
            )
        except ValueError as error:
            raise file._error(f"is no text of numbers ({error})", array.name) from None
        self.size = len(self.values)

    def read(self, first, last):
        """Bytes first ... last of the values."""
        return self.values[first:last]


class _Payload:
    """The bytes of one array: its header read once, then any range of them; ``end``: where they end in the file."""

    def __init__(self, file, array):
        self.file, self.text = file, array.inline or file.encoding == "base64"
        start = array.start
        if array.inline:
            window = file.bytes.read(start, WINDOW)
            start += len(window) - len(window.lstrip())
        elif file.appended is not None:
            start += file.appended
        self.start, width = start, file.size_type.itemsize
        if file.decompress is None:
            self.size = int(self._numbers(1)[0])
            alone = self.text and b"=" in file.bytes.read(start, _chars(width))  # a header with a padding of its own
            self.shift = 0 if alone else width
            self.data = start + (_chars(width) if alone else 0)
            self.end = self.data + (_chars(self.size + self.shift) if self.text else self.size + self.shift)
            return
        count, self.block, self.rest = (int(n) for n in self._numbers(3))
        sizes = self._numbers(3 + count)[3:].astype(np.int64)
        self.at = np.concatenate([[0], np.cumsum(sizes)])
        self.size = (count - (self.rest > 0)) * self.block + self.rest
        header = (3 + count) * width
        self.data, self.shift = start + (_chars(header) if self.text else header), 0
        self.end = self.data + (_chars(int(self.at[-1])) if self.text else int(self.at[-1]))

    def _numbers(self, count):
        size = count * self.file.size_type.itemsize
        raw = self._read(self.start, _chars(size) if self.text else size)[:size]
        if len(raw) < size:
            raise self.file._error("is damaged: the size of an array cannot be read")
        return np.frombuffer(raw, self.file.size_type)

    def read(self, first, last):
        """Bytes first ... last of the values."""
        if self.file.decompress is None or last <= first:
            return self._stored(first + self.shift, last + self.shift) if last > first else b""
        one, end = first // self.block, -(-last // self.block)
        raw, at = self._stored(int(self.at[one]), int(self.at[end])), self.at[one : end + 1] - self.at[one]
        parts = []
        for k in range(end - one):
            size = self.rest if self.rest and one + k == len(self.at) - 2 else self.block
            parts.append(self.file.decompress(raw[at[k] : at[k + 1]], size))
        return b"".join(parts)[first - one * self.block : last - one * self.block]

    def _stored(self, first, last):
        """Bytes first ... last of what is stored, decoded where it is base64: three bytes in four characters."""
        if not self.text:
            return self.file.bytes.read(self.data + first, last - first)
        one, end = first // 3, -(-last // 3)
        raw = self._read(self.data + 4 * one, 4 * (end - one))
        return raw[first - 3 * one : last - 3 * one]

    def _read(self, at, count):
        """``count`` bytes of the file, decoded where they are base64."""
        raw = self.file.bytes.read(at, count)
        try:
            return base64.b64decode(raw, validate=True) if self.text else raw
        except ValueError as error:
            raise self.file._error(f"is damaged: no base64 where values should be ({error})") from None


def _chars(size):
    return 4 * -(-size // 3)


def _lz4(piece, size):
    from numcodecs.lz4 import decompress  # comes with zarr; wants the size in front, which VTK keeps elsewhere

    return bytes(decompress(int(size).to_bytes(4, "little") + bytes(piece)))


DECOMPRESS = {
    "vtkZLibDataCompressor": lambda piece, size: zlib.decompress(piece),
    "vtkLZMADataCompressor": lambda piece, size: lzma.decompress(piece),
    "vtkLZ4DataCompressor": _lz4,
}


class _Joined:
    """Files read as if they were one."""

    def __init__(self, paths):
        self.paths = paths
        self.ends = np.cumsum([os.path.getsize(path) for path in paths])
        self.size = int(self.ends[-1])

    def read(self, at, count):
        """Up to ``count`` bytes from position ``at``."""
        parts, last = [], min(at + count, self.size)
        while at < last:
            number = int(np.searchsorted(self.ends, at, side="right"))
            begin = int(self.ends[number - 1]) if number else 0
            with open(self.paths[number], "rb") as stream:
                stream.seek(at - begin)
                piece = stream.read(min(last, int(self.ends[number])) - at)
            if not piece:
                break
            parts.append(piece)
            at += len(piece)
        return b"".join(parts)
