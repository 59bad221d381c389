"""Rows of Fourier transforms: every form over dims that are whole and over dims that are cut."""

import torch
from cases import case, refuse

fft = torch.fft
X, PLANE = (2, 7, 6), (7, 6)
EACH = ((0,), (1,), (2,))
BOTH = (((1, 2),), ((0, 1),))


def _complex(g, shape):
    return torch.randn(shape, dtype=torch.complex128, generator=g)


def _of_complex(x):
    return torch.complex(x, 2 * x - 1)


# The operands are real, since a row's cotangents are: complex ones are made of them inside.
def _lines(x):
    z = _of_complex(x)
    return _parts(
        fft.fft(x, dim=1), fft.fft(z, 5, 1, "ortho"), fft.ifft(z, n=9, dim=-2), fft.ifft(input=z, dim=1, norm="forward")
    )


def _real_lines(x):
    z = _of_complex(x)
    return (
        *_parts(fft.rfft(x, dim=1), fft.rfft(x, 9, 1, "ortho"), fft.ihfft(x, dim=1), fft.ihfft(x, n=4, dim=1)),
        *(fft.irfft(z, dim=1), fft.irfft(z, 5, 1, norm="forward"), fft.hfft(z, 7, 1), fft.hfft(z, dim=1, norm="ortho")),
    )


def _planes(x):
    z = _of_complex(x)
    return (
        *_parts(fft.fft2(x), fft.ifft2(z, (5, -1), norm="ortho"), fft.rfft2(x)),
        fft.irfft2(z),
        fft.irfft2(z, s=(8, 5)),
    )


def _hermitian(x):
    z = _of_complex(x)
    return *_parts(fft.ihfft2(x), fft.ihfftn(x, dim=(1, 0))), fft.hfft2(z, (4, 7)), fft.hfftn(z, norm="forward")


def _many(x):
    z = _of_complex(x)
    return (
        *_parts(fft.fftn(z), fft.ifftn(z, s=(3, 8)), fft.rfftn(x), fft.rfftn(x, dim=(2, 1), norm="ortho")),
        *(fft.irfftn(z), fft.irfftn(z, (9, 4), (2, 0), norm="forward")),
    )


def _parts(*zs):
    return tuple(part for z in zs for part in (z.real, z.imag))


def _shifted(x):
    z = fft.fftshift(fft.fft2(x), dim=(1, 2)).roll(1, 0).flip(1).repeat(1, 2, 1)
    return fft.fftshift(x), fft.ifftshift(x, dim=1), *_parts(z, z.cumsum(1), _of_complex(x).cumprod(1))


case("fft_free", lambda x: fft.ifft(fft.fft(x, dim=1), 4, 1).real, (X,), ((0,), (2,)), wire=())
case("fft_planes_free", lambda x: fft.irfft2(fft.rfft2(x), s=(7, 6)), ((3, 7, 6),), ((0,),), wire=())
case("fft_lines", _lines, (X,), EACH, cuts2=BOTH)
case("fft_real_lines", _real_lines, (X,), EACH, cuts2=BOTH)
case("fft_wire", lambda x: fft.rfft(x, dim=1).real, (X,), ((1,),), wire=("all_to_all",))
case("fft_planes", _planes, (X,), EACH, cuts2=BOTH)
case("fft_hermitian", _hermitian, (X,), EACH, cuts2=BOTH)
case("fft_many", _many, (X,), (*EACH, ("R",), ("P",)), cuts2=BOTH)
case(
    "fft_one_plane",
    lambda x: (fft.fft2(x).real, fft.irfft2(fft.rfft2(x), x.shape)),
    (PLANE,),
    ((0,), (1,)),
    cuts2=(((0, 1),),),
)
case("fft_one_line", lambda x: _parts(fft.fft(x), fft.rfft(x)), ((7,),), ((0,),))
case("fft_of_complex", lambda z: (fft.fft(z, dim=1), fft.irfft2(z)), (X,), EACH, cuts2=BOTH, make={0: _complex})
case("fft_shift", _shifted, (X,), EACH, cuts2=BOTH)

refuse("fft of an unknown norm", lambda x: fft.fft(x, dim=1, norm="half"))
refuse("fft of no rows", lambda x: fft.ifft(x, 0, 1))
refuse("fftn of one dim twice", lambda x: fft.fftn(x, dim=(1, 1)))
refuse("fft2 with one length", lambda x: fft.rfft2(x, s=(4,)))
