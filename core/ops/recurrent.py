"""Recurrent layers: each sequence of the batch by itself, so a cut of the batch sends nothing.

A cut along time or the channels moves to the batch, if this has a sequence for every rank, and back.
"""

import torch

from core.arguments import tensors_in
from core.dispatch import Plan, op
from core.errors import MissingShardPatch


@op(torch.gru, torch.rnn_tanh, torch.rnn_relu)
def recurrent(func, x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first=None):
    return _layers(func, x, [hx], params, num_layers, dropout, train, bidirectional, batch_first)


@op(torch.lstm)
def lstm(func, x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first=None):
    return _layers(func, x, hx, params, num_layers, dropout, train, bidirectional, batch_first)


def _layers(func, x, states, params, num_layers, dropout, train, bidirectional, batch_first):
    if batch_first is None or not isinstance(states, (list, tuple)):
        raise MissingShardPatch("packed sequences", op=func.__name__, remedy="Pad the sequences.")
    if dropout and train and num_layers > 1:
        raise MissingShardPatch(
            "dropout between the layers",
            op=func.__name__,
            operands=[x],
            remedy="Apply F.dropout between single layers.",
        )
    batch, time = (0, 1) if batch_first else (1, 0)
    turned = x.aside(time, 2)
    out = turned.reshaped([*x.shape[:2], states[0].shape[-1] * (2 if bidirectional else 1)], {batch: batch})
    inner = [turned.reshaped(s.shape, {batch: 1}) for s in states]
    final = out
    for axis, dim in x.cuts():
        if dim == time:
            final = final.with_axis(axis, x.placements[axis], x.sizes[axis])
    inputs = (turned, *inner, *(p.replicated() for p in tensors_in(params)))
    return Plan(inputs, (out, *inner), _contiguous(func), (final, *inner))


def _contiguous(func):
    """cuDNN wants its input and the first states without gaps, which a part of a cut batch has."""

    def local(x, hx, *args, **kwargs):
        hx = [h.contiguous() for h in hx] if isinstance(hx, (list, tuple)) else hx.contiguous()
        return func(x.contiguous(), hx, *args, **kwargs)

    return local


@op(torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.lstm_cell)
def cell(func, x, hx, *params):
    turned = x.aside(*range(1, x.ndim))
    several = isinstance(hx, (list, tuple))
    inner = tuple(turned.reshaped(s.shape, {0: 0}) for s in (hx if several else [hx]))
    return Plan((turned, *inner, *(p.replicated() for p in tensors_in(params))), inner if several else inner[0])
