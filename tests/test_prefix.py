"""A beginning that several rows share, computed once: the same hidden states and gradients as computing it in each row."""

import dataclasses
import math
import random

import pytest
import torch
from test_model import PlainFlash, every_variant, randomised, some_ids, tiny, with_lora

import model as model_module
from chat import Role
from config import KEYS, Config
from grpo import Guard, common, grpo_loss, logprobs, micro_batches, update
from rollout import Trajectory
from run import Clock


@pytest.fixture(params=[False, True], ids=["masked", "flash"])
def either_attention(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(model_module, "flash_attn", PlainFlash())
        monkeypatch.setattr(model_module, "_flash", lambda like: True)


def gradients(model, hidden, pull):
    model.zero_grad()
    (hidden * pull).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def both_ways(model, shared, lengths, L=20):
    """(hidden, gradients) computed with the first `shared` tokens once, and in each row. Padding has no part in it."""
    ids, lengths = some_ids(model.cfg, len(lengths), L), torch.tensor(lengths)
    ids[1:, :shared] = ids[0, :shared]
    real = (torch.arange(L) < lengths[:, None])[..., None]
    pull = torch.randn(*ids.shape, model.cfg.hidden_size, dtype=model.head.dtype) * real
    for prefix in (shared, 0):
        hidden = model(ids, lengths, prefix)
        yield hidden * real, gradients(model, hidden, pull)


@every_variant
def test_hidden_states_and_gradients_equal_the_unshared_computation(cfg, either_attention):
    torch.manual_seed(0)
    for dtype, close in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        (hidden, grads), (wanted, wanted_grads) = both_ways(randomised(cfg, dtype=dtype), 9, [20, 11, 20, 16])
        scale = lambda t: max(1.0, float(t.detach().abs().max()))
        assert (hidden - wanted).abs().max() <= close * scale(wanted)
        assert grads.keys() == wanted_grads.keys()
        for name, grad in grads.items():
            assert (grad - wanted_grads[name]).abs().max() <= close * scale(wanted_grads[name]), name


@pytest.mark.parametrize(
    "shared, lengths", [(9, [20]), (1, [20, 20]), (19, [20, 20, 20]), (10, [11, 11, 11]), (3, [4, 20])]
)
def test_any_split_of_prefix_and_rest(shared, lengths, either_attention):
    (hidden, grads), (wanted, wanted_grads) = both_ways(randomised(tiny()).double(), shared, lengths)
    torch.testing.assert_close(hidden, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_adapters_and_checkpointing(checkpointing, either_attention):
    model = with_lora(tiny())[0].double()
    model.checkpointing = checkpointing
    (hidden, grads), (wanted, wanted_grads) = both_ways(model, 9, [20, 13, 17])
    assert grads and all("lora" in name for name in grads)
    torch.testing.assert_close(hidden, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- batches and whole updates


def episodes(seed, n, beginning, V=61, sampled_beginning=0):
    """n episodes that begin alike; the last `sampled_beginning` tokens of that beginning were sampled, by all of them."""
    rng, out = random.Random(seed), []
    for i in range(n):
        rest = [rng.randrange(V) for _ in range(rng.randrange(4, 20))]
        roles = [Role.SYSTEM] * (len(beginning) - sampled_beginning) + [Role.AGENT] * sampled_beginning
        roles += [Role.USER if j % 3 else Role.AGENT for j in range(len(rest))]
        lp = [-3.0 - rng.random() if r == Role.AGENT else math.nan for r in roles]
        ids = (*beginning, *rest)
        out.append(
            Trajectory(f"t{seed}", "k", "train", i, (i,), ids, tuple(roles), tuple(lp), "user_ended", 1.0, (), (), {})
        )
    return out


def some_rows():
    rng = random.Random(5)
    policy = [rng.randrange(61) for _ in range(15)]
    return [
        *episodes(1, 5, [*policy, 1, 2], sampled_beginning=2),
        *episodes(2, 5, [*policy, 3, 4, 5]),
        *episodes(3, 2, [60]),
    ]


def test_common_is_what_brute_force_finds():
    rows = some_rows()
    for a in rows:
        for b in rows:
            n = max(i for i in range(min(len(a.ids), len(b.ids))) if a.ids[:i] == b.ids[:i])
            assert common(a, b) == n


@pytest.mark.parametrize("tokens", [1, 60, 100, 10_000])
def test_batches_share_what_their_rows_begin_with_and_keep_to_their_size(tokens):
    rows = some_rows()
    A = [float(i) for i in range(len(rows))]
    batches = micro_batches(rows, A, tokens, share=True)
    seen = []
    for b in batches:
        B = len(b.ids)
        assert b.shared < b.lengths.min() and (b.ids[:, : b.shared] == b.ids[0, : b.shared]).all()
        assert B == 1 or b.lengths.sum() - (B - 1) * b.shared <= tokens
        seen += [tuple(ids[:n].tolist()) for ids, n in zip(b.ids, b.lengths, strict=True)]
    assert sorted(seen) == sorted(r.ids for r in rows)
    assert tokens < 100 or computed(batches) < 0.75 * sum(len(r.ids) for r in rows)


def computed(batches):
    return sum(int(b.lengths.sum()) - b.shared * (len(b.ids) - 1) for b in batches)


@pytest.mark.parametrize("tokens", [200, 10_000])
def test_groups_with_prompts_of_their_own_are_kept_apart(tokens):
    """In any order they come, and if there is room for all of them in one batch: it would share nothing."""
    rows = [*episodes(1, 8, range(30)), *episodes(2, 8, range(30, 60))]
    random.Random(0).shuffle(rows)
    batches = micro_batches(rows, [1.0] * 16, tokens, share=True)
    assert all(b.shared == 30 for b in batches if len(b.ids) > 1) and len(batches) <= 4


@pytest.mark.parametrize("tokens", [300, 600, 1200, 5000])
def test_a_larger_batch_is_never_dearer(tokens):
    """Six groups with the same policy and a long beginning of their own: another group's row would leave only the policy to
    be shared. Each row's own tokens, and each group's beginning once for each batch, are all that is computed."""
    rows = [t for g in range(6) for t in episodes(g, 8, [*range(20), *([20 + g] * 60)])]
    batches = micro_batches(rows, [1.0] * len(rows), tokens, share=True)
    own = sum(len(t.ids) - 80 for t in rows)
    assert computed(batches) <= own + 80 * len(batches) and len(batches) <= 6 * (2 + 600 // tokens)
    assert all(int(b.lengths.sum()) <= KEYS * tokens for b in batches)


def test_log_probs_of_tokens_in_the_shared_part_count_for_every_row(either_attention):
    """Where all members sampled the same first words, these are trained in each, with each one's advantage."""
    model = randomised(tiny()).double()
    rows = episodes(7, 4, [5] * 10, sampled_beginning=4)
    cfg, A, grads = dataclasses.replace(Config(), kl=0.0), [1.0, -0.5, 2.0, 0.1], []
    for share in (True, False):
        [batch] = micro_batches(rows, A, 10_000, share=share)
        assert batch.shared == (10 if share else 0) and (batch.at < 9).sum() >= 12
        model.zero_grad()
        logp = logprobs(model, batch)[0]
        grpo_loss(logp, batch, cfg)[0].backward()
        grads.append([logp.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)  # the log-prob kernel works in fp32


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_an_update_moves_the_weights_the_same_way(kl, tmp_path):
    rows = [(t, (-1.0) ** t.member) for t in some_rows()]
    moved = []
    for share in (True, False):
        model, reference = randomised(tiny(), seed=1), randomised(tiny(), seed=2)
        cfg = dataclasses.replace(Config(), share_prefix=share, kl=kl, minibatches=2, tis=2.0, micro_tokens=100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = update(model, reference, optimizer, rows, cfg, 0, Clock(), Guard(tmp_path, 5))
        moved.append([torch.tensor([values["loss"], values["entropy"]]), *model.parameters()])
    torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_not_finite_is_saved_with_its_prefix(tmp_path):
    batches = micro_batches(some_rows(), [1.0] * 12, 10_000, share=True)
    assert not Guard(tmp_path / "skipped", 5).passes(math.nan, 1.0, batches, "name")
    assert (tmp_path / "skipped" / "name.safetensors").exists()
