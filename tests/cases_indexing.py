"""Rows of indexing by numbers: subscripts, index_select, gather, scatter and their kin, reads and writes."""

import torch
from cases import case

X = (2, 7, 6)


def numbers(low, high):
    """An operand of whole numbers."""
    return lambda g, shape: torch.randint(low, high, shape, generator=g)


I = {1: numbers(0, 7)}  # noqa: E741
ROUTED = ("all_to_all", "all_to_all", "all_to_all")

case(
    "index_select",
    lambda x, i: (torch.index_select(x, 1, i), x.index_select(dim=1, index=i), x[:, i]),
    (X, (9,)),
    ((1, None), (1, 0), (0, None), (2, 0), ("R", 0), (None, 0), (1, "R")),
    cuts2=(((1, 2), None), ((0, 1), (0, 0))) if False else (((1, 2), None), ((1, 2), "R")),
    make=I,
)
