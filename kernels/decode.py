"""What a CPU does between two matrix products of a decode step, compiled by numba: norms, attention over the cache, SwiGLU.

Why. A decode step gives each row one token. Its matrix products are as good as the library's; around them PyTorch runs some
forty short operations a layer, and attention that is made for long queries: it reads every row up to where the *longest* one
ends, under a mask, after gathering the rows out of the cache. Here each row is read where it lies, up to its own end.

Layout. Keys are kept [slots, kv_heads, D, M] (M positions side by side), values [slots, kv_heads, M, D]. Then scores of
neighbouring positions (16 with AVX-512) are one vector: s[t] += q[d] · K[d, t], with no sum across a vector's lanes; and so is the
weighted sum of values: out[d] += p[t] · V[t, d]. A key is written once, into D lines of the cache, and read once for every later
token.

Bytes. A step reads each row's keys and values once, 2 · kv_heads · D numbers a position and layer. Eight coordinates of keys
(four values) are taken at a time, so that a score (an output) is loaded and stored once for eight (four) products. The query
heads of a group take turns on keys that then lie in the core's own cache.

bf16 comes as its bits (uint16), is widened when loaded and rounded to nearest even when stored; all between is fp32. It is
rounded where the trainer's operations round, but for attention's probabilities, so that both see nearly the same numbers.

The slow twin is `Decoder.forward_cached` with torch's own operations; tests/test_packed.py holds this one to float64, and the two
to the same samples.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

# Attention and the draw give up Python's lock; for shorter functions to do so costs more than it gains (2 to 4 % of a rollout).
# nnan and ninf stay off: a NaN must come out as one, so that broken weights are noticed.
FAST = {"cache": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"}}


def widen(x):
    """A stored number as fp32."""


def narrow(x, like):
    """fp32 as it is stored in an array like `like`."""


@overload(widen, inline="always")
def _widen(x):
    if isinstance(x, types.Float):
        return lambda x: x
    return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def _to_bf16(x):
    bits = np.float32(x).view(np.uint32)  # NaN as processors make it (0x7fc00000, its sign) stays one
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@overload(narrow, inline="always")
def _narrow(x, like):
    if isinstance(like.dtype, types.Float):
        return lambda x, like: np.float32(x)
    return lambda x, like: _to_bf16(x)


@njit(inline="always")
def rounded(x, like):
    """fp32 as it comes back from there."""
    return widen(narrow(x, like))


@njit(inline="always", **FAST)
def exp(x):
    """eˣ in fp32 to two units in the last place, for x ≤ 88; in steps that compile to vectors, which a call does not.

    x = n · ln 2 + r with |r| ≤ ln 2 / 2, e^r as a polynomial (Cephes), 2ⁿ by its exponent bits. Below e⁻⁸⁷ it is 0.
    """
    y = max(x, np.float32(-87.0))
    n = math.floor(y * np.float32(1.44269504) + np.float32(0.5))
    r = y - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if x < np.float32(-87.0) else (p * r * r + r + np.float32(1.0)) * power


@njit(**FAST)
def add_norm(x, delta, weight, eps, out):
    """x += delta, out = x / rms(x) · weight; all [T, H] but weight [H]. The residual stream and the norm that reads it."""
    T, H = x.shape
    for t in range(T):
        total = np.float32(0)
        for i in range(H):
            v = rounded(widen(x[t, i]) + widen(delta[t, i]), x)
            x[t, i] = narrow(v, x)
            total += v * v
        scale = np.float32(1) / np.sqrt(total / np.float32(H) + np.float32(eps))
        for i in range(H):
            out[t, i] = narrow(widen(x[t, i]) * scale * widen(weight[i]), out)


@njit(**FAST)
def swiglu(gate_up, out):
    """silu(gate) · up. gate_up [T, 2F] (gate, then up) → out [T, F]."""
    T, F = out.shape
    for t in range(T):
        for i in range(F):
            g = widen(gate_up[t, i])
            g = rounded(g / (np.float32(1) + exp(min(-g, np.float32(88)))), out)
            out[t, i] = narrow(g * widen(gate_up[t, F + i]), out)


@njit(**FAST)
def turned(x, weight, eps, cos, sin, out):
    """Query or key [D] of one head, normed if there is a weight ([D], else [0]) and turned to its position, as fp32."""
    D, normed = len(x), len(weight) > 0
    scale = np.float32(1)
    if normed:
        total = np.float32(0)
        for d in range(D):
            total += widen(x[d]) * widen(x[d])
        scale = np.float32(1) / np.sqrt(total / np.float32(D) + np.float32(eps))
    head = np.empty(D, np.float32)
    for d in range(D):
        head[d] = rounded(widen(x[d]) * scale * widen(weight[d]), x) if normed else widen(x[d])
    for d in range(D):  # pair d is (x_d, x_{d+D/2}); the sign of the second is in the table (model.rotate)
        other = head[d + D // 2] if d < D // 2 else head[d - D // 2]
        out[d] = rounded(rounded(head[d] * widen(cos[d]), x) + other * widen(sin[d]), x)


@intrinsic
def _fetch(typing, address):
    """Asks for the line of memory at an address, without waiting for it."""

    def emit(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        hints = [number(0), number(2), number(1)]  # to read; into the second-level cache; data
        builder.call(function, [builder.inttoptr(arguments[0], pointer), *hints])
        return context.get_dummy_value()

    return types.void(types.intp), emit


@njit(**FAST)
def fetch(row, n):
    """Asks for the first n numbers of a row."""
    for i in range(0, n, 64 // row.itemsize):
        _fetch(row.ctypes.data + i * row.itemsize)


@njit(**FAST)
def scores(q, K, s, ahead, n_ahead):
    """s[t] = q · K[:, t]. q [D], K [D, M], s [n]. Eight coordinates at a time (D is a multiple of 8). ahead [D, M]: keys of
    which the first n_ahead positions are asked for meanwhile."""
    s[:] = 0
    for d in range(0, len(q), 8):
        for i in range(8):
            fetch(ahead[d + i], n_ahead)
        q0, q1, q2, q3, q4, q5, q6, q7 = q[d], q[d + 1], q[d + 2], q[d + 3], q[d + 4], q[d + 5], q[d + 6], q[d + 7]
        k0, k1, k2, k3, k4, k5, k6, k7 = K[d], K[d + 1], K[d + 2], K[d + 3], K[d + 4], K[d + 5], K[d + 6], K[d + 7]
        for t in range(len(s)):
            s[t] += ((q0 * widen(k0[t]) + q1 * widen(k1[t])) + (q2 * widen(k2[t]) + q3 * widen(k3[t]))) + (
                (q4 * widen(k4[t]) + q5 * widen(k5[t])) + (q6 * widen(k6[t]) + q7 * widen(k7[t]))
            )


@njit(**FAST)
def softmax(s, scale):
    """s[t] ← exp(scale · (s[t] − max)); returns their sum."""
    top, total = s[0], np.float32(0)
    for t in range(len(s)):
        top = max(top, s[t])
    for t in range(len(s)):
        s[t] = exp((s[t] - top) * scale)
        total += s[t]
    return total


@njit(**FAST)
def weighted(p, V, out, ahead, n_ahead):
    """out[d] = Σ_t p[t] · V[t, d]. p [n], V [M, D], out [D]. Four positions at a time. ahead [M, D], as above."""
    n, D = len(p), len(out)
    out[:] = 0
    for t in range(0, n - 3, 4):
        for i in range(t, min(t + 4, n_ahead)):
            fetch(ahead[i], D)
        p0, p1, p2, p3 = p[t], p[t + 1], p[t + 2], p[t + 3]
        v0, v1, v2, v3 = V[t], V[t + 1], V[t + 2], V[t + 3]
        for d in range(D):
            out[d] += (p0 * widen(v0[d]) + p1 * widen(v1[d])) + (p2 * widen(v2[d]) + p3 * widen(v3[d]))
    for t in range(n - n % 4, n):
        for d in range(D):
            out[d] += p[t] * widen(V[t, d])


@njit(**FAST)
def _write(t, qkv, q_weight, k_weight, eps, cos, sin, keys, values, slots, at, q):
    """Token t: turns its queries, and puts its key and value where its slot keeps them."""
    heads, D = q.shape[1], q.shape[2]
    kv_heads, where, pos = keys.shape[1], slots[t], at[t]
    c, s, row, k = cos[pos], sin[pos], qkv[t], np.empty(D, np.float32)
    for h in range(heads):
        turned(row[h * D : (h + 1) * D], q_weight, eps, c, s, q[t, h])
    for h in range(kv_heads):
        first = (heads + h) * D
        turned(row[first : first + D], k_weight, eps, c, s, k)
        first += kv_heads * D
        for d in range(D):
            keys[where, h, d, pos] = narrow(k[d], keys)
            values[where, h, pos, d] = row[first + d]


@njit(**FAST)
def _read(i, keys, values, slots, at, q, out):
    """What one token's group of query heads, those of one kv head, sees of positions 0 … at. i counts both."""
    kv_heads, D = keys.shape[1], q.shape[2]
    group, t, h = q.shape[1] // kv_heads, i // kv_heads, i % kv_heads
    following = min(i + 1, len(at) * kv_heads - 1)  # is asked for while the group's first head is at work
    t2, h2 = following // kv_heads, following % kv_heads
    K, V, ahead_K, ahead_V = keys[slots[t], h], values[slots[t], h], keys[slots[t2], h2], values[slots[t2], h2]
    s, mixed = np.empty(at[t] + 1, np.float32), np.empty(D, np.float32)
    for g in range(h * group, (h + 1) * group):
        n_ahead = at[t2] + 1 if g == h * group else 0
        scores(q[t, g], K, s, ahead_K, n_ahead)
        total = softmax(s, np.float32(1 / math.sqrt(D)))
        weighted(s, V, mixed, ahead_V, n_ahead)
        for d in range(D):
            out[t, g * D + d] = narrow(mixed[d] / total, out)


@njit(nogil=True, **FAST)
def attend(qkv, q_weight, k_weight, eps, cos, sin, keys, values, slots, at, q, out):
    """Attention of T tokens: token t stands at position at[t] of slot slots[t], and sees 0 … at[t] there.

    qkv [T, (heads + 2 kv_heads) · D]: queries, keys, values as the matrices gave them. q_weight, k_weight: of the norms on
    queries and keys [D], or [0]. cos, sin [length, D]. keys [slots, kv_heads, D, M] and values [slots, kv_heads, M, D] are
    written first, for all tokens; so tokens of one slot see each other. q [T, heads, D] fp32 is room. out [T, heads · D].
    """
    for t in range(len(qkv)):
        _write(t, qkv, q_weight, k_weight, eps, cos, sin, keys, values, slots, at, q)
    for i in range(len(qkv) * keys.shape[1]):
        _read(i, keys, values, slots, at, q, out)


SPAN = 512  # of the vocabulary: sums of so many lead to the one that holds the token


@njit(nogil=True, **FAST)
def draw(logits, u, temperature):
    """A token of each row's softmax(logits / temperature): where its cumulated probability first exceeds u, never one of
    probability 0; temperature 0: the first of the greatest. logprobs: its log-prob (at temperature 1 if greedy).

    logits [R, V], u [R] in [0, 1) → tokens [R], logprobs [R]. Sums are taken in float64.
    """
    R, V = logits.shape
    tokens, logprobs = np.empty(R, np.int64), np.empty(R)
    scale, p = np.float32(1 / temperature if temperature > 0 else 1), np.empty(V, np.float32)
    sums = np.empty((V + SPAN - 1) // SPAN)
    for r in range(R):
        for i in range(V):
            p[i] = widen(logits[r, i]) * scale
        top, total = p[0], 0.0
        for i in range(V):
            top = max(top, p[i])
        for b in range(len(sums)):
            sums[b] = _exponentials(p[b * SPAN : (b + 1) * SPAN], top)
            total += sums[b]
        target, below, b, token = u[r] * total, 0.0, 0, 0
        if temperature > 0:
            while b < len(sums) - 1 and below + sums[b] <= target:
                below += sums[b]
                b += 1
            for i in range(b * SPAN, min(V, (b + 1) * SPAN)):
                if p[i] > 0:
                    token = i
                    below += p[i]
                    if below > target:
                        break
        else:
            while token < V - 1 and p[token] < 1:  # e⁰: the first of the greatest
                token += 1
        tokens[r] = token
        logprobs[r] = np.float64(widen(logits[r, token]) * scale) - top - np.log(total)
    return tokens, logprobs


@njit(**FAST)
def _exponentials(x, top):
    total = 0.0
    for i in range(len(x)):
        x[i] = exp(x[i] - top)
        total += x[i]
    return total
