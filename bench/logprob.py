"""Time and memory of the fused log-prob, forward and backward, against the naive formula and other implementations.

python bench/logprob.py [--quick] [--threads 1] [--dtypes float32 bfloat16] [--json FILE]

Every measurement has a process of its own; the best of three rounds in which the implementations take turns, of two runs
each, after a warm-up. "others" is how many cores other processes used meanwhile, in the worst run (Linux). Above 0.1 the
verdict is marked "disturbed": threads wait for each other at the end of each operation, so with all cores in use one
neighbour slows many small operations (ours) more than few large ones (naive), in CPU time too, since waiting is spinning.
Extra memory: the peak during the first run, less what was there before it (the input) and less the two gradients that
any implementation must return. On a CPU that is VmHWM − VmRSS of /proc/self/status, which counts freed memory that the
allocator kept; on CUDA the allocator's own peak.
Promises, for T = 2,048: at most 1.1 × the time and 1/10 of the extra memory of the naive formula.
On CUDA (not run on a GPU here) also Liger-Kernel and cut-cross-entropy where installed.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch
from measure import in_a_process, resident
from torch.utils.checkpoint import checkpoint

from kernels.logprob import linear_logprob, linear_logprob_reference

SIZES = [(2048, 49152, 576), (2048, 151936, 1024)]  # T, V, H of SmolLM2-135M and Qwen3-0.6B
TIME, MEMORY = 1.1, 0.1  # promised, as shares of the naive formula's
COLUMNS = [("wall", "s", 1, 2), ("cpu", "s", 1, 2), ("bytes", "MiB", 2**20, 0)]  # what, unit, bytes in it, digits


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


def machine_seconds() -> float:
    """CPU seconds of all processes since the machine started."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / 100  # less idle and iowait


def least_time(a: dict, b: dict) -> dict:
    """The best of two measurements' times, the worst of all else."""
    return {k: (min if k in ("wall", "cpu") else max)(a[k], b[k]) for k in a}


def measure(variant: str, T: int, V: int, H: int, dtype: str, threads: int) -> dict:
    """In this process: {"wall", "cpu" (seconds), "bytes", "others" (cores)} of a forward and backward pass."""
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
        start, before = (time.perf_counter(), time.process_time()), machine_seconds()
        VARIANTS[variant](hidden[:tokens], weight, targets[:tokens]).backward(pull[:tokens])
        if cuda:
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        return {"wall": wall, "cpu": cpu, "others": max(0.0, (machine_seconds() - before - cpu) / wall)}

    run(8)  # libraries load their code, kernels are compiled
    hidden.grad = weight.grad = None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = torch.cuda.memory_allocated() if cuda else resident("VmRSS")
    first = run(T)
    peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")
    gradients = sum(x.numel() * x.element_size() for x in (hidden, weight))
    second = run(T)
    return least_time(first, second) | {"bytes": max(0, peak - before - gradients)}


def compare(names: list[str], size: tuple, dtype: str, threads: int, rounds: int) -> dict[str, dict]:
    """{variant: the least time and the most memory of all rounds}, without those that can't run here."""
    best = {}
    for _ in range(rounds):
        for name in names:
            arguments = json.dumps([name, *size, dtype, threads])
            if got := in_a_process(name, [sys.executable, __file__, "--measure", arguments]):
                best[name] = least_time(got, best.get(name, got))
        names = list(best)
    return best


def rows(variant: str, size: tuple, settings: str, got: dict, naive: dict) -> list[dict]:
    """Three rows of the JSON list: wall time, CPU time and extra memory, with what was promised for ours."""
    T, V, H = size
    promises = {"wall": TIME, "bytes": MEMORY}
    out = []
    for key, unit, scale, _ in COLUMNS:
        name = f"logprob {variant}, T={T} V={V} H={H} {settings}: {key}"
        row = {"name": name, "value": round(got[key] / scale, 3), "unit": unit, "against": round(naive[key] / scale, 3)}
        promise = promises.get(key) if variant == "ours" else None
        row["promise"] = promise and f"≤ {promise} × naive"
        row["met"] = promise and got[key] <= promise * naive[key]
        out.append(row | {"others": round(max(got["others"], naive["others"]), 2)})
    return out


def line(variant: str, size: tuple, dtype: str, got: dict, naive: dict, new: list[dict]) -> str:
    numbers = [f"{got[k] / scale:8.{digits}f} {got[k] / naive[k]:7.3f}" for k, _, scale, digits in COLUMNS]
    met = [row["met"] for row in new if row["met"] is not None]
    verdict = ("NOT met", "met")[all(met)] if met else ""
    disturbed = "disturbed" if new[0]["others"] > 0.1 else ""
    return f"{size!s:>20} {dtype:>9} {variant:20} {' '.join(numbers)} {got['others']:6.2f}  {verdict} {disturbed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, naive against ours, one round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 1], help="which of the sizes in this file")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*json.loads(options.measure))))
        return
    cuda = torch.cuda.is_available()
    names, rounds = [n for n in VARIANTS if cuda or n in ("naive", "ours", "compiled pieces")], 3
    if options.quick:
        names, rounds, options.sizes = ["naive", "ours"], 1, options.sizes[:1]
    where = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {options.threads} threads"
    print(f"torch {torch.__version__}, {where}; forward + backward, temperature 1, best of {2 * rounds}")
    heads = " ".join(f"{head:>8} {'×naive':>7}" for head in ("wall s", "CPU s", "+MiB"))
    print(f"{'T, V, H':>20} {'dtype':>9} {'':20} {heads} others  promises")
    table = []
    for size in (SIZES[i] for i in options.sizes):
        for dtype in options.dtypes:
            best = compare(names, size, dtype, options.threads, rounds)
            for variant, got in best.items():
                new = rows(variant, size, f"{dtype} threads={options.threads}", got, best["naive"])
                print(line(variant, size, dtype, got, best["naive"], new), flush=True)
                table += new
    if options.json:
        options.json.write_text(json.dumps(table, indent=1, ensure_ascii=False))
    sys.exit(any(row["met"] is False for row in table))


if __name__ == "__main__":
    main()
