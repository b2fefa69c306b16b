"""kernels/logprob.py against its naive twin, in value and gradient, and both against float64.

The Triton kernels run here on a GPU or, with TRITON_INTERPRET=1 set before Python starts, in Triton's interpreter; where
there is neither, one test starts the interpreter in a process of its own. All of that needs the package triton.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from kernels import logprob
from kernels.logprob import linear_logprob, linear_logprob_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
NAMES = ("logprob", "entropy", "d_hidden", "d_weight")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]

needs_triton = pytest.mark.skipif(logprob.triton is None, reason="needs the package triton (pip install triton)")
runs_triton = pytest.mark.skipif(
    logprob.triton is None or not (INTERPRETED or DEVICE == "cuda"),
    reason="needs the package triton and a GPU, or TRITON_INTERPRET=1",
)


def problem(T, V, H, dtype=torch.float32, scale=1.0, seed=0):
    """Random hidden, weight, targets and the gradient that comes back for each log-prob."""
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(T, H, generator=g, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype)
    return hidden, weight, torch.randint(0, V, (T,), generator=g), torch.randn(T, generator=g)


def with_logits(logits, targets, dtype):
    """A problem whose logits [T, V] are these exactly (as far as dtype holds them): the hidden states are unit vectors."""
    pull = torch.linspace(-1, 1, len(logits)) + 0.1
    return torch.eye(len(logits), dtype=dtype), logits.T.to(dtype).contiguous(), torch.tensor(targets), pull


def outcome(f, hidden, weight, targets, pull, temperature=1.0, dtype=None, entropy_grad=False, **options):
    """[logprob, entropy, gradient of hidden, gradient of weight] in float64."""
    hidden, weight = (x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in (hidden, weight))
    logp, entropy = f(hidden, weight, targets, temperature, entropy_grad=entropy_grad, **options)
    loss = (logp * pull.to(logp)).sum()
    if entropy_grad:
        loss = loss + (entropy * pull.to(logp).flip(0)).sum()
    loss.backward()
    return [x.detach().double() for x in (logp, entropy, hidden.grad, weight.grad)]


def errors(got, exact):
    """Relative errors of the four results: of norms over all problems together."""
    pooled = [[torch.cat([x.flatten() for x in xs]) for xs in zip(*outcomes, strict=True)] for outcomes in (got, exact)]
    return [(a - b).norm().item() / (b.norm().item() + 1e-30) for a, b in zip(*pooled, strict=True)]


def assert_no_worse_than_naive(*problems, temperature=1.0, backend=None, entropy_grad=False, units=0):
    """At most twice the naive formula's error at the same precision, plus so many fp32 units of rounding: where few
    numbers are compared the naive formula may be exact by luck."""
    options = {"temperature": temperature, "entropy_grad": entropy_grad}
    exact = [outcome(linear_logprob_reference, *p, dtype=torch.float64, **options) for p in problems]
    naive = errors([outcome(linear_logprob_reference, *p, **options) for p in problems], exact)
    ours = errors([outcome(linear_logprob, *p, backend=backend, **options) for p in problems], exact)
    for name, a, b in zip(NAMES, ours, naive, strict=True):
        assert a <= 2 * b + units * torch.finfo(torch.float32).eps, (name, a, b)


def problems(T, V, H, dtype, scale):
    """Enough of them that luck averages out."""
    return [problem(T, V, H, dtype, scale, seed) for seed in range(30 if T < 10 else 1)]


def assert_equal_outcomes(got, expected, **tolerance):
    for name, a, b in zip(NAMES, got, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


@pytest.fixture
def small_slices(monkeypatch):
    """Slices of 3 columns."""
    monkeypatch.setitem(logprob.SLICE, "cpu", (1, 3))


# ── Against the definition ───────────────────────────────────────────────────────────────────────────────────────────

SIZES = [(1, 1, 1), (1, 2, 3), (7, 13, 5), (33, 257, 31), (129, 801, 64), (700, 1009, 17)]


@pytest.mark.parametrize("entropy_grad", [False, True], ids=["", "entropy_grad"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_error_is_at_most_twice_the_naive_formulas(size, dtype, temperature, entropy_grad, monkeypatch):
    monkeypatch.setitem(logprob.SLICE, "cpu", (2**14, 128))  # several slices for the larger sizes
    many = problems(*size, dtype, scale=size[2] ** -0.5)
    assert_no_worse_than_naive(*many, temperature=temperature, entropy_grad=entropy_grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_slices_cost_no_precision(dtype, monkeypatch):
    """d_hidden is a sum over 250 slices: in fp32."""
    monkeypatch.setitem(logprob.SLICE, "cpu", (1, 8))
    hidden, weight, targets, pull = problem(64, 2000, 32, dtype, scale=32**-0.5)
    assert_no_worse_than_naive((hidden, weight.abs(), targets, pull))  # of one sign: the sum grows


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("columns", [1, 5, 256])
def test_float64_equals_the_reference(size, temperature, columns, monkeypatch):
    """However the vocabulary is cut into slices."""
    monkeypatch.setitem(logprob.SLICE, "cpu", (1, columns if size[1] < 500 else 50 * columns))
    p = problem(*size, torch.float64)
    ours, exact = (outcome(f, *p, temperature, entropy_grad=True) for f in (linear_logprob, linear_logprob_reference))
    assert_equal_outcomes(ours, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_gradcheck(entropy_grad, small_slices):
    hidden, weight, targets, _ = problem(5, 7, 3, torch.float64)
    targets[2] = -100
    n = 2 if entropy_grad else 1
    f = lambda h, w: linear_logprob(h, w, targets, 0.8, entropy_grad=entropy_grad)[:n]
    assert torch.autograd.gradcheck(f, (hidden.requires_grad_(), weight.requires_grad_()))


def by_hand(logits, target):
    """log π(target), entropy and ∂logprob/∂logits in Python's float64, for one token."""
    import math

    top = max(logits)
    e = [math.exp(z - top) for z in logits]
    total = math.fsum(e)
    logp = [z - top - math.log(total) for z in logits]
    pi = [x / total for x in e]
    entropy = -math.fsum(p * lp for p, lp in zip(pi, logp, strict=True) if p)
    return logp[target], entropy, [(v == target) - p for v, p in enumerate(pi)]


def test_by_hand(small_slices):
    """Neither torch's softmax nor its autograd is asked: they might err as we do."""
    logits = [0.5, -2.0, 3.25, 3.25, -80.0, 1.0, 80.0, 79.0]
    for target in range(len(logits)):
        p = with_logits(torch.tensor([logits], dtype=torch.float64), [target], torch.float64)[:3]
        logp, entropy, _, d_weight = outcome(linear_logprob, *p, torch.ones(1))
        expected = by_hand(logits, target)
        assert [logp.item(), entropy.item()] == pytest.approx(expected[:2], rel=1e-13)
        assert d_weight[:, 0].tolist() == pytest.approx(expected[2], rel=1e-12, abs=1e-60)


# ── Logits that break softmaxes ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scale", [30.0, 300.0])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_peaked_logits(scale, entropy_grad):
    p = problem(64, 300, 16, scale=scale)
    assert outcome(linear_logprob, *p)[1].median() < 1e-3  # they are peaked: next to no entropy
    assert_no_worse_than_naive(p, entropy_grad=entropy_grad)
    best = (p[0] @ p[1].T).argmax(-1)  # now the likely token: log-probs near 0
    assert_no_worse_than_naive((p[0], p[1], best, p[3]), entropy_grad=entropy_grad)


def adversarial(dtype):
    """±80, ties everywhere, all the same, one token far above or far below the rest."""
    V = 37
    rows = [[80.0 if v % 2 else -80.0 for v in range(V)], [0.0] * V, [-80.0] * V, [80.0] * V]
    rows += [[80.0] + [-80.0] * (V - 1), [-80.0] * (V - 1) + [80.0], [80.0] * (V - 1) + [-80.0]]
    rows += [[-8.0 - v for v in range(V)], [float(v % 3) for v in range(V)], [79.5 + (v == 20) / 2 for v in range(V)]]
    return with_logits(torch.tensor(rows), [1, 5, 36, 0, 0, 0, 36, 0, 2, 20], dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_adversarial_logits(dtype, entropy_grad, small_slices):
    assert_no_worse_than_naive(adversarial(dtype), entropy_grad=entropy_grad)


def padded_vocabulary(dtype=torch.float64, real=20, before=0, after=12):
    """The problem, and the same with rows of weight, before and after the real ones, whose logits are −∞."""
    hidden, weight, targets, pull = problem(9, real, 4, dtype)
    hidden[:, 0] = hidden[:, 0].abs() + 0.1
    padding = torch.zeros(before + after, 4, dtype=dtype)
    padding[:, 0] = -torch.inf  # hidden[:, 0] is positive
    padded = torch.cat([padding[:before], weight, padding[before:]])
    return (hidden, weight, targets, pull), (hidden, padded, targets + before, pull)


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("before", [0, 7])
def test_entries_at_minus_infinity_do_not_exist(entropy_grad, before, small_slices):
    """A padded vocabulary, with whole slices of padding. Values and gradients as if it were not there."""
    p, padded = padded_vocabulary(before=before)
    exact = outcome(linear_logprob_reference, *p, entropy_grad=entropy_grad)
    ours = outcome(linear_logprob, *padded, entropy_grad=entropy_grad)
    assert not ours[3][:before].any() and not ours[3][before + 20 :].any()
    ours[3] = ours[3][before : before + 20]
    assert_equal_outcomes(ours, exact)
    torch.testing.assert_close(linear_logprob_reference(*padded[:3])[1], exact[1])


def test_one_rotten_row_spoils_no_other():
    hidden, weight, targets, _ = problem(6, 9, 4)
    expected = linear_logprob(hidden, weight, targets)
    hidden[2, 1] = torch.nan
    got = linear_logprob(hidden, weight, targets)
    for a, b in zip(got, expected, strict=True):
        assert a[2].isnan()
        torch.testing.assert_close(a[[0, 1, 3, 4, 5]], b[[0, 1, 3, 4, 5]])


# ── Public faults of other implementations (shared/cases) ────────────────────────────────────────────────────────────


def case(name):
    path = Path(__file__).parents[2] / "shared" / "cases" / "public_cases.jsonl"
    if not path.exists():
        pytest.skip("../shared/cases is not here")
    return next(c for c in map(json.loads, path.read_text().splitlines()) if c["id"] == name)


def negative_logits(V):
    """T = 2 rows between −8 and −12: a padded column taken for a logit of 0 would outweigh them all."""
    return with_logits((-8.0 - torch.arange(V) % 5).expand(2, V), [0, V - 1], torch.float32)


@pytest.mark.parametrize("V", [1, 5, 127, 129, 1000, 32003, 129920, 151669, 151936, 262144])
def test_padded_columns_weigh_nothing(V):
    assert_no_worse_than_naive(negative_logits(V))


def test_case_kernel_1(small_slices):
    given = case("pub-kernel-1")
    p = with_logits(torch.tensor([given["input"]["logits"]]), [given["input"]["target"]], torch.float32)
    assert linear_logprob(*p[:3])[0].item() == pytest.approx(given["right"]["logprob"], abs=1e-6)


def assert_nothing_counts(T, V, **options):
    """All tokens ignored: zeros everywhere, no NaN."""
    hidden, weight, _, pull = problem(T, V, 3)
    for value in outcome(linear_logprob, hidden, weight, torch.full((T,), -100), pull, **options):
        assert not value.any()  # NaN would be any


def test_case_kernel_2():
    given = case("pub-kernel-2")["input"]
    assert_nothing_counts(given["T"], given["V"])


@pytest.mark.parametrize("T", [0, 1, 600])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_a_batch_in_which_nothing_counts(T, entropy_grad, small_slices):
    assert_nothing_counts(T, 7, entropy_grad=entropy_grad)


@pytest.mark.parametrize("dropped", [slice(0, 300), slice(100, 101), slice(300, 600)], ids=str)
@pytest.mark.parametrize("ignored", [-1, -100])
def test_ignored_tokens_change_nothing_for_the_others(dropped, ignored):
    """Runs of ignored tokens, longer than any block of rows, against the definition on the others alone."""
    hidden, weight, targets, pull = problem(600, 11, 3, torch.float64)
    keep = torch.ones(600, dtype=torch.bool)
    keep[dropped] = False
    masked = torch.where(keep, targets, ignored)
    got = outcome(linear_logprob, hidden, weight, masked, pull)
    alone = outcome(linear_logprob_reference, hidden[keep], weight, targets[keep], pull[keep])
    for whole, part in zip(got[:3], alone[:3], strict=True):
        assert not whole[~keep].any()
        torch.testing.assert_close(whole[keep], part)
    torch.testing.assert_close(got[3], alone[3])
    assert_equal_outcomes(outcome(linear_logprob_reference, hidden, weight, masked, pull), got)


# ── What it costs ────────────────────────────────────────────────────────────────────────────────────────────────────


def flops(*p):
    with FlopCounterMode(display=False) as counter:
        outcome(linear_logprob, *p)
    return counter.get_total_flops()


def test_ignored_tokens_cost_nothing():
    hidden, weight, targets, pull = problem(40, 30, 8, torch.bfloat16)
    masked = torch.where(torch.arange(40) % 4 == 0, targets, -100)
    assert flops(hidden, weight, targets, pull) == 8 * 40 * 30 * 8  # logits twice, d_hidden, d_weight
    assert flops(hidden, weight, masked, pull) == 8 * 10 * 30 * 8


class Largest(TorchDispatchMode):
    """The most numbers in one new tensor that any operation gave back: a view of an argument is not new."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old, new = ([x for x in tree_leaves(y) if isinstance(x, torch.Tensor)] for y in ((args, kwargs), out))
        known = {x.untyped_storage().data_ptr() for x in old}
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in new]
        pairs = zip(new, sizes, strict=True)
        self.numbers = max([self.numbers, *(n for x, n in pairs if x.untyped_storage().data_ptr() not in known)])
        return out


def largest(f, hidden, weight, targets, **options):
    """Forward and backward, the weights frozen: otherwise their gradient would be the largest tensor of all."""
    with Largest() as mode:
        logp, entropy = f(hidden.clone().requires_grad_(), weight, targets, **options)
        (logp + entropy).sum().backward()
    return mode.numbers


@pytest.mark.parametrize("T, H", [(100, 3), (3, 100)], ids=["logits", "weights"])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_neither_logits_nor_a_copy_of_the_weights_are_held_whole(T, H, entropy_grad, monkeypatch):
    monkeypatch.setitem(logprob.SLICE, "cpu", (2000, 4))
    hidden, weight, targets, _ = problem(T, 1000, H)
    numbers = largest(linear_logprob, hidden, weight, targets, entropy_grad=entropy_grad)
    statistics = 4 * 50 * T  # four of each of 50 slices
    assert numbers <= max(2000, statistics) < 1000 * max(T, H)
    assert largest(linear_logprob_reference, hidden, weight, targets) == T * 1000


def test_the_same_bits_every_time():
    p = problem(50, 3000, 8, torch.bfloat16)
    for a, b in zip(outcome(linear_logprob, *p), outcome(linear_logprob, *p), strict=True):
        assert torch.equal(a, b)


# ── The contract ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_entropy_is_right_and_carries_no_gradient_unless_asked():
    weight = torch.zeros(50, 3, requires_grad=True)
    args = torch.ones(2, 3), weight, torch.tensor([0, 49])
    logp, entropy = linear_logprob(*args)
    torch.testing.assert_close(entropy, torch.full((2,), 50.0).log())
    torch.testing.assert_close(logp, -entropy)
    assert logp.requires_grad and not entropy.requires_grad
    assert linear_logprob(*args, entropy_grad=True)[1].requires_grad


def test_only_what_is_asked_for_gets_a_gradient():
    hidden, weight, targets, _ = problem(6, 9, 4)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    linear_logprob(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    linear_logprob(hidden.detach(), weight, targets)[0].sum().backward()
    assert weight.grad is not None


def test_strided_inputs():
    hidden, weight, targets, _ = problem(6, 9, 8)
    got = linear_logprob(hidden[:, ::2], weight.T.contiguous().T[:, ::2], targets.int())
    for a, b in zip(got, linear_logprob(hidden[:, ::2].clone(), weight[:, ::2].clone(), targets), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "change, message",
    [({"temperature": t}, "temperature") for t in (0.0, -1.0, float("nan"))]
    + [
        ({"targets": torch.tensor([0, 3])}, "target 3"),
        ({"weight": torch.zeros(3, 4, dtype=torch.bfloat16)}, "bfloat16"),
    ]
    + [({"backend": "cuda"}, "backend"), ({"backend": "triton", "fp64": True}, "backend")],
    ids=str,
)
def test_bad_arguments_are_refused(change, message):
    args = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(3, 4), "targets": torch.tensor([0, 1])} | change
    if args.pop("fp64", False):
        args |= {k: args[k].double() for k in ("hidden", "weight")}
    with pytest.raises(ValueError, match=message):
        linear_logprob(**args)


# ── Triton: on a GPU or in the interpreter ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def triton_device(monkeypatch):
    """Where the kernels run. The interpreter multiplies bf16 as if its bits were integers and cuts the last bits off
    when it casts to bf16 (Triton 3.9): both are mended here, since the hardware does neither."""
    if INTERPRETED:
        from triton.runtime import interpreter

        builder, tl = interpreter.InterpreterBuilder, logprob.tl
        dot, cast = builder.create_dot, builder.cast_impl

        def widen(x):
            bits = x.data.astype("uint32") << 16
            return interpreter.TensorHandle(bits.view("float32"), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

        def cast_to_nearest(self, x, to):
            if (x.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
                return cast(self, x, to)
            rounded = torch.from_numpy(x.data.copy()).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(rounded, tl.bfloat16)

        monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest))
        for name in ("create_fp_trunc", "cast_impl"):
            monkeypatch.setattr(builder, name, cast_to_nearest)
    return DEVICE


def on(device, p):
    return [x.to(device) for x in p]


@runs_triton
@pytest.mark.parametrize("size", [(1, 1, 1), (7, 13, 5), (130, 130, 72)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale, temperature, entropy_grad", [(0.3, 0.9, True), (100.0, 1.0, False)])
def test_triton_error_is_at_most_twice_the_naive_formulas(
    size, dtype, scale, temperature, entropy_grad, triton_device, monkeypatch
):
    monkeypatch.setattr(logprob, "PROGRAMS", 3)  # slices of several tiles
    monkeypatch.setitem(logprob.SLICE, triton_device, (1, 100))
    p = on(triton_device, problem(*size, dtype, scale=scale * size[2] ** -0.5))
    assert_no_worse_than_naive(
        p, temperature=temperature, entropy_grad=entropy_grad, backend="triton", units=4 if size[0] < 10 else 0
    )


@runs_triton
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_triton_adversarial_logits(dtype, triton_device):
    assert_no_worse_than_naive(on(triton_device, adversarial(dtype)), entropy_grad=True, backend="triton")


@runs_triton
def test_triton_entries_at_minus_infinity_do_not_exist(triton_device, monkeypatch):
    """Whole tiles and whole slices of them, before and after the real ones."""
    monkeypatch.setattr(logprob, "PROGRAMS", 3)
    p, padded = padded_vocabulary(torch.float32, before=140, after=140)
    exact = outcome(linear_logprob_reference, *p, entropy_grad=True)
    ours = [x.cpu() for x in outcome(linear_logprob, *on(triton_device, padded), entropy_grad=True, backend="triton")]
    assert not ours[3][:140].any() and not ours[3][160:].any()
    ours[3] = ours[3][140:160]
    assert_equal_outcomes(ours, exact, rtol=1e-5, atol=1e-6)


@runs_triton
@pytest.mark.parametrize("V", [1, 5, 127, 129, 300])
def test_triton_padded_columns_weigh_nothing(V, triton_device):
    assert_no_worse_than_naive(on(triton_device, negative_logits(V)), backend="triton")


@runs_triton
@pytest.mark.parametrize("T", [0, 1, 300])
def test_triton_batch_in_which_nothing_counts(T, triton_device):
    assert_nothing_counts(T, 7, backend="triton")


@runs_triton
def test_triton_slices_are_those_of_the_torch_twin(triton_device, monkeypatch):
    """Not only the result: each kernel gives what its twin gives, here for one slice."""
    monkeypatch.setattr(logprob, "PROGRAMS", 1)
    hidden, weight, targets, pull = on(triton_device, problem(40, 200, 32))
    twin = logprob.partials_torch(hidden, weight, targets, 0.7)
    torch.testing.assert_close(logprob.partials_triton(hidden, weight, targets, 0.7), twin, rtol=1e-5, atol=1e-5)
    _, entropy, top, log_sum = logprob.combine(twin, 0.7)
    args = hidden, weight[50:], targets - 50, 0.7, top, log_sum, entropy, pull, pull.flip(0)
    torch.testing.assert_close(logprob.d_logits_triton(*args), logprob.d_logits_torch(*args), rtol=1e-5, atol=1e-6)


@needs_triton
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="the tests above run in this process")
def test_the_kernels_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-k", "test_triton", "-p", "no:xdist", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0 and "passed" in done.stdout and "skipped" not in done.stdout, done.stdout + done.stderr


# ── Triton: compiled ahead of time, which needs no GPU ───────────────────────────────────────────────────────────────

# of each architecture: the KiB of shared memory a block may have, and its tensor cores' instruction in PTX
ARCHITECTURES = {80: (163, "mma.sync"), 90: (227, "wgmma"), 100: (227, "tcgen05.mma")}
TYPES = {"Target": "*i64", "Column": "*i64", "scale": "fp32"} | dict.fromkeys("T V C H width".split(), "i32")
TYPES |= dict.fromkeys("Top LogSum Entropy Pull PullEntropy".split(), "*fp32")
BUILDS = [("partials", {}), ("d_logits", {"ENTROPY": False}), ("d_logits", {"ENTROPY": True})]


def build(name, arch, dtype, cache, monkeypatch, odd=False, **constants):
    """Compile a kernel as a call would: H is always a multiple of 16, T and V are unless `odd`, and Triton makes use of it.

    Returns the compiled kernel and its {"REG": registers a thread, "STACK": bytes spilled, "LOCAL": …}.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    kernel = getattr(logprob, f"{name}_kernel")
    tile = dict(logprob.TILES[{"bf16": 2, "fp16": 2, "fp32": 4}[dtype]])
    options = {k: tile.pop(k) for k in ("num_warps", "num_stages")}
    constants = tile | constants
    types = TYPES | dict.fromkeys(("Hidden", "Weight", "Out"), f"*{dtype}")
    if name == "partials":
        types["Out"] = "*fp32"
    signature = {a: "constexpr" if a in constants else types[a] for a in kernel.arg_names}
    aligned = [a for a, t in signature.items() if t[0] == "*" or a in ("H", "width") or (t == "i32" and not odd)]
    where = kernel.arg_names.index
    attributes = {(where(a),): [["tt.divisibility", 16]] for a in aligned}
    source = ASTSource(kernel, signature, {(where(a),): v for a, v in constants.items()}, attributes)
    compiled = logprob.triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = cache / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(importlib.util.find_spec("triton.backends.nvidia").origin).parent / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    return compiled, {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


def assert_it_fits(name, arch, dtype, cache, monkeypatch, odd=False, **constants):
    compiled, usage = build(name, arch, dtype, cache, monkeypatch, odd, **constants)
    limit, matmul = ARCHITECTURES[arch]
    print(f"sm_{arch} {dtype} {name} {constants} odd={odd}: {usage}, shared {compiled.metadata.shared} bytes")
    assert compiled.metadata.shared <= limit * 1024
    assert usage["STACK"] == usage["LOCAL"] == 0, usage  # no register is spilled
    assert (matmul in compiled.asm["ptx"]) == (dtype != "fp32")  # on the tensor cores; fp32 is never rounded to TF32
    # V·H passes 2³¹ for a vocabulary of 262,144 and 8,192 dimensions: row · H must be a product of 64 bits
    products = re.findall(r"arith\.muli .*tensor<(?:\d+x1|1x\d+)xi(\d+)>", compiled.asm["ttir"])
    assert len(products) >= 2 and set(products) == {"64"}, products
    assert "cp.async" in compiled.asm["ptx"]  # tiles are loaded while the last ones are multiplied


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "name, constants, dtype, arch",
    [(*b, "bf16", arch) for b in BUILDS[:2] for arch in ARCHITECTURES] + [(*BUILDS[1], "fp32", 80)],
)
def test_compiles_for_real_gpus_without_spills(name, constants, dtype, arch, tmp_path, monkeypatch):
    assert_it_fits(name, arch, dtype, tmp_path, monkeypatch, **constants)


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name, constants", BUILDS, ids=str)
def test_every_variant_compiles_without_spills(name, constants, dtype, odd, arch, tmp_path, monkeypatch):
    assert_it_fits(name, arch, dtype, tmp_path, monkeypatch, odd, **constants)
