"""log π(target | hidden) and the entropy of π, straight from hidden states, without ever holding the logits [T, V].

    z = hidden · weightᵀ / temperature,   log π = log_softmax(z),   entropy = −Σ_v π_v log π_v

`linear_logprob_reference` says just that in a few lines. It is right, and too big: for T = 16,384 tokens and a
vocabulary of V = 151,936 one fp32 copy of z is 9.3 GiB, and autograd keeps several. `linear_logprob` gives the same
numbers and keeps, beside its input, three numbers a token.

Forward: an online softmax over slices of the vocabulary. Each slice yields four numbers a token: its largest logit,
Σ e and Σ e·d seen from there, and the target's logit if it is in this slice. `combine` moves all slices to one common
maximum. A slice is one matmul and a few passes over a block that fits in the cache (CPU), or one Triton program that
multiplies tile by tile and never lets a logit leave the registers (CUDA). Slices also fill the chip: T/128 blocks of
rows alone would leave most multiprocessors idle. They write partial results instead of adding under a lock, so a run
repeats bit for bit.

Backward: what was kept is the largest logit and log Σ e (two numbers: their sum would round away what peaked rows
need) and the entropy. Logits are computed again, slice by slice, and become at once

    ∂L/∂logits = p·(π − 1[v = target]) + q·π·(log π + entropy),   p, q = −∂L/∂logprob, −∂L/∂entropy over the temperature

in the dtype of the weights. Two matmuls of the library follow: d_weight[slice] = d_logitsᵀ · hidden and
d_hidden += d_logits · weight[slice]. Since the softmax's sums are known by now, slices may run over the vocabulary
instead of over tokens. Each row of d_weight is then *one* product over all T tokens, summed in fp32 inside the matmul
even for bf16 and rounded once: there is no accumulator [V, H] to keep in fp32, nor to read and write for every slice.
What is accumulated is d_hidden [T, H], small, in fp32.

The price, for each of the T·V logits in bf16:

              FLOPs                          memory traffic                                   extra memory
    naive     6H (z, d_hidden, d_weight)     ~40 bytes: logits and their copies, both ways    ~14 bytes
    here      8H (z twice)                   6 bytes: d_logits written once and read twice    2 bytes, of one slice

On an H100 (3.35 TB/s; say 600 TFLOP/s in matmuls) and H = 1,024 that is 10 + 12 picoseconds against 14 + 2: computing
again would be cheaper than remembering. This is arithmetic, not a measurement. On a CPU it was measured (docs/
performance.md): much faster in bf16; in fp32 faster at H = 576 and at H = 1,024 about even, where matmuls are all.

Why not fuse the backward matmuls too? In attention the accumulator [128, head] fits in registers. Here it would be
[128, H]: for H = 1,024 that is 512 KiB in fp32, more than a multiprocessor has. One kernel for everything must add its
tiles to global memory (by atomics or locks, so the order of a sum differs from run to run), or compute the logits once
more for every piece of H. Writing d_logits costs 6 bytes where the matmuls cost thousands of FLOPs.

Others choose differently, with good reasons:
- Liger-Kernel's fused linear cross-entropy slices *tokens* and overwrites a slice of bf16 logits with its gradient. For
  a mean or a sum the gradient is known in the forward pass: 6H FLOPs, nothing is computed twice. A policy gradient must
  see the log-probs before it knows what multiplies each token's gradient, so with reduction="none" Liger computes the
  logits again as we do. d_weight is summed over slices in the dtype of the weights, unless `accum_dtype` is fp32.
- Apple's cut cross-entropy (arXiv 2411.09009) fuses both passes fully, with sums under locks, and by default skips
  tiles in which every |d_logits| is below a threshold. In a trained model that is most of them. It needs the least
  memory and little time; the gradient is not exact (its `cce_exact` gives that up again).
Neither returns the entropy, which RL logs at every step and sometimes trains on.

Left out: TMA and persistent programs, autotuning (a choice by timing would make runs differ), weights split over
devices, logit soft-capping, a bias. The Triton kernels ran in Triton's interpreter and were compiled ahead of time for
sm_80, sm_90 and sm_100 (no spills): not run on a GPU here. `backend="torch"` runs on any device.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU machine
    triton = None

# The most numbers of a slice of the vocabulary, [T, C] logits or [C, H] weights, and its least columns C. CPU: 4 MiB in
# fp32 stay in the cache (measured: docs/performance.md). CUDA: enough to fill the chip, little enough to stay in L2.
SLICE = {"cpu": (2**20, 256), "cuda": (2**24, 4096)}


def linear_logprob_reference(hidden, weight, targets, temperature=1.0, entropy_grad=False) -> tuple[Tensor, Tensor]:
    """The definition: z = hidden·weightᵀ / temperature, log π = log_softmax(z), entropy = −Σ π log π. Ignored: 0."""
    logp = (_accurate(hidden @ weight.T) / temperature).log_softmax(-1)  # [T, V]
    measured = logp if entropy_grad else logp.detach()
    entropy = -torch.where(logp > -torch.inf, measured.exp() * measured, 0).sum(-1)  # 0·log 0 = 0
    logprob = logp.gather(-1, targets.long().clamp(min=0)[:, None])[:, 0]
    return torch.where(targets >= 0, logprob, 0), torch.where(targets >= 0, entropy, 0)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    entropy_grad: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` and entropies (nats) under softmax(hidden · weightᵀ / temperature).

    hidden [T, H], weight [V, H] of one dtype, targets [T] whole numbers below V → logprob [T], entropy [T]; fp64 for
    fp64 input, else fp32. A negative target (−100, say) is ignored: its logprob and entropy are 0, it gets no gradient
    and costs no arithmetic. A logit of −∞ means that the token does not exist.
    Gradients reach hidden and weight through logprob, and through entropy only if `entropy_grad`: by default it is a
    measurement. backend: "torch", "triton", or None for Triton where there is CUDA. Raises ValueError for a
    temperature ≤ 0, a target ≥ V, two dtypes, and Triton that isn't there.
    """
    _check(hidden, weight, targets, temperature)
    use_triton = _use_triton(hidden, backend)
    kept = (targets >= 0).nonzero()[:, 0]
    if len(kept) < len(targets):  # the ignored ones never reach a matmul
        options = {"entropy_grad": entropy_grad, "backend": backend}
        some = linear_logprob(hidden[kept], weight, targets[kept], temperature, **options)
        return tuple(x.new_zeros(len(targets)).index_copy(0, kept, x) for x in some)
    if use_triton and (missing := -hidden.shape[1] % TILES[hidden.element_size()]["BLOCK_H"]):
        hidden, weight = (pad(x, (0, missing)) for x in (hidden, weight))  # no real model's H is odd: a copy is allowed
    inputs = hidden.contiguous(), weight.contiguous(), targets.long()
    return _LinearLogprob.apply(*inputs, float(temperature), entropy_grad, use_triton)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} must be above 0")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: cast one of them")
    if len(targets) and (largest := int(targets.max())) >= len(weight):
        raise ValueError(f"target {largest} is not below V = {len(weight)}, the rows of weight")


def _use_triton(hidden: Tensor, backend: str | None) -> bool:
    able = triton is not None and hidden.dtype != torch.float64
    if backend not in (None, "torch", "triton") or (backend == "triton" and not able):
        raise ValueError(f'backend = {backend!r}: use "torch", or "triton" with that package and fp32, bf16 or fp16')
    return able and len(hidden) > 0 and (hidden.is_cuda if backend is None else backend == "triton")


def _accurate(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _slices(hidden: Tensor, vocabulary: int) -> list[slice]:
    numbers, least = SLICE.get(hidden.device.type, SLICE["cuda"])
    columns = max(least, numbers // max(1, *hidden.shape))
    return [slice(v, min(v + columns, vocabulary)) for v in range(0, vocabulary, columns)]


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, entropy_grad, use_triton):
        partials = partials_triton if use_triton else partials_torch
        logprob, entropy, top, log_sum = combine(partials(hidden, weight, targets, temperature), temperature)
        ctx.save_for_backward(hidden, weight, targets, top, log_sum, entropy)
        ctx.temperature, ctx.entropy_grad, ctx.use_triton = temperature, entropy_grad, use_triton
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logprob, d_entropy):
        hidden, weight, targets, *row = ctx.saved_tensors
        row += [-d_logprob / ctx.temperature, -d_entropy / ctx.temperature if ctx.entropy_grad else None]
        d_logits = d_logits_triton if ctx.use_triton else d_logits_torch
        d_hidden = torch.zeros_like(hidden, dtype=d_logprob.dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for part in _slices(hidden, len(weight)):
            d = d_logits(hidden, weight[part], targets - part.start, ctx.temperature, *row)  # [T, C]
            if d_weight is not None:
                torch.mm(d.T, hidden, out=d_weight[part])  # all T in one product: summed in fp32 and rounded once
            if d_hidden is not None:
                _add_product(d_hidden, d, weight[part])
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, None, None, None, None


def _add_product(total: Tensor, d: Tensor, weight: Tensor) -> None:
    """total [T, H] += d [T, C] · weight [C, H], where a token at −∞ (d = 0) adds nothing: 0 · −∞ is not a number."""
    weight = weight.clamp(min=torch.finfo(weight.dtype).min)
    if total.dtype == weight.dtype:
        total.addmm_(d, weight)
    else:
        total.add_(d @ weight)


def combine(partials: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax statistics of slices of the vocabulary → those of the whole.

    partials [4, S, T]: of each slice the largest logit, Σ e, Σ e·d and the target's logit (0 if it is elsewhere), where
    d = (logit − largest) / temperature and e = exp(d) → logprob, entropy, largest logit, log Σ e; each [T].
    """
    top, total, weighted, hit = partials.unbind()
    best = top.amax(0)
    shift = ((top - best) / temperature).clamp(min=torch.finfo(top.dtype).min)  # a slice without any token: not −∞
    scale = shift.exp()
    whole = (total * scale).sum(0)
    log_sum = whole.log()
    entropy = log_sum - ((weighted + total * shift) * scale).sum(0) / whole  # = log Σ e − Σ π d
    return (hit.sum(0) - best) / temperature - log_sum, entropy, best, log_sum


# ── In plain torch ───────────────────────────────────────────────────────────────────────────────────────────────────


def partials_torch(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """hidden [T, H], weight [V, H], targets [T] → partials [4, S, T] as `combine` wants them."""
    parts = _slices(hidden, len(weight))
    out = hidden.new_empty(4, len(parts), len(hidden), dtype=_accurate(hidden[:0]).dtype)
    for i, part in enumerate(parts):
        z = _accurate(hidden @ weight[part].T)  # [T, C]
        lowest = torch.finfo(z.dtype).min
        here, column = _find(targets - part.start, z.shape[1])
        hit = torch.where(here, z.gather(1, column)[:, 0], 0)
        top = z.amax(-1)
        z.sub_(top.clamp(min=lowest)[:, None])  # exact near the top, where precision counts
        d = z if temperature == 1 else z.div_(temperature)
        e = d.exp()
        total = e.sum(-1)
        weighted = e.mul_(d.clamp_(min=lowest)).sum(-1)  # 0 · −∞ is not a number
        out[:, i] = torch.stack([top, total, weighted, hit])  # a list of small tensors would fragment the heap
    return out


def d_logits_torch(hidden, weight, column, temperature, top, log_sum, entropy, pull, pull_entropy) -> Tensor:
    """∂L/∂logits of one slice = pull·(π − 1[v = target]) + pull_entropy·π·(log π + entropy)  [T, C], dtype of weight.

    weight [C, H]: the slice. column [T]: the target seen from its start. pull, pull_entropy [T]: −∂L/∂logprob and
    −∂L/∂entropy over the temperature; pull_entropy may be None.
    """
    z = _accurate(hidden @ weight.T).sub_(top[:, None])
    logp = (z if temperature == 1 else z.div_(temperature)).sub_(log_sum[:, None])
    pi = logp.exp()
    slope = None
    if pull_entropy is not None:
        slope = logp.clamp_(min=torch.finfo(z.dtype).min).add_(entropy[:, None]).mul_(pull_entropy[:, None]).mul_(pi)
    here, column = _find(column, len(weight))
    d = pi.scatter_add_(1, column, -here.to(pi.dtype)[:, None]).mul_(pull[:, None])
    return (d if slope is None else d.add_(slope)).to(weight.dtype)


def _find(column: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Is the target in this slice [T], and an index [T, 1] that is legal even if it isn't."""
    return (column >= 0) & (column < columns), column.clamp(0, columns - 1)[:, None]


# ── The same in Triton ───────────────────────────────────────────────────────────────────────────────────────────────

# By bytes an element. No register is spilled with these on sm_80, sm_90 and sm_100: tests/test_logprob.py
# compiles them and counts. Not tuned on a GPU.
TILES = {
    2: {"BLOCK_T": 128, "BLOCK_V": 128, "BLOCK_H": 64, "num_warps": 8, "num_stages": 3},
    4: {"BLOCK_T": 64, "BLOCK_V": 64, "BLOCK_H": 32, "num_warps": 4, "num_stages": 3},
}
PROGRAMS = 1024  # the forward pass cuts the vocabulary into so many slices that there are about as many programs

if triton is not None:

    @triton.jit
    def _logits_tile(
        Hidden, Weight, rows, cols, H, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
    ):  # fmt: skip
        """hidden[rows] · weight[cols]ᵀ → [BLOCK_T, BLOCK_V] in fp32. Offsets in 64 bits: V·H may pass 2³¹.

        H is a multiple of BLOCK_H and rows and cols are legal: no load needs a mask.
        """
        k = tl.arange(0, BLOCK_H)
        h_at = Hidden + rows.to(tl.int64)[:, None] * H + k[None, :]
        w_at = Weight + cols.to(tl.int64)[None, :] * H + k[:, None]
        z = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for _ in range(0, H, BLOCK_H):
            z = tl.dot(tl.load(h_at), tl.load(w_at), z, input_precision="ieee")  # fp32 input is never rounded to TF32
            h_at += BLOCK_H
            w_at += BLOCK_H
        return z

    @triton.jit
    def partials_kernel(
        Hidden, Weight, Target, Out, T, V, H, width, scale,
        BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    ):  # fmt: skip
        """One program: BLOCK_T rows × `width` columns, tile by tile, in an online softmax. scale = 1/temperature."""
        rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        real = tl.minimum(rows, T - 1)  # loads beyond the end read the last row instead: no mask in the inner loop
        first = tl.program_id(1) * width
        target = tl.load(Target + real)
        top = tl.full((BLOCK_T,), -float("inf"), tl.float32)  # largest logit so far
        total = tl.zeros((BLOCK_T,), tl.float32)  # Σ e, seen from top
        weighted = tl.zeros((BLOCK_T,), tl.float32)  # Σ e·d
        hit = tl.zeros((BLOCK_T,), tl.float32)
        for start in range(first, tl.minimum(first + width, V), BLOCK_V):
            cols = start + tl.arange(0, BLOCK_V)
            z = _logits_tile(Hidden, Weight, real, tl.minimum(cols, V - 1), H, BLOCK_T, BLOCK_V, BLOCK_H)
            hit += tl.sum(tl.where(cols[None, :] == target[:, None], z, 0.0), 1)
            z = tl.where(cols[None, :] < V, z, -float("inf"))
            new = tl.maximum(top, tl.max(z, 1))
            base = tl.where(new == -float("inf"), 0.0, new)  # nothing but −∞ so far: avoid ∞ − ∞
            shift = tl.where(top == -float("inf"), 0.0, (top - base) * scale)
            old = tl.exp(shift)
            d = (z - base[:, None]) * scale
            e = tl.exp(d)
            weighted = (weighted + total * shift) * old + tl.sum(tl.where(e > 0, e * d, 0.0), 1)
            total = total * old + tl.sum(e, 1)
            top = new
        at = Out + tl.program_id(1).to(tl.int64) * T + rows
        step = tl.num_programs(1).to(tl.int64) * T
        tl.store(at, top, mask=rows < T)
        tl.store(at + step, total, mask=rows < T)
        tl.store(at + 2 * step, weighted, mask=rows < T)
        tl.store(at + 3 * step, hit, mask=rows < T)

    @triton.jit
    def d_logits_kernel(
        Hidden, Weight, Column, Top, LogSum, Entropy, Pull, PullEntropy, Out, T, C, H, scale,
        ENTROPY: tl.constexpr,
        BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    ):  # fmt: skip
        """One program: one tile of d_logits_torch, its logits never leaving the registers."""
        rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        real = tl.minimum(rows, T - 1)
        z = _logits_tile(Hidden, Weight, real, tl.minimum(cols, C - 1), H, BLOCK_T, BLOCK_V, BLOCK_H)
        logp = (z - tl.load(Top + real)[:, None]) * scale - tl.load(LogSum + real)[:, None]
        pi = tl.exp(logp)
        here = cols[None, :] == tl.load(Column + real)[:, None]
        d = tl.load(Pull + real)[:, None] * tl.where(here, pi - 1, pi)
        if ENTROPY:
            slope = tl.load(PullEntropy + real)[:, None] * (logp + tl.load(Entropy + real)[:, None])
            d += tl.where(pi > 0, pi * slope, 0.0)
        at = Out + rows.to(tl.int64)[:, None] * C + cols[None, :]
        tl.store(at, d.to(Out.dtype.element_ty), mask=(rows < T)[:, None] & (cols < C)[None, :])


def partials_triton(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """As partials_torch, cut into other slices. H must be a multiple of BLOCK_H."""
    (T, H), V, tile = hidden.shape, len(weight), TILES[hidden.element_size()]
    assert H % tile["BLOCK_H"] == 0, "the kernel's loads have no mask"
    row_blocks = triton.cdiv(T, tile["BLOCK_T"])
    tiles = triton.cdiv(V, tile["BLOCK_V"])
    width = triton.cdiv(tiles, triton.cdiv(PROGRAMS, row_blocks)) * tile["BLOCK_V"]
    out = hidden.new_empty(4, triton.cdiv(V, width), T, dtype=torch.float32)
    with torch.cuda.device_of(hidden):
        # row blocks vary fastest: programs that run together read the same columns of weight, out of L2
        partials_kernel[(row_blocks, out.shape[1])](
            hidden, weight, targets, out, T, V, H, width, 1 / temperature, **tile
        )
    return out


def d_logits_triton(hidden, weight, column, temperature, top, log_sum, entropy, pull, pull_entropy) -> Tensor:
    """As d_logits_torch. H must be a multiple of BLOCK_H."""
    (T, H), C, tile = hidden.shape, len(weight), TILES[hidden.element_size()]
    assert H % tile["BLOCK_H"] == 0, "the kernel's loads have no mask"
    out = hidden.new_empty(T, C)
    use_entropy = pull_entropy is not None
    with torch.cuda.device_of(hidden):
        d_logits_kernel[(triton.cdiv(T, tile["BLOCK_T"]), triton.cdiv(C, tile["BLOCK_V"]))](
            hidden, weight, column, top, log_sum, entropy, pull, pull_entropy if use_entropy else pull, out,
            T, C, H, 1 / temperature, ENTROPY=use_entropy, **tile,
        )  # fmt: skip
    return out
