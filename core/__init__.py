"""Domain parallelism: tensors cut over many devices that compute as if they were whole."""

from core import ops, stored  # noqa: F401  (the rules; what checkpoints ask a tensor)
from core.dispatch import Plan, op
from core.errors import InputError, MissingShardPatch, ShardingError, UndeterminedShardingError
from core.fallback import set_fallback
from core.mesh import DistributedManager, make_mesh
from core.ops.neighborhood import neighborhood_attention
from core.ops.neighbors import knn, radius_search
from core.shard_tensor import ShardTensor, TensorPromotionMode, scatter_tensor
from core.spec import ShardTensorSpec, make_spec

__all__ = [
    "DistributedManager",
    "InputError",
    "MissingShardPatch",
    "Plan",
    "ShardTensor",
    "ShardTensorSpec",
    "ShardingError",
    "TensorPromotionMode",
    "UndeterminedShardingError",
    "knn",
    "make_mesh",
    "make_spec",
    "neighborhood_attention",
    "op",
    "radius_search",
    "scatter_tensor",
    "set_fallback",
]
