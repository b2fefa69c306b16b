"""`explain`: the table's numbers make the trainer's loss, in every objective that a table can show; what it refuses."""

import dataclasses
import io
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_chat import CHAT

import explain
import grpo
import model as models
import mua_rl
from chat import Role, UserError
from config import Config
from domains import shop
from grpo import make_batch
from new_model import from_scratch_shape
from rollout import Trajectory
from run import Run, State, save_checkpoint
from sft import agent_view, demonstration

ROOT = Path(__file__).parents[1]
CFG = Config(layers=2, width=32, heads=2, kv_heads=1, mlp=32, tasks=1, group_size=4, kl=0.1, threads=1, temperature=0.8)
REWARDS = [1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]  # of two groups: one that teaches, one that does not


def play(policy, domain, task, member: int, reward: float) -> Trajectory:
    """A demonstrator's talk with the log-probs of `policy`, as its sampler would have noted them."""
    talk = demonstration(domain, task, "agent", random.Random(f"{task.id} {member}"))
    ctx = agent_view(domain, CHAT, talk)
    with torch.no_grad():
        logp = iter(grpo.logprobs(policy, make_batch([ctx], [0.0]), CFG.temperature)[0].tolist())
    noted = tuple(next(logp) if role == Role.AGENT else math.nan for role in ctx.roles)
    about = task.id, task.kind, task.split, member, (member,), tuple(ctx.ids), tuple(ctx.roles), noted
    exit = "context_full" if member == 2 else "user_ended"
    turns = sum(b == Role.AGENT != a for a, b in zip(ctx.roles, ctx.roles[1:], strict=False))
    return Trajectory(*about, exit, reward, (), (), {}, (), tuple(str(i % 3) for i in range(turns)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's folder: a group that teaches and one that does not, an evaluation, and weights that have moved since."""
    torch.manual_seed(0)
    path, domain = tmp_path_factory.mktemp("explain") / "run", shop.Shop()
    run, policy = Run(path, CFG), models.Decoder(from_scratch_shape(CFG, CHAT.vocab_size))
    save_checkpoint(path, policy, CHAT, [], State(), "cold_start")
    move = lambda: [p.data.add_(0.04 * torch.randn_like(p)) for p in policy.parameters()]
    move()
    tasks = [domain.task("train", 0, i) for i in range(2)]
    groups = [[play(policy, domain, t, m, r) for m, r in enumerate(rs)] for t, rs in zip(tasks, REWARDS, strict=True)]
    run.episodes(domain, CHAT, groups, tasks, "lm", grpo.advantages, phase="rl", step=3, stage="train")
    run.episodes(domain, CHAT, groups[:1], tasks[:1], "lm", grpo.advantages, phase="eval", step=3, stage="final")
    move()
    save_checkpoint(path, policy, CHAT, [], State(phase="rl", step=4))
    return path


def explained(folder: Path, number: int | None = None, terminal: bool = False, **changes) -> str:
    """What explain prints if the run's config had these values."""
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(dataclasses.replace(CFG, **changes))))
    out = io.StringIO()
    out.isatty = lambda: terminal
    explain.explain(folder, number, out)
    return out.getvalue()


def last(text: str) -> tuple[float, float, float]:
    words = text.splitlines()[-1].split()
    assert words[:2] == ["by", "hand"] and words[3:6:2] == ["trainer", "difference"]
    return float(words[2]), float(words[4]), float(words[6])


OBJECTIVES = {
    "default": {},
    "dr_grpo, constant": {"advantage": "dr_grpo", "mean": "constant", "overlong": "train"},
    "rloo, sequence mean": {"advantage": "rloo", "mean": "sequence"},
    "gspo": {"ratio": "sequence", "mean": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "kl": 0.0},
    "dual clip": {"dual_clip": 1.05, "overlong": "train"},
    "k2": {"kl_estimator": "k2"},
    "k1 with its ratio": {"kl_estimator": "k1", "kl_ratio": True},
    "k3 with its ratio": {"kl_ratio": True},
    "turn credit": {"turn_credit": 0.5, "overlong": "train"},
    "equal groups": {"skip_equal": False},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_by_hand_is_the_trainer(folder, name):
    text = explained(folder, **OBJECTIVES[name])
    by_hand, trainer, difference = last(text)
    assert abs(by_hand - trainer) <= 1e-6 and difference <= 1e-6
    assert trainer != 0


def table_of(text: str) -> list[list[float]]:
    """The numbers of the printed table's sampled tokens: log π_old, log π_θ, ρ, A, KL, term, clipped."""
    rows = (line.rsplit(maxsplit=7) for line in text.splitlines() if line.endswith(("  yes", "  no")))
    return [[*map(float, row[1:7]), row[7] == "yes"] for row in rows]


def test_the_printed_numbers_make_the_printed_loss(folder):
    """A reader with the printed pages of all members and a calculator gets the last line: the default objective."""
    pages = [explained(folder, k) for k in (0, 1, 3)]  # member 2 was cut and is not trained on
    tables = [table_of(page) for page in pages]
    assert len({page.splitlines()[-1] for page in pages}) == 1
    for page, rows in zip(pages, tables, strict=True):
        assert len(rows) > 10 and f"{len(rows):4} tokens of w" in page
    losses = []
    for old, new, ratio, A, kl, term, clipped in (row for rows in tables for row in rows):
        assert ratio == pytest.approx(math.exp(new - old), abs=1e-6)
        low, high = 1 - CFG.clip_low, 1 + CFG.clip_high
        assert clipped == ((A > 0 and ratio > high) or (A < 0 and ratio < low))
        losses.append(-A * ({True: high, False: low}[A > 0] if clipped else ratio) + CFG.kl * kl)
        assert term == pytest.approx(losses[-1], abs=1e-6)
    assert {row[-1] for rows in tables for row in rows} == {True, False}
    assert sum(losses) / len(losses) == pytest.approx(last(pages[0])[1], abs=1e-6)


def test_a_wrong_formula_would_show(folder, monkeypatch):
    right = explain.lines
    for change in ({"clip_high": 0.2}, {"kl": 0.11}, {"kl_estimator": "k2"}, {"dual_clip": 1.01}):
        wrong = lambda *a, change=change: right(*a[:-1], dataclasses.replace(a[-1], **change))
        monkeypatch.setattr(explain, "lines", wrong)
        assert last(explained(folder))[2] > 1e-5, change


def test_every_token_is_shown_turn_by_turn_and_roles_have_colours(folder, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, coloured = explained(folder), explained(folder, terminal=True)
    assert "\x1b" not in plain and "\x1b[32m" in coloured and "\x1b[34m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert explained(folder, terminal=True) == plain
    assert "turn 1: " in plain and "turn 2: " in plain and "member 3: reward 1" in plain
    roles = [line.split()[0] for line in plain.splitlines()[1:8]]
    assert {"USER", "AGENT", "TEMPLATE"} <= set(roles)


def test_from_the_shell_without_a_terminal(folder):
    explained(folder)  # leaves the default config
    args = [sys.executable, str(ROOT / "mua_rl.py"), "explain", str(folder), "--episode", "1"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=300, env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode == 0 and last(done.stdout)[2] <= 1e-6, done.stderr


REFUSED = {  # --episode, what the config has: what the line says
    (2,): "--episode 2 was not trained on (exit context_full, rewards of its group 1.0, 0.0, 0.0, 1.0); choose 0, 1, 3",
    (5,): "--episode 5 was not trained on (exit user_ended, rewards of its group 0.0, 0.0, 0.0, 0.0); choose 0, 1, 3",
    (8,): "--episode 8 was not trained on (it is of an evaluation); choose 0, 1, 3",
    (-1,): "--episode -1: ",
    (99,): "has 12 episodes, numbered from 0",
    (None, "tis", 2.0): "--tis 2.0: ",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_explained_is_refused_with_the_reason(folder, case):
    with pytest.raises(UserError) as error:
        explained(folder, case[0], **{case[1]: case[2]} if case[1:] else {})
    assert REFUSED[case] in str(error.value) and "\n" not in str(error.value)


def test_bad_runs_are_one_line_and_exit_2(tmp_path, folder, capsys):
    explained(folder)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    for run in (tmp_path / "nowhere", bare):
        with pytest.raises(SystemExit) as stop:
            mua_rl.command_line(["explain", str(run)])
        out = capsys.readouterr()
        assert stop.value.code == 2 and len(out.err.strip().splitlines()) == 1 and str(run) in out.err


def test_chat_shows_the_simulated_user_and_the_agent_and_the_verdict(folder, capsys):
    """--watch: the turns as they happen, then the verdict; a task is chosen or drawn, and always named."""
    explained(folder)  # leaves the default config

    def watched(*more) -> str:
        mua_rl.command_line(["chat", str(folder), "--watch", "--temperature", "1", *more])
        return capsys.readouterr().out

    first = watched("--task", "7")
    assert first.startswith("The user's part (--split test --task 7):\n") and "Wish: " in first
    assert "\nuser> " in first and "\nexit: " in first and "; reward: 0" in first and "\x1b" not in first
    assert watched("--task", "7") == first
    drawn = watched()
    assert watched("--task", re.search(r"--task (\d+)\):", drawn)[1]) == drawn
    with pytest.raises(SystemExit) as stop:
        watched("--task", "-1")
    assert stop.value.code == 2 and capsys.readouterr().err == "mua_rl: --task -1: give 0 or more\n"
