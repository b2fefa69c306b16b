"""log π(target | hidden) and the entropy of π, straight from hidden states, without ever holding the logits [T, V].

For a vocabulary of 150,000 and 16,000 tokens the logits alone are 9 GiB in fp32, and autograd keeps them several times.
Here they exist for a few hundred tokens at a time and are computed again in the backward pass. The matrix products are
the library's; what happens to a row of logits between them is plain torch, or one Triton kernel each way on a GPU.
Twin: `linear_logprob_reference`, the same in three lines.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU machine
    triton = None

CHUNK = 2**20  # logits held at a time (4 MiB in fp32: stays in cache on a CPU) …
MIN_ROWS = 256  # … but at least these many rows, or reading `weight` once per chunk would dominate


def linear_logprob_reference(hidden, weight, targets, temperature=1.0) -> tuple[Tensor, Tensor]:
    """The definition: z = hidden·weightᵀ / temperature, log π = log_softmax(z), entropy H = −Σ π log π (no gradient)."""
    logp = (_accurate(hidden @ weight.T) / temperature).log_softmax(-1)  # [T, V]
    entropy = torch.where(logp > -torch.inf, -logp.exp() * logp, 0).sum(-1)  # 0·log 0 = 0
    return logp.gather(-1, targets.long()[:, None])[:, 0], entropy.detach()


def linear_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` and entropies (nats) under softmax(hidden · weightᵀ / temperature).

    hidden [T, H], weight [V, H], targets [T] whole numbers in [0, V) → logprob [T], entropy [T]; fp64 for fp64 input,
    else fp32. Gradients reach hidden and weight through logprob; entropy is a measurement and carries none.
    A logit of −∞ means that the token does not exist. Raises ValueError for temperature ≤ 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} must be above 0")
    return _LinearLogprob.apply(hidden, weight, targets.long(), float(temperature))


def _accurate(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    rows = max(MIN_ROWS, CHUNK // vocabulary)
    return [slice(i, min(i + rows, tokens)) for i in range(0, tokens, rows)]


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        out = hidden.new_empty(
            4, len(hidden), dtype=_accurate(hidden[:0]).dtype
        )  # log π, entropy, max z, log Σ e^(z−max)
        rows = rows_triton if _use_triton(hidden) else rows_torch
        for part in _chunks(len(hidden), len(weight)):
            rows(_accurate(hidden[part] @ weight.T), targets[part], temperature, out[:, part])
        logprob, entropy, top, log_sum = out.unbind()
        ctx.save_for_backward(hidden, weight, targets, top, log_sum)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        hidden, weight, targets, top, log_sum = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        rows = grad_rows_triton if _use_triton(hidden) else grad_rows_torch
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = (
            torch.zeros_like(weight, dtype=grad.dtype) if wants_weight else None
        )  # summed over chunks: not in bf16
        finite = (
            torch.where(weight == -torch.inf, 0, weight) if weight.numel() and weight.amin() == -torch.inf else weight
        )
        for part in _chunks(len(hidden), len(weight)):
            logits = _accurate(hidden[part] @ weight.T)
            rows(logits, targets[part], ctx.temperature, top[part], log_sum[part], grad[part])  # now ∂L/∂logits
            d_logits = logits.to(weight.dtype)
            if wants_hidden:
                torch.mm(d_logits, finite, out=d_hidden[part])
            if wants_weight:
                _add_product(d_weight, d_logits, hidden[part])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None


def _add_product(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """total [V, H] += d_logitsᵀ · hidden"""
    if total.dtype == hidden.dtype:
        total.addmm_(d_logits.T, hidden)
    else:
        total.add_(d_logits.T @ hidden)


# What happens to rows of logits, in plain torch. Both functions overwrite `logits`.
def rows_torch(logits: Tensor, targets: Tensor, temperature: float, out: Tensor) -> None:
    """logits [C, V] → out [4, C]: log π(target), entropy, max z, log Σ e^(z − max z)   with z = logits / temperature."""
    z = logits.div_(temperature)
    top = z.amax(-1, keepdim=True)
    z.sub_(top)  # exact near the top, where precision counts
    e = z.exp()
    total = e.sum(-1)
    out[3] = total.log()
    out[2] = top[:, 0]
    out[0] = z.gather(-1, targets[:, None])[:, 0] - out[3]
    # H = −Σ π log π = log Σ e^z − Σ π z;  −∞ made finite, since 0·(−∞) is not a number
    out[1] = out[3] - e.mul_(z.clamp_(min=torch.finfo(z.dtype).min)).sum(-1) / total


def grad_rows_torch(logits, targets, temperature, top, log_sum, grad) -> None:
    """logits [C, V] ← ∂L/∂logits = grad · (1[v = target] − π_v) / temperature."""
    scale = grad / temperature
    pi = logits.div_(temperature).sub_(top[:, None]).sub_(log_sum[:, None]).exp_()
    pi.mul_(-scale[:, None]).scatter_add_(-1, targets[:, None], scale[:, None])


# The same in Triton: one program a row, one pass over the vocabulary each way.
def _use_triton(x: Tensor) -> bool:
    return triton is not None and x.is_cuda and x.dtype != torch.float64


if triton is not None:

    @triton.jit
    def _rows_kernel(Z, Target, Out, V, row_stride, out_stride, temperature, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        top, total, weighted = -float("inf"), 0.0, 0.0  # max z, Σ e^(z−top), Σ e^(z−top)·(z−top), so far
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = tl.load(Z + row * row_stride + at, mask=at < V, other=-float("inf")) / temperature
            new = tl.maximum(top, tl.max(z, 0))
            base = tl.where(new == -float("inf"), 0.0, new)  # nothing but −∞ so far: avoid ∞ − ∞
            shift = tl.where(top == -float("inf"), 0.0, top - base)  # what is summed so far, seen from the new maximum
            old = tl.where(top == -float("inf"), 0.0, tl.exp(shift))
            d = tl.where(z == -float("inf"), 0.0, z - base)
            e = tl.where(z == -float("inf"), 0.0, tl.exp(d))
            weighted = (weighted + total * shift) * old + tl.sum(e * d, 0)
            total = total * old + tl.sum(e, 0)
            top = new
        log_sum = tl.log(total)
        target = tl.load(Target + row)
        z = tl.load(Z + row * row_stride + target) / temperature
        tl.store(Out + row, z - top - log_sum)
        tl.store(Out + out_stride + row, log_sum - weighted / total)
        tl.store(Out + 2 * out_stride + row, top)
        tl.store(Out + 3 * out_stride + row, log_sum)

    @triton.jit
    def _grad_rows_kernel(Z, Target, Top, LogSum, Grad, V, row_stride, temperature, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(Z + row * row_stride + at, mask=at < V, other=-float("inf")) / temperature
        pi = tl.exp(z - tl.load(Top + row) - tl.load(LogSum + row))
        hit = tl.where(at == tl.load(Target + row), 1.0, 0.0)
        tl.store(Z + row * row_stride + at, tl.load(Grad + row) / temperature * (hit - pi), mask=at < V)


def _block(vocabulary: int) -> int:
    return min(4096, triton.next_power_of_2(vocabulary))


def rows_triton(logits: Tensor, targets: Tensor, temperature: float, out: Tensor) -> None:
    """As rows_torch, but leaves `logits` as it is."""
    C, V = logits.shape
    _rows_kernel[(C,)](
        logits, targets, out, V, logits.stride(0), out.stride(0), temperature, BLOCK=_block(V), num_warps=8
    )


def grad_rows_triton(logits, targets, temperature, top, log_sum, grad) -> None:
    """As grad_rows_torch."""
    C, V = logits.shape
    grid = (C, triton.cdiv(V, _block(V)))
    _grad_rows_kernel[grid](
        logits, targets, top, log_sum, grad.contiguous(), V, logits.stride(0), temperature, BLOCK=_block(V), num_warps=8
    )
