"""``nn.MultiheadAttention`` on shards: torch's function written in operations that each have a rule.

Torch's own merges batch and sequence, and batch and heads, into one dim and back, which would tear a cut batch apart
and move rows for nothing. Here every dim stays its own from the first projection to the last. The fused functions of
torch's inference, which compiled modules call, are made of it.
"""

import math

import torch
import torch.nn.functional as F

from core import _torch
from core.dispatch import composed
from core.errors import ShardingError


@composed(F.multi_head_attention_forward)
def multi_head_attention(
    query,
    key,
    value,
    embed_dim_to_check,
    num_heads,
    in_proj_weight,
    in_proj_bias,
    bias_k,
    bias_v,
    add_zero_attn,
    dropout_p,
    out_proj_weight,
    out_proj_bias,
    training=True,
    key_padding_mask=None,
    need_weights=True,
    attn_mask=None,
    use_separate_proj_weight=False,
    q_proj_weight=None,
    k_proj_weight=None,
    v_proj_weight=None,
    static_k=None,
    static_v=None,
    average_attn_weights=True,
    is_causal=False,
):
    """``F.multi_head_attention_forward``. As there, a row that sees no key is zero, but NaN with ``need_weights``."""
    batched = _check(query, key, value, embed_dim_to_check, num_heads, attn_mask, is_causal)
    separate = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    q, k, v = _projected(query, key, value, separate, in_proj_weight, in_proj_bias)
    if not batched:
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    if bias_k is not None:
        k, v = (torch.cat([t, b.expand(1, t.shape[1], -1)]) for t, b in ((k, bias_k), (v, bias_v)))
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
    k = k if static_k is None else static_k.unflatten(0, (-1, num_heads))
    v = v if static_v is None else static_v.unflatten(0, (-1, num_heads))
    if add_zero_attn:
        k, v = (
            torch.cat([t, torch.zeros(*t.shape[:2], 1, t.shape[3], dtype=t.dtype, device=t.device)], 2) for t in (k, v)
        )

    causal = is_causal and key_padding_mask is None and not need_weights
    added = (bias_k is not None) + bool(add_zero_attn)
    hidden = _hidden(None if causal else attn_mask, key_padding_mask, num_heads, added, q.dtype)
    dropout_p, weights = dropout_p if training else 0.0, None
    if need_weights:
        out, weights = _with_weights(q, k, v, hidden, dropout_p)
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        seen = ~hidden if hidden is not None and hidden.dtype == torch.bool else hidden
        out = F.scaled_dot_product_attention(q, k, v, seen, dropout_p, causal)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if not batched:
        return out.squeeze(1), None if weights is None else weights.squeeze(0)
    return out, weights


def _check(query, key, value, width, heads, attn_mask, is_causal):
    """Whether there is a batch dim."""
    shapes = [tuple(t.shape) for t in (query, key, value)]
    say = {"op": "multi_head_attention", "operands": shapes}
    if query.ndim not in (2, 3) or {key.ndim, value.ndim} != {query.ndim} or len({s[1:-1] for s in shapes}) > 1:
        raise ShardingError("shapes are not (length, width) or (length, batch, width)", **say)
    if query.shape[-1] != width or width % heads or key.shape[0] != value.shape[0]:
        raise ShardingError(f"shapes that do not fit a width of {width} and {heads} heads", **say)
    if is_causal and attn_mask is None:
        raise ShardingError("is_causal is a hint and needs attn_mask too", **say)
    return query.ndim == 3


def _projected(query, key, value, separate, weight, bias):
    if separate is None and query is key is value:
        return F.linear(query, weight, bias).chunk(3, -1)
    separate = weight.chunk(3) if separate is None else separate
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [F.linear(t, w, b) for t, w, b in zip((query, key, value), separate, biases)]


def _hidden(attn_mask, key_padding_mask, heads, added, dtype):
    """Both masks as one over (batch, heads, queries, keys): True where a key is hidden, or what is added to scores."""
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (-1, heads))
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[:, None, None]
    masks = [F.pad(m, (0, added)) if added else m for m in (attn_mask, key_padding_mask) if m is not None]
    if any(m.dtype != torch.bool for m in masks):
        masks = [
            m if m.dtype != torch.bool else m.new_zeros(m.shape, dtype=dtype).masked_fill(m, -math.inf) for m in masks
        ]
    if len(masks) == 2:
        return masks[0] | masks[1] if masks[0].dtype == torch.bool else masks[0] + masks[1]
    return masks[0] if masks else None


def _with_weights(q, k, v, hidden, dropout_p):
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf) if hidden.dtype == torch.bool else scores + hidden
    weights = scores.softmax(-1)
    weights = F.dropout(weights, dropout_p) if dropout_p else weights
    return weights @ v, weights


# -- inference --------------------------------------------------------------------------------------------------------
@composed(_torch.fused_attention)
def native_attention(
    query,
    key,
    value,
    embed_dim,
    num_head,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    mask=None,
    need_weights=True,
    average_attn_weights=True,
    mask_type=None,
):
    """Batch first; a mask of type 1 is of keys, others are of scores."""
    first = query.transpose(0, 1)
    q, k, v = (first if t is query else t.transpose(0, 1) for t in (query, key, value))
    out, weights = multi_head_attention(
        q, k, v, embed_dim, num_head, qkv_weight, qkv_bias, None, None, False, 0.0, proj_weight, proj_bias,
        training=False,
        key_padding_mask=mask if mask_type == 1 else None,
        need_weights=need_weights,
        attn_mask=mask if mask_type != 1 else None,
        average_attn_weights=average_attn_weights,
    )  # fmt: skip
    return out.transpose(0, 1), weights


@composed(_torch.fused_encoder_layer)
def encoder_layer(
    src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps,
    norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2,
    mask=None, mask_type=None,
):  # fmt: skip
    def attend(x):
        weights = qkv_weight, qkv_bias, proj_weight, proj_bias
        return native_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)[0]

    def feed(x):
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    def norm(x, weight, bias):
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        x = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return x + feed(norm(x, norm_weight_2, norm_bias_2))
    x = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(x + feed(x), norm_weight_2, norm_bias_2)


@composed(_torch.mask_is_left_aligned)
def left_aligned(src, mask):
    """Whether an encoder may leave its padding out: not where that would give every rank rows of its own number."""
    return False
