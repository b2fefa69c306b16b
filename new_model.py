"""What a model trained from scratch starts with: its tokenizer, its shape, and an induction head written into its weights."""

from collections.abc import Iterable

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from chat import UserError
from config import Config
from model import Decoder, ModelConfig, rope_frequencies

# ---------------------------------------------------------------------------------------------------- tokenizer

CONTROLS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# What text is cut into before anything is counted. A small model must *copy* names, numbers and items between speech and
# JSON, so a detail has to be the same tokens wherever it stands: a word takes the space behind it, never the one before;
# a full stop stays apart; an order number is a letter and a number, two alphabets that can't be mixed up. JSON's scaffolding
# (a call's head, the glue between fields) is one piece each, since there is nothing in it to decide.
PIECES = (
    r'\n?\{"name": "[a-z_]+", "arguments": \{(?:"[a-z_]+": ")?'
    r'|[\[\]{}",: ]*"[a-z_]+": [\[{"]*|[\]}"]+(?:, ")?\n?'
    r"|(?:system|user|assistant)\n|[A-Z][a-z]+(?: [a-z]+)?: |#[A-Z](?=\d)|\$?\d+|#+[A-Z]+#+"
    r"| ?[A-Za-z_']+ ?|[.,:?!] ?|\s|."
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer, trained on `texts`, in which every piece (see PIECES) seen twice is one token.

    BPE reaches a long piece through many intermediate tokens that no text ever ends up with. They are dropped after
    training, and `ignore_merges` looks whole pieces up: a piece that was never seen falls back to bytes, so any text can
    be written and read back.
    """
    texts = list(texts)
    pieces, to_bytes = Regex(PIECES), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split(pieces, "isolated"), to_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    grown = Tokenizer(models.BPE())
    grown.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(vocab_size=16384, min_frequency=2, show_progress=False, initial_alphabet=alphabet)
    grown.train_from_iterator(texts, trainer)
    used = {token for line in grown.encode_batch(texts) for token in line.tokens}
    words = [*CONTROLS, *sorted(alphabet), *sorted(used - set(alphabet))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in CONTROLS])
    return tokenizer


# ---------------------------------------------------------------------------------------------------- weights
def from_scratch_shape(cfg: Config, vocabulary: int) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3", vocab_size=vocabulary, hidden_size=cfg.width, intermediate_size=cfg.mlp,
        num_hidden_layers=cfg.layers, num_attention_heads=cfg.heads, num_key_value_heads=cfg.kv_heads,
        head_dim=cfg.width // cfg.heads, rope_theta=1e6, tie_word_embeddings=True, qk_norm=True,
        max_position_embeddings=max(1024, cfg.max_len, cfg.user_max_len),
    )  # fmt: skip


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
    for j in range(r):  # query heads that share v each write some of P: twins would get equal gradients for ever
        first.o_proj.weight[:, (j % group) * D + j] = 0.5 * P[:, j]

    # Layer 1, half of the query heads: find the token that came after the one at hand.
    pairs = min(5, half)
    slow = torch.cat([torch.arange(half - pairs, half), torch.arange(D - pairs, D)])  # both members of each pair
    wired = max(1, cfg.num_attention_heads // 2)
    for h in range(wired):
        kv = h // group  # each of these has its own directions, as long as they last
        read = (torch.arange(len(slow)) + kv * len(slow)) % r
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
