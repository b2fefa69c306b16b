"""GRPO, from trajectories to a gradient step:

    Trajectory → advantages → Batch → log-probs → loss → step

Each choice of Config's objective is one line here, and is proved against brute force in tests/test_loss.py and
tests/test_enumerated.py; docs/algorithm.md has its equation and when to use it. What it leaves out: where trajectories
come from (rollout.py), and the run around it (mua_rl.py).
"""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import model as models
from chat import Context, Role, UserError
from config import AT_ONCE, KEYS, Config
from kernels.logprob import linear_logprob
from rollout import EXITS, Trajectory


@dataclass(frozen=True)
class Batch:
    """Tensors for one forward and backward. B rows right-padded to L; N predicted tokens, those of role AGENT."""

    ids: Tensor  # [B, L] int64; padding is id 0 and is never computed
    lengths: Tensor  # [B] tokens of each row that are no padding
    row: Tensor  # [N] which row …
    at: Tensor  # [N] … and which position predicts …
    targets: Tensor  # [N] … this token, found at position at + 1
    sampled: Tensor  # [N] the sampler's log-prob of the target; nan for demonstrations
    advantage: Tensor  # [N] A of the target's trajectory, or turn
    weight: Tensor  # [N] the target's share in the mean over the minibatch
    old: Tensor | None = None  # [N] log π_old of the target; None (always without --tis): the sampler's is taken
    ref: Tensor | None = None  # [N] log π_ref of the target; None: no KL term
    shared: int = 0  # tokens that all rows begin with in common, and that are computed once


Row = Context | Trajectory  # anything with ids, roles, logprobs


Credit = float | list[float]  # the advantage of a whole trajectory, or of each of its AGENT tokens


def make_batch(
    rows: Sequence[Row], advantages: Sequence[Credit], weights: Sequence[float] | None = None, shared: int = 0
) -> Batch:
    """Pack rows. weights: of each token of a row, 1 by default. shared: how many tokens they have in common at first.

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
    return Batch(ids, lengths, row, at, targets, logprobs[row, position], torch.cat(credit), weight, shared=shared)


def micro_batches(
    rows: Sequence[Row],
    advantages: Sequence[Credit],
    tokens: int,
    weights: Sequence[float] | None = None,
    share: bool = False,
) -> list[Batch]:
    """Batches of at most `tokens` tokens (one row at least); rows that begin alike lie side by side: a group's, and groups
    with the same policy and tools.

    share: what all rows of a batch have in common at their beginning is computed, and counted, once.
    """
    batches: list[tuple[list[int], int, int]] = []  # rows, their tokens, how many of these all have in common
    for i in sorted(range(len(rows)), key=lambda i: rows[i].ids):
        n = len(rows[i].ids)
        if batches:
            chosen, total, P = batches[-1]
            in_common = min(P, common(rows[chosen[0]], rows[i])) if share else 0
            before, after = spared(P, len(chosen), total), spared(in_common, len(chosen) + 1, total + n)
            fits = total + n - after <= tokens and total + n <= KEYS * tokens
            if fits and after >= before:  # not dearer than a batch apart
                batches[-1] = ([*chosen, i], total + n, in_common)
                continue
        batches.append(([i], n, n))
    weights, out = weights or [1.0] * len(rows), []
    for chosen, total, P in batches:
        values = ([x[i] for i in chosen] for x in (rows, advantages, weights))
        out.append(make_batch(*values, P if spared(P, len(chosen), total) else 0))
    return out


def spared(P: int, B: int, total: int) -> int:
    """The tokens that B rows of `total` need not compute when they share P; 0 if below a tenth, since a shared prefix has a
    price: attention under a mask, and copied keys."""
    saved = P * (B - 1)
    return saved if saved > total / 10 else 0


def common(a: Row, b: Row) -> int:
    """How many tokens two rows have in common at their beginning, of which each keeps one to itself."""
    n = min(len(a.ids), len(b.ids)) - 1
    differ = np.not_equal(a.ids[:n], b.ids[:n])
    return int(differ.argmax()) if differ.any() else n


def logprobs(policy: models.Decoder, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log π(target) [N] at the sampling temperature, and the entropy there [N]; never holds [B, L, V]."""
    ids, lengths, row, at, targets = (
        t.to(policy.head.device) for t in (batch.ids, batch.lengths, batch.row, batch.at, batch.targets)
    )
    hidden = policy(ids, lengths, batch.shared, (row, at))  # [N, H]
    return linear_logprob(hidden, policy.head, targets, temperature)


def advantages(rewards: Sequence[float | None], kind: str = "grpo", eps: float = 1e-6) -> list[float]:
    """How much better each member of one group did than the group (r̄: mean, std: of the population, ÷ n).

    grpo     A_j = (r_j − r̄) / (std r + ε)                                  arXiv 2402.03300 §4.1.2
    dr_grpo  A_j = r_j − r̄                                                  arXiv 2503.20783 §3.2
    rloo     A_j = r_j − mean of the other rewards = (r_j − r̄) · n/(n − 1)   arXiv 2402.14740

    A member without a reward (None: its user failed) takes no part and gets 0. A group whose rewards are all
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


def each(work: Callable[[Batch], Any], batches: list[Batch], policy: models.Decoder) -> Iterator:
    """work(batch) for each, in their order; with a small model on a CPU several at once."""
    yield from (models.side_by_side if at_once(batches, policy) else map)(work, batches)


def at_once(batches: list[Batch], policy: models.Decoder) -> bool:
    """With a small model on a CPU, as many micro-batches as torch has threads. What comes out is the same for any number."""
    small = sum(p.numel() for p in policy.parameters()) <= AT_ONCE
    plain = torch.finfo(policy.head.dtype).bits >= 32 and not policy.head.is_cuda  # no masters that collect gradients
    return small and plain and min(torch.get_num_threads(), len(batches)) > 1


def backward(loss_of: Callable[[Batch], tuple[Tensor, Any]], batches: list[Batch], policy: models.Decoder) -> list:
    """Adds the gradient of every batch's loss to the parameters' .grad. loss_of(batch) → (loss, more); returns the mores.

    Batches at once must not add to one .grad as they finish: it would be another sum each time.
    """
    if not at_once(batches, policy):
        out = []
        for batch in batches:
            loss, more = loss_of(batch)
            loss.backward()
            out.append(more)
        return out
    out, trained = [], [p for p in policy.parameters() if p.requires_grad]

    def gradients(batch: Batch) -> tuple[tuple[Tensor, ...], Any]:
        loss, more = loss_of(batch)
        return torch.autograd.grad(loss, trained), more

    for found, more in each(gradients, batches, policy):
        for p, gradient in zip(trained, found, strict=True):
            p.grad = gradient if p.grad is None else p.grad.add_(gradient)
        out.append(more)
    return out


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
        values = {f"{i}.{k}": v for i, b in enumerate(batches) for k, v in vars(b).items() if v is not None}
        tensors = {name: torch.as_tensor(v) for name, v in values.items()}
        try:
            save_file(tensors, self.folder / f"{name}.safetensors")
        except SafetensorError as error:
            raise UserError(f"{self.folder}: cannot be written ({error}); make room, then use --resume") from None
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
        weights = token_weights(trajectories, cfg)
        parts.append(micro_batches(trajectories, A, cfg.micro_tokens, weights, cfg.share_prefix))
    with clock("reference"):  # what stays as it is while π_θ moves
        fixed = torch.no_grad()(lambda model, b: logprobs(model, b, cfg.temperature)[0])
        if cfg.kl:
            ref = lambda b: dataclasses.replace(b, ref=fixed(reference, b))
            parts = [list(each(ref, part, policy)) for part in parts]
        if cfg.tis:
            old = lambda b: dataclasses.replace(b, old=fixed(policy, b))
            parts = [list(each(old, part, policy)) for part in parts]

    def loss_of(batch: Batch) -> tuple[Tensor, dict]:
        logp, entropy = logprobs(policy, batch, cfg.temperature)
        loss, stats = grpo_loss(logp, batch, cfg)
        return loss, stats | {"entropy": entropy.sum(), "tokens": len(logp)}

    seen, first, norms = [], [], []  # what is logged: of the batches that taught; of the first minibatch, taught or not
    for k, part in enumerate(parts * cfg.epochs):
        with clock("training"):
            new = [{name: float(x) for name, x in stats.items()} for stats in backward(loss_of, part, policy)]
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


def adamw(parameters: list[Tensor], lr: float, kind: str = "adamw") -> torch.optim.Optimizer:
    """AdamW for reinforcement learning, stepping `masters(parameters)`. "adamw8bit" is torchao's (moments of 8 bits with a
    scale for each 256, arXiv 2110.02861; of a tensor under 4,096 numbers or no multiple of 256 in fp32).
    """
    trained, how = masters(parameters), {"betas": (0.9, 0.95), "weight_decay": 0.0}
    if kind == "adamw":
        return followed(torch.optim.AdamW(trained, lr=lr, **how))
    from torchao.optim import AdamW8bit  # an extra; check_config has seen that it is installed

    optimizer = AdamW8bit(trained, lr=0.0, **how)
    if not trained[0].is_cuda:  # it compiles its step, which needs a C++ compiler here and gains nothing
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    for p in trained:  # a step that moves nothing makes the moments: a resumed run needs them there to refill them
        p.grad = torch.zeros_like(p)
        optimizer.step()
        p.grad = None
        optimizer.state[p]["step"].zero_()
    set_lr(optimizer, lr)
    return followed(optimizer)


def trained_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def ramp(step: int, steps: int, warmup: int, cooldown: float, floor: float) -> float:
    """Learning-rate factor: linear warm-up, flat, then linear down to `floor` over the last `cooldown` share of steps."""
    up = min(1.0, (step + 1) / max(1, warmup))
    down = min(1.0, (steps - step) / max(1.0, cooldown * steps))
    return up * (floor + (1 - floor) * down)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
