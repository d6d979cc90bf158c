"""The norms of a decoder's layers as the CPU's kernels take them. Knows no buffers and no passes."""

from typing import NamedTuple

from kernels.native.cpu_kernels import HeadNorms, NormRule
from worker_svc.model.layers import DecoderLayer, Norm


class LayerRules(NamedTuple):
    """A layer's norms as the kernels take them."""

    attention_norm: NormRule
    mlp_norm: NormRule
    head_norms: HeadNorms | None

    @classmethod
    def of(cls, layer: DecoderLayer) -> "LayerRules":
        """Of one layer."""
        query, key = layer.attention.q_norm, layer.attention.k_norm
        head_norms = None
        if query is not None and key is not None:
            assert query.weight is not None and key.weight is not None, "norms of heads have weights"
            head_norms = HeadNorms(query.weight, key.weight, query.eps)
        return cls(norm_rule(layer.attention_norm), norm_rule(layer.mlp_norm), head_norms)


def norm_rule(norm: Norm) -> NormRule:
    """A norm as the kernels take it."""
    return NormRule(norm.weight, norm.bias, norm.eps, norm.rms)
