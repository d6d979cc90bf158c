"""Norms of a decoder's layers in the form of the CPU's kernels. Knows no buffers and no passes."""

from typing import NamedTuple

from kernels.native.cpu_kernels import HeadNorms, NormRule
from worker_svc.model.config import NormPlace
from worker_svc.model.layers import Attention, DecoderLayer, Norm


class LayerRules(NamedTuple):
    """Norms of one layer."""

    attention_norm: NormRule
    mlp_norm: NormRule
    head_norms: HeadNorms | None
    projection_norms: tuple[NormRule, NormRule] | None  # over all query heads of a token, and over all its key heads

    @classmethod
    def of(cls, layer: DecoderLayer) -> "LayerRules":
        """Rules of a layer."""
        then_add = layer.norm_place is NormPlace.ON_OUTPUT
        head_norms, projection_norms = _qk_norms(layer.attention)
        return cls(
            norm_rule(layer.attention_norm)._replace(then_add=then_add),
            norm_rule(layer.mlp_norm)._replace(then_add=then_add),
            head_norms,
            projection_norms,
        )


def norm_rule(norm: Norm) -> NormRule:
    """Rule of a norm."""
    return NormRule(norm.weight, norm.bias, norm.eps, norm.rms)


def _qk_norms(attention: Attention) -> tuple[HeadNorms | None, tuple[NormRule, NormRule] | None]:
    query, key = attention.q_norm, attention.k_norm
    if query is None or key is None:
        return None, None
    if query.size == key.size == attention.head_dim:
        assert query.weight is not None and key.weight is not None, "norms of heads have weights"
        return HeadNorms(query.weight, key.weight, query.eps), None
    return None, (norm_rule(query), norm_rule(key))
