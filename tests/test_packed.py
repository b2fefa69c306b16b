"""The CPU sampler's fast way (packed.py, kernels/decode.py) against float64, numpy, and the plain operations beside it."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from test_model import VARIANTS, randomised, some_ids

import packed
from kernels import decode
from model import Base, KVCache, add_lora
from packed import Packed, numbers
from rollout import draw

VARIANTS = {name: dataclasses.replace(cfg, head_dim=16) for name, cfg in VARIANTS.items()}
FAMILIES = list(VARIANTS)


def computed(model, ids, pieces, fast):
    """Hidden states [R, L, H] of ids [R, L] fed in pieces: each piece is how many tokens each row gets next."""
    R, L = ids.shape
    cache, fed = KVCache(model.cfg, R + 1, L + 3, model.head.dtype, packed=True), np.zeros(R, np.int64)
    slots, out = np.arange(R)[::-1] + 1, torch.zeros(R, L, model.cfg.hidden_size, dtype=model.head.dtype)
    fast.matrices.refresh()
    for piece in pieces:
        rows = np.repeat(np.arange(R), piece)
        at = np.concatenate([np.arange(f, f + n) for f, n in zip(fed, piece, strict=True)])
        with torch.inference_mode():
            out[rows, at] = fast.forward(ids[rows, at].numpy(), slots[rows], at, cache)
        fed += piece
    assert (fed == L).all()
    return out


PIECES = [(3, 1, 9), (1, 1, 1), (5, 7, 1), (1, 1, 1), (10, 10, 8)]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_decoder_computes(family):
    """Ragged pieces of several rows, against one float64 forward of whole rows."""
    model = randomised(VARIANTS[family]).float()
    ids = some_ids(model.cfg, 60).view(3, 20)
    with torch.no_grad():
        want = copy.deepcopy(model).double()(ids)
        got = computed(model, ids, PIECES, Packed(model))
    assert float((got - want).abs().max() / want.abs().max()) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES[:4])
def test_half_precision_is_no_further_from_float64_than_the_plain_operations(family):
    model = randomised(VARIANTS[family]).bfloat16()
    ids = some_ids(model.cfg, 60).view(3, 20)
    with torch.no_grad():
        want, plain = copy.deepcopy(model).double()(ids), model(ids).double()
        got = computed(model, ids, PIECES, Packed(model)).double()
    error = lambda x: float((x - want).square().mean().sqrt())
    assert error(got) <= 1.5 * error(plain)


def test_adapters_are_on_for_the_policy_and_off_for_its_base():
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
        error = (computed(half, ids, PIECES, Packed(half)).double() - half(ids).double()).abs().max()
        assert error < 0.1 * with_adapters.abs().max()


def test_weights_written_in_place_are_packed_anew(monkeypatch):
    """By an optimizer too; small matrices and those in oneDNN's blocks."""
    model = randomised(VARIANTS[FAMILIES[0]]).float()
    ids, optimizer = some_ids(model.cfg, 60).view(3, 20), torch.optim.AdamW(model.parameters(), lr=0.05)
    for least in (packed.BLOCKED, 1):
        monkeypatch.setattr(packed, "BLOCKED", least)
        packed._MATRICES.pop(model, None)
        fast = Packed(model)
        for _ in range(2):
            with torch.no_grad():
                assert torch.allclose(computed(model, ids, PIECES, fast), model(ids), atol=1e-4)
            model(ids).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            model.head.mul_(1.5)
            fast.matrices.refresh()
            hidden = torch.randn(5, model.cfg.hidden_size)
            assert torch.allclose(fast.matrices.head(hidden), hidden @ model.head.T, atol=1e-4)


def test_each_core_has_a_part_of_the_rows_and_nothing_changes():
    model, before = randomised(VARIANTS[FAMILIES[0]]).float(), torch.get_num_threads()
    rng, R = np.random.default_rng(0), 23
    new = [rng.integers(0, model.cfg.vocab_size, rng.integers(1, 30)).tolist() for _ in range(R)]
    u, results = rng.random(R), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            cache = KVCache(model.cfg, R, 40, packed=True)
            results.append(Packed(model).sample(new, np.arange(R), np.zeros(R, np.int64), u, 0.9, cache))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for tokens, logprobs in results[1:]:
        assert (tokens == results[0][0]).all() and np.allclose(logprobs, results[0][1], atol=1e-5)


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
    tokens, logprobs = np.empty(len(u), np.int64), np.empty(len(u))
    decode.draw(numbers(logits), u, temperature, tokens, logprobs)
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
    tokens, logprobs = np.empty(3, np.int64), np.empty(3)
    decode.draw(numbers(logits), np.full(3, 0.5), 1.0, tokens, logprobs)
    assert np.isfinite(logprobs).tolist() == [True, False, False] and (tokens >= 0).all() and (tokens < 600).all()


def test_exp_is_good_to_two_units_in_the_last_place():
    x = np.concatenate([np.linspace(-87, 88, 200_001), [-87.5, -1e4, -np.inf, 0.0]]).astype(np.float32)
    got, want = decode._exponentials, np.exp(x.astype(np.float64))
    y = x.copy()
    got(y, np.float32(0))
    good = x >= -87
    assert (np.abs(y[good] - want[good]) <= 2 * np.spacing(want[good].astype(np.float32))).all() and not y[~good].any()


def test_bf16_is_rounded_as_torch_rounds_it():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32))
    x = x[x.isfinite()][None]
    out, zero = torch.empty_like(x, dtype=torch.bfloat16), torch.zeros_like(x, dtype=torch.bfloat16)
    gate = torch.cat([torch.full_like(x, 100.0), x], 1)  # silu(100) = 100
    decode.swiglu(gate.numpy(), (wide := torch.empty_like(x)).numpy())
    assert torch.allclose(wide, 100 * x, rtol=1e-6)
    half = x.bfloat16()
    decode.add_norm(
        numbers(half.clone()), numbers(zero), numbers(torch.ones(x.shape[1]).bfloat16()), 1e-6, numbers(out)
    )
    some = torch.randn(7, 96)
    one, weight = some.bfloat16(), torch.rand(96).bfloat16() + 0.5
    normed = torch.empty_like(one)
    total = one.clone()
    delta = torch.randn(7, 96).bfloat16()
    decode.add_norm(numbers(total), numbers(delta), numbers(weight), 1e-6, numbers(normed))
    assert torch.equal(total, one + delta)
    want = torch.nn.functional.rms_norm((one + delta).double(), (96,), weight.double(), 1e-6)
    assert (normed.double() - want).abs().max() <= 2**-8 * want.abs().max()


def test_without_numba_the_plain_operations_sample_the_same(monkeypatch):
    from test_rollout import CHAT, MODEL, talk, worst_gap

    from rollout import Sampler, rollout

    run = lambda: rollout([talk(i, 3) for i in range(12)], {"agent": Sampler(MODEL, CHAT.end_ids, 5, 600)})
    fast = [ctx.ids for ctx in run()]
    monkeypatch.setattr(packed, "numba", None)
    contexts = run()
    assert [ctx.ids for ctx in contexts] == fast and worst_gap(MODEL, contexts) <= 1e-5
