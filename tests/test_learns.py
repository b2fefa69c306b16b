"""A small run of the real job that truly learns: the cold start lifts held-out success off zero, and reinforcement learning
lifts it again. About two minutes on two cores."""

import json
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAGS = (
    "--two 0 --slip 0 --sft-steps 150 --sft-talks 12 --steps 12 --tasks 12 --lr 1e-3 --kl 0.003 --user scripted --eval-every 0 "
    "--test-tasks 150 --trials 1 --threads 2"
)


def test_a_small_run_learns(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "mua_rl.py"), "train", "--run", str(tmp_path / "run"), *FLAGS.split()],
        capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    loss = [r["loss"] for r in rows if r["phase"] == "sft"]
    assert loss[-1] < 0.1 * loss[0]
    assert all(r["gap_max"] < 1e-4 for r in rows if r["phase"] == "rl" and r["trained_rows"])
    before, after = summary["cold_start_scripted"], summary["scripted_user"]
    assert before["success"] > max(summary["null"].values()) + 0.05, (before, summary["null"])
    # The same 150 tasks before and after: two standard errors of an unpaired difference are a severe bar.
    error = math.sqrt(2 * 0.25 / 150)
    assert after["success"] > before["success"] + 2 * error, (before, after)
