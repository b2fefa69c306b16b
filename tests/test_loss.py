"""The loss and the update against a twin in plain Python floats: every combination of choices, and the invariances."""

import dataclasses
import functools
import itertools
import math
import random
import threading

import pytest
import torch
from safetensors.torch import load_file

import config
import grpo
import model as models
from chat import Context, Role, UserError
from config import Config
from grpo import KL, Batch, Guard, grpo_loss, make_batch, micro_batches, token_weights, trained_rows, update
from kernels.logprob import linear_logprob
from rollout import Trajectory
from run import Clock

CFG = Config(max_len=60, tasks=3, group_size=4, minibatches=1, clip_low=0.2, clip_high=0.28, temperature=0.7)
VOCAB = 500


@pytest.fixture(autouse=True)
def float64():
    """Everything in double precision, so that what is equal in exact arithmetic is equal to about 1e-13."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ── Episodes at random ───────────────────────────────────────────────────────────────────────────────────────────────

EXIT = {
    1.0: "user_ended",
    0.0: "turn_limit",
    None: "user_failed",
    "cut": "context_full",
}  # what was earned → how it ended


def episode(rng: random.Random, earned, fresh) -> Trajectory:
    """Turns of the agent between others' tokens; `fresh()` gives each token an id of its own."""
    ids, roles, logprobs, states = [fresh()], [Role.TEMPLATE], [math.nan], []
    for _ in range(rng.randrange(1, 4)):
        states.append(rng.choice("abc"))
        for role, n in ((Role.USER, 2), (Role.AGENT, rng.randrange(1, 4)), (Role.TEMPLATE, 1)):
            for _ in range(n):
                ids.append(fresh())
                roles.append(role)
                logprobs.append(rng.uniform(-3, -0.1) if role == Role.AGENT else math.nan)
    reward = 0.0 if earned == "cut" else earned
    return Trajectory(
        task="t", kind="k", split="train", member=0, stream=(0,), ids=tuple(ids), roles=tuple(map(int, roles)),
        logprobs=tuple(logprobs), exit=EXIT[earned], reward=reward, diff=(), turns=(), metrics={}, states=tuple(states),
    )  # fmt: skip


def episodes(seed: int = 0) -> list[list[Trajectory]]:
    """Four groups: mixed; with a broken user and a cut member; all equal; all but one broken."""
    rng, count = random.Random(seed), itertools.count(1)
    plan = [[1.0, 0.0, 0.0, 1.0], [1.0, None, "cut", 0.0], [0.0, 0.0, 0.0, 0.0], [None, 1.0, None, None]]
    return [[episode(rng, earned, lambda: next(count) % VOCAB) for earned in row] for row in plan]


# ── The twin: the whole objective on plain lists ─────────────────────────────────────────────────────────────────────


def mean(values):
    return sum(values) / len(values)


def twin_advantages(rewards, kind):
    """A of each reward; None stays None."""
    known = [r for r in rewards if r is not None]
    out = []
    for r in rewards:
        if r is None:
            out.append(None)
        elif len(set(known)) < 2:
            out.append(0.0)
        elif kind == "rloo":
            out.append(r - (sum(known) - r) / (len(known) - 1))
        else:
            std = math.sqrt(mean([x * x for x in known]) - mean(known) ** 2)
            out.append((r - mean(known)) / (std + 1e-6 if kind == "grpo" else 1))
    return out


def twin_rows(groups, cfg):
    """[(ids of the agent's tokens, A of each)] of the members that are trained on."""
    rows = []
    for group in groups:
        rewards = [t.reward for t in group]
        if sum(r is not None for r in rewards) < 2:
            continue
        for t, A in zip(group, twin_advantages(rewards, cfg.advantage), strict=True):
            tokens, credit, turn = [], [], -1
            for i, role in enumerate(t.roles):
                if role == 3:
                    turn += t.roles[i - 1] != 3
                    extra = 0.0
                    if cfg.turn_credit and A is not None:
                        visits = [
                            (other.reward, other is t) for other in group for s in other.states if s == t.states[turn]
                        ]
                        step = twin_advantages([reward for reward, _ in visits], cfg.advantage)
                        extra = cfg.turn_credit * next(a for a, (_, mine) in zip(step, visits, strict=True) if mine)
                    tokens.append(t.ids[i])
                    credit.append(None if A is None else A + extra)
            cut = t.exit == "context_full" and cfg.overlong == "mask"
            if A is not None and not cut and (not cfg.skip_equal or any(credit)):
                rows.append((tokens, credit))
    return rows


def twin_loss(rows, cfg, logp, sampled, old, ref):
    """logp, sampled, old, ref: log-probs by token id. The mean over one minibatch of these rows."""
    total, everything = 0.0, sum(len(tokens) for tokens, _ in rows)
    old = old if cfg.tis else sampled
    for tokens, credit in rows:
        share = {
            "token": 1 / everything,
            "sequence": 1 / len(rows) / len(tokens),
            "constant": cfg.minibatches / (cfg.tasks * cfg.group_size) / cfg.max_len,
        }[cfg.mean]
        for t, A in zip(tokens, credit, strict=True):
            among = tokens if cfg.ratio == "sequence" else [t]
            rho = math.exp(mean([logp[u] - old[u] for u in among]))
            objective = min(rho * A, min(max(rho, 1 - cfg.clip_low), 1 + cfg.clip_high) * A)
            if cfg.dual_clip and A < 0:
                objective = max(objective, cfg.dual_clip * A)
            if cfg.tis:
                objective *= min(math.exp(mean([old[u] - sampled[u] for u in among])), cfg.tis)
            d = logp[t] - ref[t]
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[cfg.kl_estimator]
            if cfg.kl_ratio:
                kl *= math.exp(logp[t] - sampled[t])
            total += share * (-objective + cfg.kl * kl)
    return total


def twin_slopes(rows, cfg, logp, *fixed):
    """∂L/∂logp by token id: central differences of the twin."""
    slopes, h = {}, 1e-6
    for t in (t for tokens, _ in rows for t in tokens):
        up, down = (twin_loss(rows, cfg, logp | {t: logp[t] + d}, *fixed) for d in (h, -h))
        slopes[t] = (up - down) / (2 * h)
    return slopes


# ── The loss ─────────────────────────────────────────────────────────────────────────────────────────────────────────

KLS = [
    {"kl": 0.0},
    {"kl": 0.3, "kl_estimator": "k2"},
    {"kl": 0.3, "kl_estimator": "k3"},
    {"kl": 0.3, "kl_estimator": "k1", "kl_ratio": True},
    {"kl": 0.3, "kl_estimator": "k3", "kl_ratio": True},
]


def combinations(**choices):
    """Every config that these choices allow and `check_objective` lets through."""
    for values in itertools.product(*choices.values()):
        changes = {}
        for name, value in zip(choices, values, strict=True):
            changes |= value if isinstance(value, dict) else {name: value}
        if not (changes.get("turn_credit") and changes.get("ratio") == "sequence"):
            cfg = dataclasses.replace(CFG, **changes)
            config.check_objective(cfg)
            yield cfg


def tables(seed=1):
    """log π_θ, sampler, old, ref by token id: far enough apart that every clip acts."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(VOCAB, generator=g) * 0.6 - 1.5 for _ in range(4)]


def our_loss(groups, cfg, logp, old, ref, tokens=40):
    """The real thing: groups → rows → micro-batches → loss, with log-probs looked up by token id."""
    rows, A = zip(*[pair for g in groups for pair in trained_rows(g, cfg)], strict=True)
    total = 0.0
    for batch in micro_batches(rows, A, tokens, token_weights(rows, cfg)):
        look = lambda table, batch=batch: table[batch.targets]
        batch = dataclasses.replace(batch, old=look(old) if cfg.tis else None, ref=look(ref) if cfg.kl else None)
        total = total + grpo_loss(look(logp), batch, cfg)[0]
    return total


def sampled_of(groups):
    return {i: p for g in groups for t in g for i, p in zip(t.ids, t.logprobs, strict=True)}


@pytest.mark.parametrize("kind, over", [(a, m) for a in config.CHOICES["advantage"] for m in config.CHOICES["mean"]])
def test_the_whole_loss_equals_its_float64_twin_for_every_combination(kind, over):
    groups, n = episodes(), 0
    logp, _, old, ref = tables()
    plain = [dict(enumerate(x.tolist())) for x in (logp, old, ref)]
    for cfg in combinations(
        advantage=[kind], mean=[over], ratio=["token", "sequence"], kl=KLS, dual_clip=[0.0, 1.5], tis=[0.0, 1.3],
        cut=[{"overlong": "mask"}, {"overlong": "train", "skip_equal": False}], turn_credit=[0.0, 0.7],
    ):  # fmt: skip
        want = twin_loss(twin_rows(groups, cfg), cfg, plain[0], sampled_of(groups), *plain[1:])
        assert float(our_loss(groups, cfg, logp, old, ref)) == pytest.approx(want, abs=1e-12, rel=1e-12), cfg
        n += 1
    assert n == 120


def test_gradient_equals_the_twins_and_gradcheck():
    groups = episodes()
    logp, _, old, ref = tables()
    plain = [dict(enumerate(x.tolist())) for x in (logp, old, ref)]
    for cfg in combinations(ratio=["token", "sequence"], kl=KLS, dual_clip=[0.0, 1.5], tis=[0.0, 1.3]):
        x = logp.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, cfg=cfg: our_loss(groups, cfg, x, old, ref), x, fast_mode=True)
        our_loss(groups, cfg, x, old, ref).backward()
        slopes = twin_slopes(twin_rows(groups, cfg), cfg, plain[0], sampled_of(groups), *plain[1:])
        want = torch.tensor([slopes.get(i, 0.0) for i in range(VOCAB)])
        assert (x.grad - want).abs().max() < 1e-8, cfg
        assert all(x.grad[i] == 0 for i in range(VOCAB) if i not in slopes)  # users, tools, template: exactly nothing


def loose(logp, sampled, A, **more):
    """A batch of one row whose tokens have these log-probs and advantages."""
    n, none = len(A), torch.zeros(len(A), dtype=torch.long)
    return Batch(none[None], none, none, none, none, sampled, A, torch.full((n,), 1 / n), **more)


def test_an_unchanged_policy_has_ratio_one_and_the_policy_gradient():
    logp, A = torch.randn(50).requires_grad_(), torch.randn(50)
    for ratio in ("token", "sequence"):
        cfg = dataclasses.replace(CFG, kl=0.5, ratio=ratio)
        a = A if ratio == "token" else A[:1].expand(50)
        loss, stats = grpo_loss(logp, loose(logp, logp.detach(), a, ref=logp.detach()), cfg)
        [grad] = torch.autograd.grad(loss, logp)
        assert torch.allclose(grad, -a / 50) and float(stats["gap_max"]) == 0 and float(stats["kl"]) == 0


def test_the_default_loss_is_plain_grpo_to_the_bit():
    """The formula of the paper, term by term in the order in which it is computed, at single precision."""
    torch.set_default_dtype(torch.float32)
    g = torch.Generator().manual_seed(0)
    logp, sampled, ref, A = (torch.randn(999, generator=g) * 0.3 for _ in range(4))
    cfg, grads = Config(), []
    for ours in (True, False):
        x = logp.clone().requires_grad_()
        if ours:
            loss = grpo_loss(x, loose(x, sampled, A, ref=ref), cfg)[0]
        else:
            ratio = (x - sampled).exp()
            surrogate = torch.minimum(ratio * A, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * A)
            kl = (ref - x).exp() - (ref - x) - 1
            loss = (-surrogate + cfg.kl * kl).sum() / 999
        loss.backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_each_end_of_the_clip_stops_the_side_it_is_for():
    """A > 0 stops above 1 + ε_hi, A < 0 below 1 − ε_lo; dual clip stops A < 0 above c. Gradient −ρ·A elsewhere."""
    rho = torch.tensor([0.5, 0.85, 1.25, 1.35, 5.0])
    for dual, A, moves in ((0.0, 1.0, [1, 1, 1, 0, 0]), (0.0, -1.0, [0, 1, 1, 1, 1]), (3.0, -1.0, [0, 1, 1, 1, 0])):
        cfg = dataclasses.replace(CFG, kl=0.0, dual_clip=dual)
        x = rho.log().requires_grad_()
        loss, stats = grpo_loss(x, loose(x, torch.zeros(5), torch.full((5,), A)), cfg)
        loss.backward()
        assert torch.allclose(x.grad, -rho * A * torch.tensor(moves) / 5)
        assert float(stats["clip_frac"]) == 5 - sum(moves)


def test_truncated_importance_weights_use_the_trainers_own_old_log_probs():
    """A sampler that disagrees by a factor: ρ starts at 1 all the same; a token weighs min(π_old / π_sampler, C)."""
    old, A = torch.full((4,), -1.0), torch.ones(4)
    sampled = old - torch.tensor([0.0, 0.1, 2.0, -1.0])  # π_old / π_sampler = 1, 1.1, 7.4, 0.37
    cfg = dataclasses.replace(CFG, kl=0.0, tis=2.0)
    x = old.clone().requires_grad_()
    loss, stats = grpo_loss(x, loose(x, sampled, A, old=old), cfg)
    loss.backward()
    assert torch.allclose(x.grad, -torch.tensor([1.0, math.exp(0.1), 2.0, math.exp(-1)]) / 4)
    assert float(stats["tis_cut"]) == 1 and float(stats["clip_frac"]) == 0


def test_untruncated_weights_make_up_for_another_sampler_at_a_single_decision():
    """Σ_x π_sampler(x) · c ρ A = Σ_x π_θ(x) A: its gradient is the policy gradient of π_θ, whatever sampled."""
    logits = torch.randn(9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q, A = (torch.randn(9, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    q, p = q.log_softmax(-1), logits.log_softmax(-1)
    want = torch.autograd.grad(-(p.exp() * A).sum(), logits, retain_graph=True)[0]
    for C, exact in ((1e9, True), (1.0, False)):
        cfg = dataclasses.replace(CFG, kl=0.0, tis=C)
        batch = dataclasses.replace(loose(p, q, A, old=p.detach()), weight=q.exp())
        got = torch.autograd.grad(grpo_loss(p, batch, cfg)[0], logits, retain_graph=True)[0]
        assert torch.allclose(got, want, atol=1e-13) == exact


def kl_terms(estimator, weighted):
    """By enumeration of a vocabulary: expected value and gradient of β·KL_t in the loss, for tokens that π sampled."""
    torch.manual_seed(0)
    logits, ref = torch.randn(11).requires_grad_(), torch.randn(11).log_softmax(-1)
    p = logits.log_softmax(-1)
    cfg = dataclasses.replace(CFG, kl=1.0, kl_estimator=estimator, kl_ratio=weighted)
    batch = loose(p, p.detach(), torch.zeros(11), ref=ref)
    loss = grpo_loss(p, dataclasses.replace(batch, weight=p.detach().exp()), cfg)[0]
    exact, reverse = (p.exp() * (p - ref)).sum(), (ref.exp() * (ref - p)).sum()  # KL(π ‖ ref), KL(ref ‖ π)
    slope = lambda y: torch.autograd.grad(y, logits, retain_graph=True)[0]
    return float(loss.detach()), slope(loss), float(exact.detach()), slope(exact), slope(reverse)


@pytest.mark.parametrize(
    "estimator, weighted", [("k1", False), ("k1", True), ("k2", False), ("k3", False), ("k3", True)]
)
def test_kl_estimators_against_the_exact_kl_and_its_gradient(estimator, weighted):
    value, slope, exact, right, reverse = kl_terms(estimator, weighted)
    assert (value == pytest.approx(exact, abs=1e-12)) == (estimator != "k2")  # k2's value is biased
    want = {"k1": torch.zeros(11), "k2": right, "k3": reverse}[estimator]  # as a loss, without the ratio
    assert torch.allclose(slope, right if weighted else want, atol=1e-12)
    assert (right - reverse).norm() > 0.1 * right.norm() and value > 0


def test_a_weighted_kl_stays_exact_when_the_policy_has_moved():
    """Σ_x π_sampler(x) · ρ k(x) = KL(π_θ ‖ ref) whatever sampled; without ρ it is not."""
    q, p, ref = (torch.randn(9, generator=torch.Generator().manual_seed(i)).log_softmax(-1) for i in range(3))
    exact = float((p.exp() * (p - ref)).sum())
    for estimator, weighted in (("k1", True), ("k3", True), ("k3", False)):
        cfg = dataclasses.replace(CFG, kl=1.0, kl_estimator=estimator, kl_ratio=weighted)
        batch = dataclasses.replace(loose(p, q, torch.zeros(9), ref=ref), weight=q.exp())
        assert (float(grpo_loss(p, batch, cfg)[0]) == pytest.approx(exact, abs=1e-12)) == weighted
    assert KL.keys() == set(config.CHOICES["kl_estimator"])


# ── Batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tiny_model(seed=0):
    torch.manual_seed(seed)
    model = models.Decoder(
        models.ModelConfig("qwen3", VOCAB, 16, 24, 2, 4, 2, 4, rope_theta=1e4, tie_word_embeddings=True, qk_norm=True)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.3 if p.dim() == 1 else 0.0, 0.3)
    return model


def flat(seed=0):
    """(rows, A) of the trained members of random groups."""
    pairs = [pair for g in episodes(seed) for pair in trained_rows(g, CFG)]
    return [t for t, _ in pairs], [a for _, a in pairs]


def test_batch_predicts_every_agent_token_from_the_position_before_it_and_nothing_else():
    rows, A = flat()
    batch = make_batch(rows, A, [0.1 * i for i in range(len(rows))])
    columns = batch.row, batch.at, batch.targets, batch.sampled, batch.advantage, batch.weight
    got = {(r, at + 1): rest for r, at, *rest in zip(*(c.tolist() for c in columns), strict=True)}
    want = {
        (i, j): [t.ids[j], t.logprobs[j], A[i], 0.1 * i]
        for i, t in enumerate(rows)
        for j, r in enumerate(t.roles)
        if r == 3
    }
    assert got == want
    assert all(batch.ids[i, : len(t.ids)].tolist() == list(t.ids) for i, t in enumerate(rows))


@pytest.mark.parametrize("eos", [0, 5])
def test_the_mask_comes_from_roles_never_from_ids(eos):
    """Padding has id 0; an end token with that id, or any other, is trained all the same."""
    ctx = Context((0,))
    for token, role in zip((7, 8, eos, 9, 5, eos), (0, 3, 3, 1, 3, 3), strict=True):
        ctx.sampled(token, -1.0) if role == 3 else ctx.extend([token], role)
    long = Context((1,))
    long.extend([1] * 8, Role.USER)
    long.sampled(2, -1.0)
    batch = make_batch([ctx, long], [1.0, 1.0])
    assert [(r, a + 1) for r, a in zip(batch.row.tolist(), batch.at.tolist(), strict=True)] == [
        (0, 1), (0, 2), (0, 4), (0, 5), (1, 8)]  # fmt: skip


@pytest.mark.parametrize("break_it", [
    lambda t: dataclasses.replace(t, logprobs=(*t.logprobs[:-2], math.nan, math.nan)),  # AGENT, never sampled
    lambda t: dataclasses.replace(t, roles=(*t.roles[:-2], Role.USER, Role.USER)),  # sampled, not AGENT
    lambda t: dataclasses.replace(t, roles=(Role.AGENT, *t.roles[1:]), logprobs=(-1.0, *t.logprobs[1:])),
    lambda t: dataclasses.replace(t, ids=t.ids[:-1]),
])  # fmt: skip
def test_a_batch_refuses_agent_tokens_without_log_probs_and_the_reverse(break_it):
    rows, A = flat()
    with pytest.raises(AssertionError):
        make_batch([rows[0], break_it(rows[1])], A[:2])


def test_masked_positions_have_exactly_no_gradient_and_padding_changes_nothing():
    policy = tiny_model()
    rows, A = flat()
    batch = make_batch(rows, A, token_weights(rows, CFG))
    other = batch.ids.clone()
    for i, t in enumerate(rows):
        other[i, len(t.ids) :] = 7  # what stands in the padding can't matter, pad == eos or not
    assert torch.equal(*(grpo.logprobs(policy, dataclasses.replace(batch, ids=ids))[0] for ids in (batch.ids, other)))
    caught = {}
    hook = policy.model["norm"].register_forward_hook(
        lambda _, __, hidden: caught.update(hidden=hidden) or hidden.retain_grad()
    )
    logp = grpo.logprobs(policy, batch)[0]
    # The KL term moves every token.
    grpo_loss(logp, dataclasses.replace(batch, ref=logp.detach() - 1), CFG)[0].backward()
    hook.remove()
    touched = caught["hidden"].grad.abs().sum(-1)[0] > 0  # rows end to end
    assert touched.tolist() == [role == Role.AGENT for t in rows for role in (*t.roles[1:], None)]


def gradient(policy, batches, cfg):
    policy.zero_grad()
    ref, total = tiny_model(9), 0.0
    for b in batches:
        with torch.no_grad():
            b = dataclasses.replace(b, ref=grpo.logprobs(ref, b, cfg.temperature)[0])
        loss = grpo_loss(grpo.logprobs(policy, b, cfg.temperature)[0], b, cfg)[0]
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in policy.parameters()])


@pytest.mark.parametrize("over", config.CHOICES["mean"])
@pytest.mark.parametrize("ratio", config.CHOICES["ratio"])
def test_loss_and_gradient_do_not_depend_on_micro_batches_row_order_padding_or_packing(over, ratio):
    rows, A = flat(3)
    policy, cfg = tiny_model(), dataclasses.replace(CFG, kl=0.1, mean=over, ratio=ratio)
    loss, grad = gradient(policy, [make_batch(rows, A, token_weights(rows, cfg))], cfg)
    assert grad.abs().max() > 1e-4
    order = list(range(len(rows)))
    for tokens in (50, 1):  # a few batches; one row each, without padding
        random.Random(tokens).shuffle(order)
        mixed, credit = [rows[i] for i in order], [A[i] for i in order]
        cut = micro_batches(mixed, credit, tokens, token_weights(mixed, cfg))
        assert tokens > 1 or len(cut) == len(rows)
        again, grad2 = gradient(policy, cut, cfg)
        assert again == pytest.approx(loss, abs=1e-13) and (grad2 - grad).abs().max() < 1e-13


def test_a_constant_mean_does_not_depend_on_what_was_sampled_or_dropped():
    rows, _ = flat()
    for over in config.CHOICES["mean"]:
        cfg = dataclasses.replace(CFG, mean=over)
        same = token_weights(rows, cfg)[:3] == token_weights(rows[:3], cfg) == token_weights(rows[3:6], cfg)
        assert same == (over == "constant")
    assert token_weights(rows[:1], cfg) == [1 / (3 * 4 * 60)]  # tasks · G · max_len, in one minibatch


def test_temperature_is_the_samplers():
    """The numbers of huggingface/trl#4159: logits 2, 1, 0, −1 sampled at temperature 0.6."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for target, want in ((0, -0.20806040496530195), (1, -1.8747270716319686)):
        got = linear_logprob(torch.ones(1, 1), logits.T, torch.tensor([target]), 0.6)[0]
        assert float(got) == pytest.approx(want, abs=1e-12)


# ── The update ───────────────────────────────────────────────────────────────────────────────────────────────────────


def slow_logprobs(model, t, T):
    """log π of each agent token of one trajectory: full softmax, no batch, no mask."""
    logp = (model(torch.tensor([t.ids]))[0] @ model.head.T / T).log_softmax(-1)
    return {t.ids[i]: logp[i - 1, t.ids[i]] for i, role in enumerate(t.roles) if role == 3}


@pytest.fixture
def threads():
    """Sets the number of torch's threads; what it was afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def slow_update(policy, reference, groups, cfg, lr):
    """One step of plain gradient descent for all of `groups`, with the twin's slopes, for each epoch."""
    trained = {t.ids: t for g in groups for t in g}
    rows = twin_rows(groups, cfg)
    rows_of = [next(t for t in trained.values() if set(tokens) <= set(t.ids)) for tokens, _ in rows]
    every = lambda model: functools.reduce(dict.__or__, (slow_logprobs(model, t, cfg.temperature) for t in rows_of))
    number = lambda table: {k: float(v.detach()) for k, v in table.items()}
    old, ref = number(every(policy)), number(every(reference))
    for _ in range(cfg.epochs):
        logp = every(policy)
        slopes = twin_slopes(rows, cfg, number(logp), sampled_of(groups), old, ref)
        policy.zero_grad()
        sum(slopes[t] * logp[t] for t in slopes).backward()
        with torch.no_grad():
            for p in policy.parameters():
                p -= lr * p.grad


@pytest.mark.parametrize("changes", [
    {"kl": 0.1},
    {"kl": 0.1, "epochs": 3, "ratio": "sequence", "mean": "sequence", "advantage": "rloo"},
    {"kl": 0.1, "epochs": 2, "tis": 1.5, "mean": "constant", "turn_credit": 0.5, "skip_equal": False},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("at_once", [1, 3])
def test_an_update_is_gradient_descent_on_the_loss_written_out(changes, at_once, threads, tmp_path):
    """Micro-batches, one denominator, temperature in policy, old and reference: against one trajectory at a time."""
    threads(at_once)
    cfg, groups = dataclasses.replace(CFG, micro_tokens=40, grad_clip=1e9, **changes), episodes(5)[:2]
    policy, slow, reference = tiny_model(1), tiny_model(1), tiny_model(2)
    start = [p.clone() for p in policy.parameters()]
    rows = [pair for g in groups for pair in trained_rows(g, cfg)]
    sgd = torch.optim.SGD(policy.parameters(), lr=0.05)
    values = update(policy, reference, sgd, rows, cfg, 0, Clock(), Guard(tmp_path / "skipped", 1))
    slow_update(slow, reference, groups, cfg, 0.05)
    for p, q, before in zip(policy.parameters(), slow.parameters(), start, strict=True):
        assert (p - q).abs().max() < 1e-7 < (p - before).abs().max()
    n = sum(len(tokens) for tokens, _ in twin_rows(groups, cfg))
    assert values["trained_tokens"] == n * cfg.epochs and values["skipped_updates"] == 0


def test_micro_batches_at_once_give_the_bits_of_one_after_the_other(tmp_path, threads, monkeypatch):
    """Whichever is done first: with several threads the first batch is held back until the second is under way."""
    cfg = dataclasses.replace(CFG, micro_tokens=10, kl=0.1, tis=1.5, epochs=3)
    rows = [pair for g in episodes(5)[:2] for pair in trained_rows(g, cfg)]
    loss, results = grpo.grpo_loss, []
    for n in (1, 2, 3):
        begun, second = itertools.count(1), threading.Event()

        def held_back(logp, batch, cfg, n=n, begun=begun, second=second):
            if (turn := next(begun)) == 2:
                second.set()
            assert n == 1 or turn > 1 or second.wait(60)
            return loss(logp, batch, cfg)

        threads(n)
        monkeypatch.setattr(grpo, "grpo_loss", held_back)
        policy, reference = tiny_model(1), tiny_model(2)
        sgd = torch.optim.SGD(policy.parameters(), lr=0.05)
        values = update(policy, reference, sgd, rows, cfg, 0, Clock(), Guard(tmp_path / "skipped", 1))
        results.append((values, [p.clone() for p in policy.parameters()]))
        assert next(begun) > 6  # micro-batches there were
    for values, parameters in results[1:]:
        assert values == results[0][0]
        assert all(map(torch.equal, parameters, results[0][1]))


def test_minibatches_share_out_the_rows_and_no_reference_is_asked_when_it_weighs_nothing(tmp_path):
    """β = 0: the reference may be missing. Two minibatches are two steps, each with its own denominator."""
    cfg = dataclasses.replace(CFG, minibatches=2, kl=0.0, grad_clip=1e9, mean="sequence")
    rows, A = flat()
    policy, slow = tiny_model(1), tiny_model(1)
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.05)
    guard = Guard(tmp_path / "skipped", 1)
    values = update(policy, None, sgd(policy), list(zip(rows, A, strict=True)), cfg, 4, Clock(), guard)
    assert "kl" not in values
    order = list(zip(rows, A, strict=True))
    random.Random(f"minibatches {cfg.seed} 4").shuffle(order)
    for part in (order[0::2], order[1::2]):
        one = dataclasses.replace(cfg, minibatches=1)
        update(slow, None, sgd(slow), part, one, 4, Clock(), guard)
    assert all(torch.allclose(p, q, atol=1e-13) for p, q in zip(policy.parameters(), slow.parameters(), strict=True))


def test_the_logged_loss_is_the_mean_over_the_trained_tokens(tmp_path):
    """Negative losses too."""
    cfg = dataclasses.replace(CFG, kl=0.0, micro_tokens=40)
    policy = tiny_model(1)
    rows = [(dataclasses.replace(t, logprobs=exact(policy, t, cfg)), 1.0) for t in flat()[0]]
    sgd = torch.optim.SGD(policy.parameters(), lr=0.5)
    values = update(policy, None, sgd, rows, cfg, 0, Clock(), Guard(tmp_path / "skipped", 1))
    assert values["loss"] == pytest.approx(-1.0)


def test_the_gap_between_sampler_and_trainer_is_taken_before_the_first_update(tmp_path):
    cfg = dataclasses.replace(CFG, kl=0.0, minibatches=2)
    policy = tiny_model(1)
    rows = [(dataclasses.replace(t, logprobs=exact(policy, t, cfg)), 1.0) for t in flat()[0]]
    sgd = torch.optim.SGD(policy.parameters(), lr=0.5)
    values = update(policy, None, sgd, rows, cfg, 0, Clock(), Guard(tmp_path / "skipped", 1))
    assert values["gap_mean"] <= values["gap_max"] < 1e-12 and values["grad_norm"] > 0.1


def exact(policy, t, cfg):
    """The log-probs that a faultless sampler would have noted for t."""
    known = slow_logprobs(policy, t, cfg.temperature)
    return tuple(float(known[i].detach()) if role == 3 else math.nan for i, role in zip(t.ids, t.roles, strict=True))


def test_an_update_that_is_not_finite_is_skipped_saved_and_ends_the_run_if_it_goes_on(tmp_path):
    cfg = dataclasses.replace(CFG, kl=0.0)
    rows, _ = flat()
    wild = dataclasses.replace(rows[0], logprobs=tuple(-1e4 if p < 0 else p for p in rows[0].logprobs))  # ρ = ∞
    policy, guard = tiny_model(1), Guard(tmp_path / "skipped", 3)
    adam = torch.optim.AdamW(policy.parameters(), lr=0.1)
    before = [p.clone() for p in policy.parameters()]
    once = lambda row, step: update(policy, None, adam, [(row, -1.0)], cfg, step, Clock(), guard)
    for step in (0, 1):
        values = once(wild, step)
        assert values["skipped_updates"] == 1 and values["trained_tokens"] == 0
        assert all(math.isfinite(v) for k, v in values.items() if not k.startswith("gap"))
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(policy.parameters(), before, strict=True))
    saved = load_file(tmp_path / "skipped" / "step1-update0.safetensors")
    assert saved["0.ids"][0].tolist() == list(wild.ids) and saved["0.sampled"].min() == -1e4
    assert once(rows[1], 2)["skipped_updates"] == 0 and guard.in_a_row == 0  # a good one: counted from the start again
    once(wild, 3)
    once(wild, 4)
    with pytest.raises(UserError, match=r"step5-update0: .* 3 times in a row") as error:
        once(wild, 5)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
