"""Runs of the real job that truly learn: the cold start lifts held-out success off zero, and reinforcement learning lifts it
again. The library's desk takes half a minute of one core; the shop takes three minutes (`pytest -m slow`).

How many steps are enough differs by seed, and with rounding: after 120 of the desk's cold start, sixteen steps took off with
two seeds of four.
"""

import json

import pytest
from test_domains import CODE

import config
import mua_rl
from evaluation import Stage, evaluate, make_domain, make_samplers
from model_files import load_chat, load_model
from run import checkpoint_of

ALWAYS = "--tasks 16 --user scripted --eval-every 0 --test-tasks 0 --threads 1"
DESK = "--domain desk.py --layers 2 --width 64 --mlp 128 --sft-steps 200 --sft-talks 8 --steps 16"
SHOP = "--two 0 --slip 0 --sft-steps 150 --sft-talks 14 --steps 15"


@pytest.mark.parametrize("flags", [DESK, pytest.param(SHOP, marks=pytest.mark.slow)], ids=["desk", "shop"])
def test_a_small_run_learns(tmp_path, monkeypatch, flags):
    (tmp_path / "desk.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    mua_rl.main(["train", "--run", str(run), *flags.split(), *ALWAYS.split()])
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
