"""What a run needs in memory, before it starts: weights, optimizer, KV caches, activations. Arithmetic only, no model.

`python mua_rl.py plan --preset NAME` prints it. What the framework itself takes (CUDA's context, fragmentation, the matrix products' workspaces) is in none of them: leave a tenth of the card free.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from chat import UserError
from config import AT_ONCE, KEYS
from domains import find
from kernels.logprob import SLICE
from model import ModelConfig
from user_sim import parse_pool

GIB = 2**30
GROUP = Path("/sys/fs/cgroup")  # a container's, on Linux
SHAPES = {  # from the models' config.json: hidden, MLP, layers, heads, kv heads, head size, vocabulary, tied
    "smollm2": ("llama", 576, 1536, 30, 9, 3, 64, 49152, True),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
}
MOMENTS = {"adamw": 8, "adamw8bit": 2 * (1 + 4 / 256)}  # bytes a parameter; 8 bit: a code each, a fp32 scale for 256
CARDS = {"24 GB": 24e9, "48 GB": 48e9, "80 GB": 80e9, "141 GB": 141e9}


def shape(name: str) -> ModelConfig:
    """A known model's shape, without its files. Raises UserError for an unknown one."""
    if name not in SHAPES:
        raise UserError(f"--model {name}: its shape is not known without its files; known are {', '.join(SHAPES)}")
    kind, hidden, mlp, layers, heads, kv_heads, head_dim, vocabulary, tied = SHAPES[name]
    return ModelConfig(
        model_type=kind, vocab_size=vocabulary, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, rope_theta=1e6, qk_norm=kind == "qwen3",
        tie_word_embeddings=tied, max_position_embeddings=40960,
    )  # fmt: skip


@dataclass(frozen=True)
class Need:
    """Bytes, by what they are for."""

    weights: int
    reference: int  # frozen copies: KL reference and user "lm" (with LoRA the weights, adapters off); other users
    gradients: int
    masters: int  # fp32 copies of trained half-precision weights
    optimizer: int  # AdamW's two moments
    packed: int  # on a CPU the matrices of what is sampled from, once more (packed.py; small ones are no copies there)
    caches: int  # keys and values: the agent's slots and the user's
    activations: int  # one micro-batch, forward and backward
    logits: int  # slices of [T, V], and the gradients of hidden states and output matrix

    def total(self) -> int:
        return sum(vars(self).values())


def parameters(m: ModelConfig) -> tuple[int, int]:
    """(all weights, those in the blocks' linear layers). A formula: to build a model and count takes seconds at first."""
    q, kv = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    linear = m.num_hidden_layers * (m.hidden_size * (2 * q + 2 * kv) + 3 * m.hidden_size * m.intermediate_size)
    biases = m.num_hidden_layers * (q + 2 * kv) * m.attention_bias
    norms = (2 * m.num_hidden_layers + 1) * m.hidden_size + 2 * m.head_dim * m.qk_norm * m.num_hidden_layers
    return linear + biases + norms + m.vocab_size * m.hidden_size * (2 - m.tie_word_embeddings), linear


def adapters(m: ModelConfig, rank: int) -> int:
    """Parameters of LoRA on every linear layer: r · (in + out) each."""
    q, kv = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    H, F = m.hidden_size, m.intermediate_size
    return rank * m.num_hidden_layers * (2 * (H + q) + 2 * (H + kv) + 3 * (H + F))


def block_activations(m: ModelConfig, rank: int) -> int:
    """Numbers a block keeps for its backward pass, per token: inputs of norms and matrices, and what attention needs."""
    q, kv = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    norms = 4 * m.hidden_size + (q + kv) * m.qk_norm  # each norm keeps its input, each matrix the normed one
    attention = 2 * q + 2 * kv + q  # q, k, v, its output, and the rotation's inputs
    mlp = 4 * m.intermediate_size  # gate, up, silu(gate), their product
    return norms + attention + mlp + 7 * rank


def log_probs(m: ModelConfig, T: int, width: int, device: str, head_trained: bool) -> int:
    """Bytes that kernels/logprob.py holds beside its input, at most, if all T tokens are predicted.

    Of a slice of C logits: on CUDA the new and the last gradient; in torch also two blocks in fp32 beside the last slice's
    (backward: logits and π beside the last gradient; forward: logits beside the last logits and exponentials).
    """
    (numbers, least), V, H = SLICE.get(device, SLICE["cuda"]), m.vocab_size, m.hidden_size
    C = min(V, max(least, numbers // max(T, H)))
    partials = 16 * T * math.ceil(V / C)
    logits = T * C * (2 * width if device == "cuda" else 12)
    product = T * C * width + C * H * width + T * H * 2 * (width == 2)  # gradient, slice of weights, d_hidden's gain
    backward = T * H * 4 + V * H * width * head_trained + max(logits, product)
    return max(backward, partials + T * C * (0 if device == "cuda" else 12 + 2 * (width == 2)))


def voices(cfg) -> set[str]:
    """The kinds of users that are played by weights in this process: those in training, and whom evaluations meet."""
    trained = {kind for kind in parse_pool(cfg.user) if kind in ("lm", "self") or kind.startswith("frozen:")}
    return trained | ({"lm"} if find(cfg.domain).demonstrator and cfg.test_tasks else set())


def need(cfg, m: ModelConfig) -> Need:
    """The memory of a run with `cfg` (a config.Config) on a model of shape `m`: of the phase that needs more."""
    learning = phase(cfg, m)
    if not cfg.sft_steps:
        return learning
    cold_start = phase(replace(cfg, lora_rank=0, optimizer="adamw", share_prefix=False), m)  # trains all weights, alone
    return max(learning, replace(cold_start, reference=0, packed=0, caches=0), key=Need.total)


def phase(cfg, m: ModelConfig) -> Need:
    """The memory of reinforcement learning."""
    width = 2 if cfg.dtype == "bf16" else 4
    everything, linear = parameters(m)
    trained = adapters(m, cfg.lora_rank) if cfg.lora_rank else everything
    half = width == 2 and not cfg.lora_rank  # trained weights are kept a second time, in fp32
    per_token = 2 * m.num_hidden_layers * m.num_key_value_heads * m.head_dim * width
    T, layers = max(cfg.micro_tokens, cfg.max_len), m.num_hidden_layers  # one row at least, however long
    block = block_activations(m, cfg.lora_rank)
    kept = 2 * m.hidden_size + (layers * m.hidden_size + block if cfg.checkpointing else layers * block)
    keys = 2 * m.num_key_value_heads * m.head_dim * (1 if cfg.checkpointing else layers)
    copied = (KEYS - 1) * keys if cfg.share_prefix else 0  # what rows attend to beyond what is computed
    users = voices(cfg)
    start = not cfg.lora_rank and bool(cfg.kl or "lm" in users)
    at_once = cfg.threads if everything <= AT_ONCE and width == 4 and cfg.device == "cpu" else 1  # micro-batches
    held = at_once + 2 if at_once > 1 else 1  # the sum, and of each batch that is begun or waits (model.side_by_side)
    others = len(users - {"lm", "self"})  # are taken to be as large as this
    sampled = 1 + others + (start and "lm" in users)
    return Need(
        weights=everything * width + (trained * 4 if cfg.lora_rank else 0),
        reference=(start + others) * everything * width,
        gradients=trained * 4 * held,
        masters=trained * 4 if half else 0,
        optimizer=round(trained * MOMENTS[cfg.optimizer]),
        packed=sampled * (linear + m.vocab_size * m.hidden_size) * width * (cfg.device == "cpu"),
        caches=cfg.slots * (cfg.max_len + 1 + len(users) * (cfg.user_max_len + 1)) * per_token,
        activations=at_once * T * (kept + copied) * width,
        logits=at_once * log_probs(m, T, width, cfg.device.partition(":")[0], head_trained=not cfg.lora_rank),
    )


def summary(cfg, m: ModelConfig) -> str:
    """The plan in a line, with what would make it smaller."""
    n, free = need(cfg, m), free_bytes(cfg.device)
    left = "" if free is None else f"; {size(free)} are free"
    return (
        f"memory: about {size(n.total())} beyond Python and torch: weights {size(n.weights + n.reference)}, keys and values "
        f"{size(n.caches)} (--slots), activations {size(n.activations)} (--micro-tokens){left}"
    )


def free_bytes(device: str) -> int | None:
    """Memory that can still be had there: on a GPU what no one has allocated; else what Linux calls available, or what a
    container's limit leaves, if that is less (what it keeps of files it can drop). None where that can't be told."""
    if device != "cpu":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    meminfo, limit = Path("/proc/meminfo"), GROUP / "memory.max"
    if not meminfo.exists():
        return None
    free = next(int(x.split()[1]) * 1024 for x in meminfo.read_text().splitlines() if x.startswith("MemAvailable"))
    if limit.exists() and (most := limit.read_text().strip()).isdigit():
        used, files = ((GROUP / name).read_text() for name in ("memory.current", "memory.stat"))
        free = min(free, int(most) - int(used) + int(re.search(r"^inactive_file (\d+)", files, re.M)[1]))
    return free


CACHES = "--slots {slots} --max-len {max_len} --user-max-len {user_max_len}"
REMEDY = {  # for the largest part of what a run needs: the flags to blame, and what to do
    "caches": (CACHES, "give fewer slots or shorter contexts"),
    "activations": ("--micro-tokens {micro_tokens} --max-len {max_len}", "give less, or add --checkpointing"),
    "logits": ("--micro-tokens {micro_tokens}", "choose a --model with a smaller vocabulary"),
}
SMALLER = "--model {model}", "choose a smaller one, or train adapters with --lora-rank 16"
NARROWER = "--layers {layers} --width {width} --mlp {mlp}", "give less"  # from scratch


NEW = tuple(part for part in Need.__annotations__ if part != "weights")  # what a run adds to a loaded model


def check(cfg, m: ModelConfig, parts: tuple[str, ...] = NEW) -> None:
    """Raises UserError where these parts of what a run needs do not fit into the memory that is free now."""
    n, free = {k: v for k, v in vars(need(cfg, m)).items() if k in parts}, free_bytes(cfg.device)
    if free is not None and sum(n.values()) > free:
        most = max(n, key=n.get)
        flags, remedy = REMEDY.get(most, SMALLER if cfg.model else NARROWER)
        raise UserError(
            f"{flags.format(**vars(cfg))}: needs {sum(n.values()) / GIB:.1f} GiB, of which {most} {n[most] / GIB:.1f}, and {free / GIB:.1f} GiB "
            f"are free; {remedy}"
        )


def table(cfg, m: ModelConfig) -> str:
    """What a run with these values needs in memory, beyond Python and torch, and which card it fits."""
    n, lines = need(cfg, m), []
    total, millions = n.total(), parameters(m)[0] / 1e6
    lines.append(
        f"{cfg.preset}: {cfg.model or 'from scratch'}, {millions:,.{0 if millions >= 10 else 1}f} M parameters, {cfg.dtype}"
    )
    trained = f"adapters of rank {cfg.lora_rank}" if cfg.lora_rank else "all weights"
    if cfg.lora_rank and cfg.sft_steps:
        trained = f"all weights in the cold start, {trained} in reinforcement learning"
    lines.append(f"  trained: {trained}")
    if cfg.sft_steps:
        lines.append(f"  most is needed in {'reinforcement learning' if n == phase(cfg, m) else 'the cold start'}:")
    lines += [f"  {name:12} {size(value):>13}" for name, value in vars(n).items()]
    lines.append(f"  {'total':12} {size(total):>13}, beyond Python and torch")
    if cfg.device == "cpu":
        return "\n".join(lines)
    fits = [name for name, card in CARDS.items() if total < 0.9 * card]
    lines.append(f"  fits a card of {fits[0]} (a tenth left free)" if fits else "  fits none of " + ", ".join(CARDS))
    if not fits or n.caches > total / 2:
        per_slot = size(n.caches // cfg.slots)
        lines.append(f"  one slot more or less: {per_slot} (--slots), half the context: half of that (--max-len)")
    return "\n".join(lines)


def size(n: int) -> str:
    """Bytes for people: GiB, or MiB below a tenth of that."""
    return f"{n / GIB:.2f} GiB" if n >= 0.1 * GIB else f"{n / 2**20:.1f} MiB"
