"""Calls that cannot be: the same error on every rank, and nothing is sent."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import refuse

from core import neighborhood_attention

refuse("window of no points", lambda x: neighborhood_attention(x, x, x, 0))
refuse("dilated window larger than the grid", lambda x: neighborhood_attention(x, x, x, 3, dilation=3))
refuse("window larger than the grid", lambda x: neighborhood_attention(x, x, x, (9, 3)))
refuse("window of three dims", lambda x: neighborhood_attention(x, x, x, (3, 3, 3)))
refuse("operands of other shapes", lambda x: neighborhood_attention(x, x[:, 1:], x, 3))
refuse("channels", lambda x: F.conv2d(x[..., 0], torch.ones(2, 3, 1, 1)))
refuse("kernel larger than the grid", lambda x: F.conv2d(x[..., 0], torch.ones(2, 2, 9, 1)))
refuse("strided same", lambda x: F.conv2d(x[..., 0], torch.ones(2, 2, 3, 3), padding="same", stride=2))
refuse("attention dropout", lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=1.1))
refuse("attention mask", lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(3, 5)))
refuse("heads that share keys", lambda x: F.scaled_dot_product_attention(x, x[:, :, :3], x[:, :, :3], enable_gqa=True))
refuse("mask and causal", lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(6, 6), is_causal=True))
refuse("groups", lambda x: F.group_norm(x, 3))
refuse("normalized shape", lambda x: F.layer_norm(x, (5,)))
refuse("reflection wider than the grid", lambda x: F.pad(x, (0, 0, 0, 0, 0, 0, 7, 0), mode="reflect"))
refuse("crop of more than there is", lambda x: F.pad(x, (0, 0, 0, 0, 0, 0, -4, -4)))
refuse("reduction", lambda x: F.mse_loss(x, x, reduction="median"))
refuse("classes", lambda x: F.cross_entropy(x, torch.zeros(2, 9, dtype=torch.int64)))
refuse("contraction", lambda x: x[:, :, 0, 0] @ torch.ones(3, 2, dtype=x.dtype))
refuse("contraction of a cut dim", lambda x: x[:, :, 0, 0, 0] @ torch.ones(1, 2, dtype=x.dtype))
refuse("shapes of a join", lambda x: torch.cat([x, x[:, :1]], 2))
refuse("shapes of a stack", lambda x: torch.stack([x, x[:1]]))
refuse("shape of a view", lambda x: x.view(-1, 5))
refuse("lengths of a split", lambda x: x.split([2, 3], 1))
refuse("expansion of seven rows", lambda x: x.expand(2, 14, 8, 2, 4))
refuse("probability", lambda x: F.dropout(x, 1.5))


# -- a person's own messages ------------------------------------------------------------------------------------------
def _parts(x):
    return [torch.empty(x.shape, dtype=x.dtype) for _ in range(4)]


def _from_first(x):
    return _parts(x) if dist.get_rank() == 0 else None


refuse("broadcast", lambda x: dist.broadcast(x, 0))
refuse("all_reduce", dist.all_reduce)
refuse("reduce", lambda x: dist.reduce(x, 0))
refuse("all_gather", lambda x: dist.all_gather(_parts(x), x))
refuse("all_gather_into_tensor", lambda x: dist.all_gather_into_tensor(torch.cat(_parts(x)), x))
refuse("reduce_scatter", lambda x: dist.reduce_scatter(x, _parts(x)))
refuse("reduce_scatter_tensor", lambda x: dist.reduce_scatter_tensor(x, torch.cat(_parts(x))))
refuse("gather", lambda x: dist.gather(x, _from_first(x), 0))
refuse("scatter", lambda x: dist.scatter(x, _from_first(x), 0))
refuse("all_to_all", lambda x: dist.all_to_all(_parts(x), [x] * 4))
refuse("all_to_all_single", lambda x: dist.all_to_all_single(torch.cat(_parts(x)), x))
refuse("send", lambda x: dist.send(x, (dist.get_rank() + 1) % 4))
refuse("recv", lambda x: dist.recv(x, (dist.get_rank() + 1) % 4))
