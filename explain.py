"""`explain`: one episode that was trained on, token by token, from its log-probs to the loss, and the same loss by hand.

    loss = Σ_t w_t · [ −min(ρ_t A_t, clip(ρ_t, 1−ε_lo, 1+ε_hi) A_t) + β KL_t ],   ρ_t = exp(log π_θ − log π_old)

log π_old is what the sampler noted when the token was drawn, log π_θ what the run's checkpoint says of it now, in fp32.
From the numbers of the table on, everything is plain Python, on floats rounded as they are printed; the trainer's side is
`grpo_loss` on the whole group as one Batch. What it leaves out: the other groups of the minibatch (w_t is the share among
this group's tokens), and --tis, whose log π_old is not kept by any run.
"""

import dataclasses
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import model as models
import report
from chat import Role, UserError
from config import Config, read_config
from grpo import grpo_loss, logprobs, make_batch, token_weights, trained_rows
from rollout import Trajectory
from run import checkpoint_of, load_state
from weights import start_of_rl, trained_weights

DIGITS = 7  # behind the point, in the table and in what is computed from it


@dataclass(frozen=True)
class Line:
    """One sampled token: what the table prints of it."""

    old: float  # log π_old
    new: float  # log π_θ
    A: float
    ratio: float  # ρ
    clipped: bool
    kl: float
    term: float  # −min(…) + β KL


def lines(old: list[float], new: list[float], ref: list[float], A: list[float], cfg: Config) -> list[Line]:
    """The terms of one episode by hand: lists of its AGENT tokens (ref: empty without a KL term), in float64."""
    moved = [n - o for n, o in zip(new, old, strict=True)]
    if cfg.ratio == "sequence":  # GSPO: all tokens have the geometric mean of the ratios
        moved = [sum(moved) / len(moved)] * len(moved)
    out = []
    for o, n, q, a, m in zip(old, new, ref or new, A, moved, strict=True):
        ratio = math.exp(m)
        least = min(ratio * a, min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high) * a)
        if cfg.dual_clip and a < 0:
            least = max(least, cfg.dual_clip * a)
        kl = {"k1": n - q, "k2": (q - n) ** 2 / 2, "k3": math.exp(q - n) - (q - n) - 1}[cfg.kl_estimator]
        term = cfg.kl * kl * (math.exp(n - o) if cfg.kl_ratio else 1) - least
        out.append(Line(o, n, a, ratio, least != ratio * a, kl, term))
    return out


def share(lengths: list[int], n: int, cfg: Config) -> float:
    """w_t of an episode with n AGENT tokens in a group whose episodes have `lengths` of them."""
    planned = cfg.tasks * cfg.group_size / cfg.minibatches
    return {
        "token": 1 / sum(lengths),
        "sequence": 1 / (len(lengths) * n),
        "constant": 1 / (planned * cfg.max_len),
    }[cfg.mean]


def trajectory(e: dict) -> Trajectory:
    """An episode of the log as the trainer had it."""
    noted = tuple(math.nan if p is None else p for p in e["logprobs"])
    about = e["task"], e["kind"], e["split"], e["member"], (), tuple(e["ids"]), tuple(e["roles"]), noted
    return Trajectory(
        *about, e["exit"], e["reward"], tuple(e["diff"]), tuple(e["turns"]), {}, (), tuple(e.get("states", ()))
    )


def chosen(episodes: list[dict], number: int | None, cfg: Config, run: Path) -> tuple[int, list]:
    """An episode's number (default: the last that was trained on) and what `trained_rows` makes of its group. Raises
    UserError where there is no such episode, or it was not trained on.
    """
    if number is not None and not 0 <= number < len(episodes):
        raise UserError(f"--episode {number}: {run} has {len(episodes)} episodes, numbered from 0")
    if not all("ids" in e for e in episodes):
        raise UserError(f"{run}: an earlier version stored its episodes without token ids; make a new run")
    key = lambda e: (e["phase"], e["step"], e["task"])
    groups: dict[tuple, list[dict]] = {}
    for e in episodes:
        groups.setdefault(key(e), []).append(e)
    rows = {k: trained_rows([trajectory(e) for e in group], cfg) for k, group in groups.items() if k[0] == "rl"}
    taught = [i for i, e in enumerate(episodes) if any(t.member == e["member"] for t, _ in rows.get(key(e), ()))]
    if not taught:
        raise UserError(
            f"{run}: none of its {len(episodes)} stored episodes was trained on; give a run that got further"
        )
    if number is not None and number not in taught:
        e = episodes[number]
        rewards = ", ".join(str(member["reward"]) for member in groups[key(e)])
        why = f"exit {e['exit']}, rewards of its group {rewards}" if e["phase"] == "rl" else "it is of an evaluation"
        raise UserError(f"--episode {number} was not trained on ({why}); choose {', '.join(map(str, taught[-8:]))}")
    number = taught[-1] if number is None else number
    return number, rows[key(episodes[number])]


def weigh(run: Path, rows: list, cfg: Config) -> tuple[float, list[list[Line]]]:
    """The trainer's loss on the trained rows of a group, and the lines of each row by hand."""
    cfg = dataclasses.replace(cfg, dtype="fp32", device="cpu")
    policy, (trajectories, A) = trained_weights(cfg, run), zip(*rows, strict=True)
    batch = make_batch(trajectories, A, token_weights(trajectories, cfg))
    with torch.no_grad():
        logp, _ = logprobs(policy, batch, cfg.temperature)
        if cfg.kl:
            reference = models.Base(policy) if policy.lora else start_of_rl(cfg, run)
            batch = dataclasses.replace(batch, ref=logprobs(reference, batch, cfg.temperature)[0])
        trainer, _ = grpo_loss(logp, batch, cfg)
    columns = (batch.sampled, logp, logp if batch.ref is None else batch.ref, batch.advantage)
    columns = [[round(x, DIGITS) for x in column.tolist()] for column in columns]
    ends = list(itertools.accumulate((t.roles.count(Role.AGENT) for t in trajectories), initial=0))
    parts = ([column[a:b] for column in columns] for a, b in itertools.pairwise(ends))
    return float(trainer), [lines(*part, cfg) for part in parts]


HEAD = "log π_old", "log π_θ", "ratio ρ", "A", "KL", "term"


def table(episode: dict, its: list[Line], out) -> None:
    """The episode token by token, a subtotal after each turn of the agent. What was not sampled is one line a speaker."""
    out(f"{'token':24}{'role':8}" + "".join(f"{name:>14}" for name in HEAD) + "  clipped", "head")
    rest, turn, at = iter(its), 0, 0
    for role, run in itertools.groupby(episode["roles"]):
        n, name = len(list(run)), Role(role).name
        tokens, at = episode["tokens"][at : at + n], at + n
        if role != Role.AGENT:
            out(f"{quoted(''.join(tokens)):24}{name:8}{n:4} tokens heard: no log-prob, no loss", name.lower())
            continue
        said, turn = list(itertools.islice(rest, n)), turn + 1
        for token, x in zip(tokens, said, strict=True):
            numbers = "".join(f"{v:14.{DIGITS}f}" for v in (x.old, x.new, x.ratio, x.A, x.kl, x.term))
            out(f"{quoted(token):24}{name:8}{numbers}  {'yes' if x.clipped else 'no'}", "agent")
        out(f"  turn {turn}: {n} tokens, Σ term {sum(x.term for x in said):.{DIGITS}f}", "head")


def quoted(text: str) -> str:
    text = repr(text)
    return text if len(text) <= 22 else text[:20] + "…" + text[0]


def explain(run: Path, number: int | None = None, file=None) -> None:
    """Print an episode coloured by role, its table, its group, and the loss by hand and by the trainer.

    Raises UserError: no run, no such episode, one that was not trained on, an objective that the table can't show.
    """
    cfg, file = read_config(run), file or sys.stdout
    out = lambda text, kind="": print(report.painted(text, kind, file), file=file)
    if cfg.tis:
        raise UserError(
            f"--tis {cfg.tis}: its log π_old is the trainer's of that step, which no run keeps; explain another"
        )
    episodes, state = report.read_episodes(run / "episodes.jsonl.gz", needed=True), load_state(checkpoint_of(run))
    number, rows = chosen(episodes, number, cfg, run)
    episode = episodes[number]
    trainer, by_hand = weigh(run, rows, cfg)

    out(
        f"Episode {number}: step {episode['step']}, task {episode['task']}, exit {episode['exit']}, reward {episode['reward']:g}",
        "head",
    )
    at = 0
    for role, part in itertools.groupby(episode["roles"]):
        n = len(list(part))
        text, at = "".join(episode["tokens"][at : at + n]), at + n
        out(f"{Role(role).name:9}" + text.strip().replace("\n", "\n" + " " * 9), Role(role).name.lower())
    out(f"\nlog π_old: the sampler's, step {episode['step']}. log π_θ: the checkpoint's, after step {state.step}.\n")
    lengths, total = [len(its) for its in by_hand], 0.0
    for (t, _), its in zip(rows, by_hand, strict=True):
        if t.member == episode["member"]:
            table(episode, its, out)
    out(f"\nIts group, {len(rows)} trained of {cfg.group_size} (this one is member {episode['member']}):", "head")
    for (t, _), its in zip(rows, by_hand, strict=True):
        w, terms = share(lengths, len(its), cfg), sum(x.term for x in its)
        total += w * terms
        out(f"  member {t.member}: reward {t.reward:g}, {len(its):4} tokens of w = {w:.3e}, Σ term {terms:.{DIGITS}f}")
    out(f"loss = Σ w · term over {sum(lengths)} tokens (--mean {cfg.mean}; as if this group were the whole minibatch)")
    out(f"by hand {total:.9f}  trainer {trainer:.9f}  difference {abs(total - trainer):.1e}", "head")
