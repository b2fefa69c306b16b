"""A small run of the real job that truly learns: the cold start lifts held-out success off zero, and reinforcement learning
lifts it again. Three minutes on one core; the name puts it first, so that the other tests run beside it."""

import json

import config
import mua_rl
from evaluation import Stage, evaluate, make_domain, make_samplers
from model_files import load_chat, load_model
from run import checkpoint_of

FLAGS = (
    "--two 0 --slip 0 --sft-steps 150 --sft-talks 14 --steps 15 --tasks 16 --user scripted "
    "--eval-every 0 --test-tasks 0 --threads 1"
)


def test_a_small_run_learns(tmp_path):
    run = tmp_path / "run"
    mua_rl.main(["train", "--run", str(run), *FLAGS.split()])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = [r["loss"] for r in rows if r["phase"] == "sft"]
    assert loss[-1] < 0.1 * loss[0]
    assert all(r["gap_max"] < 1e-4 for r in rows if r["phase"] == "rl" and r["trained_rows"])
    cfg, chat, success = config.read_config(run), load_chat(run / "checkpoint"), {}
    for name in ("cold_start", "checkpoint"):
        weights = load_model(checkpoint_of(run, name))
        stage = Stage(cfg, make_domain(cfg), chat, make_samplers(cfg, chat, weights, weights))
        success[name] = evaluate(stage, "test", 250, 1, "scripted")[0]["success"]
    null = json.loads((run / "summary.json").read_text())["null"]
    assert success["cold_start"] > max(null.values()) + 0.05, (success, null)
    # The same 250 tasks before and after: a standard error of 4 points for the difference.
    assert success["checkpoint"] > success["cold_start"] + 0.06, success
