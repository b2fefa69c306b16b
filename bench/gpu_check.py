"""Everything that only a CUDA machine can show, in one script: `python bench/gpu_check.py [--quick] [--json FILE]`.

Parity of CPU and GPU, flash attention against torch's own, the fused log-prob kernel against its twin, a GRPO step on
random weights of Qwen3-0.6B's shape, memory against the plan, and tokens per second. Prints a table. Without a GPU it says
so and exits 0. It has not been run on a GPU by its authors yet.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import config
import grpo
import model as models
import mua_rl
import plan
from chat import Context, Role, Sample
from kernels.logprob import linear_logprob, linear_logprob_reference
from rollout import Sampler

ROWS: list[dict] = []


def row(name: str, value: float, unit: str, promise: float | None = None, against: str = "") -> None:
    met = None if promise is None else value <= promise
    ROWS.append({"name": name, "value": value, "unit": unit, "against": against, "promise": promise, "met": met})
    verdict = "" if met is None else "ok" if met else "MISSED"
    print(f"{name:58} {value:12.5g} {unit:10} {verdict:7} {against}", flush=True)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


def seconds(work, repeat: int = 3) -> float:
    """Best of several, each ended by a device synchronisation; the first (compilation) is not counted."""
    times = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def random_model(shape: models.ModelConfig, dtype, device: str) -> models.Decoder:
    torch.manual_seed(0)
    return models.Decoder(shape).to(device, dtype)


def contexts(n: int, length: int, vocabulary: int) -> list[Context]:
    """n contexts of `length` random tokens, ready to be sampled."""
    found, generator = [], torch.Generator().manual_seed(1)
    for i in range(n):
        ctx = Context((i,))
        ctx.extend(torch.randint(0, vocabulary, (length,), generator=generator).tolist(), Role.USER)
        ctx.open_turn = length
        found.append(ctx)
    return found


def sample_all(sampler: Sampler, todo: list[Context], max_new: int) -> None:
    for ctx in todo:
        sampler.submit(Sample("agent", ctx, max_new))
    while sampler.busy:
        sampler.step()


def parity(shape: models.ModelConfig) -> None:
    """The same small model on CPU in fp32 and on the GPU."""
    small = dataclasses.replace(shape, num_hidden_layers=4, vocab_size=2000)
    ids = torch.randint(0, 2000, (3, 200), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([200, 70, 131])
    real = (torch.arange(200) < lengths[:, None])[..., None]
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = random_model(small, torch.float32, "cpu")(ids) * real
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        gpu = random_model(small, dtype, "cuda")
        hidden = gpu(ids.cuda(), lengths.cuda()).cpu() * real
        row(f"hidden states, GPU {dtype} against CPU fp32", relative(hidden, exact), "relative", bound)
        if dtype == torch.bfloat16 and models.flash_attn:
            kept, models.flash_attn = models.flash_attn, None
            row("flash attention against torch's", relative(hidden, gpu(ids.cuda()).cpu() * real), "relative", 2e-2)
            models.flash_attn = kept


def ratio_gap(shape: models.ModelConfig) -> None:
    """What the sampler says of its own tokens against what the trainer says of them: the ratio should be 1."""
    small = dataclasses.replace(shape, num_hidden_layers=4)
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        policy, todo = random_model(small, dtype, "cuda"), contexts(16, 100, 1000)
        sample_all(Sampler(policy, [0], 16, 256), todo, 60)
        batch = grpo.make_batch(todo, [1.0] * len(todo))
        with torch.no_grad():
            logp = grpo.logprobs(policy, batch)[0].cpu()
        row(
            f"mean |ratio − 1|, sampler against trainer, {dtype}",
            float((logp - batch.sampled).exp().sub(1).abs().mean()),
            "",
            bound,
        )


def kernels(quick: bool) -> None:
    """The fused log-prob on the GPU against the naive formula in float64, and its time and memory against the naive one."""
    for V in (49152, 151936) if not quick else (49152,):
        generator = torch.Generator(device="cuda").manual_seed(0)
        hidden = torch.randn(2048, 1024, device="cuda", generator=generator).bfloat16().requires_grad_()
        weight = (torch.randn(V, 1024, device="cuda", generator=generator) * 0.05).bfloat16().requires_grad_()
        targets = torch.randint(0, V, (2048,), device="cuda", generator=generator)
        with torch.no_grad():
            exact = linear_logprob_reference(hidden[:256].double(), weight.double(), targets[:256])[0]
            naive = relative(linear_logprob_reference(hidden[:256], weight, targets[:256])[0], exact)
            ours = relative(linear_logprob(hidden[:256], weight, targets[:256])[0], exact)
        row(f"log-prob error over the naive formula's, V = {V}", ours / naive, "×", 2.0)
        spent = {}
        for name, function in (("naive", linear_logprob_reference), ("fused", linear_logprob)):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            spent[name] = seconds(lambda f=function, x=(hidden, weight, targets): f(*x)[0].sum().backward())
            spent[name + " memory"] = torch.cuda.max_memory_allocated() - before
        row(f"log-prob forward + backward, V = {V}", spent["fused"] / spent["naive"], "× naive", None)
        row(f"log-prob peak memory, V = {V}", spent["fused memory"] / spent["naive memory"], "× naive", 0.5)


def grpo_step(shape: models.ModelConfig, quick: bool) -> None:
    """Rollout and one update of full training in bf16 on random weights, with tokens/s and memory against the plan."""
    cfg = dataclasses.replace(
        config.PRESETS["qwen3-0.6b"], tasks=4, slots=32, max_len=1024, user_max_len=1024, micro_tokens=8192
    )
    torch.cuda.reset_peak_memory_stats()
    policy = random_model(shape, torch.bfloat16, "cuda")
    policy.checkpointing = cfg.checkpointing
    reference = random_model(shape, torch.bfloat16, "cuda").requires_grad_(False)
    trained = grpo.masters(list(policy.parameters()))
    optimizer = grpo.followed(torch.optim.AdamW(trained, lr=1e-6))
    todo = contexts(32, 400, 1000)
    sampler, user = Sampler(policy, [0], 32, 1024), Sampler(reference, [0], 32, 1024)
    new = 100 if quick else 400
    spent = seconds(lambda: sample_all(sampler, contexts(32, 400, 1000), new), 1)
    row("decoding, 32 rows after 400 tokens", 32 * new / spent, "tokens/s")
    sample_all(sampler, todo, new)
    rows = [(ctx, 1.0 if i % 2 else -1.0) for i, ctx in enumerate(todo)]
    clock, guard = mua_rl.Clock(), grpo.Guard(Path("skipped"), 3)
    spent = seconds(lambda: grpo.update(policy, reference, optimizer, rows, cfg, 0, clock, guard), 1)
    row("training step", sum(len(ctx.ids) for ctx in todo) / spent, "tokens/s")
    peak, planned = torch.cuda.max_memory_allocated(), plan.need(cfg, shape).total()
    row("peak memory over the plan's", peak / planned, "×", 1.1, f"{peak / 2**30:.1f} GiB, {user.slots} user slots")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true")
    options.add_argument("--json", default="")
    options = options.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to check (the CPU paths are what `make test` checks)")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, flash-attn {bool(models.flash_attn)}")
    shape = plan.shape("Qwen/Qwen3-0.6B")
    parity(shape)
    ratio_gap(shape)
    kernels(options.quick)
    grpo_step(shape, options.quick)
    if options.json:
        Path(options.json).write_text(json.dumps(ROWS, indent=1))
    sys.exit(any(r["met"] is False for r in ROWS))


if __name__ == "__main__":
    main()
