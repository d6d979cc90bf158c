"""Makes the parts of a decoder from a checkpoint's tensors.

Fuses matrices with the same input, and transposes those that are stored as [in, out]. Each tensor goes to its device
and dtype as it is read, so that the host never holds the whole model beside the device.
"""

import structlog
import torch
from torch import Tensor

from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.weight_reader import WeightReader
from worker_svc.model.config import ModelConfig
from worker_svc.model.layers import Attention, DecoderLayer, Linear, MakeProduct, Mlp, Norm, Product
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
    ) -> None:
        self._make_product = make_product
        self._reader = reader
        self._config = config
        self._dtype = dtype
        self._device = device
        self._names = NAMES[config.family]
        self._prefix = find_prefix(config, reader, reader.folder)
        self._shapes = dict(needed_tensors(config, reader, reader.folder))
        self.num_parameters_read = 0
        self.num_parameters_kept = 0  # a matrix that is kept in two forms counts twice

    def token_embedding(self) -> Tensor:
        """[vocab_size, embed_dim]; of tied ones, the head's matrix if only that was saved."""
        name = f"{self._prefix}{self._names.embedding}.weight"
        return self._count(self._load(name if name in self._shapes else HEAD))

    def position_embedding(self) -> Tensor | None:
        """[position_offset + max_model_len, hidden_size]; None for rotary positions."""
        return self._read_if_needed(f"{self._names.positions}.weight")

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
        matrix = self._load(HEAD)
        if self._config.tie_word_embeddings:
            if torch.equal(matrix, token_embedding):
                return self._tied_head(token_embedding)
            log.warning(
                "config.json ties the output matrix to the embedding, but the weights have two that differ: "
                "both are used; set tie_word_embeddings to false to silence this"
            )
        return self._make_product(self._count(matrix), None)

    def _tied_head(self, token_embedding: Tensor) -> Product:
        head = self._make_product(token_embedding, None)
        if not isinstance(head, Linear):
            self.num_parameters_kept += token_embedding.numel()
        return head

    def final_norm(self) -> Norm | None:
        return self._norm(self._names.final_norm, self._config.hidden_size) if self._config.final_norm else None

    def layer(self, index: int) -> DecoderLayer:
        """One layer, with query, key and value fused, and gate and up fused."""
        config, names = self._config, self._names
        prefix = names.layer.format(index)
        up = self._linear(*(prefix + name for name in names.up))
        down = self._linear(prefix + names.down)
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
            qkv=self._linear(*(prefix + name for name in names.qkv)),
            out=self._linear(prefix + names.out),
            q_norm=self._norm(f"{prefix}self_attn.q_norm", query_norm) if config.qk_norm else None,
            k_norm=self._norm(f"{prefix}self_attn.k_norm", key_norm) if config.qk_norm else None,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )

    def _linear(self, *names: str) -> Product:
        """Stack matrices with the same input into one."""
        weights = [self._read(f"{name}.weight") for name in names]
        biases = [bias for name in names if (bias := self._read_if_needed(f"{name}.bias")) is not None]
        if self._names.transposed:
            weights = [weight.t() for weight in weights]
        return self._make_product(torch.cat(weights).contiguous(), torch.cat(biases) if biases else None)

    def _norm(self, name: str, size: int) -> Norm:
        weight, bias = self._read_if_needed(f"{name}.weight"), self._read_if_needed(f"{name}.bias")
        return Norm(size, self._config.norm_eps, self._config.rms_norm, weight, bias)

    def _read_if_needed(self, name: str) -> Tensor | None:
        return self._read(name) if self._prefix + name in self._shapes else None

    def _read(self, name: str) -> Tensor:
        return self._count(self._load(self._prefix + name))

    def _count(self, tensor: Tensor) -> Tensor:
        self.num_parameters_read += tensor.numel()
        self.num_parameters_kept += tensor.numel()
        return tensor

    def _load(self, name: str) -> Tensor:
        """The tensor on its device and in its dtype. Raises CheckpointError unless all its numbers are finite there.

        The check reads the tensor once at the speed of memory: 0.1 s for one or two billion parameters.
        """
        saved = self._reader.read(name, self._shapes[name])
        tensor = saved.to(device=self._device, dtype=self._dtype)
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


def _is_finite(tensor: Tensor) -> bool:
    """True if no number is NaN or infinite: both show in minimum and maximum, which are far faster than isfinite."""
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
