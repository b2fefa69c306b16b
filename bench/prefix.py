"""Shared-prefix training: forward and backward of a group, its common prompt computed once, against once a member.

python bench/prefix.py [--quick] [--threads N] [--dtypes fp32 bf16] [--prompts 128 512] [--json FILE]

G = 8 episodes; the prompt is half of each; of the rest every third token is the agent's, as in conversations with tools.
The work is what `grpo.update` does for one micro-batch: log-probs, loss, backward. SmolLM2-135M's shape, random weights.
Promise: 1.7 times as fast. The bound is 2G / (G + 1) = 1.78 for all that is done token by token, 1.28 in attention (where
the members still look at the prompt), and 1 in the log-probs' product with the output matrix.
"""

import argparse
import dataclasses
import math

import torch
from measure import compare, decoder, finish, row, start

from chat import Role
from config import Config
from grpo import grpo_loss, logprobs, micro_batches
from rollout import Trajectory


def group(G: int, P: int, C: int, V: int, seed: int = 0) -> list[Trajectory]:
    """G episodes of P + C tokens with the same first P."""
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(V, (P,), generator=g).tolist()
    out = []
    for member in range(G):
        ids = (*prompt, *torch.randint(V, (C,), generator=g).tolist())
        roles = (Role.SYSTEM,) * P + tuple(Role.USER if i % 3 else Role.AGENT for i in range(C))
        lp = tuple(-math.log(V) if r == Role.AGENT else math.nan for r in roles)
        out.append(Trajectory("t", "k", "train", member, (member,), ids, roles, lp, "user_ended", 1.0, (), (), {}))
    return out


def forward_backward(model, rows: list[Trajectory], share: bool, tokens: int = 10**9) -> None:
    cfg = dataclasses.replace(Config(), kl=0.0)
    for batch in micro_batches(rows, [(-1.0) ** t.member for t in rows], tokens, share=share):
        grpo_loss(logprobs(model, batch)[0], batch, cfg)[0].backward()
    model.zero_grad(set_to_none=True)


def setup(share: bool, P: int, dtype: str, quick: bool):
    model = decoder("smollm2", dtype, quick)
    rows = group(8, P, P, model.cfg.vocab_size)
    return lambda: forward_backward(model, rows, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128], help="tokens of the prompt, and of the rest")
    o = start(parser, setup)
    table = []
    for dtype in o.dtypes:
        for P in o.prompts:
            got = compare(__file__, {str(share): [share, P, dtype, o.quick] for share in (True, False)}, o)
            on, off = got["True"], got["False"]
            name, ratio = f"prefix shared, {dtype}, 8 × ({P} + {P}) tokens", off["wall"] / on["wall"]
            table += [row(f"{name}: {key}", on[key], "s", off[key]) for key in ("wall", "cpu")]
            table.append(row(f"{name}: memory", on["bytes"] / 2**20, "MiB", off["bytes"] / 2**20))
            table.append(row(f"{name}: speed-up", ratio, "×", 1, "≥ 1.7", ratio >= 1.7))
    finish(table, o)


if __name__ == "__main__":
    main()
