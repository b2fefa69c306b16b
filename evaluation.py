"""Conversations on a stage, and what they are worth: success, pass^k, intervals, the user's faults, null baselines."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from api_user import Api, ApiUser, Endpoint
from chat import Chat, Role, UserError
from config import Config
from domains import find
from rollout import Limits, Sampler, Trajectory, converse, rollout
from tools import Domain, FaultyTools, Task, play
from user_sim import (
    UNJUDGED,
    ContractedModelUser,
    Heard,
    ModelUser,
    ScriptedUser,
    choose,
    departure,
    parse_pool,
)


def make_domain(cfg: Config) -> Domain:
    """A run's domain. Errors: UserError, if it lacks what it must have, or τ²-bench's data is missing or damaged."""
    domain = find(cfg.domain).from_config(cfg)
    lacking = [part for part in ("name", "policy", "functions", "splits") if not hasattr(domain, part)]
    if (domain.scripts or domain.meaning or domain.demonstrator) and not (domain.script and domain.scripts):
        lacking += ["script, or does not name it in scripts"]
    if lacking:
        raise UserError(f"--domain {cfg.domain}: it has no {', '.join(lacking)}; see docs/domains.md")
    return domain


def splits(domain: Domain) -> list[str]:
    """The splits that have tasks."""
    return [split for split, size in domain.splits.items() if size != 0]


def check_split(domain: Domain, split: str) -> None:
    """Errors: UserError with the splits that there are."""
    if split not in splits(domain):
        raise UserError(f"--split {split}: {domain.name} has no such tasks; choose one of {', '.join(splits(domain))}")


def check_splits(cfg: Config, domain: Domain) -> None:
    """Refuses to train, look and test on what is not there. Raises UserError."""
    for split in ("train", "test") if cfg.test_tasks else ("train",):
        check_split(domain, split)
    if cfg.eval_every and cfg.eval_tasks and "val" not in splits(domain):
        raise UserError(f"--eval-every {cfg.eval_every}: {domain.name} has no validation split; give 0")


def split_size(domain: Domain, split: str, n: int | None) -> int:
    """How many tasks to take: n, but none twice. None: all that a split has, 250 where there is no end of them."""
    size = domain.splits[split]
    return n or 250 if size is None else min(n or size, size)


# Parts of every stream's key, (seed, phase, step, task, member, speaker): no two phases or speakers share random numbers.
PHASE = {"rl": 0, "eval": 1, "chat": 9}
SPEAKER = {"agent": 0, "user": 1}


def user_prompt(domain: Domain, task: Task, trained: bool = True) -> str:
    """The system prompt of a user played by a model. One that was not trained for the part is told first how to play it."""
    return (domain.guide if domain.prompts or not trained else "") + domain.instruction(task)


def endpoint(cfg: Config) -> Endpoint | None:
    """Where the user openai:MODEL is, if it plays. Errors: UserError."""
    model = next((kind.partition(":")[2] for kind in parse_pool(cfg.user) if kind.startswith("openai:")), None)
    if model is None:
        return None
    place = (cfg.user_url or Endpoint.url, cfg.user_key_env)
    return Endpoint(model, *place, temperature=cfg.user_temperature, budget=cfg.user_budget or None)


def open_api(place: Endpoint | None, tokens: int = 0, troubles: dict[str, int] | None = None) -> Api | None:
    """The API of an endpoint that has answered once. tokens, troubles: what a resumed run has had. Errors: UserError."""
    if place is None:
        return None
    api = Api(place, tokens)
    api.troubles.update(troubles or {})
    try:
        api.check()
    except BaseException:
        api.close()
        raise
    return api


@dataclass
class Stage:
    """What conversations need: the domain, the chat format, and the samplers that serve agent and users. Samplers go by
    speaker: "agent", "user" (the user "lm"), and other kinds of users by their own name. api: of the user openai:MODEL;
    chats: of users with another tokenizer than the agent's.
    """

    cfg: Config
    domain: Domain
    chat: Chat
    samplers: dict[str, Sampler]
    api: Api | None = None
    chats: dict[str, Chat] = field(default_factory=dict)
    began: dict[tuple[int, int], float] = field(default_factory=dict)  # when a task's member began, Unix time

    def conversation(self, task: Task, user: str, phase: str, step: int, index: int, member: int) -> Generator:
        """A coroutine that plays one conversation. user: a pool (user_sim.parse_pool), drawn from for each conversation."""
        cfg, key = self.cfg, (self.cfg.seed, PHASE[phase], step, index, member)
        kind = choose(parse_pool(user), key)
        limits = Limits(cfg.max_turns, cfg.max_new, cfg.max_len, max_malformed=3, max_errors=cfg.max_errors)
        domain = FaultyTools(self.domain, cfg.tool_faults, key) if cfg.tool_faults else self.domain
        self.began[index, member], player = time.time(), self.player(task, kind, key)
        t = yield from converse(task, domain, player, self.chat, limits, (*key, SPEAKER["agent"]), member)
        t.metrics["user"] = kind
        if player.ctx is not None:
            t.metrics["user_tokens"] = player.ctx.roles.count(Role.AGENT)
        return t

    def player(self, task: Task, kind: str, key: tuple[int, ...]) -> Any:
        """The user of one conversation."""
        cfg, domain, stream = self.cfg, self.domain, (*key, SPEAKER["user"])
        if kind in ("scripted", "stranger"):
            return ScriptedUser(domain.script(task, random.Random(f"user {key}"), kind))
        if kind.startswith("openai:"):
            return ApiUser(self.api, user_prompt(domain, task, trained=False), domain.greeting, stream)
        speaker, chat = "user" if kind == "lm" else kind, self.chats.get(kind, self.chat)
        words = chat, user_prompt(domain, task), domain.greeting, stream, cfg.user_max_new, speaker
        if domain.demonstrator:  # weights that were trained for the part
            return ModelUser(*words)
        return ContractedModelUser(*words, domain.user_tools or None)

    def play(
        self,
        tasks: list[Task],
        members: int,
        user: str,
        phase: str,
        step: int,
        first: int = 0,
        done: dict[tuple[int, int], Trajectory] | None = None,
        on_done: Callable[[int, int, Trajectory], None] | None = None,
    ) -> list[list[Trajectory]]:
        """The groups of all tasks, `members` conversations each from the same initial state. first: how many tasks of
        the step were played before, so that no two share random numbers. done: conversations, by task and member, that
        need not be played. on_done(task, member, t): hears of each of the others as it ends.
        """
        done = dict(done or {})
        left = [(i, m) for i in range(len(tasks)) for m in range(members) if (i, m) not in done]
        talks = (self.conversation(tasks[i], user, phase, step, first + i, m) for i, m in left)
        heard = None if on_done is None else lambda at, t: on_done(*left[at], t)
        done |= dict(zip(left, rollout(talks, self.samplers, heard), strict=True))
        return [[done[i, m] for m in range(members)] for i in range(len(tasks))]


def check_room(cfg: Config, domain: Domain, chat: Chat, positions: int) -> None:
    """Refuses contexts longer than the model was made for, and such as the prompts alone fill. Raises UserError."""
    if max(cfg.max_len, cfg.user_max_len) > positions:
        raise UserError(
            f"--max-len {cfg.max_len} --user-max-len {cfg.user_max_len}: this model has "
            f"{positions} positions; give less, or a config.json with RoPE scaling"
        )
    prompt = len(chat.start(domain.system, domain.tools, (0,)).ids)
    if prompt + cfg.max_new > cfg.max_len:
        raise UserError(
            f"--max-len {cfg.max_len}: policy and tools take {prompt} tokens, --max-new {cfg.max_new}; give more"
        )
    if any(k in ("lm", "self") for k in parse_pool(cfg.user)):
        task = domain.task(splits(domain)[0], 0, 0)
        prompt = len(chat.start(user_prompt(domain, task), domain.user_tools or None, (0,)).ids)
        if prompt + cfg.user_max_new > cfg.user_max_len:
            raise UserError(
                f"--user-max-len {cfg.user_max_len}: the user's instruction takes {prompt} tokens; give more"
            )


def make_samplers(
    cfg: Config, chat: Chat, policy, user, agent_temperature: float | None = None, users: dict | None = None
) -> dict[str, Sampler]:
    """The agent's sampler, that of the user "lm" (unless user is None), and those of other kinds of users:
    users {kind: (model, chat)}.
    """
    temperature = cfg.temperature if agent_temperature is None else agent_temperature
    samplers = {"agent": Sampler(policy, chat.end_ids, cfg.slots, cfg.max_len, temperature)}
    voices = ({"user": (user, chat)} if user is not None else {}) | (users or {})
    for name, (model, its) in voices.items():
        samplers[name] = Sampler(model, its.end_ids, cfg.slots, cfg.user_max_len, cfg.user_temperature)
    return samplers


def pass_hat_k(successes: int, trials: int, k: int) -> float:
    """Unbiased estimate of the probability that k fresh trials of a task all succeed: C(c, k) / C(n, k) (τ-bench, 2406.12045)."""
    if k > trials:
        raise ValueError(f"pass^{k} needs at least {k} trials, there are {trials}")
    return math.comb(successes, k) / math.comb(trials, k)


def interval(task_means: Sequence[float], seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean: bootstrap, resampling tasks; Wilson's (1927) where every task has the same 0 or 1, of which
    a bootstrap would claim to be certain.
    """
    values = np.asarray(task_means)
    if len({*task_means}) == 1 and values[0] in (0, 1):
        most = 1.96**2 / (len(values) + 1.96**2)  # Wilson's score interval at 0 of n
        return (0.0, most) if values[0] == 0 else (1 - most, 1.0)
    picks = np.random.default_rng(seed).integers(0, len(values), (draws, len(values)))
    lo, hi = np.quantile(values[picks].mean(1), [0.025, 0.975])
    return float(lo), float(hi)


def scores(groups: list[list[Trajectory]]) -> dict:
    """Success (mean over tasks), its interval, and pass^k over the `pass_k_tasks` tasks with at least k trials.

    Conversations without a reward (the user failed) are left out of all three, so how many were planned, how
    many counted (`n`), and which tasks have no result at all belong to the numbers.
    """
    everyone = [[t.reward for t in g if t.reward is not None] for g in groups]
    known = [r for r in everyone if r]
    n, planned = sum(map(len, known)), sum(map(len, groups))
    result = {"success": None, "lo": None, "hi": None, "n": n, "planned": planned, "tasks": len(known)}
    result |= {"without_result": [g[0].task for g, r in zip(groups, everyone, strict=True) if not r]}
    result |= {"user_failed": 1 - n / max(1, planned), "pass_k": {}, "pass_k_tasks": {}, "pass_k_interval": {}}
    if not known:
        return result
    means = [sum(r) / len(r) for r in known]
    lo, hi = interval(means)
    for k in range(1, max(map(len, known)) + 1):
        estimates = [pass_hat_k(int(sum(r)), len(r), k) for r in known if len(r) >= k]
        result["pass_k"][str(k)] = sum(estimates) / len(estimates)
        result["pass_k_tasks"][str(k)] = len(estimates)
        result["pass_k_interval"][str(k)] = interval(estimates)
    return result | {"success": sum(means) / len(means), "lo": lo, "hi": hi}


def evaluate(
    stage: Stage, split: str, n: int, trials: int, user: str, step: int = 0, done=None, on_done=None
) -> tuple[dict, list]:
    """Success on the first n tasks of a held-out split. → (scores with user faults, groups). done, on_done: see Stage.play."""
    n = split_size(stage.domain, split, n)
    tasks = [stage.domain.task(split, stage.cfg.seed, i) for i in range(n)]
    for sampler in stage.samplers.values():
        sampler.weights_changed()
    groups = stage.play(tasks, trials, user, "eval", step, done=done, on_done=on_done)
    result = scores(groups) | {"user": user, "split": split, "step": step}
    return result | user_faults(stage.domain, tasks, groups), groups


def user_faults(domain: Domain, tasks: list[Task], groups: list[list[Trajectory]]) -> dict:
    """The faults of users played by models (`fault_shares`), {} if none was."""
    talks = [(task, t) for task, g in zip(tasks, groups, strict=True) for t in g]
    played = [(task, t) for task, t in talks if t.metrics.get("user") not in ("scripted", "stranger")]
    return fault_shares([fault_of(domain, task, t) for task, t in played]) if played else {}


def fault_of(domain: Domain, task: Task, t: Trajectory) -> str | None:
    """The user's first fault in a conversation, by kind, None, or UNJUDGED: of a user whose answers are looked at a breach
    of its contract (`user_sim.breach`), of one that was trained for the part a departure from the domain's script
    (`user_sim.departure`).
    """
    if "user_breaches" in t.metrics:
        fault = next(iter(t.metrics["user_breaches"]), None)
    elif domain.meaning:
        said = {who: [turn["text"] for turn in t.turns if turn["role"] == who] for who in ("agent", "user")}
        fault = departure(domain, task, said["agent"], said["user"])
    else:
        fault = UNJUDGED
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


def told_of_faults(r: dict) -> str:
    """The same in words, for a terminal; "" where no model played the user. Talks in which the script
    can't make sense of the agent are named from 1 % on: so begins a language of two (docs/main_job.md).
    """
    if "user_fault_rate" not in r:
        return ""
    lost = f"; {r['user_unjudged']:.1%} of the talks not judged" if r["user_unjudged"] >= 0.01 else ""
    return f"user faults {r['user_fault_rate']:.1%} {shares(r['user_faults'])}{lost}"


class Nobody:
    """Whom null baselines talk with where there is no script."""

    def begin(self) -> Heard:
        return Heard("")

    def answer(self, text: str) -> Heard:
        return Heard("")


def null_baselines(domain: Domain, seed: int, n: int = 500, split: str = "") -> dict[str, float]:
    """Success of the domain's `baselines`: what a reward is worth without skill. On all tasks of a split, on n where there
    is no end of them. split: by default "test", or "train" where there is none.
    """
    split = split or ("test" if "test" in splits(domain) else "train")
    rates = {}
    for name, agent in domain.baselines.items():
        won, size = 0.0, domain.splits[split] or n
        for i in range(size):
            task, rng = domain.task(split, seed, i), random.Random(f"baseline {seed} {i}")
            world = domain.world(task)
            play(agent(rng), domain.script(task, rng) if domain.script else Nobody(), world)
            won += world.reward().value
        rates[name] = won / size
    return rates


def percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def shares(values: dict[str, float]) -> str:
    return "(" + ", ".join(f"{k} {v:.1%}" for k, v in values.items()) + ")" if values else ""
