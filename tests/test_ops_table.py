"""Nothing is without a row: not a rule of core, not an operation that was promised; and docs/ops.md tells the truth."""

import pytest
from cases import load
from ops_table import FILE, render, survey

from core.dispatch import RULES
from core.ops import other_mesh

# Operations that a person may count on; each must be called by rows that cut it along two different dims at least.
PROMISED = {
    "reductions": """sum mean prod max min amax amin aminmax argmax argmin any all norm var std var_mean logsumexp
        median quantile count_nonzero softmax log_softmax cumsum cumprod sort topk linalg_vector_norm
        linalg_matrix_norm""",
    "views": """view reshape flatten unflatten permute transpose movedim squeeze unsqueeze expand unfold cat stack split
        chunk unbind tile repeat repeat_interleave flip roll rot90 select narrow tril triu diagonal""",
    "indexing": """__getitem__ gather scatter_add index_select index_add index_put take_along_dim masked_fill where
        __setitem__ masked_select embedding""",
    "products": "matmul bmm einsum linear bilinear baddbmm outer linalg_cross cdist",
    "convolutions": """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d pad max_pool1d max_pool2d
        max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool2d adaptive_max_pool2d lp_pool2d interpolate
        pixel_shuffle pixel_unshuffle grid_sample fold""",
    "norms": "batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm",
    "attention": "scaled_dot_product_attention multi_head_attention_forward neighborhood_attention",
    "losses": """mse_loss l1_loss huber_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits
        cross_entropy nll_loss kl_div cosine_similarity cosine_embedding_loss""",
    "transforms": """fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn
        fft_rfftn fft_irfftn""",
    "random": "dropout bernoulli randn_like rand_like",
    "neighbours": "knn",
}
# Reached elsewhere: kernels of GPUs (``pytest -m gpu``), the rule behind a tag, and refusals of one kind; the rules of
# ``core.ops.other_mesh`` by tests/test_foundations.py.
ELSEWHERE = {
    "pointwise", "map_", "map2_", "_foreach_clone", "repeat_interleave.Tensor",
    "_fused_rms_norm", "_fused_rms_norm_backward",
    *(f"_scaled_dot_product_{kind}_attention{tail}"
      for kind in ("cudnn", "efficient", "flash") for tail in ("", "_backward")),
}  # fmt: skip
ONE_DIM = {"embedding", "bilinear", "fold", "knn"}  # what is cut there is one dim by nature


@pytest.fixture(scope="module")
def surveyed(pool):
    return pool.run(survey, timeout=900)[0]


def _name(key):
    return getattr(key, "__name__", str(key))


def test_every_rule_has_a_row(surveyed):
    load()  # files of cases may declare rules
    elsewhere = ELSEWHERE | {_name(k) for k, rule in RULES.items() if rule.__module__ == other_mesh.__name__}
    reached = {key for row in surveyed[0].values() for key in row[2]} | surveyed[2]  # some rules only refuse
    rules = {(_name(k), rule.__qualname__) for k, rule in RULES.items()}
    missing = {r for r in rules - reached if r[0] not in elsewhere}
    assert not missing, sorted(missing)


@pytest.mark.parametrize("family", PROMISED)
def test_promised_operations_have_rows(surveyed, family):
    missing = []
    for name in PROMISED[family].split():
        rows = [r for r in surveyed[0].values() if name in r[1] or any(name == k[0] for k in r[2])]
        cuts = {part for r in rows for cut, _, _ in r[3] for part in cut.split("·") if part.startswith("S(")}
        if len(cuts) < (1 if name in ONE_DIM else 2):
            missing.append(f"{name}: {len(rows)} rows, cuts {sorted(cuts)}")
    assert not missing, missing


def test_document_is_up_to_date(surveyed):
    assert FILE.read_text() == render(*surveyed[:2]), "run: python tests/ops_table.py"
