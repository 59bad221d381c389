"""Rows of pointwise operations that torch does not tag, activations, complex numbers and questions."""

import torch
import torch.nn.functional as F
from cases import case, refuse

aten = torch.ops.aten
X = (2, 7, 6)
ONE, BOTH = ((0,), (1,), (2,)), (((1, 2),), ((2, 0),))
PAIR, PAIRS = ((1, 1), (1, 2), (2, None), (None, 1)), (((1, 2), (1, 2)), ((1, 2), (0, 1)))


def whole(g, shape):
    return torch.randint(1, 9, shape, generator=g)


def complex_(g, shape):
    return torch.randn(shape, dtype=torch.complex128, generator=g)


def pinned(x):
    try:
        return x.pin_memory()
    except RuntimeError:  # a machine without an accelerator
        return x * 1


# -- what torch does not tag ------------------------------------------------------------------------------------------
case(
    "untagged",
    lambda x: (
        aten.fill(x, 2.0),
        aten.zero(x),
        torch.rsub(x, x),
        torch.ops.prims.add(x.detach(), x.detach()),
        x.detach() // 0.3,
        x.masked_fill(x > 0, 2.0),
        torch.where(x > 0, x, 0.5),
        torch.isclose(x, x * 1.5, atol=0.3),
        x.detach().isreal(),
    ),
    (X,),
    ONE,
    cuts2=BOTH,
    wire=(),
)
case(
    "untagged_in_place",
    lambda x: tuple(
        f(x * 1)
        for f in (
            lambda t: t.abs_().copysign_(x.detach()),
            lambda t: t.xlogy_(2.0),
            lambda t: t.masked_fill_(x.detach() > 0, 0.5).fill_(x.detach().sum()),
            lambda t: F.threshold(t, 0.1, 0.2, inplace=True),
            lambda t: aten.gelu_(t),
            lambda t: F.mish(t, inplace=True),
            lambda t: F.hardswish(t, inplace=True),
            lambda t: t.detach().floor_divide_(0.3).heaviside_(x.detach()),
            lambda t: t.zero_() + x,
        )
    ),
    (X,),
    ONE,
    cuts2=BOTH,
)
case(
    "compared_in_place",
    lambda x, y: tuple(
        getattr(x.detach().clone(), name)(y) for name in ("eq_", "ne_", "lt_", "le_", "gt_", "ge_", "greater_")
    ),
    (X, X),
    PAIR,
    cuts2=PAIRS,
)
case(
    "whole_numbers_in_place",
    lambda x, y: (x.clone().gcd_(y), x.clone().lcm_(y), x.clone().__irshift__(y), x.clone().__ilshift__(1)),
    (X, X),
    PAIR,
    cuts2=PAIRS,
    make={0: whole, 1: whole},
)

case(
    "made_alike",
    lambda x: (
        torch.full_like(x, 2.0) * x,
        x.new_full((3,), 2.0),
        x.new_ones(X),
        x.new_empty((0, 4)),
        x.new_empty(X).fill_(1.0),
        x.new_zeros(X) + x,
        aten.lift_fresh(x.detach()),
        aten.alias(x),
        torch.positive(x),
        torch._neg_view(x),
        pinned(x.detach()),
    ),
    (X,),
    ONE,
    cuts2=BOTH,
    wire=(),
)

# -- activations ------------------------------------------------------------------------------------------------------
ACTIVATIONS = (F.relu, F.relu6, F.elu, F.selu, F.celu, F.silu, F.mish, F.hardtanh, F.hardswish, F.hardsigmoid)
case(
    "activations",
    lambda x: tuple(f(x) for f in (*ACTIVATIONS, F.gelu, F.softplus, F.softsign, F.tanhshrink, F.hardshrink)),
    (X,),
    ONE,
    cuts2=BOTH,
    wire=(),
)
case(
    "activations_in_place",
    lambda x: tuple(f(x * 1, inplace=True) for f in (*ACTIVATIONS, F.leaky_relu)),
    (X,),
    ONE,
    cuts2=BOTH,
    wire=(),
)
case(
    "more_activations",
    lambda x: (
        F.softshrink(x),
        F.leaky_relu(x),
        F.logsigmoid(x),
        F.threshold(x, 0.1, 0.5),
        torch.sigmoid(x),
        F.rrelu(x),
        F.gelu(x, approximate="tanh"),
    ),
    (X,),
    ONE,
    cuts2=BOTH,
    wire=(),
)
case(
    "prelu",
    lambda x, w, v: (F.prelu(x, w), F.prelu(x, v), torch.prelu(x, v)),
    (X, (7,), (1,)),
    ((0, None, None), (1, None, None), (1, 0, None), (2, 0, "R")),
    cuts2=(((1, 2), None, None),),
)
case("glu", lambda x: (F.glu(x), F.glu(x, 0)), ((2, 7, 6),), ((1,),), cuts2=(((1, 0),),))
case("glu_of_whole_dim", lambda x: F.glu(x, -1), (X,), ((0,), (1,)), cuts2=(((1, 0),),), wire=())
case("glu_of_cut_dim", lambda x: torch.nn.GLU(1)(x), ((2, 8, 6),), ((1,),), cuts2=(((1, 2),),), wire=("all_to_all",))

# -- complex numbers --------------------------------------------------------------------------------------------------
case(
    "complex_parts",
    lambda x: (x.real, x.imag, torch.view_as_real(x), x.abs(), x.angle(), (x.conj() * x).real, x.conj().imag),
    (X,),
    ONE,
    cuts2=BOTH,
    make={0: complex_},
    differentiable=(0,),
)
case(
    "complex_made",
    lambda r, i: (
        torch.complex(r, i).abs(),
        torch.polar(r, i).real,
        torch.view_as_complex(torch.stack([r, i], -1)).imag,
    ),
    (X, X),
    PAIR,
    cuts2=PAIRS,
)
case(
    "complex_functions",
    lambda x, y: tuple(torch.view_as_real(t) for t in (x * y, x / y, x.exp(), x.sqrt(), x.tanh(), x.pow(2), x.sgn())),
    (X, X),
    PAIR,
    cuts2=PAIRS,
    make={0: complex_, 1: complex_},
    differentiable=(0, 1),
)


# -- questions --------------------------------------------------------------------------------------------------------
case(
    "questions",
    lambda x, y: (
        torch.equal(x, y),
        torch.equal(x, x * 1),
        torch.equal(x, y[:1]),
        torch.allclose(x, x + 1e-9),
        torch.allclose(x, y),
        x.is_same_size(y),
        x.is_set_to(y),
        x.is_pinned(),
        torch.is_nonzero(x.sum()),
        complex(x.detach().sum()) == x.sum().item(),
    ),
    (X, X),
    PAIR,
    cuts2=PAIRS,
)

refuse("an odd gate", lambda x: F.glu(x, 1))
refuse("shapes that do not broadcast", lambda x: x + torch.ones(3, 1))
refuse("a target that would grow", lambda x: x.add_(torch.ones(3, 2, 7, 8, 2, 4)))
refuse("memory", lambda x: x.apply_(abs))
refuse("shared memory", lambda x: x.share_memory_())
refuse("memory for others", lambda x: torch.from_dlpack(x))
refuse("a random law", lambda x: x.cauchy_())
GATED = (2, 7, 6), (6,), (2, 7, 6)
case(
    "addcmul",
    lambda x, a, b: (torch.addcmul(x, a, b), x.addcmul(b, a, value=0.5), torch.addcmul(input=a, tensor1=x, tensor2=b)),
    GATED,
    (
        (1, None, 1),
        (0, None, 0),
        (2, 0, 2),
        (1, None, None),
        (None, 0, 1),
        ("R", "R", 1),
        ("P", None, "P"),
        (1, "P", 0),
    ),
    cuts2=(((1, 2), None, (0, 1)), ((0, 1), None, (2, 1))),
)
case(
    "addcmul_wire",
    lambda x, a, b: torch.addcmul(x, a[:, None], b),
    ((2, 7, 6), (2, 1), (2, 7, 6)),
    ((1, "R", 1), (1, None, 1)),
    wire=(),
)
case(
    "addcmul_in_other_words",
    lambda x, a, b: (
        torch.addcmul(x, 0.5, a, b),
        x.addcmul(2, b, a),
        torch.addcmul(x, a, b, value=torch.tensor(3.0, device=x.device)),
        torch.addcmul(x, a, b, out=None),
        torch.addcmul(x, x, x[0, 0]),
    ),
    GATED,
    ((1, None, 1), (0, "R", 0), (2, 0, None)),
)
for _some in ((0,), (1,), (2,), (0, 1), (1, 2)):
    name = f"addcmul_differentiable_{'_'.join(map(str, _some))}"
    case(name, torch.addcmul, GATED, ((1, None, 1), (1, "R", 1)), differentiable=_some)
case(
    "addcmul_of_rows_and_one",
    lambda x, a, b: torch.addcmul(a, b, x),
    ((2, 7, 6), (1, 1, 6), (2, 1, 1)),
    ((1, "R", 0), (2, 2, None)),
)
case(
    "out_none",
    lambda x, a: (torch.matmul(x, a, out=None), torch.sum(x, 1, out=None), torch.cat([x, x], 1, out=None), x.mul(2)),
    (X, (6, 3)),
    ((1, None), (2, 0)),
)
