"""A world so small that every conversation can be listed with its probability: what estimators are worth on average.

The conversations are the real `converse`: an agent of two tokens, one tool that jams at times, a user who sometimes
insists. Every group of four of them goes through the real advantages, weights and loss, weighted by its probability;
the sum's gradient is the expected estimator. Beside it stands the gradient of the expected reward, from the same list.
`PYTHONPATH=. python tests/test_enumerated.py` prints the tables of docs/algorithm.md.
"""

import collections
import dataclasses
import functools
import itertools
import math
from pathlib import Path

import pytest
import torch

import config
from chat import Context, Role, parse, turn_text
from config import Config
from grpo import advantages, grpo_loss, make_batch, token_weights, trained_rows
from rollout import EXITS, Limits, converse
from tools import Call, Task, World
from user_sim import Heard

ROOT = Path(__file__).parents[1]
CFG = Config(tasks=1, group_size=4, minibatches=1, kl=0.0, max_len=10, overlong="train")
LIMITS = Limits(max_turns=2, max_new=2, max_len=100, max_malformed=9)
TAKE, END = 6, 7  # what the agent can sample: TAKE END is a call, END alone says "Done.", TAKE TAKE is cut off


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ── The world ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Tape:
    """Chance, played back: the first choices are given, the rest take option 0. Notes what there was to choose."""

    def __init__(self, given):
        self.given, self.taken, self.nature, self.decisions = given, [], 1.0, []

    def choose(self, options: int) -> int:
        i = self.given[len(self.taken)] if len(self.taken) < len(self.given) else 0
        self.taken.append((i, options))
        return i

    def chance(self, p: float) -> bool:
        """True with probability p."""
        yes = self.choose(2) == 0
        self.nature *= p if yes else 1 - p
        return yes

    def agent(self, seen: tuple[int, ...]) -> int:
        """The policy's next token after the tokens `seen`."""
        token = (TAKE, END)[self.choose(2)]
        self.decisions.append((seen, token))
        return token


def every_path(run):
    """All outcomes of run(tape), each with its tape: an odometer over the choices that were made."""
    given = []
    while True:
        tape = Tape(given)
        yield tape, run(tape)
        taken = tape.taken
        while taken and taken[-1][0] == taken[-1][1] - 1:
            taken.pop()
        if not taken:
            return
        given = [i for i, _ in taken[:-1]] + [taken[-1][0] + 1]


class TinyChat:
    """Chat with a token a message."""

    end_ids = frozenset({END})
    words = {"Please take one.": 1, "taken": 2, "it jams": 3, "Really?": 4, "Bye": 5}  # noqa: RUF012

    parse = staticmethod(parse)

    def start(self, system, tools, stream):
        ctx = Context(stream)
        ctx.extend([0], Role.SYSTEM)
        return ctx

    def hear(self, ctx, text, role=Role.USER):
        ctx.extend([self.words[text]], role)
        ctx.open_turn = len(ctx.ids)

    def observe(self, ctx, results):
        for text in results:
            self.hear(ctx, text, Role.TOOL)

    def said(self, ctx):
        return "Done." if ctx.ids[ctx.open_turn :] == [END] else turn_text([Call("take", {})])

    def close(self, ctx):
        ctx.open_turn = None


class Shelf:
    """Domain and user. One thing is to be taken; the tool jams with probability `jams`, the user insists with 0.3."""

    system = tools = user_tools = None

    def __init__(self, tape, jams):
        self.tape, self.jams = tape, jams

    def world(self, task):
        def take(world) -> str:
            if self.tape.chance(self.jams):
                return "it jams"
            world.edit("shelf", "taken")["n"] += 1
            return "taken"

        def once(world) -> str:  # the gold action: it never jams
            world.edit("shelf", "taken")["n"] += 1
            return "taken"

        return World(task, {"take": take, "once": once})

    def open(self):
        return Heard("Please take one.")
        yield

    def reply(self, text):
        return Heard("Really?") if self.tape.chance(0.3) else Heard("Bye", ended=True)
        yield

    ctx = None


TASK = Task("t", "train", "k", {"shelf": {"taken": {"n": 0}}}, (Call("once", {}),), (), None)


def conversation(tape, jams):
    """One episode, every choice of it the tape's. The policy sees `jams` too, so that tasks share no parameter."""
    shelf = Shelf(tape, jams)
    talk = converse(TASK, shelf, shelf, TinyChat(), LIMITS, (0,))
    try:
        sample = next(talk)
        while True:
            for _ in range(sample.max_new):
                token = tape.agent((jams, *sample.ctx.ids))
                sample.ctx.sampled(token, -1.0)
                if token == END:
                    break
            sample = talk.send(None)
    except StopIteration as stop:
        return stop.value


@dataclasses.dataclass(frozen=True)
class Listed:
    """All conversations of one task. Trajectory.member is the index in these lists."""

    trajectories: list
    nature: list[float]  # the probability of what user and tool did
    logp: list[list[torch.Tensor]]  # log π of each token the agent chose, with gradient
    theta: list[torch.Tensor]  # the policy: two logits for everything it can have seen

    @property
    def P(self) -> list[torch.Tensor]:
        """The probability of each conversation, with gradient."""
        return [n * torch.stack(logp).sum().exp() for n, logp in zip(self.nature, self.logp, strict=True)]

    @property
    def J(self) -> torch.Tensor:
        """The expected reward Σ_τ P(τ) r(τ)."""
        return sum(p * t.reward for p, t in zip(self.P, self.trajectories, strict=True))

    def gradient(self, of: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.autograd.grad(of, self.theta, retain_graph=True))


@functools.cache
def listed(jams: float) -> Listed:
    paths = {}  # those that no estimator can tell apart are one
    for tape, t in every_path(lambda tape: conversation(tape, jams)):
        key = (*tape.decisions, t.states, t.reward, EXITS[t.exit].trained)
        paths[key] = (paths.get(key, (0.0,))[0] + tape.nature, tape.decisions, t)
    paths = list(paths.values())
    g = torch.Generator().manual_seed(0)
    theta = {}
    for seen in dict.fromkeys(
        seen for _, decisions, _ in paths for seen, _ in decisions
    ):  # better than chance, far from perfect
        right = END if seen[-1] in (TAKE, TinyChat.words["taken"]) else TAKE
        theta[seen] = torch.randn(2, generator=g)
        theta[seen][right - TAKE] += 1.5
        theta[seen].requires_grad_()
    logp = [[theta[seen].log_softmax(-1)[token - TAKE] for seen, token in decisions] for _, decisions, _ in paths]
    trajectories = []
    for i, (*_, t) in enumerate(paths):  # the sampler notes log-probs of this very policy
        noted = iter(logp[i])
        logprobs = tuple(next(noted).item() if role == Role.AGENT else math.nan for role in t.roles)
        trajectories.append(dataclasses.replace(t, member=i, logprobs=logprobs))
    return Listed(trajectories, [nature for nature, *_ in paths], logp, list(theta.values()))


def expected_estimator(task: Listed, cfg: Config) -> torch.Tensor:
    """−E[∇loss] over all groups: one batch of all of them, each weighing as much as it is probable."""
    P, n = [p.item() for p in task.P], cfg.group_size
    rows, A, weights = [], [], []
    for members in itertools.combinations_with_replacement(range(len(P)), n):
        orders = math.factorial(n) / math.prod(map(math.factorial, collections.Counter(members).values()))
        chance = orders * math.prod(P[i] for i in members)
        if pairs := trained_rows([task.trajectories[i] for i in members], cfg):
            trained, credit = zip(*pairs, strict=True)
            rows += trained
            A += credit
            weights += [chance * w for w in token_weights(trained, cfg)]
    logp = torch.stack([p for t in rows for p in task.logp[t.member]])
    return -task.gradient(grpo_loss(logp, make_batch(rows, A, weights), cfg)[0])


# ── What the estimators are worth ────────────────────────────────────────────────────────────────────────────────────

EASY, HARD = 0.05, 0.95  # how often the tool jams
CONSTANT = dataclasses.replace(CFG, mean="constant")


def factor(of: torch.Tensor, exact: torch.Tensor) -> float:
    """How much of `exact` there is in `of`."""
    return float(of @ exact / (exact @ exact))


def test_the_list_is_whole_and_holds_every_exit():
    task = listed(EASY)
    assert len(task.P) == 12 and sum(task.P).item() == pytest.approx(1, abs=1e-14)
    assert {t.exit for t in task.trajectories} == {"user_ended", "turn_limit", "reply_full"}
    assert task.J.item() > 0.5 and listed(HARD).J.item() < 0.05
    assert {r.count(Role.AGENT) for r in (t.roles for t in task.trajectories)} == {1, 2, 3, 4}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("skip", [True, False])
def test_rloo_with_a_constant_mean_is_the_gradient_of_the_expected_reward(n, skip):
    """And dr_grpo is (G − 1)/G of it."""
    task = listed(EASY)
    exact = task.gradient(task.J)
    for kind, share in (("rloo", 1), ("dr_grpo", (n - 1) / n)):
        cfg = dataclasses.replace(CONSTANT, advantage=kind, group_size=n, skip_equal=skip)
        assert torch.allclose(cfg.max_len * expected_estimator(task, cfg), share * exact, atol=1e-13)
    assert exact.abs().max() > 0.01


def grpo_factor(p: float, n: int, eps: float = 1e-6) -> float:
    """E[A | success] − E[A | failure], over the number of other members that succeed: what multiplies the gradient of
    the expected reward, if rewards are 0 and 1.
    """
    total = 0.0
    for others in range(n):
        chance = math.comb(n - 1, others) * p**others * (1 - p) ** (n - 1 - others)
        for own in (0, 1):
            mean = (others + own) / n
            total += chance * abs(own - mean) / (math.sqrt(mean * (1 - mean)) + eps)
    return total


@pytest.mark.parametrize("jams", [EASY, HARD])
@pytest.mark.parametrize("n", [2, 4])
def test_dividing_by_the_std_multiplies_a_tasks_gradient_by_what_its_difficulty_says(jams, n):
    task, cfg = listed(jams), dataclasses.replace(CONSTANT, group_size=n)
    want = grpo_factor(task.J.item(), n) * task.gradient(task.J)
    assert torch.allclose(cfg.max_len * expected_estimator(task, cfg), want, atol=1e-13)


ROWS = {
    "rloo, constant": {"advantage": "rloo"},
    "grpo, constant": {},
    "rloo, sequence": {"advantage": "rloo", "mean": "sequence"},
    "rloo, token": {"advantage": "rloo", "mean": "token"},
    "grpo, sequence (the GRPO paper)": {"mean": "sequence"},
    "grpo, token (the default here)": {"mean": "token"},
    "rloo, constant, overlong mask": {"advantage": "rloo", "overlong": "mask"},
    "rloo, constant, turn credit 1": {"advantage": "rloo", "turn_credit": 1.0},
}


@functools.cache
def biases() -> dict[str, tuple[float, float]]:
    """For each row: the cosine of the expected estimator over both tasks with the exact gradient, and how much the hard
    task's gradient counts relative to the easy one's (1 is right)."""
    tasks = [listed(EASY), listed(HARD)]
    exact = [t.gradient(t.J) for t in tasks]
    out = {}
    for name, changes in ROWS.items():
        got = [expected_estimator(t, dataclasses.replace(CONSTANT, **changes)) for t in tasks]
        cosine = torch.nn.functional.cosine_similarity(torch.cat(got), torch.cat(exact), dim=0)
        out[name] = cosine.item(), factor(got[1], exact[1]) / factor(got[0], exact[0])
    return out


def tables() -> list[str]:
    """The tables of docs/algorithm.md, line by line."""
    p = [listed(jams).J.item() for jams in (EASY, HARD)]
    lines = [
        f"| advantage, mean | cosine with ∇J | the hard task (J = {p[1]:.2f}) against the easy one (J = {p[0]:.2f}) |"
    ]
    lines += ["|---|---|---|"] + [
        f"| {name} | {cosine:.4f} | {ratio:.2f} |" for name, (cosine, ratio) in biases().items()
    ]
    ps = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
    lines += ["| success p | " + " | ".join(f"{p:g}" for p in ps) + " |", "|---" * (len(ps) + 1) + "|"]
    lines += ["| grpo's factor, G = 8 | " + " | ".join(f"{grpo_factor(p, 8):.2f}" for p in ps) + " |"]
    return lines


def test_which_choices_are_biased_and_the_docs_say_by_how_much():
    for name, (cosine, ratio) in biases().items():
        assert (cosine == pytest.approx(1, abs=1e-12) and ratio == pytest.approx(1, abs=1e-12)) == (
            name == "rloo, constant"
        ), name
    assert biases()["grpo, constant"][1] > 1.05  # dividing by the std favours what nearly always fails (or succeeds)
    docs = (ROOT / "docs" / "algorithm.md").read_text()
    missing = [line for line in tables() if line not in docs]
    assert not missing, "docs/algorithm.md is stale: paste what `PYTHONPATH=. python tests/test_enumerated.py` prints"


def test_a_member_whose_user_failed_changes_nothing_for_the_others():
    """With any number of broken members, at any place: the rest gets what a group without them would get."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5]
    for kind in config.CHOICES["advantage"]:
        alone = advantages(rewards, kind)
        for places in itertools.combinations(range(8), 3):
            rest = iter(rewards)
            mixed = [None if i in places else next(rest) for i in range(8)]
            got = advantages(mixed, kind)
            assert [a for i, a in enumerate(got) if i not in places] == alone and all(got[i] == 0 for i in places)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print("\n".join(tables()))
