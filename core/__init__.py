"""Domain parallelism: tensors cut over many devices that compute as if they were whole."""

from core.shard_tensor import ShardTensor, TensorPromotionMode  # first: what it imports at its end needs the class

# isort: split
from core import ops, stored  # noqa: F401  (the rules; what checkpoints ask a tensor)
from core.capture import capture
from core.dispatch import Plan, op
from core.errors import InputError, MissingShardPatch, ShardingError, UndeterminedShardingError
from core.fallback import set_fallback
from core.kernels.natten import set_neighborhood_kernel
from core.mesh import DistributedManager, make_mesh
from core.ops.neighborhood import neighborhood_attention
from core.ops.neighbors import knn, radius_search
from core.ops.rotary import rotary_embedding
from core.ops.strategies import set_attention_strategy
from core.parallelize import sync_module_over_mesh
from core.scatter import scatter_tensor
from core.spec import ShardTensorSpec, make_spec
from core.testing import numerical_shard_tensor_check

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
    "capture",
    "knn",
    "make_mesh",
    "make_spec",
    "neighborhood_attention",
    "numerical_shard_tensor_check",
    "op",
    "radius_search",
    "rotary_embedding",
    "scatter_tensor",
    "set_attention_strategy",
    "set_fallback",
    "set_neighborhood_kernel",
    "sync_module_over_mesh",
]
