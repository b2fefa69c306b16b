"""The decoder: one transformer for Qwen3, Qwen2/2.5 and Llama/SmolLM2 weights, its KV cache, LoRA, loading and saving.

Parameter names are Hugging Face's, so a checkpoint written here opens in `transformers` and the other way round.
Left out on purpose: sliding windows, mixtures of experts, RoPE kinds beyond default/linear/llama3/yarn. A checkpoint that
needs one of them is refused with a `UserError`, never run wrongly.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Regex, pre_tokenizers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chat import UserError, parse_json

try:  # an extra, for NVIDIA GPUs only; without it torch's own attention does the same
    import flash_attn
except ImportError:
    flash_attn = None

# What `transformers` assumes for a key that config.json leaves out differs by architecture. None: derived from other keys.
QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
LLAMA = {"num_key_value_heads": None, "max_position_embeddings": 2048, "head_dim": None}
FAMILIES = {
    "qwen3": {"absent": QWEN | {"head_dim": 128}, "qk_norm": True, "qkv_bias": False, "class": "Qwen3ForCausalLM"},
    "qwen2": {"absent": QWEN | {"head_dim": None}, "qk_norm": False, "qkv_bias": True, "class": "Qwen2ForCausalLM"},
    "llama": {"absent": LLAMA, "qk_norm": False, "qkv_bias": False, "class": "LlamaForCausalLM"},
}
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")  # yarn's


# ---------------------------------------------------------------------------------------------------- configuration
@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder. Field names are those of Hugging Face's config.json, but for `qk_norm` (Qwen3's norm)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # {"rope_type": "linear" | "llama3" | "yarn", "factor": …}; None: the default kind
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # biases on q, k, v (and on o, except in Qwen2)
    qk_norm: bool = False
    max_position_embeddings: int = 2048

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of num_key_value_heads = "
                f"{self.num_key_value_heads}; correct config.json"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim = {self.head_dim} is odd, RoPE turns pairs; use an even one")
        _check_rope({"rope_type": "default"} | (self.rope_scaling or {}))

    @classmethod
    def from_hf(cls, hf: dict) -> "ModelConfig":
        """From the dict in a config.json, written by transformers 4 or 5. Raises UserError for what we can't run."""
        kind = hf.get("model_type")
        if kind not in list(FAMILIES):  # a list: what stands in a file need not be hashable
            raise UserError(f"architecture {kind!r} is not supported; use one of {', '.join(FAMILIES)}")
        family = FAMILIES[kind]
        _refuse_unsupported(hf)
        theta, scaling = _rope_from_hf(hf)
        size = {key: _positive(hf, key) for key in SIZES}
        derived = {
            "num_key_value_heads": size["num_attention_heads"],
            "head_dim": size["hidden_size"] // size["num_attention_heads"],
        }
        hf = {"rms_norm_eps": 1e-6} | family["absent"] | hf
        hf |= {key: value for key, value in derived.items() if hf[key] is None}
        return cls(
            model_type=kind,
            **size,
            **{key: _positive(hf, key) for key in (*derived, "max_position_embeddings")},
            rms_norm_eps=float(_number(hf, "rms_norm_eps")),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            attention_bias=bool(hf.get("attention_bias", False)) or family["qkv_bias"],
            qk_norm=family["qk_norm"],
        )

    def to_hf(self) -> dict:
        """The dict for config.json. RoPE is spelled twice, so that transformers 4 and 5 both read it."""
        out = {key: getattr(self, key) for key in SIZES}
        out |= {
            "architectures": [FAMILIES[self.model_type]["class"]],
            "model_type": self.model_type,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                **(self.rope_scaling or {}),
            },
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
        }
        if self.model_type != "qwen2":  # Qwen2's biases are not an option there
            out["attention_bias"] = self.attention_bias
        return out


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


LIMITS = {"num_hidden_layers": 10_000}  # beyond which a number in a file is a mistake; others: 2^24, of positions too


def _positive(hf: dict, key: str) -> int:
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LIMITS.get(key, 2**24):
        raise UserError(f"{key} = {value!r:.40} is not a positive whole number of a model's size; correct it")
    return value


def _number(hf: dict, key: str) -> float:
    value = hf.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise UserError(f"{key} = {value!r} is not a positive number; correct it")
    return value


def _refuse_unsupported(hf: dict) -> None:
    """Anything that would change the arithmetic and that we don't have must stop us, not be skipped."""
    windowed = hf.get("use_sliding_window", hf["model_type"] == "llama") and hf.get("sliding_window")
    kinds = hf.get("layer_types") or []
    if windowed or not isinstance(kinds, list) or any("full" not in str(kind) for kind in kinds):
        raise UserError(
            f"sliding-window attention (sliding_window = {hf.get('sliding_window')!r}) is not supported; "
            "use a checkpoint with full attention in every layer"
        )
    for key, wanted in {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None}.items():
        if hf.get(key, wanted) != wanted:
            raise UserError(f"{key} = {hf[key]!r} is not supported; use a checkpoint where it is {wanted!r}")


def _check_rope(scaling: dict) -> None:
    """Refuses what `rope_frequencies` and `rope_magnitude` can't compute with. Raises UserError."""
    kind = scaling["rope_type"]
    if kind not in list(ROPE_KEYS):  # a list: what stands in a file need not be hashable
        raise UserError(f"RoPE kind {kind!r} is not supported; use a checkpoint with one of {', '.join(ROPE_KEYS)}")
    optional = [key for key in ROPE_OPTIONAL if kind == "yarn" and scaling.get(key)]  # 0 and null: not given
    for key in (*ROPE_KEYS[kind], *optional):
        try:
            _number(scaling, key)
        except UserError as error:
            raise UserError(f"RoPE kind {kind!r} needs a number for {key}: {error}") from None
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise UserError("RoPE kind 'llama3' needs low_freq_factor below high_freq_factor; correct config.json")


def _rope_from_hf(hf: dict) -> tuple[float, dict | None]:
    """(theta, scaling or None). transformers 4: `rope_theta` beside `rope_scaling`; 5: both in `rope_parameters`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"rope_parameters = {rope!r} is not supported; use a checkpoint with one RoPE for all layers")
    rope = dict(rope)
    theta = _number({"rope_theta": rope.pop("rope_theta", hf.get("rope_theta", 10000.0))}, "rope_theta")
    if (part := rope.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError(f"partial_rotary_factor = {part!r} is not supported; use a checkpoint where it is 1")
    kind = rope.pop("type", None)  # the spelling of old checkpoints
    rope.setdefault("rope_type", kind or "default")
    if rope["rope_type"] == "yarn" and hf.get("max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    return float(theta), (None if rope["rope_type"] == "default" else rope)


# ---------------------------------------------------------------------------------------------------- the decoder
def rope_frequencies(cfg: ModelConfig) -> Tensor:
    """Angle per position of each of the head_dim/2 pairs [D/2], fp32: θ_i = theta^(−2i/D)   (RoFormer, eq. 15).

    linear: all divided by `factor`. llama3: slow pairs divided by `factor`, fast ones kept, a ramp between (Llama 3.1).
    yarn (arXiv 2309.00071, §3.2): the same with a ramp that is linear in the pair's number i.
    """
    freq = 1.0 / cfg.rope_theta ** (torch.arange(0, cfg.head_dim, 2).float() / cfg.head_dim)
    scaling = cfg.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    if scaling["rope_type"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)  # full turns within the old context
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: a fast pair, 0: a slow one
        return (1 - keep) * freq / scaling["factor"] + keep * freq
    if scaling["rope_type"] == "yarn":
        D, span = cfg.head_dim, scaling["original_max_position_embeddings"]
        pair = lambda turns: (
            D * math.log(span / (turns * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))
        )  # turns so often
        first, last = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
        if scaling.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, D - 1)
        slow = ((torch.arange(D // 2).float() - first) / max(last - first, 0.001)).clamp(0, 1)
        return slow * freq / scaling["factor"] + (1 - slow) * freq
    return freq


def rope_magnitude(cfg: ModelConfig) -> float:
    """What cos and sin are multiplied by: 1, but for yarn, which sharpens attention over its longer context (eq. 22)."""
    scaling = cfg.rope_scaling or {}
    if scaling.get("rope_type") != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    grown = lambda m: 1 + 0.1 * m * math.log(max(1.0, scaling["factor"]))
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1)


def rope_table(cfg: ModelConfig, length: int, device, dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin of positions 0..length−1, both [length, D]; angles are made in fp32 whatever `dtype` is."""
    angle = torch.arange(length).float()[:, None] * rope_frequencies(cfg)  # [length, D/2]
    cos, sin = angle.cos() * rope_magnitude(cfg), angle.sin() * rope_magnitude(cfg)
    table = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return table[0].to(device, dtype), table[1].to(device, dtype)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE on x [..., D]: pair i is (x_i, x_{i+D/2}), as Hugging Face keeps it. The sign of −x_{i+D/2} is in the table."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class RMSNorm(nn.Module):
    """x / rms(x) · weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(nn.Linear):
    """x Wᵀ + b; with LoRA (arXiv 2106.09685) W is frozen and (α/r) · x Aᵀ Bᵀ is added while the adapters are on."""

    lora: "LoRA | None" = None  # one object for all layers of a model

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if self.lora is None or not self.lora.on:
            return out
        low = F.linear(x, self.lora_A.to(x.dtype))  # [.., r]
        return out + F.linear(low, self.lora_B.to(x.dtype)) * self.lora.scale


@dataclass
class LoRA:
    """What the adapters of one model share. B starts at 0, so a fresh adapter changes nothing."""

    rank: int
    alpha: float
    on: bool = True

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            cfg.num_attention_heads,
            cfg.num_key_value_heads,
            cfg.head_dim,
        )
        size, bias = cfg.hidden_size, cfg.attention_bias
        self.q_proj = Linear(size, self.heads * self.head_dim, bias=bias)
        self.k_proj = Linear(size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(self.heads * self.head_dim, size, bias=bias and cfg.model_type != "qwen2")
        self.q_norm = RMSNorm(self.head_dim, cfg.rms_norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, cfg.rms_norm_eps) if cfg.qk_norm else None

    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, L, H] → q [B, L, heads, D], k and v [B, L, kv_heads, D]; q and k normed and turned to their positions."""
        B, L, _ = x.shape
        q = self.q_proj(x).view(B, L, self.heads, self.head_dim)
        k = self.k_proj(x).view(B, L, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(B, L, self.kv_heads, self.head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rope), rotate(k, rope), v

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], rows: "Rows | None" = None) -> Tensor:
        """Training: every row holds positions 0..L−1. With `rows`, x is [1, T, H]: rows end to end, without padding where
        flash attention is at hand, and without the beginning that they share."""
        q, k, v = self.qkv(x, rope)
        if rows is None:
            return self.o_proj(self.causal(q, k, v).flatten(2))
        if rows.mask is not None:
            return self.o_proj(self.after_prefix(q, k, v, rows).flatten(1)[None])
        q, k, v = q[0], *(t[0] if rows.keys is None else t[0].index_select(0, rows.keys) for t in (k, v))
        span = (rows.starts, rows.key_starts, rows.longest, rows.longest)
        # Its causal mask holds queries for a row's last tokens. Its backward pass would otherwise sum in any order.
        out = flash_attn.flash_attn_varlen_func(q, k, v, *span, causal=True, deterministic=True)
        return self.o_proj(out.flatten(1)[None])

    def causal(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q [B, L, heads, D], k and v [B, T, kv_heads, D] → [B, L, heads, D]. mask [L, T]: where not plainly causal."""
        how = {"is_causal": True} if mask is None else {"attn_mask": mask}
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = self.heads != self.kv_heads
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **how).transpose(1, 2)

    def after_prefix(self, q: Tensor, k: Tensor, v: Tensor, rows: "Rows") -> Tensor:
        """q, k, v [1, L + (B−1)·C, ·, D]: one whole row, and the last C tokens of others that begin like it → [T, heads, D].

        The others' queries look at the first row's L − C keys, and at their own up to themselves. A gradient comes back to
        the shared keys from all of them, as the sum that B separate computations of the prefix would give.
        """
        L, C = rows.longest, len(rows.mask)
        own = lambda t: t[0, L:].unflatten(0, (-1, C))  # [B − 1, C, ·, D]
        seen = lambda t: torch.cat([t[:, : L - C].expand(rows.others, -1, -1, -1), own(t)], 1)  # [B − 1, L, ·, D]
        first = self.causal(q[:, :L], k[:, :L], v[:, :L])
        rest = self.causal(own(q), seen(k), seen(v), rows.mask)
        return torch.cat([first[0], rest.flatten(0, 1)])

    def cached(self, x: Tensor, rope, layer: "LayerCache", mask: Tensor | None) -> Tensor:
        """Inference: write this step's keys and values, then attend over all T positions kept. mask [R, 1, L or G·L, T],
        or None for flash attention, which needs none and reads the cache where it lies.

        The G query heads that share a kv head are laid along the query axis, so keys are never copied G times.
        """
        R, L, _ = x.shape
        q, k, v = self.qkv(x, rope)
        layer.write(k, v)
        if mask is None:
            ends, slots = (layer.at[:, 0] + L).int(), None if layer.slots is None else layer.slots.int()
            past = (t.transpose(1, 2)[: R if slots is None else None] for t in (layer.keys, layer.values))
            out = flash_attn.flash_attn_with_kvcache(q, *past, cache_seqlens=ends, cache_batch_idx=slots, causal=True)
            return self.o_proj(out.flatten(2))
        k, v = layer.read(R)  # [R, kv_heads, T, D]
        group = self.heads // self.kv_heads
        q = q.view(R, L, self.kv_heads, group, self.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(R, self.kv_heads, group * L, self.head_dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.view(R, self.kv_heads, group, L, self.head_dim).permute(0, 3, 1, 2, 4)
        return self.o_proj(out.reshape(R, L, self.heads * self.head_dim))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.self_attn = Attention(cfg)
        self.mlp = MLP(cfg)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, x: Tensor, attend) -> Tensor:
        x = x + attend(self.self_attn, self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The whole model. `forward` for training, `forward_cached` for sampling; both return hidden states after the last
    norm [.., H], and logits are `hidden @ model.head.T`, which training never needs to hold whole (kernels/logprob.py).
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(cfg.vocab_size, cfg.hidden_size),
                "layers": nn.ModuleList(Block(cfg) for _ in range(cfg.num_hidden_layers)),
                "norm": RMSNorm(cfg.hidden_size, cfg.rms_norm_eps),
            }
        )
        self.lm_head = None if cfg.tie_word_embeddings else nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        self.lora: LoRA | None = None  # set by add_lora
        self.checkpointing = False  # keep only each block's input for the backward pass and compute the rest again
        self._table = None  # RoPE's cos/sin, grown when a longer row comes
        for name, p in self.named_parameters():  # Hugging Face's initialisation
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    @property
    def head(self) -> Tensor:
        """Output matrix [V, H]."""
        return self.model["embed_tokens"].weight if self.lm_head is None else self.lm_head.weight

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        like = self.head
        table = self._table
        if table is None or len(table[0]) < length or table[0].device != like.device or table[0].dtype != like.dtype:
            with torch.inference_mode(False):  # made inside sampling, it must still serve training
                table = self._table = rope_table(self.cfg, max(256, 2 * length), like.device, like.dtype)
        return table

    def forward(self, ids: Tensor, lengths: Tensor | None = None, shared: int = 0) -> Tensor:
        """Training: ids [B, L] at positions 0..L−1 → hidden [B, L, H]. Attention is causal, so right padding is harmless.

        `shared`: how many tokens all rows have in common at their beginning (fewer than the shortest row has); they are
        computed once. Where flash attention is to be had and the rows' `lengths` [B] are given, padding isn't even
        computed, and hidden is 0 there. In both cases rows are laid end to end.
        """
        B, L = ids.shape
        packed = lengths is not None and _flash(self.head)
        if not packed and not shared:
            rope = tuple(t[:L, None] for t in self._rope(L))  # [L, 1, D]
            return self._blocks(self.model["embed_tokens"](ids), rope, None)
        real = torch.arange(L, device=ids.device) < (lengths if packed else ids.new_full((B,), L))[:, None]  # [B, L]
        computed = real.clone()
        computed[1:, :shared] = False
        place = (computed.flatten().cumsum(0) - 1).view(B, L)  # of each token in what is computed
        place[:, :shared] = place[0, :shared]
        rows = _packed_rows(real, computed, place, shared) if packed else _prefix_rows(B, L, shared, self.head)
        rope = tuple(t[computed.nonzero()[:, 1], None] for t in self._rope(L))  # [T, 1, D]
        x = self._blocks(self.model["embed_tokens"](ids[computed])[None], rope, rows)  # [1, T, H]
        hidden = x[0].index_select(0, place.flatten()).view(B, L, -1)
        return hidden * real[..., None] if packed else hidden

    def _blocks(self, x: Tensor, rope: tuple[Tensor, Tensor], rows: "Rows | None") -> Tensor:
        attend = lambda attention, h: attention(h, rope, rows)
        for block in self.model["layers"]:
            again = self.checkpointing and torch.is_grad_enabled()
            x = checkpoint(block, x, attend, use_reentrant=False) if again else block(x, attend)
        return self.model["norm"](x)

    def _mask(self, positions: Tensor, T: int) -> Tensor:
        """0 where a position [R, L] may look, −∞ where not: [R, 1, G·L, T], with each row once for every head in a group."""
        (R, L), cfg = positions.shape, self.cfg
        seen = torch.arange(T, device=positions.device) <= positions[..., None]  # [R, L, T]
        mask = torch.zeros(R, L, T, dtype=self.head.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]
        repeats = cfg.num_attention_heads // cfg.num_key_value_heads if L > 1 else 1
        return mask.repeat(1, 1, repeats, 1) if repeats > 1 else mask

    @torch.no_grad()
    def forward_cached(self, ids: Tensor, cache: "KVCache", slots: Tensor | None, starts: Tensor, upto=None) -> Tensor:
        """Sampling: row r's tokens ids[r] sit at positions starts[r], starts[r]+1, …; what its slot holds before
        starts[r] is its past. ids [R, L], slots [R] (distinct) or None for slots 0..R−1, starts [R] → hidden [R, L, H].

        Rows may be right-padded: what padding writes lies after the row's end, where nothing looks before a later call
        has overwritten it; past max_len it goes to a position that is never read. `upto` = max(starts) + L, if the
        caller knows it: saves a device synchronisation. Raises ValueError when a row starts beyond the cache.
        """
        L = ids.shape[1]
        upto = int(starts.max()) + L if upto is None else upto
        if upto - L >= cache.max_len:
            raise ValueError(f"a row starts at {upto - L}, the cache holds {cache.max_len} positions")
        T = min(upto, cache.max_len)
        positions = starts[:, None] + torch.arange(L, device=ids.device)  # [R, L]
        mask = None if _flash(self.head) and upto <= cache.max_len else self._mask(positions, T)
        rope = tuple(t[positions, None] for t in self._rope(upto))  # [R, L, 1, D]
        x = self.model["embed_tokens"](ids)
        at = positions.clamp(max=cache.max_len)
        for i, block in enumerate(self.model["layers"]):
            layer = LayerCache(cache.keys[i], cache.values[i], slots, at, T)
            x = block(x, lambda attention, h, layer=layer: attention.cached(h, rope, layer, mask))
        return self.model["norm"](x)


def logits_of(hidden: Tensor, head: Tensor) -> Tensor:
    """hidden [R, H] · head [V, H]ᵀ in fp32 [R, V], rounded where the trainer's log-probs (kernels/logprob.py) round.

    There half-precision logits never leave the registers on CUDA, so they are not rounded here either; on a CPU the matrix
    product rounds them, in both places. In fp32 there is nothing to round.
    """
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, head.T, out_dtype=torch.float32)
    return (hidden @ head.T).float()


@dataclass(frozen=True)
class Rows:
    """B rows that lie end to end. Row r's queries are tokens starts[r] .. starts[r+1]−1. Its keys are those, or, where a
    shared beginning is left out of all rows but the first, keys[key_starts[r]] .. keys[key_starts[r+1]−1]."""

    longest: int
    starts: Tensor | None = None  # [B + 1] int32, for flash attention
    key_starts: Tensor | None = None  # [B + 1] int32
    keys: Tensor | None = None  # [K]
    mask: Tensor | None = None  # [C, L] without flash attention: what the last C tokens of the other rows may look at
    others: int = 0  # B − 1


def _packed_rows(real: Tensor, computed: Tensor, place: Tensor, shared: int) -> Rows:
    starts, key_starts = (F.pad(t.sum(1).cumsum(0), (1, 0)).int() for t in (computed, real))
    return Rows(int(real.sum(1).max()), starts, key_starts, place[real] if shared else None)


def _prefix_rows(B: int, L: int, shared: int, like: Tensor) -> Rows:
    future = torch.ones(L - shared, L, dtype=torch.bool, device=like.device).triu(shared + 1)
    mask = torch.zeros(future.shape, dtype=like.dtype, device=like.device).masked_fill_(future, -torch.inf)
    return Rows(L, mask=mask, others=B - 1)


def _flash(like: Tensor) -> bool:
    return flash_attn is not None and like.is_cuda and like.dtype in (torch.bfloat16, torch.float16)


class KVCache:
    """Keys and values of every slot, each [layers, slots, kv_heads, max_len + 1, D]. Position max_len is a bin: padding
    that would fall off the end is written there and never read. `slots` rows, `max_len` tokens each."""

    def __init__(self, cfg: ModelConfig, slots: int, max_len: int, dtype=torch.float32, device="cpu"):
        shape = (cfg.num_hidden_layers, slots, cfg.num_key_value_heads, max_len + 1, cfg.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # zeros: a masked NaN would still be a NaN
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.slots, self.max_len, self.dtype = slots, max_len, dtype

    def copy(self, source: int, targets: Tensor, length: int) -> None:
        """Give the slots `targets` the first `length` positions of slot `source` (a shared prompt, prefilled once)."""
        for t in (self.keys, self.values):
            t[:, targets, :, :length] = t[:, source, :, :length].unsqueeze(1)


@dataclass
class LayerCache:
    """One layer's part of a KVCache, as one call sees it: its rows, where they write, how far they read."""

    keys: Tensor  # [slots, kv_heads, max_len + 1, D]
    values: Tensor
    slots: Tensor | None  # [R]
    at: Tensor  # [R, L]
    upto: int

    def write(self, k: Tensor, v: Tensor) -> None:
        """k, v [R, L, kv_heads, D] to their rows and positions."""
        rows = torch.arange(len(k), device=k.device) if self.slots is None else self.slots
        self.keys[rows[:, None], :, self.at] = k
        self.values[rows[:, None], :, self.at] = v

    def read(self, R: int) -> tuple[Tensor, Tensor]:
        """The R rows' first `upto` positions [R, kv_heads, upto, D]."""
        kept = self.keys[:, :, : self.upto], self.values[:, :, : self.upto]
        if self.slots is None:
            return kept[0][:R], kept[1][:R]  # views: nothing is copied
        return tuple(t.index_select(0, self.slots) for t in kept)  # on CPU twice as fast as t[slots]


# ---------------------------------------------------------------------------------------------------- LoRA
def add_lora(model: Decoder, rank: int, alpha: float = 32.0, seed: int = 0) -> None:
    """Freeze the model and give every linear layer of its blocks an adapter: A [r, in] random, B [out, r] zero, in fp32.

    α stays at 32 whatever the rank: the best learning rate then hardly depends on it (Schulman et al. 2025, "LoRA Without
    Regret", which also finds that adapters belong on *every* layer, and that reinforcement learning needs little rank).
    """
    model.requires_grad_(False)
    model.lora, generator = LoRA(rank, alpha), torch.Generator().manual_seed(seed)
    for _, layer in linears(model):
        out, size = layer.weight.shape
        layer.lora, device = model.lora, layer.weight.device
        bound = size**-0.5  # PEFT's: uniform in ±1/√in
        layer.lora_A = nn.Parameter((torch.rand(rank, size, generator=generator) * 2 - 1).mul_(bound).to(device))
        layer.lora_B = nn.Parameter(torch.zeros(out, rank, device=device))


def linears(model: Decoder) -> list[tuple[str, Linear]]:
    """Every linear layer of the blocks, with its Hugging Face name."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, Linear)]


@torch.no_grad()
def merge_lora(model: Decoder) -> None:
    """W ← W + (α/r) · B A, after which the adapters are gone."""
    for _, layer in linears(model) if model.lora else ():
        layer.weight.copy_(layer.weight.float() + model.lora.scale * (layer.lora_B @ layer.lora_A))  # rounded once
        del layer.lora_A, layer.lora_B
        layer.lora = None
    model.lora = None


class Base:
    """A model with its adapters off, sharing all its memory: the KL reference and the frozen user cost nothing."""

    def __init__(self, model: Decoder):
        self.model, self.cfg, self.head = model, model.cfg, model.head

    def __call__(self, *args) -> Tensor:
        return self._without_adapters(self.model, *args)

    def forward_cached(self, *args, **options) -> Tensor:
        return self._without_adapters(self.model.forward_cached, *args, **options)

    def _without_adapters(self, compute, *args, **options) -> Tensor:
        self.model.lora.on = False
        try:
            return compute(*args, **options)
        finally:
            self.model.lora.on = True


ADAPTER = "base_model.model.{}.lora_{}.weight"  # PEFT's name of a tensor


def save_adapter(model: Decoder, folder, base: str) -> None:
    """Write the adapters as `peft` reads them. `base`: where the frozen weights are to be had."""
    tensors = {}
    for name, layer in linears(model):
        tensors |= {ADAPTER.format(name, "A"): layer.lora_A.detach(), ADAPTER.format(name, "B"): layer.lora_B.detach()}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none",
        "r": model.lora.rank, "lora_alpha": model.lora.alpha, "lora_dropout": 0.0, "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name, _ in linears(model)}),
    }  # fmt: skip
    write_tensors(Path(folder), "adapter_model.safetensors", tensors, "adapter_config.json", config)


# Fields of PEFT's LoraConfig that change nothing in how an adapter is applied, or that `load_adapter` follows; and those of
# which it knows some values (EVA and the like only choose where A and B start). Any other field that is set is a variant.
LORA_FIELDS = set(
    "r lora_alpha lora_dropout target_modules exclude_modules base_model_name_or_path task_type inference_mode revision "
    "peft_version auto_mapping runtime_config megatron_core qalora_group_size eva_config".split()
)
LORA_VALUES = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


def _lora_of(config: dict, where: Path) -> tuple[int, float]:
    """(r, α) of an adapter_config.json. Raises UserError for whatever would make it more than x Wᵀ + (α/r) · x Aᵀ Bᵀ."""
    for key, value in config.items():
        if value not in LORA_VALUES[key] if key in LORA_VALUES else value and key not in LORA_FIELDS:
            raise UserError(
                f"{where}: {key} = {value!r} is not supported; merge the adapter into its weights with peft"
            )
    try:
        return _positive(config, "r"), _number(config, "lora_alpha")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


@torch.no_grad()
def load_adapter(model: Decoder, folder) -> None:
    """Give `model` the adapters in a folder. Raises UserError if they are cut, another model's, or of a kind we don't have."""
    folder = Path(folder)
    rank, alpha = _lora_of(_read_json(folder / "adapter_config.json"), folder / "adapter_config.json")
    tensors = dict(_tensors_in(folder / "adapter_model.safetensors"))
    add_lora(model, rank, alpha)
    for name, layer in linears(model):
        for letter, p in (("A", layer.lora_A), ("B", layer.lora_B)):
            found = tensors.pop(ADAPTER.format(name, letter), None)
            if found is None or found.shape != p.shape:
                raise UserError(
                    f"{folder}: no adapter {letter} of shape {list(p.shape)} for {name}; it is another model's, or not on "
                    "every linear layer"
                )
            p.copy_(found)
    if tensors:
        raise UserError(
            f"{folder}: an adapter for {min(tensors)}, which this model does not have; it is another model's"
        )


# ---------------------------------------------------------------------------------------------------- loading, saving
def load(folder, dtype=torch.float32, device="cpu") -> Decoder:
    """A Hugging Face folder (config.json, model.safetensors or its shards and index) → Decoder.

    Files are mapped, not read: at most one copy of the weights is in memory, and one shard more while it is converted.
    Raises UserError when the folder is no such thing, the architecture is not ours, or weights and config disagree.
    Weights in pickle files are never opened: a pickle can run any code.
    """
    folder = Path(folder)
    cfg = read_config(folder)
    tensors = (pair for name in _weight_files(folder) for pair in _tensors_in(folder / name))
    return from_tensors(cfg, ((name, t.to(device, dtype)) for name, t in tensors), str(folder))


def read_config(folder: Path) -> ModelConfig:
    """The shape in a folder's config.json."""
    try:
        return ModelConfig.from_hf(_read_json(folder / "config.json"))
    except UserError as error:
        place = str(folder / "config.json")
        raise error if place in str(error) else UserError(f"{place}: {error}") from None


def from_tensors(cfg: ModelConfig, tensors: Iterable[tuple[str, Tensor]], where: str) -> Decoder:
    """A Decoder that holds exactly these named tensors. Raises UserError for a missing, surplus or misshapen one."""
    with torch.device("meta"):  # no time and memory for weights that are about to be replaced
        model = Decoder(cfg)
    wanted = {name: p.shape for name, p in model.named_parameters()}
    missing, surplus = set(wanted), []
    for name, tensor in tensors:
        if name.endswith("rotary_emb.inv_freq") or (cfg.tie_word_embeddings and name == "lm_head.weight"):
            continue  # old Llama files hold the first, some files hold the tied matrix twice
        if name not in wanted:
            surplus.append(name)
        elif tensor.shape != wanted[name]:
            raise UserError(
                f"{where}: tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(wanted[name])}; "
                "use the config.json that belongs to these weights"
            )
        else:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, nn.Parameter(tensor))
            missing.discard(name)
    if missing:
        raise UserError(
            f"{where}: tensor {min(missing)} is missing; get the whole checkpoint, or correct its config.json"
        )
    if surplus:
        raise UserError(
            f"{where}: {len(surplus)} tensors have no place in a {cfg.model_type} decoder, the first is {min(surplus)}; "
            "use the config.json that belongs to these weights"
        )
    return model


def _read_json(path: Path) -> dict:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a folder that holds a Hugging Face checkpoint") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} can't be read as JSON ({e}); restore the file") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; restore the file")
    return value


def _weight_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if index.is_file():
        return _shards(index)
    if pickles := sorted(p.name for ext in ("bin", "pt", "pth", "ckpt") for p in folder.glob(f"*.{ext}")):
        raise UserError(f"{folder} holds its weights only as a pickle ({pickles[0]}); convert it to safetensors first")
    raise UserError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json; get the weights")


def _shards(index: Path) -> list[str]:
    """File names in an index. A name with a folder in it could reach outside the checkpoint: refused."""
    names = _read_json(index).get("weight_map")
    names = sorted({str(n) for n in names.values()}) if isinstance(names, dict) else []
    if not names or any(Path(n).name != n for n in names):
        raise UserError(f"{index} has no usable weight_map; restore the file")
    return names


def _tensors_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of one safetensors file, mapped into memory one by one."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist, but is needed; get the whole checkpoint") from None
    except (OSError, SafetensorError) as e:
        raise UserError(f"{path} is cut or damaged ({e}); get the file again") from None


def fetch(name: str) -> Path:
    """A folder's path, or that of a Hugging Face Hub repository in the Hub's own cache, downloaded if need be.

    HF_HOME, HF_TOKEN and HF_HUB_OFFLINE work as everywhere. Raises UserError when there is no such folder or repository.
    """
    if Path(name).exists():
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserError(
            f"{name}: no such folder; give a model's folder, or its name on the Hub, such as Qwen/Qwen3-0.6B"
        )
    import huggingface_hub  # slow to import, and needed for a Hub name only

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # of many kinds: no network, no such repository, no access, no space
        why = (str(error).strip() or "no reason").splitlines()[0][:160]
        raise UserError(f"{name}: not a folder here, and the Hub gave: {type(error).__name__}: {why}") from None


def save(model: Decoder, folder) -> None:
    """Write config.json and model.safetensors. Each is written beside, synced and renamed, so a kill leaves the old file
    or the new one, never half of one. Adapters are not written (`save_adapter` does, `merge_lora` folds them in).
    Raises UserError when the folder can't be written or the disk is full."""
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters() if ".lora_" not in name}
    config = model.cfg.to_hf() | {"dtype": str(model.head.dtype).removeprefix("torch.")}
    write_tensors(Path(folder), "model.safetensors", tensors, "config.json", config)


def write_tensors(folder: Path, weights: str, tensors: dict[str, Tensor], about: str, config: dict) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / weights, lambda beside: save_file(tensors, beside, metadata={"format": "pt"}))
        _replace(folder / about, lambda beside: beside.write_text(json.dumps(config, indent=2) + "\n"))
    except (OSError, SafetensorError) as e:
        raise UserError(
            f"can't write a checkpoint to {folder} ({e}); free some space or choose another folder"
        ) from None


def _replace(path: Path, write) -> None:
    beside = path.with_name(path.name + ".part")
    write(beside)
    with open(beside, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(beside, path)
    directory = os.open(path.parent, os.O_RDONLY)  # the new name itself must survive a power cut too
    os.fsync(directory)
    os.close(directory)


# How text is cut before merging, by the name that stands in a GGUF file (llama.cpp, src/llama-vocab.cpp). The file holds no
# more than the name, and with another cut the same text becomes tokens that the model has never seen.
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLIT = (  # Llama 3 takes up to three digits together, Qwen one
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str):
    pattern = pre_tokenizers.Split(Regex(SPLIT.replace("DIGITS", digits)), "isolated")
    return pre_tokenizers.Sequence([pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _split("{1,3}")),
    "qwen2": _split(""),
}


def _pre_tokenizer(path: Path):
    """The one that a GGUF file names; None, and a warning, where it is not known. A SentencePiece model has none."""
    import gguf

    fields = gguf.GGUFReader(path).fields
    kind, name = (
        fields[key].contents() if (key := f"tokenizer.ggml.{k}") in fields else None for k in ("model", "pre")
    )
    if kind == "gpt2" and name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        print(
            f"warning: {path}: pre-tokenizer {name!r} is none of {known}: text may become wrong tokens", file=sys.stderr
        )
    return PRE_TOKENIZERS.get(name) if kind == "gpt2" else None


def load_gguf(path, dtype=torch.float32):
    """A Llama-family GGUF file → (Decoder, tokenizers.Tokenizer, chat template, special tokens).

    `transformers` reads it and turns blocks of 4 bits into numbers, which takes half a minute for 135 M parameters.
    Raises UserError when the file is missing, damaged, or of another architecture.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a GGUF file")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        there, name = path.parent, path.name
        cut = _pre_tokenizer(path)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(there, gguf_file=name, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(there, gguf_file=name)
    except ImportError as error:
        raise UserError(f"{path}: {error}; run `make smol`") from None
    except Exception as error:  # whatever a damaged file makes it stumble over
        raise UserError(f"{path} is no whole GGUF that can be read ({type(error).__name__}: {error})") from None
    if cut is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = cut
    hf = {k: v for k, v in theirs.config.to_dict().items() if k != "quantization_config"}
    hf["rms_norm_eps"] = float(f"{hf['rms_norm_eps']:.6g}")  # kept in fp32 there: 9.99999e-06
    decoder = from_tensors(ModelConfig.from_hf(hf), theirs.state_dict().items(), str(path))
    return decoder, tokenizer.backend_tokenizer, tokenizer.chat_template, tokenizer.special_tokens_map


# ---------------------------------------------------------------------------------------------------- induction head
# Why. An agent must copy names and order numbers it has never seen. Transformers do that with two heads in a row
# (Olsson et al. 2022, "In-context Learning and Induction Heads"), and a small model on a few hundred thousand tokens
# never finds the pair by itself. So we write it in; everything stays ordinary weights, free to be trained away.
#
# How, on the text  … a b … a  ?   where the model should answer b:
#   layer 0 looks one token back. Every embedding has the same number in coordinate 0, and this head's q and k read
#     nothing else, so its score depends only on the distance: RoPE turns keys by position, and with q turned back by
#     one position the two agree best at distance 1. The fastest RoPE pairs notice a step of one. What it sees there
#     (v: r random directions A of the token) it writes into r other directions P: at b, P now says "after a".
#   layer 1 looks for itself in P. Its k reads P ("I come after a"), its q reads A of the token at hand ("I am a"), and
#     the two agree at b. The slowest RoPE pairs carry them, since these hardly turn within a conversation: the match
#     must not depend on how long ago it was. q- and k-norm weights of 2 sharpen both layers.
#   Its output copies: W_O = ½·W_Vᵀ brings back the very directions that v read, so b's own embedding grows. All other
#     heads start as such copiers too ("mimetic", Trockman & Kolter 2023); the MLPs start silent (down_proj = 0).
# Only the first half of the query heads of layer 1 is wired: the rest has to learn everything else.
@torch.no_grad()
def wire_induction(model: Decoder, seed: int) -> None:
    """Overwrite all weights of a Qwen3-layout model with a start in which an *induction head* is already written.

    Seeded: the result depends on `seed` and the shape only. Raises UserError without qk_norm or a second layer.
    """
    cfg = model.cfg
    if not cfg.qk_norm or cfg.num_hidden_layers < 2:
        raise UserError("an induction head needs the qwen3 layout and at least 2 layers; leave that option out")
    generator = torch.Generator().manual_seed(seed)
    _mimetic_start(model, generator)
    size, D, half = cfg.hidden_size, cfg.head_dim, cfg.head_dim // 2
    group = cfg.num_attention_heads // cfg.num_key_value_heads
    r = min(D, (size - 1) // 2)
    basis = torch.randn(size, 2 * r, generator=generator)
    basis[0] = 0  # coordinate 0 is the constant
    basis = torch.linalg.qr(basis).Q.to(model.head)  # orthogonal, so that P never disturbs A
    A, P = basis.split(r, dim=1)  # [H, r] each
    first, second = (model.model["layers"][i].self_attn for i in (0, 1))

    # Layer 0, kv head 0 and its query heads: one token back.
    fast = torch.arange(min(6, half))
    turn = rope_frequencies(cfg)[fast].to(model.head)  # q turned by −1 position: (1, 0) → (cos θ, −sin θ)
    for weight, heads in ((first.q_proj.weight, group), (first.k_proj.weight, 1)):
        weight[: heads * D] = 0
    first.k_proj.weight[fast, 0] = 1
    for h in range(group):
        first.q_proj.weight[h * D + fast, 0] = turn.cos()
        first.q_proj.weight[h * D + half + fast, 0] = -turn.sin()
    first.v_proj.weight[:D] = 0
    first.v_proj.weight[:r] = A.T
    # The other heads of this layer keep out of A and P, which only the wired one may write.
    first.o_proj.weight.copy_(first.o_proj.weight - basis @ (basis.T @ first.o_proj.weight))
    first.o_proj.weight[:, : group * D] = 0
    for j in range(
        r
    ):  # query heads that share v each write some of P: as twins they would get equal gradients for ever
        first.o_proj.weight[:, (j % group) * D + j] = 0.5 * P[:, j]

    # Layer 1, half of the query heads: find the token that came after the one at hand.
    pairs = min(5, half)
    slow = torch.cat([torch.arange(half - pairs, half), torch.arange(D - pairs, D)])  # both members of each pair
    wired = max(1, cfg.num_attention_heads // 2)
    for h in range(wired):
        kv = h // group
        read = (
            torch.arange(len(slow)) + kv * len(slow)
        ) % r  # each kv head has its own directions, as long as they last
        second.k_proj.weight[kv * D : (kv + 1) * D] = 0
        second.k_proj.weight[kv * D + slow] = P[:, read].T
        noise = torch.randn(D, size, generator=generator).to(model.head) * 0.02 / size**0.5  # again: no twins
        second.q_proj.weight[h * D : (h + 1) * D] = noise
        second.q_proj.weight[h * D + slow] += A[:, read].T


def _mimetic_start(model: Decoder, generator: torch.Generator) -> None:
    """Embeddings with rows of norm 1 and the constant in coordinate 0; matrices of std 1/√fan_in; copying heads."""
    cfg = model.cfg
    for name, p in model.named_parameters():
        if p.dim() == 2:
            p.copy_(torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5)
        else:
            p.fill_(0.0 if name.endswith("bias") else 1.0)
    model.model["embed_tokens"].weight[:, 0] = 0.3
    group = cfg.num_attention_heads // cfg.num_key_value_heads
    for i, block in enumerate(model.model["layers"]):
        attention = block.self_attn
        block.mlp.down_proj.weight.zero_()
        v = attention.v_proj.weight.unflatten(0, (cfg.num_key_value_heads, cfg.head_dim))  # [kv_heads, D, H]
        copied = v.repeat_interleave(group, 0).flatten(0, 1)  # the v that each query head sees
        attention.o_proj.weight.copy_(0.5 * copied.T)
        if i < 2:
            attention.q_norm.weight.fill_(2.0)
            attention.k_norm.weight.fill_(2.0)
