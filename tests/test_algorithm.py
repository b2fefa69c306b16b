"""The algorithm against independent witnesses: plain-Python float64 twins, enumeration, and invariances."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

import model as models
import mua_rl
from chat import Context, Role
from kernels.logprob import linear_logprob
from mua_rl import Batch, Config, advantages, grpo_loss, interval, make_batch, micro_batches, pass_hat_k
from rollout import EXITS, Trajectory

CFG = Config()


def tiny_model(seed=0, vocab=23, dtype=torch.float32):
    torch.manual_seed(seed)
    cfg = models.ModelConfig(
        model_type="qwen3",
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        tie_word_embeddings=True,
        attention_bias=False,
        qk_norm=True,
        max_position_embeddings=128,
    )
    model = models.Decoder(cfg).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.3 if p.dim() == 1 else 0.0, 0.3)
    return model


def random_row(rng, length, vocab=23, sampled=True):
    """A context of random tokens and roles that begins with template text."""
    ctx = Context((rng.randrange(10**6),))
    ctx.extend([rng.randrange(vocab)], Role.TEMPLATE)
    while len(ctx.ids) < length:
        if rng.random() < 0.5:
            ctx.sampled(rng.randrange(vocab), rng.uniform(-4, -0.1)) if sampled else ctx.extend(
                [rng.randrange(vocab)], Role.AGENT
            )
        else:
            ctx.extend([rng.randrange(vocab)], rng.choice([Role.USER, Role.TOOL, Role.SYSTEM, Role.TEMPLATE]))
    return ctx


def random_rows(n, seed=0, longest=40):
    rng = random.Random(seed)
    rows = [random_row(rng, rng.randrange(2, longest)) for _ in range(n)]
    for row in rows:
        row.sampled(1, -0.5)  # at least one trained token each
    return rows, [rng.uniform(-2, 2) for _ in rows]


# ── Batch ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_batch_predicts_every_agent_token_from_the_position_before_it_and_nothing_else():
    rows, A = random_rows(7)
    batch = make_batch(rows, A)
    got = {(int(r), int(a) + 1): (int(t), float(o), float(w)) for r, a, t, o, w in zip(
        batch.row, batch.at, batch.targets, batch.old, batch.advantage, strict=True)}  # fmt: skip
    want = {}
    for i, row in enumerate(rows):
        for j, role in enumerate(row.roles):
            if role == Role.AGENT:
                want[i, j] = (row.ids[j], row.logprobs[j], A[i])
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key] == pytest.approx(value, abs=1e-6)


def test_a_batch_refuses_agent_tokens_without_log_probs_and_the_reverse():
    good = random_rows(1)[0][0]
    for change in (
        lambda c: c.logprobs.__setitem__(len(c.ids) - 1, math.nan),
        lambda c: c.roles.__setitem__(-1, Role.USER),
    ):
        ctx = random_row(random.Random(1), 9)
        ctx.sampled(2, -1.0)
        ctx.sampled(3, -1.0)
        change(ctx)
        with pytest.raises(AssertionError):
            make_batch([good, ctx], [1.0, 1.0])
    ctx = Context((0,))
    ctx.sampled(1, -1.0)
    with pytest.raises(AssertionError):
        make_batch([ctx], [1.0])


def test_padding_and_the_other_roles_have_no_gradient_and_change_nothing():
    policy = tiny_model()
    rows, A = random_rows(5)
    batch = make_batch(rows, A)
    ids = batch.ids.clone()
    for i, row in enumerate(rows):  # what stands in the padding can't matter, pad == eos or not
        ids[i, len(row.ids) :] = 7
    other = dataclasses.replace(batch, ids=ids)
    a, b = (mua_rl.logprobs(policy, x)[0] for x in (batch, other))
    assert torch.equal(a, b)
    embedded = policy.model["embed_tokens"](batch.ids).detach().requires_grad_()
    policy.model["embed_tokens"].forward = lambda _: embedded
    mua_rl.logprobs(policy, batch)[0].sum().backward()
    for i, row in enumerate(rows):
        last = max(j for j, r in enumerate(row.roles) if r == Role.AGENT)
        assert embedded.grad[i, last:].abs().max() == 0  # the last trained token itself is only predicted


def gradient(policy, batches, cfg, tokens):
    policy.zero_grad()
    ref = tiny_model(9).requires_grad_(False)
    total = 0.0
    for batch in batches:
        logp, _ = mua_rl.logprobs(policy, batch, cfg.temperature)
        with torch.no_grad():
            r = mua_rl.logprobs(ref, batch, cfg.temperature)[0]
        loss, _ = grpo_loss(logp, r, batch, cfg)
        (loss / tokens).backward()
        total += float(loss.detach()) / tokens
    return total, torch.cat([p.grad.flatten() for p in policy.parameters()])


@pytest.mark.parametrize("tokens", [10_000, 100, 1])
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_row_order(tokens):
    rows, A = random_rows(9, seed=3)
    n = sum(r.roles.count(Role.AGENT) for r in rows)
    policy, cfg = tiny_model(), dataclasses.replace(CFG, kl=0.1)
    loss, grad = gradient(policy, [make_batch(rows, A)], cfg, n)
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    cut = micro_batches([rows[i] for i in order], [A[i] for i in order], tokens)
    assert sum(len(b.targets) for b in cut) == n and (tokens > 1 or len(cut) == len(rows))
    loss2, grad2 = gradient(policy, cut, cfg, n)
    assert loss2 == pytest.approx(loss, rel=1e-5)
    assert (grad2 - grad).abs().max() <= 1e-5 * grad.abs().max()


# ── Loss against a twin without torch ────────────────────────────────────────────────────────────────────────────────


def loss_twin(logp, old, ref, A, cfg):
    """The sum over tokens, on plain floats."""
    total = 0.0
    for p, o, r, a in zip(logp, old, ref, A, strict=True):
        ratio = math.exp(p - o)
        clipped = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
        total += -min(ratio * a, clipped * a) + cfg.kl * (math.exp(r - p) - (r - p) - 1)
    return total


@pytest.mark.parametrize("clip_low, clip_high, kl", [(0.2, 0.28, 0.01), (0.1, 0.1, 0.0), (0.3, 5.0, 1.0)])
def test_loss_equals_its_float64_twin(clip_low, clip_high, kl):
    rng = random.Random(clip_high)
    cfg = dataclasses.replace(CFG, clip_low=clip_low, clip_high=clip_high, kl=kl)
    n = 200
    logp, old, ref = ([rng.uniform(-3, 0) for _ in range(n)] for _ in range(3))
    A = [rng.choice([-1.5, -0.5, 0.5, 1.5]) for _ in range(n)]
    as64 = lambda x: torch.tensor(x, dtype=torch.float64)
    none = torch.zeros(0, dtype=torch.long)
    batch = Batch(none, none, none, none, as64(old), as64(A))
    x = as64(logp).requires_grad_()
    loss, stats = grpo_loss(x, as64(ref), batch, cfg)
    assert float(loss.detach()) == pytest.approx(loss_twin(logp, old, ref, A, cfg), abs=1e-12 * n)
    loss.backward()
    for i in rng.sample(range(n), 20):  # central differences of the twin
        h, up, down = 1e-6, list(logp), list(logp)
        up[i], down[i] = logp[i] + h, logp[i] - h
        slope = (loss_twin(up, old, ref, A, cfg) - loss_twin(down, old, ref, A, cfg)) / (2 * h)
        assert float(x.grad[i]) == pytest.approx(slope, abs=1e-6)
    inside = [1 - clip_low <= math.exp(p - o) <= 1 + clip_high for p, o in zip(logp, old, strict=True)]
    flat = [not ok and (math.exp(p - o) > 1) == (a > 0) for ok, p, o, a in zip(inside, logp, old, A, strict=True)]
    assert float(stats["clip_frac"]) == sum(flat)


def test_an_unchanged_policy_has_ratio_one_and_the_policy_gradient():
    logp = torch.randn(50, dtype=torch.float64).requires_grad_()
    A = torch.randn(50, dtype=torch.float64)
    none = torch.zeros(0, dtype=torch.long)
    cfg = dataclasses.replace(CFG, kl=0.5)
    loss, stats = grpo_loss(logp, logp.detach(), Batch(none, none, none, none, logp.detach(), A), cfg)
    loss.backward()
    assert torch.allclose(logp.grad, -A) and float(stats["gap_max"]) == 0 and float(stats["kl"]) == 0


def test_k3_is_unbiased_for_the_kl_by_enumeration():
    """E_{x~π}[k3] = KL(π ‖ π_ref), summed over a whole vocabulary."""
    torch.manual_seed(0)
    p, q = torch.randn(2, 11, dtype=torch.float64).log_softmax(-1)
    k3 = (q - p).exp() - (q - p) - 1
    exact = (p.exp() * (p - q)).sum()
    assert float((p.exp() * k3).sum()) == pytest.approx(float(exact), abs=1e-12)


def test_temperature_is_the_samplers():
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 8, dtype=torch.float64), torch.randn(9, 8, dtype=torch.float64)
    targets = torch.tensor([1, 2, 3, 8])
    for T in (0.6, 1.0, 2.0):
        want = (hidden @ weight.T / T).log_softmax(-1)[torch.arange(4), targets]
        assert torch.allclose(linear_logprob(hidden, weight, targets, T)[0], want, atol=1e-12)


# ── Advantages, exits ────────────────────────────────────────────────────────────────────────────────────────────────


def test_advantages():
    assert advantages([1, 0, 0, 0]) == pytest.approx([1.7320508, -0.5773503, -0.5773503, -0.5773503], abs=1e-5)
    assert advantages([1.0] * 8) == [0.0] * 8 and advantages([0.1 + 0.2, 0.3]) == [0.0, 0.0]
    assert advantages([1, None, 0]) == pytest.approx([1, 0, -1], abs=1e-5)  # a broken member takes no part
    assert advantages([1, None]) == [0.0, 0.0] and advantages([None] * 3) == [0.0] * 3


def trajectory(exit, reward):
    return Trajectory(
        task="t", kind="k", split="train", member=0, stream=(0,), ids=(1, 2), roles=(4, 3), logprobs=(math.nan, -1.0),
        exit=exit, reward=reward, diff=(), turns=(), metrics={}, user_ids=(),
    )  # fmt: skip


def test_what_each_exit_teaches():
    """DESIGN's table: overlong episodes count in mean and std but have no gradient unless asked for; a failed simulator
    takes no part at all."""
    reward = {"graded": 1.0, "zero": 0.0, "none": None}
    group = [trajectory("user_ended", 1.0), trajectory("user_ended", 0.0)]
    for exit, rule in EXITS.items():
        member = trajectory(exit, reward[rule.reward])
        for overlong in ("mask", "train"):
            rows = mua_rl.trained_rows([*group, member], dataclasses.replace(CFG, overlong=overlong))
            is_overlong = exit in ("context_full", "reply_full")
            assert (member in [t for t, _ in rows]) == (
                exit != "user_failed" and (overlong == "train" or not is_overlong)
            )
            win = next(a for t, a in rows if t is group[0])
            others = [1.0, 0.0] + ([reward[rule.reward]] if rule.counts else [])
            mean = sum(others) / len(others)
            std = math.sqrt(sum((r - mean) ** 2 for r in others) / len(others))
            assert win == pytest.approx((1 - mean) / std, abs=1e-4), exit


def test_overlong_is_read_from_the_exit_table():
    assert {e for e, rule in EXITS.items() if rule.trained == "overlong"} == {"context_full", "reply_full"}
    assert not EXITS["user_failed"].counts and not EXITS["user_failed"].trained


# ── Evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pass_hat_k_equals_enumeration_of_draws_without_replacement():
    for n in range(1, 7):
        for c in range(n + 1):
            outcomes = [1] * c + [0] * (n - c)
            for k in range(1, n + 1):
                draws = list(itertools.combinations(outcomes, k))
                assert pass_hat_k(c, n, k) == pytest.approx(sum(map(all, draws)) / len(draws))
    with pytest.raises(ValueError):
        pass_hat_k(2, 3, 4)


def test_bootstrap_interval_covers():
    rng = random.Random(0)
    hits = 0
    for seed in range(200):
        means = [float(rng.random() < 0.6) for _ in range(60)]
        lo, hi = interval(means, seed, 400)
        hits += lo <= 0.6 <= hi
    assert 0.88 <= hits / 200 <= 0.99


def test_learning_rate_ramp():
    values = [mua_rl.ramp(s, 100, 5, 0.3, 0.1) for s in range(100)]
    assert values[0] == pytest.approx(0.2) and values[10] == 1.0 and values[69] == 1.0
    assert values[99] < 0.14 and all(a >= b for a, b in itertools.pairwise(values[5:]))
