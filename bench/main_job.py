"""The evidence for the main job: runs it for several seeds (or reads runs that exist) and writes a CSV and a plot.

python bench/main_job.py --seeds 0 1 2 --runs runs --out docs/evidence
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import report  # noqa: E402

COLUMNS = "cold_start cold_start_scripted final scripted_user unseen_user unseen_combination unseen_names greedy greedy_unseen_user".split()


def row(summary: dict, config: dict) -> dict:
    """One line of the CSV: every measured success with its interval, pass^k, user faults, cost."""
    out = {"seed": summary["seed"], "steps": config["steps"], "threads": summary["threads"], "torch": summary["torch"]}
    out |= {k: summary[k] for k in ("wall_s", "peak_rss_mb", "user_fault_rate", "sampled_tokens", "trained_tokens")}
    out |= {f"null_{k}": v for k, v in summary["null"].items()} | {"careless": summary["careless"]}
    for name in COLUMNS:
        for key in ("success", "lo", "hi", "n"):
            out[f"{name}_{key}"] = summary[name][key]
    out |= {f"final_pass^{k}": v for k, v in summary["final"]["pass_k"].items()}
    out["final_user_fault_rate"] = summary["final"]["user_fault_rate"]
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in out.items()}


def plot(runs: list[Path], path: Path) -> None:
    """Held-out success and training success over the steps, one line a seed. Before and after GRPO the tasks are those of
    the test split, on the way those of the validation split. A cross: the scripted user in words never met.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.2))
    for i, run in enumerate(runs):
        rows = report.read_metrics(run / "metrics.jsonl")
        rl = [r for r in rows if r["phase"] == "rl"]
        axis.plot([r["step"] + 1 for r in rl], [100 * r["success"] for r in rl], color=f"C{i}", alpha=0.3, lw=1)
        evals = [
            r for r in rows if r["phase"] == "eval" and r.get("name", "").startswith(("cold_start", "step_", "final"))
        ]
        evals = [r for r in evals if r.get("user") == "lm" and r["success"] is not None]
        keys = ("success", "lo", "hi", "split")
        points = sorted((0 if r["name"] == "cold_start" else r["step"], *(r[k] for k in keys)) for r in evals)
        x, y, lo, hi, splits = zip(*points, strict=True)
        error = [
            [100 * (b - a) for a, b in zip(lo, y, strict=True)],
            [100 * (b - a) for a, b in zip(y, hi, strict=True)],
        ]
        axis.errorbar(x, [100 * v for v in y], error, color=f"C{i}", capsize=3, label=f"seed {i}")
        fill = [f"C{i}" if split == "test" else "white" for split in splits]
        axis.scatter(x, [100 * v for v in y], 20, fill, edgecolors=f"C{i}", zorder=3)
        unmet = next(r for r in rows if r["phase"] == "eval" and r.get("name") == "unseen_user")
        axis.scatter(x[-1] + 1, 100 * unmet["success"], 45, f"C{i}", marker="x")
    axis.scatter([], [], 20, "black", label="test tasks")
    axis.scatter([], [], 45, "black", marker="x", label="test tasks, a user never met")
    axis.scatter([], [], 20, "white", edgecolors="black", label="validation tasks")
    axis.plot([], [], color="black", alpha=0.3, lw=1, label="the step's training tasks")
    axis.set(xlabel="GRPO step (16 tasks × 8 conversations)", ylabel="success, %", ylim=(0, 100))
    axis.set_title("Talking with a language-model user: success at temperature 1")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    options = parser.parse_args()
    runs = [options.runs / f"seed{seed}" for seed in options.seeds]
    for seed, run in zip(options.seeds, runs, strict=True):
        if not (run / "summary.json").exists():
            subprocess.run(
                [sys.executable, str(ROOT / "mua_rl.py"), "train", "--seed", str(seed), "--run", str(run)], check=True
            )
    rows = [
        row(json.loads((r / "summary.json").read_text()), json.loads((r / "config.json").read_text())) for r in runs
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "main_job.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    plot(runs, options.out / "main_job.png")


if __name__ == "__main__":
    main()
