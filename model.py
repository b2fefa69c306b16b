"""The decoder: one transformer for Qwen3, Qwen2/2.5 and Llama/SmolLM2 weights, its KV cache, and LoRA.

Parameter names are Hugging Face's. Left out on purpose: sliding windows, mixtures of experts, RoPE kinds beyond
default/linear/llama3/yarn (model_files.py refuses a checkpoint that needs one of them).
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

try:  # an extra, for NVIDIA GPUs only; without it torch's own attention does the same
    import flash_attn
except ImportError:
    flash_attn = None


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


_CORES = threading.local()  # .pool, of .n threads: each thread that asks has its own, for the cores that it may use


def keep_to_cores(n: int) -> None:
    """In this thread torch uses n cores from now on. Asked first, since a thread that has never asked takes over whatever
    any other thread set last."""
    torch.get_num_threads()
    torch.set_num_threads(n)


def side_by_side(work: Callable[[Any], Any], parts: Iterable) -> Iterator:
    """work(part) for each, in their order, in threads that keep to one core: a small model's operations are too short to be
    shared out among cores one by one, while micro-batches, or rows that are sampled, go through the whole model side by
    side. At most one more than there are threads is begun or waits to be taken. If one fails, those that run are waited for.
    """
    n, begun = torch.get_num_threads(), deque()
    if getattr(_CORES, "n", 0) != n:
        _CORES.pool, _CORES.n = ThreadPoolExecutor(n, initializer=keep_to_cores, initargs=(1,)), n
    try:
        for part in parts:
            if len(begun) > n:
                yield begun.popleft().result()
            begun.append(_CORES.pool.submit(work, part))
        while begun:
            yield begun.popleft().result()
    finally:
        for future in begun:
            future.cancel()
        wait(begun)


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
        # The number of the pair that turns so often within the old context.
        pair = lambda turns: D * math.log(span / (turns * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))
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
        return out if self.lora is None or not self.lora.on else out + self.adapter(x)

    def adapter(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.lora_A.to(x.dtype))  # [.., r]
        return F.linear(low, self.lora_B.to(x.dtype)) * self.lora.scale


_OFF = threading.local()  # .lora: whose adapters are off in this thread; others may train micro-batches at once


@dataclass
class LoRA:
    """What the adapters of one model share. B starts at 0, so a fresh adapter changes nothing."""

    rank: int
    alpha: float

    @property
    def on(self) -> bool:
        return getattr(_OFF, "lora", None) is not self

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
        self.head_dim, size, bias = cfg.head_dim, cfg.hidden_size, cfg.attention_bias
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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], rows: "Rows") -> Tensor:
        """Training: x [1, T, H] is rows end to end, without padding and without the beginning that they share."""
        q, k, v = (t[0] for t in self.qkv(x, rope))
        if rows.keys is not None:
            k, v = k.index_select(0, rows.keys), v.index_select(0, rows.keys)
        return self.o_proj(rows.attend(q, k, v).flatten(1)[None])

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

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | None = None,
        shared: int = 0,
        at: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Training: ids [B, L] at positions 0..L−1 → hidden [B, L, H]; 0 for what is padding by `lengths` [B] (None: nothing
        is). at: only those of row at[0][i], position at[1][i] → [N, H].

        `shared`: how many tokens all rows have in common at their beginning (fewer than the shortest row has). They are
        computed once, and padding not at all: what is computed are the T tokens left, rows end to end.
        """
        B, L = ids.shape
        lengths = ids.new_full((B,), L) if lengths is None else lengths
        real = torch.arange(L, device=ids.device) < lengths[:, None]  # [B, L]
        computed = real.clone()
        computed[1:, :shared] = False
        place = (computed.flatten().cumsum(0) - 1).view(B, L)  # of each token in what is computed
        place[1:, :shared] = place[0, :shared]
        keys = place[real] if shared and B > 1 else None
        rows = Rows(computed.sum(1), lengths, keys, self.head)
        row, position = computed.nonzero(as_tuple=True)
        rope = tuple(t[position, None] for t in self._rope(L))  # [T, 1, D]
        x = self.model["embed_tokens"](ids[row, position])[None]  # [1, T, H]
        attend = lambda attention, h: attention(h, rope, rows)
        for block in self.model["layers"]:
            again = self.checkpointing and torch.is_grad_enabled()
            x = checkpoint(block, x, attend, use_reentrant=False) if again else block(x, attend)
        x = self.model["norm"](x)[0]
        if at is not None:
            return x.index_select(0, place[at])
        return x.index_select(0, place.flatten()).view(B, L, -1).masked_fill(~real[..., None], 0)

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


class Rows:
    """B rows that lie end to end, without the beginning that they share but in the first of them.

    queries [B]: how many tokens of each are there. lengths [B]: how many it has. keys [sum of lengths]: where each row's
    tokens are, one row after the other; None: there are all of them, in this order.
    """

    def __init__(self, queries: Tensor, lengths: Tensor, keys: Tensor | None, like: Tensor):
        self.keys, self.flash = keys, _flash(like)
        if self.flash:
            self.starts, self.key_starts = (F.pad(n.cumsum(0), (1, 0)).int() for n in (queries, lengths))  # [B + 1]
            self.longest = int(lengths.max())
            return
        self.queries, self.lengths = queries.tolist(), lengths.tolist()
        if keys is not None:  # of the longest row but the first; shorter ones are cut out of it
            C, L = max(self.queries[1:]), max(self.lengths[1:])
            future = torch.ones(C, L, dtype=torch.bool, device=like.device).triu(L - C + 1)
            self.mask = torch.zeros(C, L, dtype=like.dtype, device=like.device).masked_fill_(future, -torch.inf)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [sum of queries, heads, D], k and v [sum of lengths, kv_heads, D] → like q. Causal: a row's queries are its last
        positions, and each looks at all that come before it."""
        if self.flash:
            span = (self.starts, self.key_starts, self.longest, self.longest)
            # Its backward pass would otherwise sum in any order.
            return flash_attn.flash_attn_varlen_func(q, k, v, *span, causal=True, deterministic=True)
        grouped, out = q.shape[1] != k.shape[1], []
        parts = zip(q.split(self.queries), k.split(self.lengths), v.split(self.lengths), strict=True)
        for q, k, v in parts:
            how = {"is_causal": True} if len(q) == len(k) else {"attn_mask": self.mask[: len(q), : len(k)]}
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, heads, ·, D]
            out.append(F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **how)[0].transpose(0, 1))
        return torch.cat(out)


def _flash(like: Tensor) -> bool:
    return flash_attn is not None and like.is_cuda and like.dtype in (torch.bfloat16, torch.float16)


class KVCache:
    """Keys and values of every slot, each [layers, slots, kv_heads, max_len + 1, D]. Position max_len is a bin: padding
    that would fall off the end is written there and never read. `slots` rows, `max_len` tokens each.

    transposed: keys lie in memory with their positions side by side instead of their coordinates (kernels/decode.py says why).
    """

    def __init__(self, cfg: ModelConfig, slots: int, max_len: int, dtype=torch.float32, device="cpu", transposed=False):
        rows, P, D = (cfg.num_hidden_layers, slots, cfg.num_key_value_heads), max_len + 1, cfg.head_dim
        # Zeros: a masked NaN would still be a NaN.
        zeros = lambda *shape: torch.zeros(*rows, *shape, dtype=dtype, device=device)
        self.keys = zeros(D, P).transpose(-1, -2) if transposed else zeros(P, D)
        self.values = zeros(P, D)
        self.max_len = max_len

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

    def __call__(self, *args, **options) -> Tensor:
        return self._without_adapters(self.model, *args, **options)

    def forward_cached(self, *args, **options) -> Tensor:
        return self._without_adapters(self.model.forward_cached, *args, **options)

    def _without_adapters(self, compute, *args, **options) -> Tensor:
        _OFF.lora = self.model.lora
        try:
            return compute(*args, **options)
        finally:
            _OFF.lora = None
