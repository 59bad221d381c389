"""Rows of tables, bins and counts, and what is refused of all indexing."""

import torch
import torch.nn.functional as F
from cases import case, refuse
from cases_indexing import ROUTED, X, numbers

# -- tables, bins and counts -----------------------------------------------------------------------------------------
TABLE = dict(make={0: numbers(0, 7)})
case(
    "embedding",
    lambda i, w: (
        F.embedding(i, w),
        F.embedding(i, w, padding_idx=3),
        F.embedding(weight=w, input=i[0], padding_idx=-1),
    ),
    ((2, 9), (7, 6)),
    ((1, None), (0, None), (1, 0), (None, 0), (None, 1), (0, 1), ("R", None)),
    cuts2=(((0, 1), None), (None, (0, 1))),
    **TABLE,
)
case(
    "embedding_wire",
    lambda i, w: (F.embedding(i, w), F.one_hot(i, 8)),
    ((2, 9), (7, 6)),
    ((1, None), (0, None)),
    wire=(),
    **TABLE,
)
case("embedding_rows", F.embedding, ((2, 9), (7, 6)), ((1, 0), (None, 0)), wire=ROUTED, **TABLE)
case(
    "embedding_bag",
    lambda i, w: (
        F.embedding_bag(i, w, mode="sum"),
        F.embedding_bag(i, w),
        F.embedding_bag(i, w, mode="sum", per_sample_weights=w[:2, :1].expand(2, 9), padding_idx=2),
    ),
    ((2, 9), (7, 6)),
    ((0, None), (1, None), (0, 0), (None, 1)),
    cuts2=(((0, 1), None), ((0, 1), (0, 1))),
    **TABLE,
)
case(
    "one_hot",
    lambda i: (F.one_hot(i, 8), F.one_hot(i), F.one_hot(i[0, 0], 7)),
    ((2, 9),),
    ((1,), (0,), ("R",)),
    cuts2=(((0, 1),),),
    **TABLE,
)
case(
    "bins",
    lambda x, e: (
        torch.bucketize(x, e.sort()[0]),
        torch.searchsorted(e.sort()[0], x, right=True),
        torch.isin(x.round(), e.round()),
        torch.isin((x * 2).int(), 1, invert=True),
    ),
    (X, (5,)),
    ((1, None), (0, None), (2, None), ("R", None)),
    cuts2=(((1, 2), None),),
    wire=(),
    differentiable=(),
)
case(
    "bins_cut",
    lambda x, e: (
        torch.bucketize(x, e[0, 0].sort()[0]),
        torch.searchsorted(e.sort(-1)[0], x),
        torch.isin(x.round(), e.round()),
        torch.searchsorted(e, x, sorter=e.argsort(-1)),
        torch.searchsorted(e[0, 0].sort()[0], 0.5),
        torch.bucketize(-0.5, e[0, 0].sort()[0]),
        torch.isin(1, (e * 2).int()),
    ),
    (X, (2, 7, 4)),
    ((None, 2), (1, 1), (0, 2), (2, 0), (2, 1), (None, 1)),
    cuts2=(((1, 2), (0, 1)), (None, (1, 2))),
    differentiable=(),
)
case(
    "counts",
    lambda i, w: (torch.bincount(i), torch.bincount(i, w, minlength=9), i.bincount(minlength=2)),
    ((9,), (9,)),
    ((0, 0), (0, None), (None, 0), ("R", None)),
    cuts2=(("R", "R"),),
    **TABLE,
    differentiable=(),
)


def _histograms(x):
    yield from torch.histogram(x, 5)
    yield from torch.histogram(x, 4, range=(-1.0, 2.0), weight=x.square(), density=True)
    yield from torch.histogram(x, torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=x.dtype))


case(
    "histograms",
    lambda x: (
        torch.histc(x, 5),
        x.histc(4, min=-1, max=1),
        *([] if x.is_cuda else _histograms(x)),  # torch has none for GPUs
    ),
    (X,),
    ((0,), (1,), (2,)),
    cuts2=(((1, 2),),),
    differentiable=(),
)

# -- refused ---------------------------------------------------------------------------------------------------------
refuse("gather of other dims", lambda x: x.gather(1, torch.zeros(2, 3, dtype=torch.int64)))
refuse(
    "scatter beyond its source",
    lambda x: x[..., 0, 0].scatter(1, torch.zeros(2, 9, 8, dtype=torch.int64), x[..., 0, 0]),
)
refuse("rows that do not fit", lambda x: x.index_add(1, torch.zeros(2, dtype=torch.int64), x))
refuse("values that do not fit", lambda x: x.index_put((torch.tensor([0, 1]),), torch.ones(3, dtype=x.dtype)))
refuse("norms of embeddings", lambda x: F.embedding(torch.tensor([1]), x[0, :, :, 0, 0], max_norm=1.0))
refuse("sparse gradients of embeddings", lambda x: F.embedding(torch.tensor([1]), x[0, :, :, 0, 0], sparse=True))
refuse("rows of another length", lambda x: x.__setitem__((slice(None), slice(0, 3)), x[:, :4]))
refuse("a longer value by mask", lambda x: x.__setitem__(x[..., 0] > 9, torch.ones(5, dtype=x.dtype)))
