"""A GRPO training step on the same episodes: ours against TRL's own loss and step, with the same weights.

python bench/train_step.py [--quick] [--threads N] [--python PEERS_PYTHON] [--json FILE]

Sixteen episodes of two tasks (8 each), of unequal lengths; a third of what comes after the prompt is the agent's. Both do
log-probs of the agent's tokens, the loss without KL term, backward, clipping and an AdamW step, in fp32 at SmolLM2-135M's
shape, and none holds more than 4 episodes at a time (TRL: per_device_train_batch_size 4 and gradient accumulation; ours: at
most a quarter of the tokens that are to be computed, which makes five batches). TRL is
handed the padded tensors and a tool mask as its own generation would make them; building these is not counted, packing
ours is. "share of GEMM": 6 FLOPs per weight in the blocks' and the output matrix and token, and attention's, over the time
and the FLOP/s of a plain matrix product of this model's size in the same process.
Promises: half the time and half the peak memory of TRL; half of the GEMM limit.
"""

import argparse
import dataclasses
import math
import random
import tempfile
import time
from pathlib import Path

import torch
from measure import compare, decoder, finish, row, start, trl_trainer, twin
from prefix import group

import plan
from chat import Role
from config import Config
from grpo import Guard, update
from run import Clock


def episodes(V: int, quick: bool) -> list:
    """Two groups of 8 with 64 tokens of prompt and 64 to 256 of conversation."""
    rng, out = random.Random(0), []
    for seed in range(2):
        for t in group(8, 16 if quick else 64, 64 if quick else 256, V, seed):
            n = len(t.ids) - rng.randrange(48 if quick else 192)
            out.append(dataclasses.replace(t, ids=t.ids[:n], roles=t.roles[:n], logprobs=t.logprobs[:n]))
    return out


def gemm_flops(dtype) -> float:
    """FLOP/s of a matrix product [2048, 576] × [576, 1536], the best of 5."""
    a, b = torch.randn(2048, 576, dtype=dtype), torch.randn(576, 1536, dtype=dtype)
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(10):
            a @ b
        best = min(best, time.perf_counter() - began)
    return 10 * 2 * 2048 * 576 * 1536 / best


def flops(cfg, rows: list) -> float:
    """What the arithmetic of one step needs without sharing or recomputing anything."""
    linear, sizes = plan.parameters(cfg)[1], [len(t.ids) for t in rows]
    targets = sum(t.roles.count(Role.AGENT) for t in rows)
    attention = sum(n * n / 2 for n in sizes) * 4 * cfg.num_attention_heads * cfg.head_dim * cfg.num_hidden_layers
    return 6 * linear * sum(sizes) + 6 * cfg.vocab_size * cfg.hidden_size * targets + 3 * attention


def ours(share: bool, quick: bool):
    model = decoder("smollm2", "fp32", quick)
    rows = episodes(model.cfg.vocab_size, quick)
    beginning = rows[0].roles.count(Role.SYSTEM) if share else 0  # computed once in each of the two groups
    tokens = (sum(len(t.ids) for t in rows) - (len(rows) - 2) * beginning) // 4
    cfg = dataclasses.replace(Config(), kl=0.0, minibatches=1, micro_tokens=tokens, share_prefix=share)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    limit = gemm_flops(model.head.dtype)
    credit, guard = [(t, (-1.0) ** t.member) for t in rows], Guard(Path(tempfile.mkdtemp()), 1)

    def step() -> dict:
        began = time.perf_counter()
        update(model, None, optimizer, credit, cfg, 0, Clock(), guard)
        return {"gemm": flops(model.cfg, rows) / (time.perf_counter() - began) / limit}

    return step


def theirs(quick: bool):
    model = twin("smollm2", "fp32", quick, tempfile.mkdtemp())
    rows = episodes(model.config.vocab_size, quick)
    trainer = trl_trainer(model, quick, per_device_train_batch_size=8, num_generations=8, beta=0.0)
    trainer.current_gradient_accumulation_steps = len(rows) // 4
    prompt = rows[0].roles.count(Role.SYSTEM)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    pad = lambda parts: torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in parts], batch_first=True)
    batches = []
    for i in range(0, len(rows), 4):
        part = rows[i : i + 4]
        batches.append({
            "prompt_ids": torch.tensor([t.ids[:prompt] for t in part]), "prompt_mask": torch.ones(4, prompt, dtype=torch.long),
            "completion_ids": pad([t.ids[prompt:] for t in part]), "completion_mask": pad([[1] * (len(t.ids) - prompt) for t in part]),
            "tool_mask": pad([[int(r == Role.AGENT) for r in t.roles[prompt:]] for t in part]),
            "advantages": torch.tensor([(-1.0) ** t.member for t in part]),
            "num_items_in_batch": torch.tensor(sum(t.roles.count(Role.AGENT) for t in rows)),
        })  # fmt: skip
    trainer.model.train()

    def step() -> None:
        for batch in batches:
            trainer.compute_loss(trainer.model, batch).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def setup(variant: str, quick: bool):
    return theirs(quick) if variant == "TRL" else ours(variant == "ours", quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    o = start(parser, setup)
    got = compare(__file__, {name: [name, o.quick] for name in ("ours", "ours, prefix not shared", "TRL")}, o)
    table, trl = [], got.get("TRL")
    for name in [n for n in got if n != "TRL"]:
        mine, promised = got[name], name == "ours" and trl
        for key, unit, scale in (("wall", "s", 1), ("cpu", "s", 1), ("bytes", "MiB", 2**20)):
            promise = "≤ ½ of TRL's" if promised and key != "cpu" else None
            met = mine[key] <= trl[key] / 2 if promise else None
            against = trl and trl[key] / scale
            table.append(row(f"training step, {name}: {key}", mine[key] / scale, unit, against, promise, met))
    if (plain := got.get("ours, prefix not shared")) is not None:
        table.append(row("share of GEMM", plain["gemm"], "", 1, "≥ 0.5", plain["gemm"] >= 0.5))
    finish(table, o)


if __name__ == "__main__":
    main()
