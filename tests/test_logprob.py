"""kernels/logprob.py against its three-line twin, in value and gradient, and both against float64."""

import os

import pytest
import torch

from kernels import logprob
from kernels.logprob import linear_logprob, linear_logprob_reference


def problem(T, V, H, dtype=torch.float32, scale=1.0, seed=0):
    """Random hidden, weight, targets and the gradient that comes back for each log-prob."""
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(T, H, generator=g, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), generator=g), torch.randn(T, generator=g)


def outcome(f, hidden, weight, targets, pull, temperature=1.0, dtype=None):
    """[logprob, entropy, gradient of hidden, gradient of weight] in float64."""
    hidden, weight = (x.detach().to(dtype or x.dtype).requires_grad_() for x in (hidden, weight))
    logp, entropy = f(hidden, weight, targets, temperature)
    (logp * pull.to(logp.dtype)).sum().backward()
    return [x.detach().double() for x in (logp, entropy, hidden.grad, weight.grad)]


def errors(got, exact):
    return [(a - b).norm().item() / (b.norm().item() + 1e-30) for a, b in zip(got, exact, strict=True)]


def assert_no_worse_than_naive(p, temperature=1.0):
    """At most twice the naive formula's error at the same precision. Where a handful of numbers are compared, four units
    of rounding are allowed besides: there the naive formula may be exact by luck."""
    luck = 4 * torch.finfo(torch.float32).eps if len(p[0]) < 10 else 0.0
    exact = outcome(linear_logprob_reference, *p, temperature, dtype=torch.float64)
    naive = errors(outcome(linear_logprob_reference, *p, temperature), exact)
    ours = errors(outcome(linear_logprob, *p, temperature), exact)
    for name, a, b in zip(("logprob", "entropy", "d_hidden", "d_weight"), ours, naive, strict=True):
        assert a <= 2 * b + luck, (name, a, b)


SIZES = [(1, 1, 1), (1, 2, 3), (7, 13, 5), (33, 257, 31), (129, 801, 64), (700, 1009, 17)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_error_is_at_most_twice_the_naive_formulas(size, dtype, temperature):
    assert_no_worse_than_naive(problem(*size, dtype, scale=size[2] ** -0.5), temperature)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("rows", [1, 5, 256])
def test_float64_equals_the_reference(size, temperature, rows, monkeypatch):
    """However the tokens are cut into chunks."""
    monkeypatch.setattr(logprob, "CHUNK", 1)
    monkeypatch.setattr(logprob, "MIN_ROWS", rows)
    p = problem(*size, torch.float64)
    for ours, exact in zip(
        outcome(linear_logprob, *p, temperature), outcome(linear_logprob_reference, *p, temperature), strict=True
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


def test_gradcheck(monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK", 1)
    monkeypatch.setattr(logprob, "MIN_ROWS", 2)  # three chunks
    hidden, weight, targets, _ = problem(5, 7, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: linear_logprob(h, w, targets, 0.8)[0], (hidden, weight))


@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_peaked_logits(scale):
    p = problem(64, 300, 16, scale=scale)
    assert outcome(linear_logprob, *p)[1].median() < 1e-3  # they are peaked: next to no entropy
    assert_no_worse_than_naive(p)
    best = (p[0].detach() @ p[1].detach().T).argmax(-1)  # now the likely token: log-probs near 0
    assert_no_worse_than_naive((p[0], p[1], best, p[3]))


def test_no_tokens_at_all():
    hidden, weight, targets, pull = problem(0, 11, 3)
    logp, entropy = linear_logprob(hidden, weight, targets)
    assert logp.shape == entropy.shape == (0,)
    (logp * pull).sum().backward()
    assert hidden.grad.shape == (0, 3) and not weight.grad.any()


def test_entries_at_minus_infinity_do_not_exist():
    """A padded vocabulary: rows of `weight` that make the logit −∞. Values and gradients as if they were not there."""
    hidden, weight, targets, pull = problem(9, 20, 4, torch.float64)
    with torch.no_grad():
        hidden[:, 0] = hidden[:, 0].abs() + 0.1
        padding = torch.zeros(12, 4, dtype=torch.float64)
        padding[:, 0] = -torch.inf  # hidden[:, 0] is positive
    padded = torch.cat([weight.detach(), padding])
    exact = outcome(linear_logprob_reference, hidden, weight, targets, pull)
    ours = outcome(linear_logprob, hidden, padded, targets, pull)
    assert not ours[3][20:].any()
    ours[3] = ours[3][:20]
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(linear_logprob_reference(hidden, padded, targets)[1], exact[1])


def test_entropy_is_right_and_carries_no_gradient():
    weight = torch.zeros(50, 3, requires_grad=True)
    logp, entropy = linear_logprob(torch.ones(2, 3), weight, torch.tensor([0, 49]))
    torch.testing.assert_close(entropy, torch.full((2,), 50.0).log())
    torch.testing.assert_close(logp, -entropy)
    assert logp.requires_grad and not entropy.requires_grad


def test_only_what_is_asked_for_gets_a_gradient():
    hidden, weight, targets, _ = problem(6, 9, 4)
    linear_logprob(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    linear_logprob(hidden.detach(), weight, targets)[0].sum().backward()
    assert weight.grad is not None


def test_logits_are_never_held_whole(monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK", 2000)
    monkeypatch.setattr(logprob, "MIN_ROWS", 4)
    largest = []
    for name in ("rows_torch", "grad_rows_torch"):
        real = getattr(logprob, name)
        monkeypatch.setattr(logprob, name, lambda z, *a, real=real: (largest.append(z.numel()), real(z, *a)))
    outcome(linear_logprob, *problem(100, 200, 3))
    assert len(largest) == 20 and max(largest) <= 2000


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_none_is_refused(temperature):
    hidden, weight, targets, _ = problem(2, 3, 4)
    with pytest.raises(ValueError, match="temperature"):
        linear_logprob(hidden, weight, targets, temperature)


# On a GPU, or anywhere with TRITON_INTERPRET=1 set before Python starts.
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    logprob.triton is None or not (interpreted or torch.cuda.is_available()),
    reason="needs triton and a GPU, or TRITON_INTERPRET=1",
)


@needs_triton
@pytest.mark.parametrize("size", [(1, 1, 1), (7, 13, 5), (3, 4097, 8), (20, 801, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.3, 100.0])
def test_triton_rows_equal_their_torch_twins(size, dtype, scale, monkeypatch):
    device = "cpu" if interpreted else "cuda"
    p = [x.detach().to(device) for x in problem(*size, dtype, scale=scale)]
    exact = outcome(linear_logprob_reference, *p, 0.9, dtype=torch.float64)
    naive = errors(outcome(linear_logprob_reference, *p, 0.9), exact)
    monkeypatch.setattr(logprob, "_use_triton", lambda x: x.dtype != torch.float64)
    ours = errors(outcome(linear_logprob, *p, 0.9), exact)
    for a, b in zip(ours, naive, strict=True):
        assert a <= 2 * b + 4 * torch.finfo(torch.float32).eps


@needs_triton
def test_triton_rows_with_entries_at_minus_infinity():
    """Whole blocks of them, before and after the real ones."""
    device = "cpu" if interpreted else "cuda"
    logits = torch.full((3, 3 * 4096 + 5), -torch.inf, device=device)
    logits[:, 5000:5100] = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).to(device)
    targets = torch.tensor([5000, 5050, 5099], device=device)
    a, b = torch.empty(4, 3, device=device), torch.empty(4, 3, device=device)
    logprob.rows_triton(logits, targets, 0.5, a)
    logprob.rows_torch(logits.clone(), targets, 0.5, b)
    torch.testing.assert_close(a, b)
    grad, twin = logits.clone(), logits.clone()
    logprob.grad_rows_triton(grad, targets, 0.5, a[2], a[3], torch.ones(3, device=device))
    logprob.grad_rows_torch(twin, targets, 0.5, a[2], a[3], torch.ones(3, device=device))
    torch.testing.assert_close(grad, twin)
