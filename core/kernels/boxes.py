"""Boxes of grid points inside a Triton kernel: which one is whose, where it lies in memory, and who sees whom.

A grid has three dims here, the missing ones of one point. Points are counted along their class ``i % dilation``, whose
*places* 0, 1, .. have windows without gaps; :mod:`core.ops.windows` says what a window is. ``WINDOWS`` has a window
(size, dilation, causal) for each dim, an axis is (all points, first query at hand, queries, first key, keys), a field
is a pointer with its strides (batch, head, three dims), and ``here`` is a head and a batch.
"""

import triton
import triton.language as tl


# -- along the dim I --------------------------------------------------------------------------------------------------
@triton.jit
def _first(place, length, I: tl.constexpr, WINDOWS: tl.constexpr):
    """Place of the first key that a query sees, in a class of ``length`` points."""
    if WINDOWS[I][2]:
        return tl.maximum(place - (WINDOWS[I][0] - 1), 0)
    else:
        return tl.minimum(tl.maximum(place - WINDOWS[I][0] // 2, 0), length - WINDOWS[I][0])


@triton.jit
def _places(position, c, I: tl.constexpr, WINDOWS: tl.constexpr):
    """Number of the places of class ``c`` before a position."""
    return (position - c + WINDOWS[I][1] - 1) // WINDOWS[I][1]


@triton.jit
def _keys_of(axis, c, tile, I: tl.constexpr, WINDOWS: tl.constexpr, OWN: tl.constexpr):
    """Start and stop of a box of queries, low and high of all keys in their windows, length of the class."""
    length = _places(axis[0], c, I, WINDOWS)
    start = _places(axis[1], c, I, WINDOWS) + tile * OWN[I]
    stop = _places(axis[1] + axis[2], c, I, WINDOWS)
    last = tl.minimum(start + OWN[I], stop) - 1
    low, high = _first(start, length, I, WINDOWS), last + 1
    if not WINDOWS[I][2]:
        high = _first(last, length, I, WINDOWS) + WINDOWS[I][0]
    return start, stop, low, tl.where(start < stop, high, low), length


@triton.jit
def _queries_of(axis, c, tile, I: tl.constexpr, WINDOWS: tl.constexpr, OWN: tl.constexpr):
    """Start and stop of a box of keys, low and high of all queries whose windows reach it, length of the class."""
    length, size = _places(axis[0], c, I, WINDOWS), WINDOWS[I][0]
    start = _places(axis[3], c, I, WINDOWS) + tile * OWN[I]
    stop = _places(axis[3] + axis[4], c, I, WINDOWS)
    last = tl.minimum(start + OWN[I], stop) - 1
    if WINDOWS[I][2]:
        low, high = start, last + size
    else:  # a window that is pushed inwards is that of every query further out
        low = tl.where(start < size, 0, start - (size - 1) + size // 2)
        high = tl.where(last >= length - size, length, last + size // 2 + 1)
    low = tl.maximum(low, _places(axis[1], c, I, WINDOWS))
    high = tl.minimum(high, _places(axis[1] + axis[2], c, I, WINDOWS))
    return start, stop, low, tl.where(start < stop, tl.maximum(low, high), low), length


@triton.jit
def _along(places, stop, origin, field, I: tl.constexpr, WINDOWS: tl.constexpr):
    """Offset along one dim; places beyond the last count as the last."""
    return (tl.minimum(places[I], stop[I] - 1) * WINDOWS[I][1] + origin[I]).to(tl.int64) * field[1][2 + I]


@triton.jit
def _within(queries, keys, length, I: tl.constexpr, WINDOWS: tl.constexpr):
    start = _first(queries[I], length[I], I, WINDOWS)
    after = (keys[I] - start).to(tl.uint32, bitcast=True)  # huge before the start
    if WINDOWS[I][2]:
        return after <= (queries[I] - start).to(tl.uint32, bitcast=True)
    else:
        return after < WINDOWS[I][0]


# -- boxes ------------------------------------------------------------------------------------------------------------
@triton.jit
def program(axes, tiles, heads, BACK: tl.constexpr, WINDOWS: tl.constexpr, OWN: tl.constexpr):
    """What this program owns, and where it has to walk; neighbouring boxes follow each other.

    Returns:
        here; start and stop of the owned box; low and high of the walk; length of the class; position of its place 0
        among the queries and among the keys at hand. ``BACK``: keys are owned and queries walked over.
    """
    p = tl.program_id(0)
    t2, p = p % tiles[2], p // tiles[2]
    t1, p = p % tiles[1], p // tiles[1]
    t0, p = p % tiles[0], p // tiles[0]
    c2, p = p % WINDOWS[2][1], p // WINDOWS[2][1]
    c1, p = p % WINDOWS[1][1], p // WINDOWS[1][1]
    c0, p = p % WINDOWS[0][1], p // WINDOWS[0][1]
    here = (p // heads).to(tl.int64), (p % heads).to(tl.int64)
    reach: tl.constexpr = _queries_of if BACK else _keys_of
    x = reach(axes[0], c0, t0, 0, WINDOWS, OWN)
    y = reach(axes[1], c1, t1, 1, WINDOWS, OWN)
    z = reach(axes[2], c2, t2, 2, WINDOWS, OWN)
    q = c0 - axes[0][1], c1 - axes[1][1], c2 - axes[2][1]
    k = c0 - axes[0][3], c1 - axes[1][3], c2 - axes[2][3]
    start, stop, low, high = (x[0], y[0], z[0]), (x[1], y[1], z[1]), (x[2], y[2], z[2]), (x[3], y[3], z[3])
    return here, start, stop, low, high, (x[4], y[4], z[4]), q, k


@triton.jit
def box(at, BOX: tl.constexpr):
    """Places along each dim of the points of a box that starts ``at``."""
    n = tl.arange(0, BOX[0] * BOX[1] * BOX[2])
    return at[0] + n // (BOX[1] * BOX[2]), at[1] + n // BOX[2] % BOX[1], at[2] + n % BOX[2]


@triton.jit
def before(places, stop):
    return (places[0] < stop[0]) & (places[1] < stop[1]) & (places[2] < stop[2])


@triton.jit
def steps(low, high, BOX: tl.constexpr):
    """Number of boxes from ``low`` to ``high``."""
    n0 = (high[0] - low[0] + BOX[0] - 1) // BOX[0]
    n1 = (high[1] - low[1] + BOX[1] - 1) // BOX[1]
    return n0 * n1 * ((high[2] - low[2] + BOX[2] - 1) // BOX[2])


@triton.jit
def next_box(at, low, high, BOX: tl.constexpr):
    a2 = at[2] + BOX[2]
    full = a2 >= high[2]
    a1 = at[1] + tl.where(full, BOX[1], 0)
    done = a1 >= high[1]
    a0 = at[0] + tl.where(done, BOX[0], 0)
    return a0, tl.where(done, low[1], a1), tl.where(full, low[2], a2)


@triton.jit
def offsets(field, here, places, stop, origin, WINDOWS: tl.constexpr):
    """Where in a field the points are; those beyond ``stop`` count as the last before it."""
    return (
        (here[0] * field[1][0] + here[1] * field[1][1])
        + _along(places, stop, origin, field, 0, WINDOWS)
        + _along(places, stop, origin, field, 1, WINDOWS)
        + _along(places, stop, origin, field, 2, WINDOWS)
    )


@triton.jit
def seen(scores, level, queries, keys, length, Q: tl.constexpr, K: tl.constexpr, WINDOWS: tl.constexpr):
    """Scores above a level, -inf where a key is not in the window of a query.

    A dim where both boxes have one point needs no look: the walk passes nothing there that is out of reach. The first
    dims go into the level, of which a thread has few different ones: all but the last dim come with the subtraction.
    """
    if Q[0] * K[0] > 1:
        level = tl.where(_within(queries, keys, length, 0, WINDOWS), level, float("inf"))
    if Q[1] * K[1] > 1:
        level = tl.where(_within(queries, keys, length, 1, WINDOWS), level, float("inf"))
    scores -= level
    if Q[2] * K[2] > 1:
        scores = tl.where(_within(queries, keys, length, 2, WINDOWS), scores, float("-inf"))
    return scores


@triton.jit
def as_rows(places):
    return places[0][:, None], places[1][:, None], places[2][:, None]


@triton.jit
def as_columns(places):
    return places[0][None, :], places[1][None, :], places[2][None, :]


# -- channels, in parts whose widths are powers of two ----------------------------------------------------------------
@triton.jit
def load(field, at, CHANNELS: tl.constexpr, PARTS: tl.constexpr):
    """The channels of points, (points, width) for each part."""
    parts = ()
    for i in tl.static_range(len(PARTS)):
        c = PARTS[i][0] + tl.arange(0, PARTS[i][1])[None, :]
        where = field[0] + at[:, None] + c
        if PARTS[i][0] + PARTS[i][1] <= CHANNELS:
            parts = parts + (tl.load(where),)
        else:
            parts = parts + (tl.load(where, mask=c < CHANNELS, other=0.0),)
    return parts


@triton.jit
def store(field, at, there, parts, CHANNELS: tl.constexpr, PARTS: tl.constexpr):
    for i in tl.static_range(len(PARTS)):
        c = PARTS[i][0] + tl.arange(0, PARTS[i][1])[None, :]
        value = parts[i].to(field[0].dtype.element_ty)
        tl.store(field[0] + at[:, None] + c, value, mask=there[:, None] & (c < CHANNELS))


@triton.jit
def zeros(BOX: tl.constexpr, PARTS: tl.constexpr):
    parts = ()
    for i in tl.static_range(len(PARTS)):
        parts = parts + (tl.full((BOX[0] * BOX[1] * BOX[2], PARTS[i][1]), 0, tl.float32),)
    return parts


@triton.jit
def times(parts, factor):
    scaled = ()
    for i in tl.static_range(len(parts)):
        scaled = scaled + (parts[i] * factor,)
    return scaled


@triton.jit
def products(a, b, PRECISION: tl.constexpr):
    """Products of all points of ``a`` with all points of ``b``."""
    s = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        s = tl.dot(a[i], tl.trans(b[i]), s, input_precision=PRECISION)
    return s


@triton.jit
def added(total, weights, points, PRECISION: tl.constexpr):
    """``total`` and the weighted sums of the channels of points."""
    parts = ()
    for i in tl.static_range(len(points)):
        parts = parts + (tl.dot(weights.to(points[i].dtype), points[i], total[i], input_precision=PRECISION),)
    return parts
