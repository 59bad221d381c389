"""Fields in 16 bits: whole numbers with a scale and an offset for each channel, where nothing is lost that was known.

Imagery comes as counts with a scale and is stored as those counts; lightning is counts. Radar is a mean over a cell of
values that MRMS gives in steps of 0.1 mm/h or 0.5 dBZ: it is rounded to 0.01 dBZ, which the archive says.
"""

import numpy as np

from core.errors import InputError

FILL = -32768
ROUNDED = {"refc": (0.01, 0.0), "refb": (0.01, 0.0)}  # scale, offset
COUNTS = {"glm": (1.0, 0.0)}
SLACK = 1e-3  # of a scale: what float32 does to a value between file and archive


def centred(scale, offset):
    """Scale and offset of signed numbers for those of unsigned ones: count 0 becomes -32767."""
    return scale, offset + 32767 * scale


def pack(frame, names, packing):
    """A frame (channel, y, x) with NaN to int16 by {channel: (scale, offset)}.

    Raises `InputError` for a value that 16 bits cannot hold, or that is rounded where no rounding was agreed.
    """
    out = np.full(frame.shape, FILL, np.int16)
    for c, name in enumerate(names):
        scale, offset = packing[name]
        seen = np.isfinite(frame[c])
        exact = (frame[c][seen].astype(np.float64) - offset) / scale
        whole = np.rint(exact)
        if whole.size and np.abs(whole).max() > 32767:
            raise InputError(f"{frame[c][seen].max():g} does not fit 16 bits", variable=name,
                             remedy="Build with --dtype float32")  # fmt: skip
        if name not in ROUNDED:
            far = np.abs(exact - whole).max(initial=0)
            if far > max(SLACK, 2e-7 * np.abs(frame[c][seen]).max(initial=0) / scale):
                raise InputError(f"values lie {far * scale:g} beside the steps of {scale:g} of the first file",
                                 variable=name, remedy="Build with --dtype float32")  # fmt: skip
        out[c][seen] = whole
    return out


def unpack(values, scale, offset):
    """int16 (channel, y, x) to float32, NaN where missing; scale and offset (channel,)."""
    scale, offset = (np.asarray(v, np.float64)[:, None, None] for v in (scale, offset))
    return np.where(values == FILL, np.nan, values * scale + offset).astype(np.float32)
