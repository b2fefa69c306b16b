"""How time and memory of a step grow with the number of dialogues, of turns, and with the context.

python bench/scaling.py [--quick] [--threads N] [--out docs/evidence] [--json FILE]

One thing varies at a time, in the main job's shape, random weights: 16 to 256 dialogues (8 turns), 2 to 30 turns
(64 dialogues), 128 to 2,048 tokens of context in training (a fixed 16,384 tokens a step). Rollout: recorded dialogues
as in bench/rollout.py. Training: forward and backward of as many tokens, with the main job's `micro_tokens`.
Promise: linear, but for attention's own term. So for dialogues and turns, what a token costs at the largest value is at
most 1.5 times the cost at the smallest; for the context growth is reported beside the FLOPs'. With --out a plot (scaling.png).
"""

import argparse
from pathlib import Path

from measure import compare, decoder, finish, row, start
from prefix import forward_backward, group

import plan
from config import Config

SWEEPS = {
    "dialogues": (16, 64, 256),
    "turns": (2, 8, 30),
    "context": (128, 512, 2048),
}


def setup(what: str, n: int, quick: bool):
    import importlib.util

    spec = importlib.util.spec_from_file_location("bench_rollout", Path(__file__).with_name("rollout.py"))
    recorded = importlib.util.module_from_spec(spec)  # by path: `rollout` is the sampler's module
    spec.loader.exec_module(recorded)
    model = decoder("tiny", "fp32", quick)
    if what == "context":
        rows = group(max(1, (2048 if quick else 16384) // n), n // 2, n // 2, model.cfg.vocab_size)
        tokens = sum(len(t.ids) for t in rows)

        def step() -> dict:
            forward_backward(model, rows, False, Config().micro_tokens)
            return {"tokens": tokens}

        return step
    talks = recorded.dialogues(n if what == "dialogues" else 64, 8 if what == "dialogues" else n, model.cfg.vocab_size)
    run = recorded.ours(model, talks, [3] * 8)
    return lambda: run() | {"read": sum(len(heard) for turns in talks for heard, _ in turns)}


def growth(cfg, short: int, long: int) -> float:
    """How much more a token of a row of `long` costs in FLOPs than one of a row of `short`."""
    per_token = lambda n: (
        2 * plan.parameters(cfg)[1] + 2 * n * cfg.num_attention_heads * cfg.head_dim * cfg.num_hidden_layers
    )
    return per_token(long) / per_token(short)


def plot(points: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(points), figsize=(4 * len(points), 3.2))
    for axis, (what, values) in zip(axes, points.items(), strict=True):
        x = list(values)
        axis.plot(x, [values[n]["wall"] for n in x], marker="o", label="seconds")
        axis.plot(x, [values[n]["bytes"] / 2**30 for n in x], marker="s", label="extra memory, GiB")
        axis.set(xlabel=what, ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for scaling.png")
    o = start(parser, setup)
    table, points = [], {}
    for what, values in SWEEPS.items():
        values = values[:2] if o.quick else values
        got = points[what] = {n: compare(__file__, {what: [what, n, o.quick]}, o, rounds=1)[what] for n in values}
        cost = {n: g["wall"] / (g["tokens"] + g.get("read", 0)) for n, g in got.items()}
        for n, g in got.items():
            table.append(row(f"{what} = {n}: time", g["wall"], "s"))
            table.append(row(f"{what} = {n}: memory", g["bytes"] / 2**20, "MiB"))
            table.append(row(f"{what} = {n}: a token", 1e6 * cost[n], "µs"))
        first, last = values[0], values[-1]
        if what == "context":
            flops = growth(decoder("tiny", "fp32", o.quick).cfg, first, last)
            table.append(row(f"a token at {what} {last} against {first}", cost[last] / cost[first], "×", flops))
        else:
            ratio = cost[last] / cost[first]
            table.append(row(f"a token at {what} {last} against {first}", ratio, "×", 1, "≤ 1.5", ratio <= 1.5))
    if o.out:
        plot(points, o.out / "scaling.png")
    finish(table, o)


if __name__ == "__main__":
    main()
