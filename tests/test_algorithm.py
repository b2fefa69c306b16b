"""What surrounds the loss: advantages, exits, refilling, faulty tools, evaluation, random streams, refused choices."""

import contextlib
import dataclasses
import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import CHAT
from test_users import task_of

import config
import grpo
import model as models
import mua_rl
from chat import Context, Role, UserError
from config import Config
from domains import shop
from evaluation import PHASE, Stage, interval, pass_hat_k, scores
from grpo import advantages, trained_rows
from mua_rl import collect
from rollout import EXITS, Sampler, Trajectory
from run import Clock, State
from tools import TOOL_FAULTS, FaultyTools

CFG = Config()
SHOP = shop.Shop()


def trajectory(exit, reward, task="t", **changes):
    return Trajectory(
        task=task, kind="k", split="train", member=0, stream=(0,), ids=(1, 2), roles=(4, 3), logprobs=(math.nan, -1.0),
        exit=exit, reward=reward, diff=(), turns=(), metrics={}, **changes,
    )  # fmt: skip


# ── Advantages, exits ────────────────────────────────────────────────────────────────────────────────────────────────


def test_advantages():
    third = [-1 / 3] * 3
    assert advantages([1, 0, 0, 0]) == pytest.approx([1.7320508, *[-0.5773503] * 3], abs=1e-5)  # std ÷ n, not n − 1
    assert advantages([1, 0, 0, 0], "rloo") == pytest.approx([1, *third])
    assert advantages([1, 0, 0, 0], "dr_grpo") == pytest.approx([0.75, *[-0.25] * 3])
    assert advantages([1, None, 0]) == pytest.approx([1, 0, -1], abs=1e-5)
    assert advantages([1, 0, 1, None], "dr_grpo") == pytest.approx([1 / 3, -2 / 3, 1 / 3, 0])
    assert advantages([1, None]) == [0, 0] and advantages([None] * 3) == [0, 0, 0] and advantages([]) == []


@pytest.mark.parametrize("kind", config.CHOICES["advantage"])
def test_rewards_that_are_equal_but_for_rounding_teach_exactly_nothing(kind):
    """NVIDIA-NeMo/RL#4161: a spread of rounding errors, divided by itself, would be an advantage of 1."""
    for rewards in ([0.3] * 8, [0.1] * 7, [1.0] * 4, [0.0] * 4, [0.1 + 0.2, 0.3], [1e9, 1e9 + 1e-6], [-2.5, -2.5]):
        for dtype in (np.float64, np.float32):
            noisy = [float(r) for r in np.array(rewards, dtype=dtype) * dtype(1 / 3) * dtype(3)]
            for values in (rewards, noisy, [*noisy[:-1], float(np.nextafter(dtype(noisy[-1]), dtype(2e9)))]):
                assert set(advantages(values, kind)) == {0.0}, values
    assert advantages([0.0, 1e-3], kind)[1] > 0  # a small difference is one


def test_what_each_exit_teaches():
    """DESIGN's table: overlong episodes count in mean and std but have no gradient unless asked for; a failed simulator
    takes no part at all, and is never counted as reward 0."""
    reward = {"graded": 1.0, "zero": 0.0, "none": None}
    group = [trajectory("user_ended", 1.0), trajectory("user_ended", 0.0)]
    for exit, rule in EXITS.items():
        member = trajectory(exit, reward[rule.reward])
        for overlong in ("mask", "train"):
            rows = trained_rows([*group, member], dataclasses.replace(CFG, overlong=overlong))
            is_overlong = exit in ("context_full", "reply_full")
            assert (member in [t for t, _ in rows]) == (
                exit != "user_failed" and (overlong == "train" or not is_overlong)
            )
            win = next(a for t, a in rows if t is group[0])
            others = [1.0, 0.0] + ([reward[rule.reward]] if rule.counts else [])
            mean = sum(others) / len(others)
            std = math.sqrt(sum((r - mean) ** 2 for r in others) / len(others))
            assert win == pytest.approx((1 - mean) / std, abs=1e-4), exit
    assert {e for e, rule in EXITS.items() if rule.trained == "overlong"} == {"context_full", "reply_full"}
    assert EXITS["user_failed"] == ("none", False, False)


def test_an_episode_in_which_the_agent_never_spoke_counts_but_has_nothing_to_train():
    mute = dataclasses.replace(trajectory("user_ended", 0.0), roles=(4, 4), logprobs=(math.nan, math.nan))
    rows = trained_rows([trajectory("user_ended", 1.0), mute], CFG)
    assert [a for _, a in rows] == pytest.approx([1.0], abs=1e-5)


def test_turn_credit_needs_a_world_that_tells_its_state():
    group = [trajectory("user_ended", 1.0), trajectory("user_ended", 0.0)]
    with pytest.raises(UserError, match="--turn-credit 1"):
        trained_rows(group, dataclasses.replace(CFG, turn_credit=1.0))


def test_turn_credit_compares_turns_that_began_in_the_same_state():
    """Both start in a; one goes to b and wins, two go to c and one of them wins: in c there is something to compare."""
    turns = {"ids": (1, 2, 3, 4), "roles": (4, 3, 4, 3), "logprobs": (math.nan, -1.0, math.nan, -1.0)}
    group = [
        dataclasses.replace(trajectory("user_ended", reward), states=states, **turns)
        for reward, states in ((1.0, ("a", "b")), (1.0, ("a", "c")), (0.0, ("a", "c")))
    ]
    rows = trained_rows(group, dataclasses.replace(CFG, advantage="rloo", turn_credit=2.0))
    assert [a for _, a in rows] == [pytest.approx(a) for a in ([1.5, 0.5], [1.5, 2.5], [-3.0, -3.0])]


def test_advantages_compare_within_a_task_never_over_the_batch(monkeypatch):
    """Two tasks, one easy and one hard: what `learn` hands to the update."""
    seen, nothing = [], lambda *args, **kwargs: None
    monkeypatch.setattr(mua_rl, "update", lambda *args: seen.extend(args[3]) or {"trained_tokens": 0})
    metrics = {"turns": 1, "malformed": 0, "tools": {}, "agent_tokens": 1}
    rewards = [[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    groups = [[dataclasses.replace(trajectory("user_ended", r), metrics=metrics) for r in group] for group in rewards]
    tasks = [SHOP.task("train", 0, i) for i in range(2)]
    job = SimpleNamespace(
        cfg=dataclasses.replace(CFG, advantage="dr_grpo"), domain=SHOP, chat=CHAT, policy=None, frozen=None, guard=None,
        optimizers=[SimpleNamespace(param_groups=[])], clock=Clock(), state=State(), rollout_seconds=1.0, began=0.0,
        run=SimpleNamespace(log=nothing, episodes=nothing), progress=SimpleNamespace(step=nothing),
    )  # fmt: skip
    mua_rl.learn(job, 0, groups, tasks)
    assert [a for _, a in seen] == [0.25, 0.25, 0.25, -0.75, 0.75, -0.25, -0.25, -0.25]


# ── Refilling ────────────────────────────────────────────────────────────────────────────────────────────────────────


def refilled(cfg: Config, step: int, teaches) -> tuple[list[str], list[tuple]]:
    """(tasks in the order played, keys of the conversations) of a `collect` whose groups teach if `teaches(task)`."""
    keys, forgot = [], []

    def play(tasks, members, user, phase, step, first=0):
        assert forgot == ["agent", "user"]  # keys and values that other weights made, before anything is sampled
        keys.extend((phase, step, first + i, m) for i in range(len(tasks)) for m in range(members))
        return [[trajectory("user_ended", float(m == 0 and teaches(t)), t) for m in range(members)] for t in tasks]

    class Silent:
        def __init__(self, who):
            self.weights_changed, self.seconds = lambda: forgot.append(who), Counter()

    samplers = {who: Silent(who) for who in ("agent", "user")}
    stage = SimpleNamespace(play=play, samplers=samplers)
    domain = SimpleNamespace(task=lambda split, seed, i: f"{split} {seed} {i}")
    groups, tasks = collect(SimpleNamespace(cfg=cfg, domain=domain, stage=stage, clock=Clock()), step)
    assert [g[0].task for g in groups] == tasks
    return tasks, keys


def test_groups_that_teach_nothing_are_refilled_up_to_the_cap():
    cfg = dataclasses.replace(CFG, tasks=6, group_size=3, refill=8)
    dull = lambda task: random.Random(task).random() < 0.5
    seen = Counter()
    for step in range(20):
        tasks, keys = refilled(cfg, step, dull)
        assert (tasks, keys) == refilled(cfg, step, dull)  # a resumed run draws the same
        assert tasks[:6] == refilled(dataclasses.replace(cfg, refill=0), step, dull)[0]
        taught = sum(map(dull, tasks))
        assert len(tasks) <= 14 and (taught == 6 or (taught < 6 and len(tasks) == 14))
        assert len(set(keys)) == len(keys) == 3 * len(tasks)  # a refilled task repeats nobody's random numbers
        seen.update(tasks)
    assert max(seen.values()) == 1 and 130 < len(seen) < 280  # no task comes twice in a run
    assert len(refilled(cfg, 0, lambda t: True)[0]) == 6 and len(refilled(cfg, 0, lambda t: False)[0]) == 14


def process(saved: State, resume: str, interrupted_at=None, killed_at=None) -> list[int]:
    """One process of a run of five steps: the steps whose outcome it left in the checkpoint `saved`."""
    done, kept = [], []

    def save():
        saved.step = job.state.step
        kept.extend(done)
        done.clear()

    cfg, state = dataclasses.replace(CFG, resume=resume), dataclasses.replace(saved)
    job = SimpleNamespace(cfg=cfg, state=state, interrupted=False, wall=lambda: 0.0, save=save)
    with contextlib.suppress(mua_rl.Stop):
        for step in mua_rl.Job.steps(job, "rl", 5):
            if step == killed_at:
                break
            done.append(step)
            job.interrupted = step == interrupted_at
    return kept


@pytest.mark.parametrize("how", ["interrupted_at", "killed_at"])
def test_a_resumed_run_skips_no_step_and_repeats_none(how):
    for step in range(5):
        saved = State("rl")
        assert process(saved, "", **{how: step}) + process(saved, "run") == [0, 1, 2, 3, 4]


# ── Faulty tools ─────────────────────────────────────────────────────────────────────────────────────────────────────


def calls_of(task, p, seed):
    """(results of the gold calls, each tried until it works; the world)."""
    world = FaultyTools(SHOP, p, seed).world(task)
    world.identified = set(task.db["customers"])
    results = []
    for call in task.gold:
        while not results or results[-1] in TOOL_FAULTS:
            results.append(world.call(call.name, call.arguments))
    return results, world


def test_faulty_tools_do_nothing_say_so_and_play_again_the_same():
    task = task_of("cancel")
    assert FaultyTools(SHOP, 0.5, (0,)).greeting == SHOP.greeting and FaultyTools(SHOP, 0.5, (0,)).tools == SHOP.tools
    never, always = (FaultyTools(SHOP, p, (0,)).world(task) for p in (0.0, 1.0))
    [gold] = task.gold
    never.identified = always.identified = set(task.db["customers"])
    fresh = always.state()
    assert always.call(gold.name, gold.arguments) in TOOL_FAULTS and always.state() == fresh and not always.written
    assert (
        never.call(gold.name, gold.arguments) not in TOOL_FAULTS
        and never.state() != fresh
        and never.reward().diff == ()
    )
    assert always.reward().diff  # the goal is found with tools that work
    tries = {member: calls_of(task, 0.5, (0, 0, 0, 1, member))[0] for member in range(200)}
    assert tries == {member: calls_of(task, 0.5, (0, 0, 0, 1, member))[0] for member in range(200)}
    failed = sum(len(r) - 1 for r in tries.values())
    assert 140 < failed < 270 and len(set(map(tuple, tries.values()))) > 5  # one failure a success, in either wording
    assert all(calls_of(task, 0.5, (member,))[1].reward().diff == () for member in range(20))


def test_equal_keys_are_equal_states():
    task = task_of("cancel")
    [gold] = task.gold
    a, b = SHOP.world(task), SHOP.world(task)
    assert a.state() == b.state()
    a.identified = set(task.db["customers"])
    assert a.state() != b.state()
    b.identified = set(task.db["customers"])
    assert a.state() == b.state()
    table, rows = next(iter(task.db.items()))
    a.edit(table, next(iter(rows)))  # looked at to be written, and left as it was
    assert a.state() == b.state()
    a.call(gold.name, gold.arguments)
    assert a.state() != b.state()
    b.call(gold.name, gold.arguments)
    assert a.state() == b.state()


# ── Evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pass_hat_k_equals_enumeration_of_draws_without_replacement():
    for n in range(1, 7):
        for c in range(n + 1):
            outcomes = [1] * c + [0] * (n - c)
            for k in range(1, n + 1):
                draws = list(itertools.combinations(outcomes, k))
                assert pass_hat_k(c, n, k) == pytest.approx(sum(map(all, draws)) / len(draws))
    with pytest.raises(ValueError, match="at least 4 trials"):
        pass_hat_k(2, 3, 4)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 1.0])
def test_pass_1_and_pass_hat_k_are_unbiased(p):
    """Over all outcomes of n trials: E = p^k exactly, which (c/n)^k is not (claw-eval/claw-eval#35)."""
    for n in (1, 4, 8):
        chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        for k in range(1, n + 1):
            mean = sum(chance * pass_hat_k(c, n, k) for c, chance in enumerate(chances))
            naive = sum(chance * (c / n) ** k for c, chance in enumerate(chances))
            assert mean == pytest.approx(p**k, abs=1e-12) and (naive - p**k < 1e-12) == (k == 1 or p in (0, 1))


def test_scores_tell_how_much_they_rest_on():
    """sierra-research/tau2-bench#493: one success among failures of the service is no 100 % without its coverage."""
    results = {"A": [1.0, None, None, None], "B": [None] * 4, "C": [1.0, 0.0, 1.0, 1.0]}
    group = lambda task, n=4: [
        trajectory("user_ended" if r is not None else "user_failed", r, task) for r in results[task]
    ][:n]
    s = scores([group("A"), group("B")])
    assert (s["success"], s["n"], s["planned"], s["tasks"], s["without_result"]) == (1.0, 1, 8, 1, ["B"])
    assert s["pass_k"] == {"1": 1.0} and s["user_failed"] == 7 / 8  # and no pass^4
    s = scores([group("A"), group("B"), group("C")])
    assert s["success"] == pytest.approx((1 + 0.75) / 2) and s["pass_k"]["2"] == 0.5 and s["pass_k"]["4"] == 0
    assert s["pass_k_tasks"] == {"1": 2, "2": 1, "3": 1, "4": 1}
    nothing = scores([group("B")])
    assert nothing["success"] is None and nothing["without_result"] == ["B"] and nothing.keys() == s.keys()


@pytest.mark.parametrize("hard", [0.5, 0.9])
def test_bootstrap_intervals_cover_at_the_nominal_rate(hard):
    """Tasks of different difficulty, four trials each: about 95 of 100 intervals hold the true mean."""
    rng, runs, hits = np.random.default_rng(0), 400, 0
    for seed in range(runs):
        p = np.where(rng.random(100) < hard, 0.1, 0.8)
        lo, hi = interval(rng.binomial(4, p) / 4, seed, 400)
        hits += lo <= hard * 0.1 + (1 - hard) * 0.8 <= hi
    assert 0.92 <= hits / runs <= 0.98


def test_an_interval_at_0_or_100_percent_does_not_claim_certainty():
    """Wilson's score interval by hand: z² / (n + z²) = 3.8416 / 23.8416 at 0 of 20."""
    assert interval([0.0] * 20) == pytest.approx((0, 0.16113), abs=1e-5)
    assert interval([1.0] * 20) == pytest.approx((0.83887, 1), abs=1e-5)


# ── Random streams ───────────────────────────────────────────────────────────────────────────────────────────────────


def contexts(stage: Stage, user: str, phase: str, step: int, index: int, member: int) -> list[Context]:
    """The contexts of one conversation: the agent's and, if a model plays it, the user's."""
    task = SHOP.task("train", 0, index)
    talk = stage.conversation(task, user, phase, step, index, member)
    found = [next(talk).ctx]
    if user == "lm":
        for token in [*CHAT.encode("Hello."), CHAT.end_id]:
            found[0].sampled(token, -1.0)
        found.append(talk.send(None).ctx)
    talk.close()
    return found


def test_every_task_member_speaker_step_and_phase_has_its_own_stream():
    first = Counter()
    for seed in (0, 1):
        stage = Stage(dataclasses.replace(CFG, seed=seed), SHOP, CHAT, {})
        for phase, step, index, member in itertools.product(PHASE, (0, 1, 12), (0, 1, 2, 11), (0, 1, 2)):
            for ctx in contexts(stage, "lm", phase, step, index, member):
                first[tuple(ctx.uniform() for _ in range(2))] += 1
                again = contexts(stage, "lm", phase, step, index, member)
                assert ctx.stream in {c.stream for c in again}  # and the same one when it is played again
    assert len(first) == 2 * len(PHASE) * 3 * 4 * 3 * 2 and set(first.values()) == {1}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 10**9), min_size=1, max_size=6).map(tuple), min_size=2, max_size=20, unique=True)
)
def test_different_keys_are_different_streams(keys):
    """(1,) and (1, 0), (7, 1) and (6, 2), (12, 3) and (1, 23) included."""
    keys = list(dict.fromkeys([*keys, (1,), (1, 0), (7, 1), (6, 2), (12, 3), (1, 23)]))
    assert len({Context(key).uniform() for key in keys}) == len(keys)


def test_scripted_users_and_tool_faults_draw_from_streams_of_their_own():
    stage, drawn = Stage(CFG, SHOP, CHAT, {}), Counter()
    for phase, step, member in itertools.product(PHASE, (0, 1), range(4)):
        key = (0, PHASE[phase], step, 5, member)
        [ctx] = contexts(stage, "scripted", phase, step, 5, member)
        assert ctx.stream == (*key, 0)
        drawn.update(
            [ctx.uniform(), random.Random(f"user {key}").random(), random.Random(f"tool faults {key}").random()]
        )
    assert len(drawn) == len(PHASE) * 2 * 4 * 3


def test_members_of_a_group_differ_and_do_not_depend_on_the_slots():
    """vllm-project/vllm#11953: with one seed for all, eight samples of one prompt are one sample."""
    torch.manual_seed(0)
    shape = models.ModelConfig("qwen3", CHAT.vocab_size, 16, 16, 1, 2, 1, 8, tie_word_embeddings=True, qk_norm=True)
    flat, groups = models.Decoder(shape), []
    cfg = dataclasses.replace(CFG, max_turns=1, max_new=6, max_len=400)
    for slots in (1, 8):
        stage = Stage(cfg, SHOP, CHAT, {"agent": Sampler(flat, CHAT.end_ids, slots, 400)})
        [group] = stage.play([SHOP.task("train", 0, 0)], 8, "scripted", "rl", 0)
        groups.append([[i for i, r in zip(t.ids, t.roles, strict=True) if r == Role.AGENT] for t in group])
    assert groups[0] == groups[1] and len(set(map(tuple, groups[0]))) == 8
    stage.samplers["agent"].weights_changed()
    [rest] = stage.play([SHOP.task("train", 0, 0)], 8, "scripted", "rl", 0, first=1)
    assert len({t.ids for t in rest} | {t.ids for t in group}) == 16


# ── Refused choices ──────────────────────────────────────────────────────────────────────────────────────────────────

REFUSED = {
    "--advantage": {"advantage": "gae"},
    "--ratio": {"ratio": "turn"},
    "--mean": {"mean": "median"},
    "--kl-estimator abs": {"kl_estimator": "abs"},
    "--overlong": {"overlong": "maybe"},
    "--dual-clip 0.5": {"dual_clip": 0.5},
    "--dual-clip 1": {"dual_clip": 1.0},
    "--tis 0.5": {"tis": 0.5},
    "--tis nan": {"tis": math.nan},
    "expected gradient is 0": {"kl_estimator": "k1"},
    "without a ratio": {"kl_estimator": "k2", "kl_ratio": True},
    "no KL term": {"kl": 0.0, "kl_ratio": True},
    "over all turns; choose token": {"turn_credit": 1.0, "ratio": "sequence"},
    "--refill": {"refill": 4, "skip_equal": False},
    "--turn-credit -1": {"turn_credit": -1.0},
    "--tool-faults 2": {"tool_faults": 2.0},
    "--epochs 0": {"epochs": 0},
    "--max-skipped 0": {"max_skipped": 0},
}


@pytest.mark.parametrize("says", REFUSED)
def test_choices_that_make_no_sense_are_refused_with_the_reason(says):
    with pytest.raises(UserError, match=says) as error:
        config.check_config(dataclasses.replace(CFG, **REFUSED[says]))
    assert "\n" not in str(error.value)


def test_learning_rate_ramp():
    values = [grpo.ramp(s, 100, 5, 0.3, 0.1) for s in range(100)]
    assert values[0] == pytest.approx(0.2) and values[10] == 1.0 and values[69] == 1.0
    assert values[99] < 0.14 and all(a >= b for a, b in itertools.pairwise(values[5:]))
