"""Ablations of the main job on three seeds: what each part of the method is worth here.

    python bench/evidence.py                 all studies (80 minutes of CPU, two runs at once); what is there is not run again
    python bench/evidence.py kl users        some of them

Every run of a seed starts from the same cold start and sees the same training tasks for STEPS steps. Then 150 held-out
tasks at temperature 1, with each user of TESTED. For each study: docs/evidence/STUDY.csv and STUDY.png.
"""

import argparse
import csv
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import report  # noqa: E402

SEEDS, STEPS, TESTS = (0, 1, 2), 12, 150
TESTED = {"lm": "lm", "scripted": "scripted", "stranger": "stranger", "lm, tools fail": "lm"}  # test → user
COLUMNS = "step success reward kl entropy grad_norm turns tokens_per_turn unique_4grams user_fault".split()


# ── Two things that the method does not do, and so Config has no flag for them ──────────────────────────────────────


def user_tokens_trained(mua_rl) -> None:
    """The loss takes user and tool tokens too. Nothing sampled them, so π_old is the policy before its update."""
    import torch

    import grpo
    from chat import Role

    update = mua_rl.update

    def unmasked(policy, reference, optimizer, rows, cfg, *rest):
        heard = {Role.USER, Role.TOOL, Role.AGENT}
        changed = []
        for t, A in rows:
            roles = tuple(Role.AGENT if r in heard else r for r in t.roles)
            t = dataclasses.replace(t, roles=roles, logprobs=(math.nan,) * len(roles))
            with torch.no_grad():
                old = iter(grpo.logprobs(policy, grpo.make_batch([t], [0.0]), cfg.temperature)[0].tolist())
            logprobs = [next(old) if r == Role.AGENT and i else math.nan for i, r in enumerate(t.roles)]
            changed.append((dataclasses.replace(t, logprobs=tuple(logprobs)), A))
        return update(policy, reference, optimizer, changed, cfg, *rest)

    mua_rl.update = unmasked


def std_over_the_batch(mua_rl) -> None:
    """(r − the group's mean) / the *batch's* standard deviation: every group weighs by its spread."""
    update = mua_rl.update

    def normalised(policy, reference, optimizer, rows, *rest):
        rewards = [t.reward for t, _ in rows]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        return update(policy, reference, optimizer, [(t, A / (std + 1e-6)) for t, A in rows], *rest)

    mua_rl.update = normalised


class Variant(NamedTuple):
    """A run: what differs from the main job, and the changes that no flag makes."""

    flags: str = ""
    change: Callable | None = None
    start: str = "cold_start"  # or "base": random weights


VARIANTS = {
    "main job": Variant(),
    "no cold start": Variant("--user scripted", start="base"),
    "scripted user": Variant("--user scripted"),
    "pool of both": Variant("--user lm=0.5,scripted=0.5"),
    "user tokens trained": Variant(change=user_tokens_trained),
    "std over the batch": Variant("--advantage dr_grpo", std_over_the_batch),
    "no std": Variant("--advantage dr_grpo"),
    "KL 0": Variant("--kl 0"),
    "KL 0.001": Variant("--kl 0.001"),
    "KL 0.01": Variant("--kl 0.01"),
    "faulty tools": Variant("--tool-faults 0.15"),
    "credit by turn": Variant("--turn-credit 0.5"),
}
STUDIES = {  # study → (title, variants); "main job" is KL 0.003, the in-process user, masked, std over the group
    "start": ("Cold start, then RL; and RL without it", ["main job", "scripted user", "no cold start"]),
    "mask": ("User and tool tokens masked, or trained", ["main job", "user tokens trained"]),
    "std": ("Advantage over the group's std, the batch's, or none", ["main job", "std over the batch", "no std"]),
    "kl": ("Weight of KL to the cold start", ["KL 0", "KL 0.001", "main job", "KL 0.01"]),
    "users": ("Who plays the user in training", ["main job", "scripted user", "pool of both"]),
    "faults": ("Tools that time out or fail in training (15 % of calls)", ["main job", "faulty tools"]),
    "credit": ("Credit by turn, among turns from the same database state", ["main job", "credit by turn"]),
}


# ── One run, in a process of its own ─────────────────────────────────────────────────────────────────────────────────


def flags_of(run: Path, seed: int) -> list[str]:
    return f"--run {run} --seed {seed} --threads 1 --test-tasks 0 --eval-every 0".split()


def cold_start(folder: Path, seed: int) -> None:
    """The main job's cold start; and the weights that it began with, for "no cold start"."""
    import mua_rl

    for name, extra in (("base", "--sft-steps 1 --sft-lr 1e-9 --sft-lr-rest 1e-9"), ("cold", "")):
        if not (folder / name / "summary.json").exists():
            mua_rl.main(["sft", *flags_of(folder / name, seed), *extra.split()])


def one(folder: Path, name: str, seed: int) -> None:
    """Train a variant and test it; leaves evidence.json in its folder."""
    import mua_rl

    variant, run = VARIANTS[name], folder / name.replace(" ", "_")
    start = folder / ("base" if variant.start == "base" else "cold") / "cold_start"
    if variant.change is not None:
        variant.change(mua_rl)
    if not (run / "summary.json").exists():
        flags = f"--model {start} --sft-steps 0 --steps {STEPS} {variant.flags}".split()
        mua_rl.main(["train", *flags_of(run, seed), *flags])
    tested = test(str(run), seed, variant.start == "base")
    if name == "main job":  # what every run of this seed came from
        tested |= {f"{k}, before RL": v for k, v in test(str(folder / "cold"), seed, False).items()}
    (run / "evidence.json").write_text(json.dumps(tested, indent=1))


def test(run: str, seed: int, no_lm: bool) -> dict[str, list[float]]:
    """{test: [success, lo, hi]}. no_lm: its language-model user is the base, which says nothing of sense."""
    import commands
    from evaluation import Stage, evaluate, make_samplers

    cfg, domain, chat, policy, voices = commands.opened(run, commands.Place(seed=seed), {"lm": 1.0})
    found = {}
    for label, who in TESTED.items():
        if no_lm and who == "lm":
            continue
        its = dataclasses.replace(cfg, tool_faults=0.15 if "fail" in label else 0.0)
        stage = Stage(its, domain, chat, make_samplers(its, chat, policy, None, 1.0, voices))
        result, _ = evaluate(stage, "test", TESTS, 1, who)
        found[label] = [result[k] for k in ("success", "lo", "hi")]
    return found


# ── All of them ──────────────────────────────────────────────────────────────────────────────────────────────────────


def run_all(runs: Path, wanted: list[str], at_once: int) -> None:
    """Each in a process with one thread, `at_once` of them side by side."""
    jobs = [(runs / f"seed{seed}", name, seed) for name in wanted for seed in SEEDS]
    todo = [j for j in jobs if not (j[0] / j[1].replace(" ", "_") / "evidence.json").exists()]

    def child(*args: object) -> None:
        log = runs / ("-".join(str(a).replace(" ", "_").replace("/", "_") for a in args) + ".log")
        with open(log, "w") as file:
            command = [sys.executable, __file__, "--runs", str(runs), "--child", *map(str, args)]
            code = subprocess.run(
                command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"}
            ).returncode
        print(f"{' '.join(map(str, args))}: {'done' if not code else f'failed, see {log}'}", flush=True)

    runs.mkdir(parents=True, exist_ok=True)

    def after(cold_start: Future, job: tuple[Path, str, int]) -> None:
        cold_start.result()
        child(job[1], job[2])

    with ThreadPoolExecutor(at_once) as pool:  # cold starts stand first in the queue, so no run waits for one in vain
        cold = {seed: pool.submit(child, "cold start", seed) for seed in SEEDS if any(j[2] == seed for j in todo)}
        runs_left = [pool.submit(after, cold[job[2]], job) for job in sorted(todo, key=lambda j: j[2])]
        for future in runs_left:
            future.result()


def write(runs: Path, out: Path, study: str) -> None:
    """STUDY.csv: a line for each variant, seed and test; STUDY.png."""
    title, variants = STUDIES[study]
    lines, curves = [], {}
    for name in variants:
        for seed in SEEDS:
            run = runs / f"seed{seed}" / name.replace(" ", "_")
            rl = [r for r in report.read_metrics(run / "metrics.jsonl") if r["phase"] == "rl"]
            curves[name, seed] = rl
            last = {f"last5_{k}": mean([r[k] for r in rl[-5:] if r.get(k) is not None]) for k in COLUMNS[1:]}
            for test, (success, lo, hi) in json.loads((run / "evidence.json").read_text()).items():
                row = {"variant": name, "seed": seed, "test": test, "success": success, "lo": lo, "hi": hi}
                lines.append({k: round(v, 4) if isinstance(v, float) else v for k, v in (row | last).items()})
    with open(out / f"{study}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    plot(out / f"{study}.png", title, variants, lines, curves)


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def plot(path: Path, title: str, variants: list[str], lines: list[dict], curves: dict) -> None:
    """Left: success in training, a line a seed. Right: held-out success by test, a point with its interval a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
    tests = list(dict.fromkeys(line["test"] for line in lines))
    for v, name in enumerate(variants):
        for seed in SEEDS:
            rl = curves[name, seed]
            label = name if seed == SEEDS[0] else None
            left.plot([r["step"] + 1 for r in rl], [100 * r["success"] for r in rl], color=f"C{v}", lw=1, label=label)
        for line in (x for x in lines if x["variant"] == name and x["success"] is not None):
            x = tests.index(line["test"]) + (v - (len(variants) - 1) / 2) * 0.2 + (line["seed"] - 1) * 0.05
            y, error = (
                100 * line["success"],
                [[100 * (line["success"] - line["lo"])], [100 * (line["hi"] - line["success"])]],
            )
            right.errorbar(x, y, error, color=f"C{v}", marker="o", ms=4, lw=1, capsize=2)
    left.set(xlabel="GRPO step", ylabel="success in training, %", ylim=(0, 100))
    right.set(ylabel="held-out success, %", ylim=(0, 100))
    right.set_xticks(range(len(tests)), [t.replace(", ", ",\n") for t in tests], fontsize=8)
    left.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []], help="all by default")
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "evidence")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, seed = options.child[0], int(options.child[1])
        folder = options.runs / f"seed{seed}"
        return cold_start(folder, seed) if name == "cold start" else one(folder, name, seed)
    studies = options.studies or list(STUDIES)
    wanted = list(dict.fromkeys(v for s in studies for v in STUDIES[s][1]))
    run_all(options.runs, wanted, options.at_once)
    for study in studies:
        write(options.runs, options.out, study)


if __name__ == "__main__":
    main()
