"""The sampler's way through the decoder on a CPU: the new tokens of all rows end to end, packed weights, compiled kernels.

`Decoder.forward_cached` computes the same with plain torch operations. It is the reference of this file, and serves where
this does not: on GPUs, without numba, in other number formats or head sizes, for prompts longer than LONG. What is gained:

- No padding and no waiting. A row that decodes brings one token, one that has heard something brings that, and all go
  through the weights together.
- Four matrix products a layer instead of seven: q, k and v come from one matrix, gate and up from another.
- oneDNN keeps large matrices in the blocks that its kernels read. A plain product of few rows spends most of its time on
  bringing them into that form, every time (SmolLM2-135M's matrices, 16 rows: 1.7 times faster in bf16, 2 to 3 in fp32).
- What lies between the products is four calls of compiled code (kernels/decode.py) instead of forty of torch's.
"""

import itertools
import weakref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Base, Decoder, KVCache, RMSNorm, side_by_side

try:
    import numba

    from kernels import decode
except (ImportError, RuntimeError):  # not there, or no folder to keep what it compiles: slower, not wrong
    numba = None

LONG = 64  # more new tokens than this in a row: attention of so many queries is better done as matrix products
TILED = 2**18  # a matrix of fewer numbers gains nothing by oneDNN's tiles
ROWS = 16  # the number of rows that these tiles are made for; others work as well
ROWS_A_CORE = 4  # with fewer than that, all cores share each product


class Matrix:
    """Linear layers that read the same input, as one product. Adapters stay apart: each update changes them."""

    def __init__(self, *layers: nn.Module):
        self.layers, self.sizes = layers, [len(layer.weight) for layer in layers]
        weights = [layer.weight.detach() for layer in layers]
        biases = [bias.detach() for layer in layers if (bias := getattr(layer, "bias", None)) is not None]
        self.matrix = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.bias = torch.cat(biases) if biases else None
        self.tiled = self.matrix.numel() >= TILED and _onednn(self.matrix.dtype)
        if self.tiled:
            self.matrix = torch.ops.mkldnn._reorder_linear_weight(self.matrix, ROWS)

    def __call__(self, x: Tensor, adapters: bool = False) -> Tensor:
        """x [T, in] → [T, out of all layers]"""
        if self.tiled:
            out = torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.bias, "none", [], "")
        else:
            out = F.linear(x, self.matrix, self.bias)
        if adapters:
            for layer, part in zip(self.layers, out.split(self.sizes, -1), strict=True):
                part += layer.adapter(x)
        return out


def _onednn(dtype: torch.dtype) -> bool:
    here = torch.backends.mkldnn.is_available()
    return here and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Matrices:
    """The matrices of a decoder as `Packed` multiplies by them."""

    def __init__(self, model: Decoder):
        self.layers = []
        for block in model.model["layers"]:
            attention, mlp = block.self_attn, block.mlp
            qkv = Matrix(attention.q_proj, attention.k_proj, attention.v_proj)
            gate_up = Matrix(mlp.gate_proj, mlp.up_proj)
            self.layers.append((qkv, Matrix(attention.o_proj), gate_up, Matrix(mlp.down_proj)))
        self.head = Matrix(model.model["embed_tokens"] if model.lm_head is None else model.lm_head)


# A model and its `Base` share them.
_MATRICES: weakref.WeakKeyDictionary[Decoder, Matrices] = weakref.WeakKeyDictionary()


class Packed:
    """The fast way through one model."""

    def __init__(self, model: Decoder | Base):
        self.base = isinstance(model, Base)  # without adapters
        self.model = model.model if isinstance(model, Base) else model
        _MATRICES.pop(self.model, None)  # of weights as they were at another time, perhaps

    @staticmethod
    def serves(model: Decoder | Base) -> bool:
        head = model.head
        fits = head.dtype in (torch.float32, torch.bfloat16) and model.cfg.head_dim % 8 == 0
        return numba is not None and head.device.type == "cpu" and fits

    def weights_changed(self) -> None:
        """Forgets the copies. Under adapters, which are never copied, the weights stay as they are."""
        if self.model.lora is None:
            _MATRICES.pop(self.model, None)

    def matrices(self) -> Matrices:
        if self.model not in _MATRICES:
            _MATRICES[self.model] = Matrices(self.model)
        return _MATRICES[self.model]

    def sample(
        self,
        new: list[list[int]],
        slots: np.ndarray,
        starts: np.ndarray,
        u: np.ndarray,
        temperature: float,
        cache: KVCache,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Row r's new tokens new[r] follow what its slot holds before starts[r] (slots distinct). Writes their keys and
        values, and draws one more token for each row, by u[r] (`kernels.decode.draw`) → tokens [R], log-probs [R].

        With enough rows each core takes a part of them through the whole model, of about as many tokens as the others.
        """
        n, parts = np.array([len(tokens) for tokens in new]), torch.get_num_threads()
        total = n.cumsum()
        if (last := int((starts + n).max())) > cache.max_len:
            raise ValueError(f"a row ends at {last}, the cache holds {cache.max_len} positions")
        self.model._rope(last)  # made here, as the matrices are, before the parts look at it
        self.matrices()
        if len(new) < ROWS_A_CORE * parts:
            parts = 1
        cuts = [0, *(np.searchsorted(total, total[-1] * np.arange(1, parts) / parts) + 1), len(new)]
        rows = [slice(a, b) for a, b in itertools.pairwise(cuts) if a < b]
        work = lambda r: self._sample(new[r], n[r], slots[r], starts[r], u[r], temperature, cache)
        done = [work(rows[0])] if len(rows) == 1 else side_by_side(work, rows)
        return tuple(map(np.concatenate, zip(*done, strict=True)))

    @torch.inference_mode()
    def _sample(self, new, n, slots, starts, u, temperature, cache) -> tuple[np.ndarray, np.ndarray]:
        ends = n.cumsum()
        at = np.arange(ends[-1]) + np.repeat(starts - ends + n, n)  # each row's count begins with starts[r]
        ids = np.fromiter(itertools.chain.from_iterable(new), np.int64, ends[-1])
        hidden = self.forward(ids, np.repeat(slots, n), at, cache)  # [T, H]
        logits = self.matrices().head(hidden if len(hidden) == len(n) else hidden[ends - 1])  # [R, V]
        return decode.draw(numbers(logits), u, temperature)

    def forward(self, ids: np.ndarray, slots: np.ndarray, at: np.ndarray, cache: KVCache) -> Tensor:
        """Token t is ids[t], at position at[t] of slot slots[t] (all [T]; tokens of one slot in their order). Writes keys
        and values, and returns hidden states after the last norm [T, H]."""
        model, cfg, T, matrices = self.model, self.model.cfg, len(ids), self.matrices()
        on = model.lora is not None and not self.base
        cos, sin = (numbers(t) for t in model._rope(int(at.max()) + 1))
        x = F.embedding(torch.from_numpy(ids), model.model["embed_tokens"].weight)
        delta, normed = torch.zeros_like(x), torch.empty_like(x)
        mixed = x.new_empty(T, cfg.num_attention_heads * cfg.head_dim)
        product = x.new_empty(T, cfg.intermediate_size)
        room = np.empty((T, cfg.num_attention_heads, cfg.head_dim), np.float32)
        weight = lambda norm: numbers(x.new_empty(0) if norm is None else norm.weight)
        for i, (block, (qkv, o, gate_up, down)) in enumerate(zip(model.model["layers"], matrices.layers, strict=True)):
            attention = block.self_attn
            add_norm(x, delta, block.input_layernorm, normed)
            decode.attend(
                numbers(qkv(normed, on)), weight(attention.q_norm), weight(attention.k_norm), cfg.rms_norm_eps, cos, sin,
                numbers(cache.keys[i].transpose(-1, -2)), numbers(cache.values[i]), slots, at, room, numbers(mixed),
            )  # fmt: skip
            add_norm(x, o(mixed, on), block.post_attention_layernorm, normed)
            decode.swiglu(numbers(gate_up(normed, on)), numbers(product))
            delta = down(product, on)
        add_norm(x, delta, model.model["norm"], normed)
        return normed


def add_norm(x: Tensor, delta: Tensor, norm: RMSNorm, out: Tensor) -> None:
    """x += delta; out = norm(x)."""
    decode.add_norm(numbers(x), numbers(delta), numbers(norm.weight), norm.eps, numbers(out))


def numbers(t: Tensor) -> np.ndarray:
    """The same memory for numba; numpy has no bf16, so that comes as its bits."""
    t = t.detach()
    return (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy()
