"""Rows of operations on lists of tensors, which optimizers use."""

import torch
from cases import case

from core.ops.foreach import ARITHMETIC, UNARY

X = (2, 7, 6)
LISTS = ((1, 0, None, None), (2, 1, 1, 1), (None, "R", 0, 1))
SHAPES = (X, (4, 7), X, (4, 7))
LISTS2 = (((1, 2), (0, 1), None, None), ((1, 2), None, (0, 2), (0, 1)))
BINARY = ARITHMETIC[:9]


def in_place(name, tensors, *args):
    """The in-place form on copies, which keep their cuts."""
    copies = [t.detach().clone() for t in tensors]
    getattr(torch, f"_foreach_{name}_")(copies, *args)
    return copies


def positive(g, shape):
    return torch.rand(shape, dtype=torch.float64, generator=g) * 0.8 + 0.1


def blended(results):
    """One tensor a shape, in which every result counts in its own way."""
    return [sum(t * (1 + i % 7) for i, t in enumerate(results[k::2])) for k in range(2)]


def made_positive(**kwargs):
    return dict(make={i: positive for i in range(4)}, cuts2=LISTS2, **kwargs)


case(
    "lists_unary",
    lambda a, b, c, d: [
        *blended([t for name in UNARY for t in getattr(torch, f"_foreach_{name}")([a, b])]),
        *blended([t for name in (*UNARY, "zero") for t in in_place(name, [a, b])]),
    ],
    SHAPES,
    LISTS,
    **made_positive(wire=()),
)


def binary(a, b, c, d):
    others = ([c, d], 0.3, [0.3, 0.6])
    results = [t for n in BINARY for other in others for t in getattr(torch, f"_foreach_{n}")([a, b], other)]
    return blended(results + [t for n in BINARY for t in in_place(n, [a, b], [c.detach(), d.detach()])])


case("lists_binary", binary, SHAPES, LISTS, **made_positive())
case(
    "lists_ternary",
    lambda a, b, c, d: [
        *torch._foreach_lerp([a, b], [c, d], 0.3),
        *torch._foreach_addcmul([a, b], [c, d], [a, b], 0.3),
        *torch._foreach_addcdiv([a, b], [c, d], [a, b], [0.3, 0.6]),
        *torch._foreach_mul([a, b], torch.tensor(2.0)),
        *in_place("lerp", [a, b], [c.detach(), d.detach()], 0.3),
        *in_place("addcmul", [a, b], [c.detach(), d.detach()], [a.detach(), b.detach()]),
        *in_place("addcdiv", [a, b], [c.detach(), d.detach()], [a.detach(), b.detach()]),
        *in_place("copy", [a, b], [c.detach(), d.detach()]),
    ],
    SHAPES,
    LISTS,
    **made_positive(),
)
case(
    "lists_norm",
    lambda a, b, c, d: [
        t.clone() for ord in (1, 2, 3.0, float("inf")) for t in torch._foreach_norm([a.detach(), b.detach()], ord)
    ],
    SHAPES,
    LISTS,
    **made_positive(),
)


def stepped(name, a, b, c, d, **kwargs):
    """One step of a fused optimizer on copies; gradients and moments are cut as they come."""
    params, grads = ([t.detach().clone() for t in pair] for pair in ((a, b), (c, d)))
    moments = [[torch.zeros_like(p) for p in params] for _ in range(kwargs.pop("moments"))]
    steps = [[torch.ones((), device=a.device) for _ in params]] if name != "sgd" else []
    empty = [[]] if name.startswith("adam") else []
    getattr(torch, f"_fused_{name}_")(params, grads, *moments, *empty, *steps, lr=0.1, weight_decay=0.1, **kwargs)
    return [*params, *(t for m in moments for t in m)]


ADAM = dict(moments=2, beta1=0.9, beta2=0.99, eps=1e-8, amsgrad=False, maximize=False)
SGD = dict(moments=1, momentum=0.9, dampening=0.0, nesterov=False, maximize=False, is_first_step=True)
case(
    "lists_fused",
    lambda a, b, c, d: [
        *stepped("adam", a, b, c, d, **ADAM),
        *stepped("adamw", a, b, c, d, **ADAM),
        *stepped("adagrad", a, b, c, d, moments=1, lr_decay=0.0, eps=1e-8, maximize=False),
        *stepped("sgd", a, b, c, d, **SGD),
    ],
    SHAPES,
    LISTS,
    **made_positive(atol=1e-7),  # torch's own kernels are that exact
)


def unscaled(a, b):
    """A value that is not finite on one rank only."""
    grads, found = [a.detach() * 8, b.detach() * 8], torch.zeros((), device=a.device)
    grads[0] = torch.where(grads[0] == grads[0].amax(), float("inf"), grads[0])
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.125, device=a.device))
    return found.clone(), grads[1]


case("lists_unscale", unscaled, (X, (4, 7)), ((1, 0), (2, None)), cuts2=(((1, 2), (0, 1)),))
