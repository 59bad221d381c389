"""Functions caught above autograd whose results torch hands out as a named tuple (``x.max(1).values``)."""

import torch

from core.dispatch import _ENGINE, above, op


def named(**functions):
    """Registers a rule for functions of torch that return ``torch.return_types.<keyword>``.

    A node of the graph can only give plain tuples, so the rule stands for a plain twin of the function, and the
    function itself calls the twin and puts the names back.
    """

    def register(rule):
        for name, spellings in functions.items():
            for function in spellings:
                twin = plain(function)
                op(twin)(rule)
                _ENGINE[function] = _named(twin, getattr(torch.return_types, name))
        return rule

    return register


def plain(function):
    """The function with its results in a plain tuple."""

    def twin(*args, **kwargs):
        return tuple(function(*args, **kwargs))

    twin.__name__ = function.__name__
    return twin


def _named(twin, kind):
    return lambda *args, **kwargs: kind(above(twin, (), args, kwargs))
