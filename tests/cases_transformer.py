"""Rows of ``nn.MultiheadAttention`` and the transformer layers: operands first, then all their parameters."""

import torch
from cases import case, refuse
from cases_attention import minus_infinity, with_strategy
from torch import nn
from torch.func import functional_call

from core import rotary_embedding

WIDTH, HEADS = 8, 2
X, M = (3, 7, WIDTH), (3, 5, WIDTH)


def module(name, built, call, shapes, cuts, cuts2=(), inference=False, **kwargs):
    """A row of ``call(module, *operands)`` with the gradients of operands and parameters; ``inference``: without."""
    built = built.double().train(not inference)
    names, values = zip(*built.named_parameters())

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = built

        def forward(self, *operands):
            return call(self.inner, *operands)

    def fn(*operands):
        own = {f"inner.{n}": p for n, p in zip(names, operands[len(shapes) :])}
        return functional_call(Called(), own, operands[: len(shapes)])

    plain = (None,) * len(names)
    if inference:
        kwargs["differentiable"] = ()
    case(
        name,
        fn,
        (*shapes, *(tuple(v.shape) for v in values)),
        [(*c, *plain) for c in cuts],
        cuts2=[(*c, *plain) for c in cuts2],
        **kwargs,
    )


def hidden(g, shape):
    """True where a key is hidden; never all of them."""
    mask = torch.rand(shape, generator=g) > 0.6
    mask[..., 2] = False
    return mask


def attention(**kwargs):
    return nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **kwargs})


def itself(**kwargs):
    return lambda m, x, *rest: m(x, x, x, **kwargs)


EACH = ((0,), (1,), (2,))
module("multihead_batch", attention(), itself(need_weights=False), (X,), ((0,),), wire=())
module("multihead_whole_weights", attention(), itself(), (X,), EACH, (((0, 1),), ((1, 0),)))
module("multihead_ring", attention(), with_strategy("ring", itself(need_weights=False)), (X,), ((1,),), (((0, 1),),))
module(
    "multihead_sequence_first",
    attention(batch_first=False, bias=False),
    lambda m, x: (*m(x, x, x, average_attn_weights=False), m(x, x, x, need_weights=False)[0]),
    ((7, 3, WIDTH),),
    ((0,), (1,)),
    (((0, 1),),),
)
module(
    "multihead_one_sample",
    attention(),
    lambda m, x: (*m(x, x, x), m(x, x, x, need_weights=False)[0]),
    ((7, WIDTH),),
    ((0,), (1,), ("R",)),
)


def masked(m, x, mask, bias, padding):
    causal = torch.ones(7, 7, dtype=torch.bool, device=mask.device).triu(1)
    yes, no = {"need_weights": True}, {"need_weights": False}
    return (
        *m(x, x, x, attn_mask=mask, key_padding_mask=padding, **yes),
        m(x, x, x, attn_mask=mask, key_padding_mask=padding, **no)[0],
        m(x, x, x, attn_mask=bias, **no)[0],
        m(x, x, x, key_padding_mask=padding, **no)[0],
        m(x, x, x, attn_mask=causal, is_causal=True, **no)[0],
        m(x, x, x, attn_mask=causal, is_causal=True, key_padding_mask=padding, **no)[0],
    )


module(
    "multihead_masks",
    attention(),
    masked,
    (X, (7, 7), (3 * HEADS, 7, 7), (3, 7)),
    ((0, None, None, None), (1, None, None, 1), (1, 0, 1, 0)),
    (((0, 1), None, None, (0, 1)),),
    make={1: hidden, 2: minus_infinity, 3: hidden},
)
CROSS = ((3, 7, WIDTH), (3, 5, 6), (3, 5, 4), (7, 5), (3, 5))
module(
    "multihead_cross",
    attention(kdim=6, vdim=4, add_bias_kv=True, add_zero_attn=True),
    lambda m, q, k, v, mask, padding: (
        *m(q, k, v, attn_mask=mask, key_padding_mask=padding),
        m(q, k, v, attn_mask=mask, key_padding_mask=padding, need_weights=False)[0],
        m(q, k, v, need_weights=False)[0],
    ),
    CROSS,
    ((0, 0, 0, None, None), (1, 1, 1, None, 1), (1, None, None, 0, None), (None, 1, 1, 1, None), (1, 0, 0, None, 0)),
    (((0, 1), (0, 1), (0, 1), None, None),),
    make={3: hidden, 4: hidden},
)
module(
    "multihead_shared_keys",
    attention(),
    lambda m, q, k: m(q, k, k),
    (X, M),
    ((1, 1), (1, None), (None, 1), (0, 0)),
    (((0, 1), (0, 1)), ((1, 0), (0, 1))),
)


# -- layers ------------------------------------------------------------------------------------------------------------
def layers(norm_first, kind=nn.TransformerEncoderLayer):
    return kind(WIDTH, HEADS, 12, dropout=0.0, batch_first=True, norm_first=norm_first)


def encoded(m, x, mask, padding):
    return (
        m(x),
        m(x, mask, is_causal=False),
        m(x, src_key_padding_mask=padding),
        m(x, nn.Transformer.generate_square_subsequent_mask(7, x.device, torch.float64), is_causal=True),
    )


for _first in (True, False):
    for _inference in (True, False):
        module(
            f"encoder_layer_{_first}_{_inference}",
            layers(_first),
            encoded,
            (X, (7, 7), (3, 7)),
            ((0, None, None), (1, None, None), (1, 0, 1)),
            (((0, 1), None, None),),
            inference=_inference,
            make={1: hidden, 2: hidden},
        )
module(
    "encoder",
    nn.TransformerEncoder(layers(False), 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False),
    encoded,
    (X, (7, 7), (3, 7)),
    ((0, None, None), (1, None, None)),
    (((0, 1), None, None),),
    inference=True,
    make={1: hidden, 2: hidden},
)
module(
    "decoder_layer",
    layers(True, nn.TransformerDecoderLayer),
    lambda m, x, memory, mask, padding: (m(x, memory), m(x, memory, mask, memory_key_padding_mask=padding)),
    (X, M, (7, 7), (3, 5)),
    ((0, 0, None, None), (1, 1, None, None), (1, None, 0, 1), (None, 1, None, None)),
    (((0, 1), (0, 1), None, None),),
    make={2: hidden, 3: hidden},
)
module(
    "transformer",
    nn.Transformer(WIDTH, HEADS, 1, 1, 12, 0.0, batch_first=True),
    lambda m, x, y: m(x, y),
    (X, M),
    ((0, 0), (1, 1)),
    (((0, 1), (0, 1)),),
    atol=1e-9,
)


# -- what torch's inference calls --------------------------------------------------------------------------------------
def fused_layer(m, x, mask, padding):
    a = m.self_attn
    attention = a.embed_dim, HEADS, a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias
    norms = m.norm1.weight, m.norm1.bias, m.norm2.weight, m.norm2.bias
    feed = m.linear1.weight, m.linear1.bias, m.linear2.weight, m.linear2.bias
    masks = (None, None), (padding, 1), (mask.expand(3, HEADS, 7, 7), 2)
    exact = x.device.type == "cpu"  # on GPUs torch fuses an approximation of GELU
    layer = [
        torch._transformer_encoder_layer_fwd(x, *attention, gelu and exact, first, 1e-5, *norms, *feed, *m)
        for gelu, first, m in zip((True, False, True), (False, True, True), masks)
    ]
    return *layer, *torch._native_multi_head_attention(x, x, x, *attention, None, True, True)


module(
    "encoder_layer_fused",
    layers(False),
    fused_layer,
    (X, (7, 7), (3, 7)),
    ((0, None, None), (1, None, 1)),
    (((0, 1), None, None),),
    inference=True,
    make={1: hidden, 2: hidden},
)


def padded_at_the_end(g, shape):
    return torch.arange(shape[1]) >= torch.tensor([[5], [7], [3]])


module(
    "encoder_without_padding",
    nn.TransformerEncoder(layers(False), 2),
    lambda m, x, padding: m(x, src_key_padding_mask=padding) * ~padding[..., None],
    (X, (3, 7)),
    ((0, None), (1, None)),
    (((0, 1), None),),
    inference=True,
    make={1: padded_at_the_end},
)

ROTARY = (2, 5, 7, 3, 4), (5, 7, 1, 2), (5, 7, 1, 2)
case(
    "rotary_embedding",
    rotary_embedding,
    ROTARY,
    ((0, None, None), (1, 0, 0), (1, None, None), (2, 1, None), (3, None, None), (4, 3, 3), (None, 0, 1)),
    cuts2=(((1, 2), (0, 1), None), ((0, 1), None, None)),
)
case("rotary_embedding_no_wire", rotary_embedding, ROTARY, ((0, None, None), (1, None, None), (2, 1, 1)), wire=())
refuse(
    "an odd number of channels to turn", lambda x: rotary_embedding(x[..., :3], x[0, ..., :1, :1], x[0, ..., :1, :1])
)
refuse("angles of other tokens", lambda x: rotary_embedding(x, x[0, :2, ..., :1, :2], x[0, :2, ..., :1, :2]))

for _some in ((0,), (1,), (2,), (1, 2)):
    name = f"rotary_embedding_differentiable_{'_'.join(map(str, _some))}"
    case(name, rotary_embedding, ROTARY, ((1, None, None), (1, 0, 0)), differentiable=_some)
