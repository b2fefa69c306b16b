"""report.py and its page: files that a kill cut, runs that lack almost everything, text that tries to become markup.

The page is tested in a real headless Chromium (`apt-get install chromium`), which is driven over its debugging pipe.
"""

import base64
import fcntl
import gzip
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import report
from chat import UserError

EVIL = '<script>document.title=1</script> <!-- </script> <img src=x onerror="document.title=1"> %DATA% \x1b[31m'


def an_episode(step: int, task: int, member: int, rng: random.Random) -> dict:
    reward = int(rng.random() < 0.6)
    tokens = ["<|im_start|>", "user\n", "Cancel", " it", "<|im_end|>", "\n", "Which", " order", "?", "<|im_end|>"]
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
    for stage, step, success in (("cold_start", 0, 0.45), ("during", steps // 2, 0.7), ("final", steps, 0.88)):
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
            "train_tok_s": 9000, "rss_mb": 900, "unique_4grams": 500,
            "exits": {"user_ended": 50 + i % 5, "turn_limit": 9, "reply_full": 3},
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


# ---- the files of a run ----


def test_imports_nothing_that_trains():
    code = "import report, sys; print([m for m in ('torch', 'matplotlib', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_kill_cut_off_is_left_out_and_no_whole_batch_is_lost(tmp_path):
    rng, path = random.Random(0), tmp_path / "episodes.jsonl.gz"
    assert report.read_episodes(path) == []
    batches = [[{"step": i, "text": "é" * i, "noise": rng.random()} for _ in range(20)] for i in range(3)]
    for batch in batches[:2]:
        report.append_episodes(path, batch)
    whole, known = path.stat().st_size, batches[0] + batches[1]
    report.append_episodes(path, batches[2])
    data = path.read_bytes()
    assert gzip.decompress(data).count(b"\n") == 60  # any gzip reader opens the whole file
    for cut in range(whole, len(data) + 1):
        path.write_bytes(data[:cut])
        found = report.read_episodes(path)
        assert found[:40] == known and found == (known + batches[2])[: len(found)]
    assert len(found) == 60
    for cut in range(20):  # within the first header
        path.write_bytes(data[:cut])
        assert report.read_episodes(path) == []


def test_a_long_log_that_was_cut_keeps_all_that_was_whole(tmp_path):
    path, rng = tmp_path / "episodes.jsonl.gz", random.Random(0)  # longer than any reader's buffer
    for i in range(30):
        report.append_episodes(path, [{"i": i, "logprobs": [rng.random() for _ in range(700)]} for _ in range(5)])
    os.truncate(path, path.stat().st_size - 1000)
    found = [episode["i"] for episode in report.read_episodes(path)]
    assert path.stat().st_size > 5e5 and len(found) >= 145 and found == sorted(found)


def test_a_log_of_no_episodes_is_a_log(tmp_path):
    report.append_episodes(tmp_path / "episodes.jsonl.gz", [])
    assert report.read_episodes(tmp_path / "episodes.jsonl.gz") == []


def test_a_log_that_is_something_else_is_named(tmp_path):
    (tmp_path / "episodes.jsonl.gz").write_text("hello")
    with pytest.raises(UserError, match=r"not an episode log .*restore"):
        report.read_episodes(tmp_path / "episodes.jsonl.gz")


def test_metrics_with_a_cut_line_and_with_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert report.read_metrics(path) == []
    path.write_text('{"step": 0, "kl": NaN}\n{"step": 1, "exits": {"a": 1}}\n{"step": 2, "exits": {"a": 3}')
    assert report.read_metrics(path) == [{"step": 0, "kl": None}, {"step": 1, "exits": {"a": 1}}]


# ---- curves ----


def test_panels_hold_what_was_logged(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rl = [row for row in rows if row["phase"] == "rl"]
    panels = {panel["title"]: panel for panel in report.panels(rows)}
    [clip] = panels["Clipped tokens"]["lines"]
    assert clip["x"] == list(range(60)) and clip["y"] == pytest.approx([100 * r["clip_frac"] for r in rl], rel=1e-4)
    window = [rl[i]["clip_frac"] for i in (29, 30)]  # a 25th of 60 steps: two
    assert clip["mean"][30] == pytest.approx(100 * sum(window) / 2, rel=1e-4)
    assert clip["mean"][0] == clip["y"][0]
    calls = {line["label"]: line["y"] for line in panels["Tool calls"]["lines"]}
    assert [*calls] == ["get order", "find customer", "cancel order", "change town"]
    assert calls["get order"][3] == pytest.approx(100 * 80 / (64 + 80 + 20 + 12), rel=1e-4)
    final = panels["Success"]["points"][0]
    assert [final[key][-1] for key in ("x", "y", "lo", "hi")] == [60, 88, 83, 92]
    assert panels["rss mb"]["lines"][0]["y"] == [900] * 60  # a number without a panel of its own gets one


def test_the_agent_is_greedy_not_the_user():
    """A run logs a greedy evaluation's user as "lm, greedy"."""
    row = {"phase": "eval", "step": 60, "split": "test", "user": "lm, greedy", "success": 0.9, "lo": 0.8, "hi": 1.0}
    [success] = [panel for panel in report.panels([row]) if panel["title"] == "Success"]
    assert [point["label"] for point in success["points"]] == ["test, lm user, greedy agent"]


def test_shares_of_many_tools_go_together():
    row = {"phase": "rl", "step": 0, "tools": {f"tool_{i}": 100 - i for i in range(12)}}
    [panel] = [panel for panel in report.panels([row]) if panel["title"] == "Tool calls"]
    assert [line["label"] for line in panel["lines"]] == [f"tool {i}" for i in range(8)] + ["others"]
    assert sum(line["y"][0] for line in panel["lines"]) == pytest.approx(100, abs=0.01)
    assert panel["lines"][-1]["y"][0] == pytest.approx(100 * (92 + 91 + 90 + 89) / 1134, rel=1e-4)


def test_curves_draw_what_there_is(run):
    bare = [
        {"phase": "rl", "step": 0, "success": None, "gap_max": 0.0},
        {"phase": "eval"},
        {"phase": "rl", "exits": {"a": 0}},
        {},
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in bare)
    png = report.curves(run).read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 50_000 and not (run / ".curves.png").exists()
    found = report.panels(bare)
    assert len(found) == report.DRAWN
    assert [panel["title"] for panel in found if panel["lines"] or panel["points"]] == ["Sampler against trainer"]


def test_curves_of_nothing(tmp_path):
    assert report.curves(tmp_path).read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


# ---- the page as a file ----


def test_page_is_self_contained_and_holds_the_run(run):
    page = report.html(run).read_text()
    assert set(re.findall(r"https?://[^'\"]*", page)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    data = data_of(page)
    rows = {row["name"]: row for row in data["success"]}
    assert rows["final"]["lo"] == 0.85 and rows["final"]["pass_k"] == "pass^2 80.0 %  pass^3 75.0 %  pass^4 71.0 %"
    assert rows["null: act without asking"]["success"] == 0.061 and rows["careless"]["success"] == 0.55
    facts = dict(data["facts"])
    assert facts["user fault rate"] == "3.1 %" and facts["wall time"] == "18.8 min"
    assert facts["seconds by phase"] == "sft 4.7 min · rl 11.7 min · eval 90.0 s"
    assert facts["sampled tokens"] == "1,234,567" and not {"final", "careless", "null"} & facts.keys()
    assert len(data["episodes"]) == 32 and data["episodes"][0]["tokens"][3] == [" it", 1, None]


def test_model_text_is_inert_in_the_file(run):
    evil = {"task": EVIL, "diff": [EVIL], "turns": [{"role": EVIL, "text": EVIL}]}
    report.append_episodes(run / "episodes.jsonl.gz", [evil])
    page = report.html(run).read_text()
    assert "<" not in page.split('id="data">')[1].split("</script>")[0]
    assert len(re.findall("<script", page, re.I)) == len(re.findall("</script", page, re.I)) == 2 and "<img" not in page
    assert data_of(page)["episodes"][-1]["turns"][0]["text"] == EVIL  # it is there as it was typed
    script = page.split("<script>")[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\(|srcdoc", script)


def test_page_stays_small(run, monkeypatch):
    rng = random.Random(1)
    report.append_episodes(run / "episodes.jsonl.gz", [an_episode(9, i // 8, i % 8, rng) for i in range(100)])
    monkeypatch.setattr(report, "MAX_EPISODES", 50)
    monkeypatch.setattr(report, "MAX_TOKENS", 75)  # ten each
    data = data_of(report.html(run).read_text())
    assert [e["i"] for e in data["episodes"]] == list(range(82, 132)) and data["left_out"] == 82
    assert [e["i"] for e in data["episodes"] if e["tokens"]] == list(range(125, 132))


def test_a_long_system_prompt_is_shortened(run):
    n = report.MAX_PROMPT + 1234
    prompt = {
        "tokens": ["x"] * n + ["Hi", "!"],
        "roles": [4] + [0] * (n - 1) + [1, 3],
        "logprobs": [None] * (n + 1) + [-1.0],
    }
    report.append_episodes(run / "episodes.jsonl.gz", [prompt])
    tokens = data_of(report.html(run).read_text())["episodes"][-1]["tokens"]
    assert len(tokens) == report.MAX_PROMPT + 3 and "1,234 more tokens" in tokens[-3][0]
    assert tokens[-2:] == [["Hi", 1, None], ["!", 3, -1.0]]


# ---- the page in a browser ----


KEY_CODES = {"Tab": 9, "Escape": 27}  # keys that Chromium acts on by their number


class Browser:
    """Headless Chromium, driven over its debugging pipe by JSON messages that end in NUL. An error in a page fails."""

    def __init__(self, profile: Path):
        read, self.write = os.pipe()
        self.read, write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read, write)]  # clear of 3 and 4, where they go
        moves = [(os.POSIX_SPAWN_DUP2, ends[0], 3), (os.POSIX_SPAWN_DUP2, ends[1], 4)]
        moves += [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
        command = ["chromium", "--remote-debugging-pipe", *flags.split(), f"--user-data-dir={profile}"]
        self.pid = os.posix_spawnp(command[0], command, os.environ, file_actions=moves)
        for end in (read, write, *ends):
            os.close(end)
        self.n, self.buffer, self.session, self.events = 0, b"", {}, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Network"):
            self.call(domain + ".enable")

    def message(self) -> dict:
        while b"\0" not in self.buffer:
            some = os.read(self.read, 1 << 20)
            assert some, "chromium ended"
            self.buffer += some
        text, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(text)
        assert message.get("method") != "Runtime.exceptionThrown", message
        self.events += [message] if "method" in message else []
        return message

    def call(self, method: str, **params) -> dict:
        self.n += 1
        message = {"id": self.n, "method": method, "params": params, **self.session}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self.message()).get("id") != self.n:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def js(self, code: str):
        """The value of an expression in the page (of a promise: what it becomes)."""
        answer = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, path: Path, width: int = 1440, height: int = 900, theme: str = "light") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in [event["method"] for event in self.events]:
            self.message()
        self.settle()

    def settle(self) -> None:
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, key: str) -> None:
        code = {"windowsVirtualKeyCode": KEY_CODES[key]} if key in KEY_CODES else {}
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def keys(self, *keys: str) -> None:
        for key in keys:
            self.press(key)
        self.settle()

    def point(self, selector: str, across: float = 0.5) -> dict:
        """Move the mouse to a share of an element's width; returns where that is."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{find}.scrollIntoView({{block: 'center'}})")
        self.settle()
        x, y, w, h = self.js(f"(({{x, y, width, height}}) => [x, y, width, height])({find}.getBoundingClientRect())")
        at = {"x": x + across * w, "y": y + h / 2}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        return at

    def click(self, selector: str) -> None:
        at = self.point(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
        self.settle()

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        os.write(self.write, b'{"id": 0, "method": "Browser.close"}\0')
        os.waitpid(self.pid, 0)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not shutil.which("chromium"):
        pytest.skip("needs chromium: apt-get install chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.parametrize("content", ["evil", "bare", "empty"])
def test_any_run_opens_and_only_our_script_runs(run, browser, content):
    fields = dict.fromkeys(("task", "kind", "user", "exit", "instruction", "name", "split"), EVIL)
    turns = [{"role": role, "text": EVIL} for role in ("user", "agent", "call", "tool", EVIL)]
    evil = fields | {"diff": [EVIL, f"{EVIL}: {EVIL}, goal {EVIL}"], "turns": turns}
    evil |= {"tokens": [EVIL], "roles": [3], "logprobs": [-1.0], "reward": 0, "member": EVIL, "phase": "eval"}
    (run / "episodes.jsonl.gz").unlink()
    if content == "empty":
        (run / "summary.json").unlink(), (run / "metrics.jsonl").unlink(), (run / "config.json").unlink()
    report.append_episodes(run / "episodes.jsonl.gz", {"evil": [evil] * 2, "bare": [{}], "empty": []}[content])
    browser.open(report.html(run))
    for view in ("g", "t", "p", "c", "o") if content != "empty" else "":
        browser.keys(view)
        assert browser.js("document.title") == "Run toy"
        assert browser.js("document.querySelectorAll('img, iframe, script').length") == 2  # the data and the script
        if content == "evil" and view != "p":
            assert "onerror=" in browser.js("$('panel').innerText")  # what was typed is read as it was typed
    text = browser.js("document.body.innerText")
    expected = {"evil": "2 of 2", "bare": "1 of 1", "empty": "No episodes were written yet"}
    assert expected[content] in text and ("Unfinished" in text) == (content == "empty")
    fetched = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert fetched == [(run / "report.html").as_uri()]


def test_security_policy_refuses_what_is_not_ours(run, browser):
    browser.open(report.html(run))
    browser.js("""(() => { const s = document.createElement('script'); s.textContent = 'document.title = 1';
        document.body.append(s); const i = new Image(); i.setAttribute('onerror', 'document.title = 1'); i.src = 'x';
        document.body.append(i); return new Promise(done => setTimeout(done, 100)); })()""")
    assert browser.js("document.title") == "Run toy"


def test_two_thousand_episodes_open_within_a_second(run, browser):
    rng = random.Random(2)
    many = [an_episode(9 + i // 8, i // 8, i % 8, rng) for i in range(2000)]
    for episode in many:
        for key in ("turns", "tokens", "roles", "logprobs"):
            episode[key] = episode[key] * 10
    report.append_episodes(run / "episodes.jsonl.gz", many)
    page, seconds = report.html(run), []
    browser.call("Performance.enable", timeDomain="threadTicks")  # CPU seconds: no matter what else runs here
    for _ in range(2):
        browser.open(page)
        metrics = {m["name"]: m["value"] for m in browser.call("Performance.getMetrics")["metrics"]}
        seconds.append(metrics["TaskDuration"])
    assert page.stat().st_size > 4e6 and 0 < min(seconds) < 1, seconds
    assert browser.js("document.querySelectorAll('#list tbody tr').length") < 100  # only what can be seen
    slow = "(act => { const from = performance.now(); act(); return performance.now() - from; })"
    assert browser.js(slow + "(() => { $('find').value = 'red bag'; filter(); })") < 500
    browser.js("$('list').scrollTop = 1e6")
    browser.settle()
    assert browser.js("[...document.querySelectorAll('#list tbody tr:not(.gap)')].at(-1).id") == "row2031"


def test_keys_walk_filter_and_switch_views(run, browser):
    browser.open(report.html(run))
    at = lambda: browser.js("E[at].i")
    assert at() == 31  # the last, as `show` does
    browser.keys("k", "k", "j")
    assert at() == 30
    browser.keys("h", "h")
    assert at() == 28 and browser.js("location.hash") == "#28"
    browser.keys(*"hhhhhhh")
    assert at() == 28  # the first member of its group
    browser.keys("l")
    assert at() == 29
    browser.keys("t")
    assert browser.js("document.querySelectorAll('.tokens[tabindex] span').length") == 10
    browser.keys("g")
    assert browser.js("document.querySelectorAll('.members > div').length") == 4
    browser.keys("/", *"#E37 j")
    assert (
        browser.js("document.activeElement.id") == "find" and browser.js("$('find').value") == "#E37 j" and at() == 29
    )
    assert browser.js("$('count').textContent").startswith("0 of 32")
    browser.keys("Escape", "Home")
    assert browser.js("document.activeElement.role") == "grid" and at() == 29  # nothing to walk
    browser.click("#clear")
    browser.js("table.focus()")
    browser.keys("Home", "ArrowDown", "PageDown", "End")
    assert at() == 31 and browser.js("table.getAttribute('aria-activedescendant')") == "row31"
    browser.keys("?")
    assert browser.js("$('keys').open")
    browser.keys("Escape", "k")
    assert not browser.js("$('keys').open") and at() == 30


def test_filters_show_what_python_finds(run, browser):
    episodes = report.read_episodes(run / "episodes.jsonl.gz")
    browser.open(report.html(run))
    assert browser.js("[...document.querySelectorAll('#filters select')].map(s => s.name)") == [
        "step",
        "kind",
        "exit",
        "reward",
    ]
    for field, value in (("exit", "turn_limit"), ("reward", 0), ("kind", "return"), ("step", 2)):
        browser.js(f"clear(), document.querySelector('select[name={field}]').value = '={value}', filter()")
        expected = [i for i, e in enumerate(episodes) if e[field] == value]
        assert 0 < len(expected) < 32 and browser.js("shown") == expected
    browser.js("clear(), $('find').value = 'TRAIN-1', filter()")
    assert browser.js("shown") == [i for i, e in enumerate(episodes) if e["task"] == "train-1"]
    browser.js("document.querySelector('select[name=step]').value = '=3', filter()")
    browser.click("#list tbody tr:nth-child(2)")
    assert browser.js("E[at].i") == 29


def test_an_episode_shows_its_sides_its_group_and_its_tokens(run, browser):
    episodes = report.read_episodes(run / "episodes.jsonl.gz")
    n = next(i for i, e in enumerate(episodes) if e["reward"] == 0)
    browser.open(report.html(run))
    browser.js(f"go({n})")
    assert browser.js("document.querySelector('.sides .left:not(h4)').innerText").endswith(
        "You are Dora Cole. Cancel #E37."
    )
    assert browser.js("document.querySelector('.fold').open") is False
    assert browser.js("document.querySelector('.fold summary').textContent") == (
        'get_order(order="#E37") → {"status": "pending", "items": ["red bag"]}'
    )
    browser.click(".fold summary")
    assert browser.js("document.querySelector('.fold').open") is True
    cells = browser.js("[...document.querySelectorAll('.diff td')].map(td => td.textContent)")
    assert cells == ["orders/#E37/status", "pending", "cancelled"]
    browser.keys("g")
    mates = [f"A {e['advantage']:+.2f}".replace("-", "−") for e in episodes[n - n % 4 : n - n % 4 + 4]]
    assert browser.js("[...document.querySelectorAll('.members button')].map(b => b.lastChild.textContent)") == mates
    browser.keys("t")
    pieces = "[...document.querySelectorAll('.tokens[tabindex] span')]"
    underlined = f"{pieces}.filter(s => getComputedStyle(s).textDecorationLine == 'underline').map(s => s.textContent)"
    assert browser.js(underlined) == ["Which", " order", "?", "<|im_end|>"]
    browser.point(".tokens[tabindex] span:nth-child(7)", 0.5)
    logprob = episodes[n]["logprobs"][6]
    said = f'token 6: "Which", agent, in the loss, probability {math.exp(logprob):.3f}, log-prob {logprob:.3f}'
    assert browser.js("document.querySelector('.readout').textContent") == said
    browser.js("document.querySelector('.tokens[tabindex]').focus()")
    browser.keys("ArrowLeft")
    assert browser.js("document.querySelector('.readout').textContent") == 'token 5: "\\n", template, not in the loss'
    tints = f"{pieces}.slice(6, 9).map(s => getComputedStyle(s).backgroundColor)"
    browser.keys("p")
    assert len(set(browser.js(tints))) == 3  # three probabilities, three tints


def test_charts_read_the_logged_values(run, browser):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rl = [row for row in rows if row["phase"] == "rl"]
    browser.open(report.html(run))
    chart = "#curves figure:nth-child(4)"  # entropy
    assert browser.js(f"document.querySelector('{chart} figcaption').textContent").startswith("Entropy")
    value = lambda: float(browser.js(f"document.querySelector('{chart} .legend b').textContent"))
    assert value() == pytest.approx(rl[-1]["entropy"], rel=5e-3)
    browser.point(chart + " > svg", 0.5)
    step = int(re.search(r"step (\d+)", browser.js(f"document.querySelector('{chart} output').textContent"))[1])
    assert 25 < step < 35 and value() == pytest.approx(rl[step]["entropy"], rel=5e-3)
    browser.js(f"document.querySelector('{chart} > svg').focus()")
    browser.keys("Home", "ArrowRight", "ArrowRight")
    assert value() == pytest.approx(rl[2]["entropy"], rel=5e-3)
    said = browser.js(f"document.querySelector('{chart} > svg').getAttribute('aria-valuetext')")
    assert re.fullmatch(r"entropy 0\.\d+, step 2", said)
    drawn = browser.js("[...document.querySelectorAll('#curves figure')].map(f => f.querySelectorAll('path').length)")
    assert len(drawn) == report.DRAWN and min(drawn) > 0


def test_charts_are_drawn_to_scale(run, browser):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    row = [row for row in rows if row["phase"] == "rl"][30]
    browser.open(report.html(run))

    def each(title: str, selector: str, code: str) -> list:
        find = f"[...document.querySelectorAll('figure')].find(f => f.textContent.startsWith('{title}'))"
        return browser.js(f"[...{find}.querySelectorAll(':scope > svg {selector}')].map(x => {code})")

    def height(title: str, value: float) -> float:  # in pixels, by the labels of the axis
        labels = each(title, "text[text-anchor=end]", "[+x.textContent, x.getAttribute('y') - 4]")
        (v0, y0), (v1, y1) = labels[:2]
        return y0 + (value - v0) / (v1 - v0) * (y1 - y0)

    [drawn] = each("Entropy", ".raw", "x.getAttribute('d')")
    assert float(re.split("[ML ]", drawn)[62]) == pytest.approx(height("Entropy", row["entropy"]), abs=0.3)
    left, right = each("Tool calls", ".grid", "[+x.getAttribute('x1'), +x.getAttribute('x2')]")[0]
    x, floor = left + 30.5 / 60 * (right - left), 0.0  # within step 30 of 60
    for i, name in enumerate(("get_order", "find_customer", "cancel_order", "change_town")):  # commonest at the bottom
        share = 100 * row["tools"][name] / sum(row["tools"].values())
        spot = f"new DOMPoint({x}, {height('Tool calls', floor + share / 2)})"
        assert each("Tool calls", ".area", f"x.isPointInFill({spot})") == [k == i for k in range(4)]
        floor += share


LOW_CONTRAST = """(() => {  // [texts seen, "text contrast" of each below 4.5]; a canvas mixes the ancestors' colours
    const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
    const pen = canvas.getContext('2d', {willReadFrequently: true});
    const luminance = colours => {
        for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
        const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
        const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map(v => linear(v / 255));
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const low = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let seen = 0;
    while (texts.nextNode()) {
        const text = texts.currentNode.data.trim(), node = texts.currentNode.parentElement;
        if (!text || !node.checkVisibility() || node.closest('option, script')) continue;
        const grounds = [];
        for (let a = node; a; a = a.parentElement) grounds.unshift(getComputedStyle(a).backgroundColor);
        const ground = luminance(['white', ...grounds]), style = getComputedStyle(node);
        const ink = luminance([node.closest('svg') ? style.fill : style.color]);
        const contrast = (Math.max(ground, ink) + .05) / (Math.min(ground, ink) + .05);
        seen += 1;
        if (contrast < 4.5) low.push(text.slice(0, 40) + ' ' + contrast.toFixed(2));
    }
    return [seen, ...low];
})()"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_has_the_contrast_of_wcag_aa(run, browser, theme):
    n = next(i for i, e in enumerate(report.read_episodes(run / "episodes.jsonl.gz")) if e["reward"] == 0)
    browser.open(report.html(run), theme=theme)
    browser.js(f"document.querySelectorAll('details').forEach(d => d.open = true), go({n})")
    browser.keys("o")
    for key in ("c", "g", "t", "p"):
        browser.keys(key)
        seen, *low = browser.js(LOW_CONTRAST)
        assert seen > 300 and low == []


def test_theme_can_be_chosen(run, browser):
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.open(report.html(run), theme="dark")
    dark = browser.js(ground)
    browser.click("#theme")
    light = browser.js(ground)
    assert browser.js("$('theme').textContent") == "Theme: light" and light != dark
    browser.open(run / "report.html", theme="dark")  # kept
    assert browser.js(ground) == light
    browser.click("#theme")
    assert browser.js(ground) == dark
    browser.click("#theme")


RING = """(() => {  // [which element has the focus, whether it has a ring]
    const has = document.activeElement, style = getComputedStyle(has.closest('#list') ?? has);
    const ring = style.outlineStyle != 'none' && parseFloat(style.outlineWidth) >= 2;
    return [has.tagName.toLowerCase() + '#' + has.id, ring];
})()"""


def test_every_stop_of_the_keyboard_is_seen(run, browser):
    browser.open(report.html(run))
    stops = []
    for _ in range(70):
        browser.press("Tab")
        stops.append(browser.js(RING))
    assert [stop for stop, ring in stops if not ring and not stop.startswith("body")] == []
    names = [stop for stop, _ in stops]
    assert {"button#theme", "button#help", "input#find", "table#", "article#episode", "button#tab-conversation"} <= set(
        names
    )
    assert sum(name.startswith("svg") for name in names) >= report.DRAWN


@pytest.mark.parametrize("width", [360, 800, 1440, 2200])
def test_nothing_sticks_out_of_the_window(run, browser, width):
    browser.open(report.html(run), width=width)
    for key in ("c", "g", "t"):
        browser.keys(key)
        assert browser.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    if width == 360:
        browser.click("#row20")
        assert 0 <= browser.js("$('episode').getBoundingClientRect().top") < 450  # what was chosen is in sight
        browser.click("#back")
        assert browser.js("Math.abs($('episodes-part').getBoundingClientRect().top)") < 20


# ---- the terminal ----


def test_show_prints_summary_and_an_episode(run):
    text = shown(run, 3)
    assert "report.html (not written yet)" in text and "\x1b" not in text
    assert "88.0 %  [85.0 %, 91.0 %] pass^2 80.0 %" in text and "user fault rate 3.1 %" in text
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
