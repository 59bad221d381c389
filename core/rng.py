"""Random fields that do not depend on the number of ranks.

A value is a function of a key and of the element's index in the whole tensor, nothing else: each rank computes its own
elements and all cuts give the same field, bit for bit. The function is the mixing step of SplitMix64 (Steele, Lea and
Flood, OOPSLA 2014), which passes the usual batteries of tests, in wrapping 64-bit integers.

Keys come from numbers (:func:`key`: seed, sample, step), so that a sample has its noise wherever it is drawn; those of
``dropout`` and its like from torch's default generator of the CPU, which all ranks of a domain seed alike.
"""

import math

import torch

from core.errors import ShardingError
from core.shard_tensor import ShardTensor
from core.strides import contiguous_stride

_STEP = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(number):
    """The 64 bits of a number as torch's int64 has them."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _shifted(x, n):
    """``x >> n`` without the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mixed(x):
    """Of a tensor, or of a number."""
    for shift, factor in zip((30, 27), _FACTORS):
        x = _wrapped((x ^ _shifted(x, shift)) * _signed(factor))
    return x ^ _shifted(x, 31)


def _wrapped(x):
    return _signed(x) if isinstance(x, int) else x


def key(*numbers):
    """One key from several whole numbers, such as seed, sample and step; any difference gives another field."""
    mixed = 0
    for number in numbers:
        mixed = _mixed(_signed((mixed ^ _signed(int(number))) + _STEP))
    return mixed


def draw_key(generator=None):
    """A key from a generator, torch's default one of the CPU if None. A tensor: drawing needs no synchronisation."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ShardingError(
            "random numbers would be the same at every replay",
            op="capture",
            remedy="Draw them outside and give them to the captured module, or do not capture it.",
        )
    device = "cpu" if generator is None else generator.device
    return torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device=device, generator=generator)


def bits(key, shape, ranges, device=None):
    """64 random bits, as int64, of each element of the part ``ranges`` (one half-open range a dim) of ``shape``."""
    if isinstance(key, (list, tuple)):
        if not shape or len(key) != shape[0]:
            raise ShardingError(f"{len(key)} keys for a first dim of {tuple(shape)[:1]}", op="core.rng",
                                remedy="Give one key for each of its indices, or one for all.")  # fmt: skip
        keys = torch.tensor([_mixed(_signed(int(k))) for k in key[slice(*ranges[0])]], dtype=torch.int64, device=device)
        return _mixed(_steps(shape[1:], ranges[1:], device) + keys.view(-1, *[1] * (len(shape) - 1)))
    key = key if isinstance(key, torch.Tensor) else torch.tensor(_signed(int(key)))
    return _mixed(_steps(shape, ranges, device) + _mixed(key))


def _steps(shape, ranges, device):
    """How far the generator has gone at each element."""
    index = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    for dim, ((start, stop), stride) in enumerate(zip(ranges, contiguous_stride(shape))):
        along = torch.arange(start, stop, device=device) * stride
        index = index + along.view([-1 if d == dim else 1 for d in range(len(shape))])
    return (index + 1) * _signed(_STEP)


def unit(bits, dtype):
    """Uniform in [0, 1), as fine as the dtype's mantissa."""
    digits = round(1 - math.log2(torch.finfo(dtype).eps))
    return _shifted(bits, 64 - digits).to(dtype) * 2.0**-digits


def bell(bits, dtype):
    """Standard normal, by Box and Muller's formula from the upper and lower half of the bits."""
    wide = torch.promote_types(dtype, torch.float32)
    radius = ((_shifted(bits, 32).to(wide) + 0.5) * 2.0**-32).log_().mul_(-2).sqrt_()
    return ((bits & 0xFFFFFFFF).to(wide) * (2 * math.pi * 2.0**-32)).cos_().mul_(radius).to(dtype)


def uniform(shape=None, key=0, device=None, dtype=None, *, spec=None):
    """Field of independent values, uniform in [0, 1).

    Args:
        shape: shape of a plain tensor, or
        spec: cut of a ShardTensor with the same values; every rank computes its own.
        key: whole number, see :func:`key`; or a list of them, one for each index of the first dim, which gives each
            the field of the other dims that it would have alone.
        dtype: torch's default if None.
    """
    return _field(unit, shape, key, device, dtype, spec)


def normal(shape=None, key=0, device=None, dtype=None, *, spec=None):
    """Field of independent standard normal values; arguments as those of :func:`uniform`."""
    return _field(bell, shape, key, device, dtype, spec)


def _field(values, shape, key, device, dtype, spec):
    dtype = dtype or torch.get_default_dtype()
    if (shape is None) == (spec is None):
        raise ShardingError("needs a shape or a spec, and one only", op="core.rng")
    if spec is None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return values(bits(key, shape, [(0, n) for n in shape], device), dtype)
    own = own_bits(key, spec.finished(), device or spec.mesh.device_type)
    return ShardTensor(values(own, dtype), spec.finished())


def own_bits(key, spec, device):
    """:func:`bits` of this rank's part."""
    return bits(key, spec.shape, [spec.local_range(d) for d in range(spec.ndim)], device)
