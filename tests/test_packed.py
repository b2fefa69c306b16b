"""The CPU sampler's fast way (packed.py, kernels/decode.py) against float64, numpy, and the plain operations beside it."""

import copy
import dataclasses
import math
import threading
import time

import numpy as np
import pytest
import torch
from test_model import VARIANTS, randomised, some_ids
from torch import nn

import packed
from kernels import decode
from model import Base, KVCache, add_lora, rope_table, rotate, side_by_side
from packed import Packed, numbers
from rollout import draw

VARIANTS = {name: dataclasses.replace(cfg, head_dim=16) for name, cfg in VARIANTS.items()}
FAMILIES = list(VARIANTS)
BIASED = next(name for name, cfg in VARIANTS.items() if cfg.attention_bias)


def computed(model, ids, pieces, fast):
    """Hidden states [R, L, H] of ids [R, L] fed in pieces: each piece is how many tokens each row gets next."""
    R, L = ids.shape
    cache, fed = KVCache(model.cfg, R + 1, L + 3, model.head.dtype, transposed=True), np.zeros(R, np.int64)
    slots, out = np.arange(R)[::-1] + 1, torch.zeros(R, L, model.cfg.hidden_size, dtype=model.head.dtype)
    for piece in pieces:
        rows = np.repeat(np.arange(R), piece)
        at = np.concatenate([np.arange(f, f + n) for f, n in zip(fed, piece, strict=True)])
        with torch.inference_mode():
            out[rows, at] = fast.forward(ids[rows, at].numpy(), slots[rows], at, cache)
        fed += piece
    assert (fed == L).all()
    return out


PIECES = [(3, 1, 9), (1, 1, 1), (5, 7, 1), (1, 1, 1), (10, 10, 8)]


@pytest.fixture(params=[False, True], ids=["plain", "tiled"])
def tiled(request, monkeypatch):
    """All matrices as torch keeps them (those of these small models are), or all in oneDNN's tiles."""
    if request.param:
        monkeypatch.setattr(packed, "TILED", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_decoder_computes(family, tiled):
    """Ragged pieces of several rows, against one float64 forward of whole rows."""
    model = randomised(VARIANTS[family]).float()
    ids = some_ids(model.cfg, 60).view(3, 20)
    with torch.no_grad():
        want = copy.deepcopy(model).double()(ids)
        got = computed(model, ids, PIECES, Packed(model))
    assert float((got - want).abs().max() / want.abs().max()) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES[:4])
def test_half_precision_is_no_further_from_float64_than_the_plain_operations(family, tiled):
    model = randomised(VARIANTS[family]).bfloat16()
    ids = some_ids(model.cfg, 60).view(3, 20)
    with torch.no_grad():
        want, plain = copy.deepcopy(model).double()(ids), model(ids).double()
        got = computed(model, ids, PIECES, Packed(model)).double()
    error = lambda x: float((x - want).square().mean().sqrt())
    assert error(got) <= 1.5 * error(plain)


def test_adapters_are_on_for_the_policy_and_off_for_its_base(tiled):
    model = randomised(VARIANTS[FAMILIES[0]]).float()
    before = copy.deepcopy(model)
    ids, early = some_ids(model.cfg, 60).view(3, 20), Packed(model)  # made before there were any
    add_lora(model, 3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.2)
        with_adapters, without = model(ids), before(ids)
        assert (with_adapters - without).abs().max() > 0.01
        for its, want in ((Packed(model), with_adapters), (early, with_adapters), (Packed(Base(model)), without)):
            assert torch.allclose(computed(model, ids, PIECES, its), want, atol=1e-4)
        half = model.bfloat16()  # the same parameters, with other numbers in them
        error = (computed(half, ids, PIECES, Packed(half)).double() - half(ids).double()).square().mean().sqrt()
        assert error < 0.05 * with_adapters.square().mean().sqrt()


def test_weights_that_changed_are_packed_anew(tiled):
    """However they changed: in place, by an optimizer that says so to nobody, replaced, or only the biases."""
    model = randomised(VARIANTS[BIASED]).float()
    ids, fast = some_ids(model.cfg, 60).view(3, 20), Packed(model)
    with torch.no_grad():
        computed(model, ids, PIECES, fast)  # as they were at first
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    attention = model.model["layers"][0].self_attn

    def learn():
        model(ids).square().mean().backward()
        optimizer.step()

    changes = [
        learn,
        lambda: model.head.data.mul_(1.5),
        lambda: attention.k_proj.bias.data.add_(1.0),
        lambda: model.load_state_dict({k: 1.1 * v for k, v in model.state_dict().items()}, assign=True),
        lambda: setattr(attention.q_proj, "weight", nn.Parameter(-attention.q_proj.weight.detach())),
    ]
    logits = lambda its: its.matrices().head(computed(model, ids, PIECES, its).flatten(0, 1))
    for change in changes:
        with torch.no_grad():
            before = model(ids) @ model.head.T
        change()
        with torch.no_grad():
            want = model(ids) @ model.head.T
            assert (want - before).abs().max() > 1e-3
            fast.weights_changed()
            assert torch.allclose(logits(fast), want.flatten(0, 1), atol=1e-4)
        model.head.data.mul_(1.1)  # nobody was told, but a new one looks for itself
        with torch.no_grad():
            assert torch.allclose(logits(Packed(model)), (model(ids) @ model.head.T).flatten(0, 1), atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_core_has_a_part_of_the_rows_and_nothing_changes(threads, monkeypatch):
    model, before = randomised(VARIANTS[FAMILIES[0]]).float(), torch.get_num_threads()
    rng, R = np.random.default_rng(0), 23
    new = [rng.integers(0, model.cfg.vocab_size, rng.integers(1, 30)).tolist() for _ in range(R)]
    parts, whole = [], Packed._sample

    def seen(self, new, *more):
        parts.append((threading.get_ident(), sum(map(len, new))))
        return whole(self, new, *more)

    monkeypatch.setattr(Packed, "_sample", seen)
    u, cache = rng.random(R), KVCache(model.cfg, R, 40, transposed=True)
    try:
        torch.set_num_threads(threads)
        tokens, logprobs = Packed(model).sample(new, np.arange(R), np.zeros(R, np.int64), u, 0.9, cache)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    total = sum(map(len, new))
    # 23 rows are enough for 5 threads of 4 each.
    assert len(parts) == threads and all(abs(n - total / threads) <= 30 for _, n in parts)
    assert all((ident == threading.get_ident()) == (threads == 1) for ident, _ in parts)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        for ids, uniform, token, logprob in zip(new, u, tokens, logprobs, strict=True):
            logits = exact(torch.tensor([ids]))[0, -1] @ exact.head.T
            want = torch.log_softmax(logits / 0.9, -1)
            assert abs(float(want[token]) - logprob) <= 1e-5
            ends = want.exp().cumsum(-1)
            assert float(ends[token] - want[token].exp()) - 1e-5 <= uniform <= float(ends[token]) + 1e-5


def test_few_rows_keep_all_cores_together(monkeypatch):
    model, spread = randomised(VARIANTS[FAMILIES[0]]).float(), []
    monkeypatch.setattr(packed, "side_by_side", lambda work, parts: spread.append(parts) or map(work, parts))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for R in (7, 8):
        cache = KVCache(model.cfg, R, 40, transposed=True)
        Packed(model).sample([[1]] * R, np.arange(R), np.zeros(R, np.int64), np.full(R, 0.5), 1.0, cache)
    assert spread == [[slice(0, 4), slice(4, 8)]]


def test_a_row_beyond_the_cache_is_refused():
    """Compiled code checks no index: it would write into another row."""
    model = randomised(VARIANTS[FAMILIES[0]]).float()
    cache = KVCache(model.cfg, 2, 10, transposed=True)
    for start, fits in ((9, True), (10, False)):
        call = lambda start=start: Packed(model).sample(
            [[1], [1]], np.arange(2), np.array([0, start]), np.full(2, 0.5), 1.0, cache
        )
        if fits:
            call()
        else:
            with pytest.raises(ValueError, match="a row ends at 11, the cache holds 10 positions"):
                call()


def test_side_by_side_keeps_the_order_and_waits_when_one_fails():
    ended, began = [], threading.Barrier(2)

    def work(i):
        if i < 2:
            began.wait(10)
        if i == 0:
            raise ValueError("the first")
        time.sleep(0.2 / (1 + i))
        ended.append(i)
        return i

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(ValueError, match="the first"):
            list(side_by_side(work, [0, 1]))
        assert ended == [1]
        assert list(side_by_side(work, [5, 2, 7, 3])) == [5, 2, 7, 3]
        assert set(side_by_side(lambda i: torch.get_num_threads(), range(4))) == {1}
        begun, taken = [], []
        for i in side_by_side(lambda i: begun.append(i) or i, range(20)):
            taken.append(i)
            assert len(begun) - len(taken) <= 3  # each holds a gradient
    finally:
        torch.set_num_threads(before)


LOGITS = {
    "random": lambda g: torch.randn(40, 1300, generator=g) * 4,
    "peaked": lambda g: torch.randn(40, 700, generator=g) * 80,
    "ties": lambda g: torch.randint(0, 3, (40, 33), generator=g).float(),
    "masked": lambda g: torch.randn(40, 1024, generator=g).masked_fill(
        torch.rand(40, 1024, generator=g) < 0.9, -math.inf
    ),
    "one": lambda g: torch.randn(40, 1, generator=g),
}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LOGITS)
def test_draw_takes_the_token_that_the_cumulated_probability_says(kind, dtype, temperature):
    """By float64 in numpy: u lies within the token's share, or within rounding of it; and by the twin in torch."""
    logits = LOGITS[kind](torch.Generator().manual_seed(1)).to(dtype)
    u = np.random.default_rng(2).random(len(logits))
    u[:3] = 0.0, np.nextafter(1, 0), 0.5
    tokens, logprobs = decode.draw(numbers(logits), u, temperature)
    x = logits.double().numpy() / (temperature or 1.0)
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    rows, ends = np.arange(len(u)), p.cumsum(1)
    assert np.allclose(logprobs, np.log(p[rows, tokens]), atol=2e-5) and (p[rows, tokens] > 0).all()
    if temperature:
        low, high = ends[rows, tokens] - p[rows, tokens], ends[rows, tokens]
        assert (low - 1e-6 <= u).all() and (u <= high + 1e-6).all()
    else:
        assert (tokens == logits.float().argmax(-1).numpy()).all()
    other, others = draw(logits.float(), torch.from_numpy(u), temperature)
    same = other.numpy() == tokens
    assert same.mean() > 0.9 and np.allclose(others.numpy()[same], logprobs[same], atol=2e-5)


def test_broken_weights_are_noticed():
    logits = torch.randn(3, 600)
    logits[1, 5], logits[2] = math.nan, math.nan
    tokens, logprobs = decode.draw(numbers(logits), np.full(3, 0.5), 1.0)
    assert np.isfinite(logprobs).tolist() == [True, False, False] and (tokens >= 0).all() and (tokens < 600).all()


def test_exp_is_good_to_two_units_in_the_last_place():
    x = np.concatenate([np.linspace(-87, 88, 200_001), [-87.5, -1e4, -np.inf, 0.0]]).astype(np.float32)
    want, y = np.exp(x.astype(np.float64)), x.copy()
    decode._exponentials(y, np.float32(0))
    good = x >= -87
    assert (np.abs(y[good] - want[good]) <= 2 * np.spacing(want[good].astype(np.float32))).all() and not y[~good].any()


def same_rounding(a, b):
    """All alike but where sums in another order fall on the other side of a rounding (none, on the machines seen)."""
    return (a == b).double().mean() >= 0.99 and torch.allclose(a.double(), b.double(), rtol=2**-7)


def test_between_the_products_bf16_has_the_bits_of_torchs_own_operations():
    """Norms, SwiGLU and the turning of queries and keys round where the trainer's operations round."""
    g = torch.Generator().manual_seed(0)
    some = lambda *shape: torch.randn(*shape, generator=g).bfloat16() * 3
    x, delta, weight = some(7, 96), some(7, 96), some(96)
    total, normed = x.clone(), torch.empty_like(x)
    decode.add_norm(numbers(total), numbers(delta), numbers(weight), 1e-6, numbers(normed))
    assert torch.equal(total, x + delta)
    assert same_rounding(normed, torch.nn.functional.rms_norm(x + delta, (96,), weight, 1e-6))
    gate, up, out = some(500, 33), some(500, 33), torch.empty(500, 33, dtype=torch.bfloat16)
    decode.swiglu(numbers(torch.cat([gate, up], 1)), numbers(out))
    assert same_rounding(out, torch.nn.functional.silu(gate) * up)
    head, norm = some(50, 16), some(16)
    cos, sin = (t.bfloat16() for t in rope_table(VARIANTS[FAMILIES[0]], 50, "cpu", torch.float32))
    for w in (torch.empty(0, dtype=torch.bfloat16), norm):
        turned = np.empty((50, 16), np.float32)
        for i in range(50):
            decode.turned(*(numbers(t) for t in (head[i], w)), 1e-6, numbers(cos[i]), numbers(sin[i]), turned[i])
        normed = torch.nn.functional.rms_norm(head, (16,), w, 1e-6) if len(w) else head
        assert same_rounding(torch.from_numpy(turned).bfloat16(), rotate(normed, (cos, sin)))


def test_without_numba_the_plain_operations_sample_the_same(monkeypatch):
    from test_rollout import CHAT, MODEL, talk, worst_gap

    from rollout import Sampler, rollout

    def run(fast):
        sampler = Sampler(MODEL, CHAT.end_ids, 5, 600)
        assert (sampler.packed is not None) == fast
        return rollout([talk(i, 3) for i in range(12)], {"agent": sampler})

    fast = [ctx.ids for ctx in run(True)]
    monkeypatch.setattr(packed, "numba", None)
    contexts = run(False)
    assert [ctx.ids for ctx in contexts] == fast and worst_gap(MODEL, contexts) <= 1e-5
