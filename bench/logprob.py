"""Time and memory of the fused log-prob, forward and backward, against the naive formula and other implementations.

python bench/logprob.py [--quick] [--threads 1] [--dtypes float32 bfloat16] [--json FILE]

Every measurement has a process of its own. Time: the best of several runs after a warm-up. Extra memory: the peak during
the first run, less what was there before it (input) and less the two gradients that any implementation must return. On
a CPU that is VmHWM − VmRSS of /proc/self/status, where freed memory still counts if the allocator kept it; on CUDA the
allocator's own peak. Promises are for T = 2,048 and hold for each row: at most 1.1 × the time and 1/10 of the extra
memory of the naive formula. On CUDA (not run on a GPU here) also Liger-Kernel and cut-cross-entropy where installed.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from kernels.logprob import linear_logprob, linear_logprob_reference  # noqa: E402

SIZES = [(2048, 49152, 576), (2048, 151936, 1024)]  # T, V, H of SmolLM2-135M and Qwen3-0.6B
TIME, MEMORY = 1.1, 0.1  # promised, as shares of the naive formula's


def compiled(hidden, weight, targets):
    """The naive formula on 256 tokens at a time, each piece compiled, and computed again in the backward pass."""
    piece = torch.compile(linear_logprob_reference)
    parts = zip(hidden.split(256), targets.split(256), strict=True)
    return torch.cat([checkpoint(piece, h, weight, t, use_reentrant=False)[0] for h, t in parts])


def liger(hidden, weight, targets):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return -liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")


def cut_cross_entropy(hidden, weight, targets):
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, targets, reduction="none", impl="cce_exact")


VARIANTS = {
    "naive": lambda *a: linear_logprob_reference(*a)[0],
    "ours": lambda *a: linear_logprob(*a)[0],
    "ours, backend torch": lambda *a: linear_logprob(*a, backend="torch")[0],
    "compiled pieces": compiled,
    "Liger-Kernel": liger,  # no entropy
    "cut-cross-entropy": cut_cross_entropy,  # no entropy
}


def status(key: str) -> int:
    """Bytes of VmRSS (resident now) or VmHWM (the most so far)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def measure(variant: str, T: int, V: int, H: int, dtype: str, threads: int, runs: int) -> dict:
    """In this process: {"seconds", "bytes"} of one forward and backward pass."""
    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    g = torch.Generator().manual_seed(0)
    kind = {"dtype": getattr(torch, dtype), "device": device}
    hidden = torch.randn(T, H, generator=g).to(**kind).requires_grad_()
    weight = torch.empty(V, H, **kind)
    for part in weight.split(4096):  # piece by piece: no peak before the measurement
        part.copy_(torch.randn(part.shape, generator=g) * H**-0.5)
    weight.requires_grad_()
    targets, pull = torch.randint(0, V, (T,), generator=g).to(device), torch.randn(T, generator=g).to(device)

    def run(tokens):
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        VARIANTS[variant](hidden[:tokens], weight, targets[:tokens]).backward(pull[:tokens])
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run(8)  # libraries load their code, kernels are compiled
    hidden.grad = weight.grad = None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else status("VmRSS")
    first = run(T)
    peak = torch.cuda.max_memory_allocated() if cuda else status("VmHWM")
    gradients = sum(x.numel() * x.element_size() for x in (hidden, weight))
    return {"seconds": min([first, *(run(T) for _ in range(runs - 1))]), "bytes": peak - before - gradients}


def in_a_process(*args) -> dict | None:
    """measure(*args) there; None where the package or a compiler is missing."""
    command = [sys.executable, __file__, "--measure", json.dumps(args)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    print(f"{args[0]}: not here ({(done.stderr.strip().splitlines() or ['no message'])[-1][:100]})", file=sys.stderr)
    return None


def rows(variant: str, size: tuple, dtype: str, threads: int, got: dict, naive: dict) -> list[dict]:
    """Two rows of the JSON list: time and extra memory, with what was promised for ours."""
    T, V, H = size
    out = []
    for key, unit, scale, promise in (("seconds", "s", 1, TIME), ("bytes", "MiB", 2**20, MEMORY)):
        name = f"logprob {variant}, T={T} V={V} H={H} {dtype} threads={threads}: {key}"
        row = {"name": name, "value": round(got[key] / scale, 3), "unit": unit, "against": round(naive[key] / scale, 3)}
        promised = variant == "ours"
        row["promise"] = f"≤ {promise} × naive" if promised else None
        out.append(row | {"met": got[key] <= promise * naive[key] if promised else None})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smaller size, naive against ours, one run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*json.loads(options.measure))))
        return
    cuda = torch.cuda.is_available()
    names = (
        ["naive", "ours"]
        if options.quick
        else [n for n in VARIANTS if cuda or n in ("naive", "ours", "compiled pieces")]
    )
    where = (
        torch.cuda.get_device_name()
        if cuda
        else f"{platform.processor() or platform.machine()}, {options.threads} threads"
    )
    print(
        f"torch {torch.__version__}, {where}; forward + backward with temperature 1; best of {1 if options.quick else 3}"
    )
    print(
        f"{'T, V, H':>20} {'dtype':>9} {'':20} {'seconds':>8} {'× naive':>8} {'extra MiB':>10} {'× naive':>8}  promises"
    )
    table = []
    for size in SIZES[: 1 if options.quick else None]:
        for dtype in options.dtypes:
            naive = None
            for variant in names:
                got = in_a_process(variant, *size, dtype, options.threads, 1 if options.quick else 3)
                if got is None:
                    continue
                naive = naive or got
                new = rows(variant, size, dtype, options.threads, got, naive)
                table += new
                ratios = [got[k] / naive[k] for k in ("seconds", "bytes")]
                verdict = {True: "met", False: "NOT met", None: ""}[new[0]["met"] and new[1]["met"]]
                print(f"{size!s:>20} {dtype:>9} {variant:20} {got['seconds']:8.2f} {ratios[0]:8.2f}", end=" ")
                print(f"{got['bytes'] / 2**20:10.0f} {ratios[1]:8.3f}  {verdict}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1, ensure_ascii=False))
    sys.exit(not all(row["met"] is not False for row in table))


if __name__ == "__main__":
    main()
