"""Makes the parts of a decoder from a checkpoint's tensors.

Fuses matrices with the same input, and transposes those that are stored as [in, out]. Each tensor goes to its device
and dtype as it is read, so that the host never holds the whole model beside the device. Nothing that is kept lies in
the memory of a mapped file: files may be replaced while the model is served. A rank of a tensor-parallel group reads
its part of each tensor alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import structlog
import torch
from torch import Tensor

from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.weight_reader import WeightReader
from worker_svc.model.config import ModelConfig, QkNorm
from worker_svc.model.layers import Attention, DecoderLayer, LayersOnly, Linear, MakeProduct, Mlp, Norm, Product
from worker_svc.model.model_part import WHOLE, ModelPart, Span, num_kv_heads_of
from worker_svc.model.tensor_names import HEAD, NAMES, find_prefix, needed_tensors

log = structlog.get_logger()


class WeightLoader:
    """Reads the parts of one decoder: the tensors that its config needs; one with another shape is refused."""

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        make_product: MakeProduct = Linear,
        model_part: ModelPart = WHOLE,
    ) -> None:
        """`config`: of the whole model, of which `model_part` is read."""
        self._make_product = make_product
        self._make_outer_product = Linear if isinstance(make_product, LayersOnly) else make_product
        self._model_part = model_part
        self._reader = reader
        self._config = config
        self._dtype = dtype
        self._device = device
        self._names = NAMES[config.family]
        self._prefix = find_prefix(config, reader, reader.folder)
        self._shapes = dict(needed_tensors(config, reader, reader.folder))
        self.num_parameters_read = 0
        self.num_bytes_kept = 0  # a matrix that is kept in two forms counts twice

    def token_embedding(self) -> Tensor:
        """[vocab_size, embed_dim], or the part's rows; of tied ones, the head's matrix if only that was saved."""
        name = f"{self._prefix}{self._names.embedding}.weight"
        embedding = self._count(self._load(name if name in self._shapes else HEAD, self._vocabulary))
        self._keep(embedding)
        return embedding

    def position_embedding(self) -> Tensor | None:
        """[position_offset + max_model_len, hidden_size], or the part's rows; None for rotary positions."""
        name = f"{self._names.positions}.weight"
        if self._prefix + name not in self._shapes:
            return None
        embedding = self._read(name, self._model_part.span_of(self._shapes[self._prefix + name][0]))
        self._keep(embedding)
        return embedding

    def projections(self) -> tuple[Product | None, Product | None]:
        """Projections into and out of hidden_size, if the embedding has another size."""
        if self._config.hidden_size == self._config.embed_dim:
            return None, None
        return self._linear("project_in"), self._linear("project_out")

    def head(self, token_embedding: Tensor) -> Product:
        """The output product, [vocab_size, embed_dim]; a tied one is made from the embedding, which is kept beside it.

        The embedding needs rows to look tokens up, which a packed product does not have, so a packed tied matrix is
        kept twice. It is the largest matrix of a small model, and its slowest product unless it is packed.
        If config.json ties both and the file has both, they are tied only if they are equal, as in `transformers`.
        """
        if self._config.tie_word_embeddings and HEAD not in self._reader:
            return self._tied_head(token_embedding)
        matrix = self._load(HEAD, self._vocabulary)
        if self._config.tie_word_embeddings:
            if torch.equal(matrix, token_embedding):
                return self._tied_head(token_embedding)
            log.warning(
                "config.json ties the output matrix to the embedding, but the weights have two that differ: "
                "both are used; set tie_word_embeddings to false to silence this"
            )
        return self._made(self._make_outer_product, self._count(matrix), None)

    def _tied_head(self, token_embedding: Tensor) -> Product:
        head = self._make_outer_product(token_embedding, None)
        if not isinstance(head, Linear):
            self.num_bytes_kept += head.nbytes
        return head

    def final_norm(self) -> Norm | None:
        return self._norm(self._names.final_norm, self._config.hidden_size) if self._config.final_norm else None

    def layer(self, index: int) -> DecoderLayer:
        """One layer, with query, key and value fused, and gate and up fused."""
        config, names = self._config, self._names
        prefix = names.layer.format(index)
        inner = self._model_part.span_of(config.intermediate_size)
        up = self._column_product([prefix + name for name in names.up], [inner] * len(names.up))
        down = self._row_product(prefix + names.down, inner)
        return DecoderLayer(
            attention=self._attention(prefix),
            mlp=Mlp(up, down, config.gated_mlp),
            attention_norm=self._norm(prefix + names.attention_norm, config.hidden_size),
            mlp_norm=self._norm(prefix + names.mlp_norm, config.hidden_size),
            norm_place=config.norm_place,
        )

    def _attention(self, prefix: str) -> Attention:
        config, names = self._config, self._names
        query_norm, key_norm = config.qk_norm_sizes
        return Attention(
            qkv=self._qkv(prefix),
            out=self._row_product(prefix + names.out, self._model_part.span_of(config.query_size)),
            q_norm=self._norm(f"{prefix}self_attn.q_norm", query_norm) if config.qk_norm else None,
            k_norm=self._key_norm(f"{prefix}self_attn.k_norm", key_norm) if config.qk_norm else None,
            num_heads=config.num_heads // self._model_part.size,
            num_kv_heads=num_kv_heads_of(config, self._model_part.size),
            head_dim=config.head_dim,
        )

    def _key_norm(self, name: str, size: int) -> Norm:
        """Norm of keys. Over all heads of a token those that several ranks hold count as often."""
        norm, num_heads = self._norm(name, size), self._config.num_kv_heads
        num_repeated = self._model_part.size * num_kv_heads_of(self._config, self._model_part.size) // num_heads
        if self._config.qk_norm is not QkNorm.PROJECTIONS or num_repeated == 1 or norm.weight is None:
            return norm
        weight = norm.weight.view(num_heads, -1).repeat_interleave(num_repeated, dim=0).flatten()
        return replace(norm, size=len(weight), weight=weight)

    @property
    def _vocabulary(self) -> Span:
        return self._model_part.span_of(self._config.vocab_size)

    def _qkv(self, prefix: str) -> Product:
        """Query, key and value of the part's heads in one product, from one matrix or three."""
        config, names = self._config, self._names.qkv
        kv = self._model_part.span_of_kv(config)
        spans = [self._model_part.span_of(config.query_size), kv, kv]
        if len(names) == 1:
            begins = (0, config.query_size, config.query_size + config.kv_size)
            spans = [Span(begin + span.begin, begin + span.end) for begin, span in zip(begins, spans, strict=True)]
            names *= len(spans)
        return self._column_product([prefix + name for name in names], spans)

    def _linear(self, name: str) -> Product:
        """Product outside of the layers, which every rank computes whole."""
        weight, bias = self._read_matrix(name, None, None), self._read_if_needed(f"{name}.bias")
        return self._made(self._make_outer_product, weight.clone(memory_format=torch.contiguous_format), bias)

    def _column_product(self, names: Sequence[str], spans: Sequence[Span]) -> Product:
        """Stack outputs of matrices with the same input into one product: those in the spans."""
        biases = [self._read_if_needed(f"{name}.bias", span) for name, span in zip(names, spans, strict=True)]
        added = [bias for bias in biases if bias is not None]
        weight = self._stacked(names, spans)
        return self._made(self._make_product, weight, torch.cat(added) if added else None)

    def _stacked(self, names: Sequence[str], spans: Sequence[Span]) -> Tensor:
        """Outputs of several matrices below each other. Only one of them is in memory beside the result."""
        begin, num_outputs = 0, sum(span.end - span.begin for span in spans)
        stacked: Tensor | None = None
        for name, span in zip(names, spans, strict=True):
            weight = self._read_matrix(name, span, None)
            if stacked is None:
                stacked = weight.new_empty((num_outputs, weight.shape[1]))
            stacked[begin : begin + len(weight)] = weight
            begin += len(weight)
        assert stacked is not None, "a product has a matrix"
        return stacked

    def _row_product(self, name: str, span: Span) -> Product:
        """Product of a span of the inputs; ranks sum their results, so that only the first one adds the bias."""
        weight = torch.cat([self._read_matrix(name, None, span)]).contiguous()
        bias = self._read_if_needed(f"{name}.bias") if self._model_part.is_first else None
        return self._made(self._make_product, weight, bias)

    def _made(self, make_product: MakeProduct, weight: Tensor, bias: Tensor | None) -> Product:
        product = make_product(weight, bias)
        self.num_bytes_kept += product.nbytes
        return product

    def _read_matrix(self, name: str, outputs: Span | None, inputs: Span | None) -> Tensor:
        """Read [outputs, inputs] of a matrix, which the caller copies."""
        spans = (inputs, outputs) if self._names.transposed else (outputs, inputs)
        matrix = self._count(self._load(f"{self._prefix}{name}.weight", *spans, is_copied=True))
        return matrix.t() if self._names.transposed else matrix

    def _norm(self, name: str, size: int) -> Norm:
        weight, bias = self._read_if_needed(f"{name}.weight"), self._read_if_needed(f"{name}.bias")
        self._keep(weight, bias)
        return Norm(size, self._config.norm_eps, self._config.rms_norm, weight, bias)

    def _read_if_needed(self, name: str, *spans: Span | None) -> Tensor | None:
        return self._read(name, *spans) if self._prefix + name in self._shapes else None

    def _read(self, name: str, *spans: Span | None) -> Tensor:
        return self._count(self._load(self._prefix + name, *spans))

    def _count(self, tensor: Tensor) -> Tensor:
        self.num_parameters_read += tensor.numel()
        return tensor

    def _keep(self, *tensors: Tensor | None) -> None:
        """Count tensors that the decoder keeps as they were read."""
        self.num_bytes_kept += sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _load(self, name: str, *spans: Span | None, is_copied: bool = False) -> Tensor:
        """The tensor on its device and in its dtype. Raises CheckpointError unless all its numbers are finite there.

        `spans`: what to read of it, by dimension; None: all. `is_copied`: by the caller; it may be the file's memory.

        The check reads the tensor once at the speed of memory: 0.1 s for one or two billion parameters.
        """
        saved = self._reader.read(name, self._shapes[name], self._part(name, spans))
        tensor = saved.to(device=self._device, dtype=self._dtype, copy=not is_copied)
        if _is_finite(tensor):
            return tensor
        if _is_finite(saved):
            dtype = str(self._dtype).removeprefix("torch.")
            raise CheckpointError(
                f"tensor {name!r} in {self._reader.folder} has numbers beyond the range of {dtype}: "
                "give --dtype bfloat16 or float32"
            )
        raise CheckpointError(
            f"tensor {name!r} in {self._reader.folder} has NaN or infinity among its numbers, so every answer would "
            "be wrong: download the checkpoint again, or choose another"
        )

    def _part(self, name: str, spans: Sequence[Span | None]) -> list[slice]:
        """Slices of a tensor; none where all of it is meant."""
        shape = self._shapes[name]
        part = [slice(0, size) if span is None else slice(*span) for span, size in zip(spans, shape, strict=False)]
        return [] if all(each == slice(0, size) for each, size in zip(part, shape, strict=False)) else part


def _is_finite(tensor: Tensor) -> bool:
    """True if no number is NaN or infinite: both show in minimum and maximum, which are far faster than isfinite."""
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
