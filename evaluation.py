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
from chat import Call, Chat, Role, UserError
from config import Config
from domains import shop
from domains.airline import Airline
from domains.retail import Retail
from domains.tau2 import PaperSplit
from domains.telecom import Telecom
from rollout import Limits, Sampler, Trajectory, converse, rollout
from tools import FaultyTools, Task, play
from user_sim import (
    GUIDE,
    STOPS,
    UNJUDGED,
    ContractedModelUser,
    ModelUser,
    ScriptedUser,
    choose,
    parse_pool,
    user_fault,
)


def make_domain(cfg: Config) -> Any:
    """The domain object (see tools.py). Errors: UserError, if τ²-bench's data is missing or damaged."""
    if cfg.domain == "shop":
        return shop.Shop(cfg.prompts, shop.Mix(cfg.two, cfg.forbidden, cfg.changed, cfg.slip))
    domain = {"retail": Retail, "airline": Airline, "telecom": Telecom}[cfg.domain]
    tested = domain(cfg.data or None, cfg.task_set)
    return PaperSplit(domain(cfg.data or None, "tau1"), tested) if cfg.paper_split else tested


def check_split(domain: Any, split: str) -> None:
    """Errors: UserError with the splits that there are."""
    splits = [name for name, ids in domain.splits.items() if ids]
    if split not in splits:
        raise UserError(f"--split {split}: {domain.name} has no such tasks; choose one of {', '.join(splits)}")


def split_size(domain: Any, split: str, n: int | None) -> int:
    """How many tasks to take: n, but no task twice where a split is a list. None: all of a list, 250 of the shop's."""
    size = len(domain.splits[split]) if hasattr(domain, "ids") else n or 250
    return min(n or size, size)


PHASE = {"rl": 0, "eval": 1}  # part of every stream's key, so that no two phases share random numbers


def user_prompt(domain: Any, task: Task, trained: bool = True) -> str:
    """The system prompt of a user played by a model. τ²-bench's says how to play it; the shop's is for weights that were
    trained for the part (trained), others are told first.
    """
    guide = hasattr(domain, "prompts") and (domain.prompts or not trained)
    return (GUIDE if guide else "") + domain.instruction(task)


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
    domain: Any
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
        t = yield from converse(task, domain, player, self.chat, limits, (*key, 0), member)
        t.metrics["user"] = kind
        if player.ctx is not None:
            t.metrics["user_tokens"] = player.ctx.roles.count(Role.AGENT)
        return t

    def player(self, task: Task, kind: str, key: tuple[int, ...]) -> Any:
        """The user of one conversation."""
        cfg, domain = self.cfg, self.domain
        if kind in ("scripted", "stranger"):
            return ScriptedUser(domain.script(task, random.Random(f"user {key}"), kind))
        stops = getattr(domain, "stops", STOPS)
        if kind.startswith("openai:"):
            return ApiUser(self.api, user_prompt(domain, task, trained=False), domain.greeting, (*key, 1), stops)
        speaker, chat = "user" if kind == "lm" else kind, self.chats.get(kind, self.chat)
        words = chat, user_prompt(domain, task), domain.greeting, (*key, 1), cfg.user_max_new, speaker
        if hasattr(domain, "meaning"):  # weights that were trained for the part, and an audit by the domain's script
            return ModelUser(*words)
        return ContractedModelUser(*words, domain.user_tools or None, stops=stops)

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


def check_room(cfg: Config, domain: Any, chat: Chat, positions: int) -> None:
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
    if hasattr(domain, "user_tools") and any(k in ("lm", "self") for k in parse_pool(cfg.user)):
        task = domain.task("train" if domain.splits.get("train") else next(iter(domain.splits)), 0, 0)
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
        if cfg.user_max_len > model.cfg.max_position_embeddings:
            raise UserError(
                f"--user-max-len {cfg.user_max_len}: {name} has {model.cfg.max_position_embeddings} positions"
            )
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

    Conversations without a reward (the user simulator failed) are left out of all three, so how many were planned, how
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


def user_faults(domain: Any, tasks: list[Task], groups: list[list[Trajectory]]) -> dict:
    """The faults of users played by models (`fault_shares`), {} if none was."""
    talks = [(task, t) for task, g in zip(tasks, groups, strict=True) for t in g]
    played = [(task, t) for task, t in talks if t.metrics.get("user") not in ("scripted", "stranger")]
    return fault_shares([fault_of(domain, task, t) for task, t in played]) if played else {}


def fault_of(domain, task: Task, t: Trajectory) -> str | None:
    """The user's first fault in a conversation, by kind, None, or UNJUDGED: what the domain's script would not have said
    (`user_sim.user_fault`), or, where there is no script, what breaks the contract of any user (`contract_fault`).
    """
    if hasattr(domain, "meaning") and "user_faults" not in t.metrics:
        said = {who: [turn["text"] for turn in t.turns if turn["role"] == who] for who in ("agent", "user")}
        fault = user_fault(domain, task, said["agent"], said["user"])
    else:
        fault = next(iter(t.metrics.get("user_faults", ())), None)
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


def null_baselines(domain: Any, seed: int, n: int = 500, split: str = "test") -> dict[str, float]:
    """Success of agents that no one would want: what a reward is worth without skill. In the shop they talk with the
    scripted user; elsewhere they do all they do before the user says a word, on each task of the split.
    """
    if hasattr(domain, "ids"):
        tasks = [domain.task(split, seed, i) for i in range(len(domain.ids(split)))]
        at_once = {"do_nothing": (), "transfer": (Call("transfer_to_human_agents", {"summary": ""}),)}
        return {name: sum(verdict(domain, t, calls) for t in tasks) / len(tasks) for name, calls in at_once.items()}
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


def verdict(domain: Any, task: Task, calls: Sequence[Call]) -> float:
    """The reward of an agent that makes these calls and says nothing."""
    world = domain.world(task)
    for call in calls:
        world.call(call.name, call.arguments)
    return world.reward().value


def percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def shares(values: dict[str, float]) -> str:
    return "(" + ", ".join(f"{k} {v:.1%}" for k, v in values.items()) + ")" if values else ""
