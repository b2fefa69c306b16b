"""Conversations on a stage, and what they are worth: success, pass^k, intervals, the user's faults, null baselines."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chat import Chat, UserError
from config import Config
from domains import shop
from rollout import Limits, Sampler, Trajectory, converse, rollout
from tools import FaultyTools, Task, play
from user_sim import GUIDE, UNJUDGED, ModelUser, ScriptedUser, user_fault


def make_domain(cfg: Config) -> shop.Shop:
    return shop.Shop(cfg.prompts, shop.Mix(cfg.two, cfg.forbidden, cfg.changed, cfg.slip))


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


def percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def shares(values: dict[str, float]) -> str:
    return "(" + ", ".join(f"{k} {v:.1%}" for k, v in values.items()) + ")" if values else ""
