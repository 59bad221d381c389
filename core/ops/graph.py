"""Functions that torch.compile takes as one operation, without loading the compiler before somebody compiles.

Dynamo reads the Python of what it meets, and would read past the border where a function of ours is caught as a whole.
It stops at operators of a library; so each function has one, which compiled code calls instead of it. The operator is
that function again: traced through, differentiated and caught on shards as ever.
"""

import torch

from core.dispatch import composed

_library = torch.library.Library("core", "FRAGMENT")


def operator(schema, function):
    """An operator of ``schema`` that is ``function``."""
    name = _library.define(schema)
    _library.impl(name, function, "CompositeImplicitAutograd")
    packet = getattr(torch.ops.core, name)
    composed(packet, packet.default)(function)
    return packet
