"""Everything that only a CUDA machine can show, in one script: `python bench/gpu_check.py [--quick] [--json FILE]`.

Parity of CPU and GPU, hidden states and every gradient; flash attention against torch's own; the fused log-prob kernel
against float64; whole runs of `train` with adapters, killed and resumed; a GRPO step on random weights of Qwen3-0.6B's
shape, its memory against the plan, tokens per second. Prints a table, in under 8 minutes. Without a GPU it says so and
exits 0. It has not been run on a GPU by its authors yet; `--device cpu --quick` runs every line of it on tiny sizes, which
checks the script and nothing about a GPU.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import resource
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file

import config
import grpo
import model as models
import mua_rl
import plan
from chat import CHATML_TEMPLATE, Chat, Context, Role, Sample
from kernels.logprob import linear_logprob, linear_logprob_reference
from model_files import save_chat, save_model
from new_model import train_tokenizer
from rollout import Sampler

ROWS: list[dict] = []


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is run on which device."""

    device: str
    whole: models.ModelConfig  # for speed and memory
    small: models.ModelConfig  # for parity with the CPU; its head is no embedding, so that it can be scaled alone
    vocabularies: tuple[int, ...]
    tokens: int  # of the kernel's check
    rows: int  # conversations at once, in decoding and in a step
    prompt: int
    new: int


def sizes(device: str, quick: bool) -> Sizes:
    whole = plan.shape("Qwen/Qwen3-0.6B")
    small = dataclasses.replace(whole, num_hidden_layers=4, vocab_size=2000, tie_word_embeddings=False)
    if device != "cpu":
        return Sizes(device, whole, small, (49152, 151936), 2048, 32, 400, 100 if quick else 400)
    few = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    tiny = dataclasses.replace(small, num_hidden_layers=2, vocab_size=300, **few)
    return Sizes(device, dataclasses.replace(tiny, tie_word_embeddings=True), tiny, (1000,), 64, 4, 20, 8)


def row(name: str, value: float, unit: str, promise: float | None = None, against: str = "") -> None:
    met = None if promise is None else value <= promise
    ROWS.append({"name": name, "value": value, "unit": unit, "against": against, "promise": promise, "met": met})
    verdict = "" if met is None else "ok" if met else "MISSED"
    print(f"{name:58} {value:12.5g} {unit:10} {verdict:7} {against}", flush=True)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


def seconds(s: Sizes, work, repeat: int = 3) -> float:
    """Best of several, each ended by a device synchronisation; the first (compilation) is not counted."""
    wait, times = torch.cuda.synchronize if s.device != "cpu" else (lambda: None), []
    for _ in range(repeat + 1):
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def peak_bytes(s: Sizes, reset: bool = False) -> int:
    """Allocated on the device at most since the last reset; on a CPU the process's own peak, which can't be reset."""
    if s.device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


@torch.no_grad()
def random_model(shape: models.ModelConfig, dtype, device: str, head: float = 1.0) -> models.Decoder:
    """Matrices of std 1/√fan_in, so that every layer has its say; the output matrix is scaled by `head`."""
    torch.manual_seed(0)
    model = models.Decoder(shape)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape) * p.shape[1] ** -0.5 if p.dim() == 2 else p)
    model.head.mul_(head)
    return model.to(device, dtype)


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


def hidden_and_gradients(model: models.Decoder) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of a batch of ragged rows: hidden states, 0 where there is padding, and the gradient of its mean log-prob."""
    device, ids = model.head.device, torch.randint(0, model.cfg.vocab_size, (3, 100), generator=torch.Generator())
    lengths = torch.tensor([100, 35, 66])
    real = torch.arange(100) < lengths[:, None]
    hidden = model(ids.to(device), lengths.to(device))
    targets = ids.roll(-1, 1)[real].to(device)
    (linear_logprob(hidden[real.to(device)], model.head, targets)[0].mean()).backward()
    return hidden.detach().cpu() * real[..., None], {name: p.grad for name, p in model.named_parameters()}


def parity(s: Sizes) -> None:
    """The same small model on the CPU in fp32 and on the device, forward and backward."""
    torch.backends.cuda.matmul.allow_tf32 = False
    exact, wanted = hidden_and_gradients(random_model(s.small, torch.float32, "cpu"))
    for dtype, near, turned, off in ((torch.float32, 1e-4, 1e-6, 1e-3), (torch.bfloat16, 3e-2, 1e-2, 0.15)):
        hidden, found = hidden_and_gradients(random_model(s.small, dtype, s.device))
        row(f"hidden states, {s.device} {dtype} against CPU fp32", relative(hidden, exact), "relative", near)
        cosine = lambda a, b: float(torch.cosine_similarity(a.double().cpu().flatten(), b.double().flatten(), 0))
        angles = {name: 1 - cosine(found[name], g) for name, g in wanted.items()}
        errors = {name: relative(found[name], g) for name, g in wanted.items()}
        for what, values, unit, bound in (("angle", angles, "1 − cosine", turned), ("error", errors, "relative", off)):
            worst = max(values, key=values.get)
            row(f"worst gradient's {what}, {dtype}", values[worst], unit, bound, f"{worst}, of {len(values)}")
        if dtype == torch.bfloat16 and models.flash_attn and s.device != "cpu":
            with mock.patch.object(models, "flash_attn", None):
                plain, gradients = hidden_and_gradients(random_model(s.small, dtype, s.device))
            row("flash attention against torch's", relative(hidden, plain), "relative", 2e-2)
            worst = max(relative(found[name], g) for name, g in gradients.items())
            row("flash attention against torch's, worst gradient", worst, "relative", 0.15)


def ratio_gap(s: Sizes) -> None:
    """What the sampler says of its own tokens against what the trainer says of them: the ratio should be 1. A random model
    is unsure of everything; with a larger head it is as sure as a trained one, and rounding shows."""
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        for head, name in ((1.0, "flat"), (10.0, "peaked")):
            policy, todo = random_model(s.small, dtype, s.device, head), contexts(s.rows // 2, s.prompt // 4, 300)
            sample_all(Sampler(policy, [0], s.rows // 2, s.prompt + s.new), todo, min(60, s.new))
            batch = grpo.make_batch(todo, [1.0] * len(todo))
            with torch.no_grad():
                logp = grpo.logprobs(policy, batch)[0].cpu()
            gap = float((logp - batch.sampled).exp().sub(1).abs().mean())
            mean = f"mean log-prob {float(batch.sampled.mean()):.2f}"
            row(f"mean |ratio − 1|, sampler against trainer, {dtype}, {name}", gap, "", bound, mean)


def kernels(s: Sizes) -> None:
    """The fused log-prob on the device against the naive formula, both against float64; its time and memory."""
    for V in s.vocabularies:
        generator = torch.Generator(device=s.device).manual_seed(0)
        H, some = s.whole.hidden_size, min(256, s.tokens)
        hidden = torch.randn(s.tokens, H, device=s.device, generator=generator).bfloat16().requires_grad_()
        weight = (torch.randn(V, H, device=s.device, generator=generator) * 0.05).bfloat16().requires_grad_()
        targets = torch.randint(0, V, (s.tokens,), device=s.device, generator=generator)

        def results(function, dtype, x=hidden, w=weight, targets=targets, some=some):
            x, w = (t.detach().to(dtype).requires_grad_() for t in (x[:some], w))
            logprob = function(x, w, targets[:some])[0]
            logprob.sum().backward()
            return logprob.detach(), x.grad, w.grad

        exact = results(linear_logprob_reference, torch.float64)
        naive, ours = (results(f, torch.bfloat16) for f in (linear_logprob_reference, linear_logprob))
        for what, a, b, right in zip(("log-prob", "d hidden", "d weight"), ours, naive, exact, strict=True):
            row(f"{what}: error over the naive formula's, V = {V}", relative(a, right) / relative(b, right), "×", 2.0)
        del exact, naive, ours
        spent = {}
        for name, function in (("naive", linear_logprob_reference), ("fused", linear_logprob)):
            peak_bytes(s, reset=True)
            before = torch.cuda.memory_allocated() if s.device != "cpu" else 0
            spent[name] = seconds(s, lambda f=function, x=(hidden, weight, targets): f(*x)[0].sum().backward())
            spent[name + " memory"] = peak_bytes(s) - before
        row(f"log-prob forward + backward, V = {V}", spent["fused"] / spent["naive"], "× naive")
        promise = 0.5 if s.device != "cpu" else None
        row(f"log-prob peak memory, V = {V}", spent["fused memory"] / spent["naive memory"], "× naive", promise)


def train_path(s: Sizes) -> None:
    """`train` itself on a random model of Qwen3's layout, as the GPU presets go: bf16, no cold start; adapters with
    checkpointing, and all weights with 8-bit moments where torchao is. Each in one go, and stopped and resumed."""
    words = ["Where is my order #W12?", "The lamp is in the box.", '{"name": "get_order", "arguments": {}}'] * 2
    with tempfile.TemporaryDirectory() as place:
        folder, chat = Path(place) / "model", Chat(train_tokenizer(words), CHATML_TEMPLATE)
        folder.mkdir()
        shape = dataclasses.replace(s.small, vocab_size=chat.vocab_size, max_position_embeddings=4096)
        save_chat(chat, folder)
        save_model(random_model(shape, torch.float32, "cpu"), folder)
        flags = (
            f"--model {folder} --device {s.device} --dtype bf16 --sft-steps 0 --tasks 2 --group-size 2 --max-turns 2 "
            f"--max-new 8 --user-max-new 8 --slots 4 --user scripted "
            f"--overlong train --eval-every 0 --test-tasks 0 --cooldown 0 --minibatches 1 --lr 1e-3 "
            f"--threads {torch.get_num_threads()}"
        ).split()
        eight = "adamw8bit" if importlib.util.find_spec("torchao") else "adamw"
        for name, more in (
            ("adapters", ["--lora-rank", "4", "--checkpointing"]),
            ("all weights, " + eight, ["--optimizer", eight]),
        ):
            runs = [Path(place) / f"{name}-{i}" for i in (0, 1)]
            mua_rl.main(["train", "--run", str(runs[0]), "--steps", "2", *flags, *more])
            mua_rl.main(["train", "--run", str(runs[1]), "--steps", "1", *flags, *more])
            mua_rl.main(["train", "--resume", str(runs[1]), "--steps", "2"])
            norms = [
                line["grad_norm"] for line in map(json.loads, (runs[1] / "metrics.jsonl").open()) if "grad_norm" in line
            ]
            fine = len(norms) == 2 and all(math.isfinite(n) and n > 0 for n in norms)
            row(f"train, {name}: steps without a gradient", 2 - len(norms) if fine else math.inf, "steps", 0.0)
            whole, resumed = (load_file(next((r / "checkpoint").glob("*model.safetensors"))) for r in runs)
            apart = max(float((whole[k].float() - resumed[k].float()).abs().max()) for k in whole)
            row(f"train, {name}: resumed against unbroken", apart, "largest Δ", 0.0 if s.device == "cpu" else None)


def grpo_step(s: Sizes) -> None:
    """Rollout and one update of full training in bf16 on random weights, with tokens/s and memory against the plan."""
    room = s.prompt + s.new + 1
    cfg = dataclasses.replace(
        config.PRESETS["qwen3-0.6b"], tasks=4, slots=s.rows, max_len=room, user_max_len=room, device=s.device,
        micro_tokens=room * s.rows // 4,
    )  # fmt: skip
    peak_bytes(s, reset=True)
    policy = random_model(s.whole, torch.bfloat16, s.device)
    policy.checkpointing = cfg.checkpointing
    reference = random_model(s.whole, torch.bfloat16, s.device).requires_grad_(False)
    optimizer = grpo.adamw(list(policy.parameters()), 1e-6)
    sampler, user = (Sampler(m, [0], s.rows, room) for m in (policy, reference))
    play = lambda: sample_all(sampler, contexts(s.rows, s.prompt, 300), s.new)
    row(f"decoding, {s.rows} rows after {s.prompt} tokens", s.rows * s.new / seconds(s, play, 1), "tokens/s")
    todo = contexts(s.rows, s.prompt, 300)
    sample_all(sampler, todo, s.new)
    rows = [(ctx, 1.0 if i % 2 else -1.0) for i, ctx in enumerate(todo)]
    clock, guard = mua_rl.Clock(), grpo.Guard(Path("skipped"), 3)
    spent = seconds(s, lambda: grpo.update(policy, reference, optimizer, rows, cfg, 0, clock, guard), 1)
    row("training step", sum(len(ctx.ids) for ctx in todo) / spent, "tokens/s")
    peak, planned = peak_bytes(s), plan.need(cfg, s.whole).total()
    promise = 1.1 if s.device != "cpu" else None
    row("peak memory over the plan's", peak / planned, "×", promise, f"{peak / 2**30:.1f} GiB, {user.slots} user slots")


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cuda")
    options.add_argument("--quick", action="store_true")
    options.add_argument("--json", default="")
    options = options.parse_args(argv)
    if options.device != "cpu" and not torch.cuda.is_available():
        print("no CUDA device here: nothing to check (the CPU paths are what `make test` checks)")
        return 0
    name = torch.cuda.get_device_name() if options.device != "cpu" else "a dry run on the CPU"
    print(f"{name}, torch {torch.__version__}, flash-attn {bool(models.flash_attn)}")
    s, began = sizes(options.device, options.quick), time.monotonic()
    # A random policy never earns a reward, and without rewards nothing is trained: members get advantages of their own.
    by_turns = lambda rewards, *_: [(-1.0) ** i * (1 + i / 10) for i in range(len(rewards))]
    same_anywhere = {"null_baselines": lambda *_: {"do_nothing": 0.0, "careless": 0.5}, "report": mock.DEFAULT}
    with mock.patch.object(grpo, "advantages", by_turns), mock.patch.multiple(mua_rl, **same_anywhere):
        for check in (parity, ratio_gap, kernels, train_path, grpo_step):
            check(s)
    row("all checks", time.monotonic() - began, "seconds", 480.0)
    if options.json:
        Path(options.json).write_text(json.dumps(ROWS, indent=1))
    return int(any(r["met"] is False for r in ROWS))


if __name__ == "__main__":
    sys.exit(main())
