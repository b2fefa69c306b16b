"""report.py: files that a kill cut, runs that lack almost everything, text that tries to become markup."""

import gzip
import io
import json
import math
import random
import re
import shutil
import subprocess
import sys
import time

import pytest

import report
from chat import UserError

EVIL = '<script>document.title=1</script> <!-- </script> <img src=x onerror="document.title=1"> \x1b[31m'


def an_episode(step: int, task: int, member: int, rng: random.Random) -> dict:
    reward = int(rng.random() < 0.6)
    tokens = [
        "<|im_start|>",
        "user\n",
        "Cancel",
        " it",
        "<|im_end|>",
        "\n",
        "Which",
        " order",
        "?",
        "<|im_end|>",
    ]
    roles = [4, 4, 1, 1, 4, 4, 3, 3, 3, 3]
    turns = [
        {"role": "user", "text": "Please cancel my order."},
        {"role": "agent", "text": "Which order is it?"},
        {"role": "call", "text": '{"name": "get_order", "arguments": {"order": "#E37"}}'},
        {"role": "tool", "text": '{"status": "pending", "items": ["red bag"]}'},
    ]
    return {
        "phase": "rl", "step": step, "stage": "", "split": "train", "task": f"train-{task}",
        "kind": ["cancel", "return"][task % 2], "member": member, "user": "lm", "reward": reward,
        "advantage": rng.gauss(0, 1), "exit": "user_ended" if reward else "turn_limit",
        "instruction": "You are Dora Cole. Cancel #E37.",
        "diff": [] if reward else ["orders/#E37/status: pending, goal cancelled"], "turns": turns,
        "roles": roles, "tokens": tokens,
        "logprobs": [-0.3 * rng.random() if role == 3 else None for role in roles],
    }  # fmt: skip


def some_metrics(steps: int, rng: random.Random) -> list[dict]:
    rows = [{"phase": "sft", "step": i, "tokens": 2000, "loss": 5 * math.exp(-i / 30) + 0.1} for i in range(150)]
    for stage, step, success in (
        ("cold_start", 0, 0.45),
        ("during", steps // 2, 0.7),
        ("final", steps, 0.88),
    ):
        for user, y in (("lm", success), ("scripted", success - 0.08)):
            row = {"phase": "eval", "step": step, "stage": stage, "user": user, "split": "test", "n": 200}
            rows.append(row | {"success": y, "lo": y - 0.05, "hi": y + 0.04})
    for i in range(steps):
        p, noise = 0.45 + 0.4 * i / steps + rng.gauss(0, 0.05), rng.random()
        rows.append({
            "phase": "rl", "step": i, "reward": p, "success": p, "kl": 0.02 * i / steps + 0.003 * noise,
            "entropy": 0.3 - 0.1 * i / steps, "clip_frac": 0.01 * noise, "grad_norm": 1 + rng.random(),
            "gap_mean": 1e-6 * (1 + noise), "gap_max": 3e-5 * (1 + rng.random()), "turns": 7 + noise,
            "tokens_per_turn": 9 + rng.random(), "all_right": 0.5 * i / steps,
            "all_wrong": 0.3 * (1 - i / steps), "malformed": 0.02 * noise, "user_fault": 0.04 * rng.random(),
            "sample_tok_s": 2000 + 100 * noise,
            "train_tok_s": 9000, "exits": {"user_ended": 50 + i % 5, "turn_limit": 9, "reply_full": 3},
            "tools": {"find_customer": 64, "get_order": 80, "cancel_order": 20, "change_town": 9 + i % 7},
        })  # fmt: skip
    return rows


PASS_K = {"1": 0.88, "2": 0.8, "3": 0.75, "4": 0.71}
SUMMARY = {
    "preset": "tiny", "seed": 0, "wall_s": 1130.5, "peak_rss_mb": 1840.2, "careless": 0.55,
    "null": {"do_nothing": 0.0, "transfer": 0.03, "act_without_asking": 0.061},
    "cold_start": {"success": 0.45, "lo": 0.41, "hi": 0.49, "n": 400},
    "final": {"success": 0.88, "lo": 0.85, "hi": 0.91, "n": 400, "pass_k": PASS_K},
    "unseen_user": {"success": 0.79, "lo": 0.74, "hi": 0.83, "n": 400},
    "unseen_combination": {"success": 0.6, "n": 100},
    "user_fault_rate": 0.031, "sampled_tokens": 1_234_567, "trained_tokens": 900_000, "sample_tok_s": 2100.0,
    "train_tok_s": 9000.0, "seconds_by_phase": {"sft": 280.0, "rl": 700.0, "eval": 90.0},
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    rng, folder = random.Random(0), tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"preset": "tiny", "seed": 0}))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some_metrics(60, rng)))
    for step in range(4):
        group = [an_episode(step, task, member, rng) for task in range(2) for member in range(4)]
        report.append_episodes(folder / "episodes.jsonl.gz", group)
    return folder


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))


def shown(run, episode=None) -> str:
    out = io.StringIO()
    report.show(run, episode, out)
    return out.getvalue()


def test_imports_nothing_that_trains():
    code = "import report, sys; print([m for m in ('torch', 'matplotlib', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_cut_member_is_dropped_wherever_the_kill_hit(tmp_path):
    path, batches = tmp_path / "episodes.jsonl.gz", [[{"step": i, "text": "é" * i}] * 3 for i in range(3)]
    assert report.read_episodes(path) == []
    for batch in batches[:2]:
        report.append_episodes(path, batch)
    whole = path.stat().st_size
    report.append_episodes(path, batches[2])
    data = path.read_bytes()
    assert gzip.decompress(data).count(b"\n") == 9  # any gzip reader opens the whole file
    for cut in range(whole, len(data)):
        path.write_bytes(data[:cut])
        assert report.read_episodes(path) == batches[0] + batches[1]
    for cut in range(whole + 1, len(data)):  # and a resumed run writes on behind the cut
        path.write_bytes(data[:cut])
        report.append_episodes(path, batches[2])
        assert report.read_episodes(path) == batches[0] + batches[1] + batches[2]


def test_a_log_that_is_something_else_is_named(tmp_path):
    (tmp_path / "episodes.jsonl.gz").write_text("hello")
    with pytest.raises(UserError, match="not an episode log"):
        report.read_episodes(tmp_path / "episodes.jsonl.gz")


def test_several_megabytes_are_read_quickly(tmp_path):
    rng, path = random.Random(0), tmp_path / "episodes.jsonl.gz"
    for _ in range(60):
        noise = [[rng.random() for _ in range(100)] for _ in range(60)]
        report.append_episodes(path, [{"logprobs": x} for x in noise])
    assert path.stat().st_size > 3e6
    start = time.monotonic()
    assert len(report.read_episodes(path)) == 3600
    assert time.monotonic() - start < 5


def test_metrics_with_a_cut_line_and_with_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert report.read_metrics(path) == []
    path.write_text('{"step": 0, "kl": NaN}\n{"step": 1, "exits": {"a": 1}}\n{"step": 2, "exits": {"a"')
    assert report.read_metrics(path) == [{"step": 0, "kl": None}, {"step": 1, "exits": {"a": 1}}]
    with path.open("a") as file:
        file.write('{"step": 2, "exits": {"a": 3}}\n')  # a resumed run, glued to the cut line
    assert report.read_metrics(path)[-1] == {"step": 2, "exits": {"a": 3}}


def test_curves_from_whole_partial_and_no_metrics(run, tmp_path):
    full = report.curves(run).read_bytes()
    assert full.startswith(b"\x89PNG") and len(full) > 50_000
    rows = [
        {"phase": "rl", "step": 0, "success": None},
        {"phase": "eval"},
        {"phase": "rl", "exits": {"a": 0}, "step": 1},
        {},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report.curves(run).read_bytes() != full
    empty = tmp_path / "empty"
    empty.mkdir()
    assert report.curves(empty).read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in empty.iterdir()] == ["curves.png"]


def test_repeated_steps_of_a_resumed_run_count_once(run):
    again = report.read_episodes(run / "episodes.jsonl.gz")[-8:]
    report.append_episodes(run / "episodes.jsonl.gz", again)
    assert len(data_of(report.html(run).read_text())["episodes"]) == 32


def test_page_is_self_contained_and_holds_the_run(run):
    (run / "curves.png").write_bytes(b"\x89PNG")
    page = report.html(run).read_text()
    assert not re.search(r"https?://", page) and "data:image/png;base64,iVBORw==" in page
    data = data_of(page)
    rows = {row["name"]: row for row in data["success"]}
    assert rows["final"]["lo"] == 0.85 and "pass^4 71.0 %" in rows["final"]["pass_k"]
    assert (
        rows["null: act_without_asking".replace("_", " ")]["success"] == 0.061 and rows["careless"]["success"] == 0.55
    )
    facts = dict(data["facts"])
    assert (
        facts["user fault rate"] == "3.1 %" and facts["seconds by phase"] == "sft 4.7 min · rl 11.7 min · eval 90.0 s"
    )
    assert facts["wall time"] == "18.8 min" and facts["sampled tokens"] == "1,234,567"
    assert len(data["episodes"]) == 32 and data["episodes"][0]["roles"] == [4, 4, 1, 1, 4, 4, 3, 3, 3, 3]


def test_model_text_is_inert_in_the_page(run):
    keys = ("task", "kind", "user", "exit", "instruction")
    evil = {
        **dict.fromkeys(keys, EVIL),
        "diff": [EVIL],
        "turns": [{"role": EVIL, "text": EVIL}],
        "tokens": [EVIL],
        "roles": [3],
    }
    report.append_episodes(run / "episodes.jsonl.gz", [evil])
    page = report.html(run).read_text()
    block = page.split('id="data">')[1].split("</script>")[0]
    assert "<" not in block and page.lower().count("</script>") == 2 and page.lower().count("<script") == 2
    assert page.count("<img") == 1 and "<!--" not in page
    assert data_of(page)["episodes"][-1]["turns"][0]["text"] == EVIL  # shown as it was typed
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", report.SCRIPT)


def test_page_stays_small_with_thousands_of_episodes(run):
    rng = random.Random(1)
    many = [an_episode(10 + i // 8, i // 8 % 100, i % 8, rng) for i in range(5000)]
    report.append_episodes(run / "episodes.jsonl.gz", many)
    start = time.monotonic()
    data = data_of(report.html(run).read_text())
    assert time.monotonic() - start < 20
    assert len(data["episodes"]) == report.MAX_EPISODES and data["left_out"] == 5032 - report.MAX_EPISODES
    with_tokens = [episode["i"] for episode in data["episodes"] if "tokens" in episode]
    assert with_tokens == list(range(5032 - report.MAX_WITH_TOKENS, 5032))


def test_page_of_an_empty_run(tmp_path):
    data = data_of(report.html(tmp_path).read_text())
    assert data["episodes"] == [] and data["success"] == []


def browser_text(page, tmp_path) -> str:
    """The page as headless Chromium holds it after its scripts ran, without the scripts."""
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-sync --disable-component-update"
    flags += " --disable-background-networking --virtual-time-budget=3000 --dump-dom"
    command = ["chromium", *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.S)


needs_browser = pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium: apt-get install chromium")


@needs_browser
@pytest.mark.parametrize("content", ["evil", "bare", "empty"])
def test_page_in_a_browser(run, tmp_path, content):
    evil = {"instruction": EVIL, "turns": [{"role": "agent", "text": EVIL}], "tokens": [EVIL], "roles": [3]}
    (run / "episodes.jsonl.gz").unlink()
    if content == "empty":
        (run / "summary.json").unlink()
    report.append_episodes(run / "episodes.jsonl.gz", {"evil": [evil], "bare": [{}], "empty": []}[content])
    dom = browser_text(report.html(run), tmp_path)
    assert "<title>Run toy</title>" in dom and "<img" not in dom  # our script ran, and only ours
    awaited = {"evil": "&lt;img src=x onerror", "bare": "Episode 0", "empty": "No episodes were written"}
    assert awaited[content] in dom and ("0 of 0" if content == "empty" else "1 of 1") in dom


@needs_browser
def test_keys_walk_filter_and_page_in_a_browser(run, tmp_path):
    rng = random.Random(2)
    many = [an_episode(9 + i // 8, i // 8, i % 8, rng) for i in range(2000)]
    report.append_episodes(run / "episodes.jsonl.gz", many)
    page = report.html(run).read_text()
    driver = r"""<script>
    const seen = [], rows = () => seen.push($('rows').children.length);
    const active = () => seen.push(document.activeElement.id);
    const down = key => new KeyboardEvent('keydown', {key, bubbles: true});
    const hit = (key, on = document.body) => on.dispatchEvent(down(key));
    const see = () => seen.push($('episode').querySelector('h2').textContent.match(/\d+/)[0]);
    rows(); see(); hit('j'); hit('j'); see(); hit('k'); see(); hit('l'); see();
    hit('ArrowDown', $('list')); see();
    hit('/'); active(); hit('j', $('find')); see(); hit('Escape', $('find')); active();
    $('by-step').value = '=2'; refresh(); rows(); hit('j'); see();
    $('find').value = 'no such words'; refresh(); rows();
    $('find').value = $('by-step').value = ''; refresh();
    for (let i = 0; i < 300; i++) hit('j'); see(); rows();
    document.title = seen.join(' ');</script>"""
    page = re.sub('<meta http-equiv="Content-Sec.*?>', "", page, flags=re.S)  # which would refuse this script
    (run / "driven.html").write_text(page.replace("</body>", driver + "</body>"))
    title = re.search("<title>(.*?)</title>", browser_text(run / "driven.html", tmp_path)).group(1)
    assert title == "100 0 2 1 2 3 find 3 list 8 16 0 316 400"


def test_show_prints_summary_and_an_episode(run):
    text = shown(run, 3)
    assert "report.html (not written yet)" in text and "\x1b" not in text
    assert "88.0 %  [85.0 %, 91.0 %] pass^1 88.0 %" in text and "user fault rate 3.1 %" in text
    assert "Episode 3: phase rl, step 0, kind cancel, task train-0" in text and "Which order is it?" in text
    assert "Episode 31:" in shown(run)
    (run / "summary.json").unlink()
    assert "continue it with train --resume" in shown(run)


def test_show_colours_only_a_terminal_and_cleans_control_characters(run, monkeypatch):
    report.append_episodes(run / "episodes.jsonl.gz", [{"turns": [{"role": "agent", "text": EVIL}]}])
    assert "\x1b" not in shown(run)
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.delenv("NO_COLOR", raising=False)
    report.show(run, None, out)
    assert "\x1b[32m agent" in out.getvalue() and "> \x1b[31m" not in out.getvalue()
    out.truncate(0)
    monkeypatch.setenv("NO_COLOR", "1")
    report.show(run, None, out)
    assert "\x1b" not in out.getvalue()


def test_show_names_what_is_wrong_and_the_remedy(run, tmp_path):
    for folder in (tmp_path / "absent", run / "config.json"):
        with pytest.raises(UserError, match=f"no run folder at {re.escape(str(folder))}: give"):
            shown(folder)
    with pytest.raises(UserError, match=r"no episode 99 in .*it has 32, numbered from 0"):
        shown(run, 99)
    with pytest.raises(UserError, match="no episode -1"):
        shown(run, -1)
    (run / "summary.json").write_text('{"final": ')
    with pytest.raises(UserError, match=r"summary.json holds broken JSON .*restore"):
        shown(run)
    (run / "summary.json").unlink()
    (run / "episodes.jsonl.gz").unlink()
    with pytest.raises(UserError, match=r"half-written.*--resume"):
        shown(run)
    (run / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config.json"):
        shown(run)
