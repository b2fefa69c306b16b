"""What people look at: the episode log, `curves.png`, `report.html`, and one episode on a terminal.

Reads the files of a run folder and imports nothing that trains, so a report can be rebuilt anywhere. Any file
may be missing and any number absent: a run that was killed, or never reached RL, still gets a page. The page
is one static file without network; what a model wrote reaches it as JSON, shown as text, never as markup.
Deliberately left out: anything that recomputes a number. What is shown is what was logged.
"""

import base64
import gzip
import hashlib
import json
import math
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from chat import UserError

GZIP = b"\x1f\x8b\x08\x00"  # how every member we write begins
MAX_EPISODES, MAX_WITH_TOKENS, MAX_TOKENS = 4000, 100, 400_000  # the page's latest; of each phase; in all
INK = [
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f7f7f",
    "#b8a800",
]  # Okabe and Ito


# ---- the files of a run ----


def append_episodes(path: Path, episodes: list[dict]) -> None:
    """Append one gzip member of JSON lines and sync it: a kill can only ever cut the last member."""
    if not episodes:
        return
    text = "".join(json.dumps(episode) + "\n" for episode in episodes)
    with open(path, "ab") as file:
        file.write(gzip.compress(text.encode(), mtime=0))
        file.flush()
        os.fsync(file.fileno())


def read_episodes(path: Path) -> list[dict]:
    """Every episode of the whole members, oldest first; [] where there is no file. NaN reads as None.

    A member cut by a kill is dropped, also when a resumed run has appended others behind it.
    """
    data = Path(path).read_bytes() if Path(path).exists() else b""
    if data[:4] != GZIP[: len(data)]:
        raise UserError(f"{path} is not an episode log (no gzip header): move it away, or restore it")
    return [_json(line, path) for text in _members(data) for line in text.splitlines()]


def _members(data: bytes) -> Iterator[bytes]:
    at = data.find(GZIP)
    while at >= 0:
        inflate, text, end = zlib.decompressobj(wbits=31), [], at  # 31: gzip, and the check sum is verified
        try:
            while not inflate.eof and end < len(data):
                text.append(inflate.decompress(data[end : end + 65536]))
                end = min(end + 65536, len(data))
        except zlib.error:
            pass  # a cut member with another one behind it
        if inflate.eof:
            yield b"".join(text)
        at = data.find(GZIP, end - len(inflate.unused_data) if inflate.eof else at + 1)


def read_metrics(path: Path) -> list[dict]:
    """Every whole line of `metrics.jsonl`, oldest first; [] where there is no file. NaN reads as None.

    A cut line is dropped. Where a resumed run wrote on behind a cut line, the object glued to it is kept.
    """
    rows = []
    for line in Path(path).read_text(errors="replace").splitlines() if Path(path).exists() else []:
        while line:
            try:
                rows.append(json.loads(line, parse_constant=lambda _: None))
                break
            except json.JSONDecodeError:
                line = line[line.find("{", 1) :] if "{" in line[1:] else ""
    return [row for row in rows if isinstance(row, dict)]


def _json(text: str | bytes, path: Path):
    try:
        return json.loads(text, parse_constant=lambda _: None)  # NaN is not JSON, and a browser refuses it
    except ValueError as error:
        raise UserError(f"{path} holds broken JSON ({error}): restore it, or train again") from None


def _object(path: Path) -> dict:
    return _json(path.read_text(errors="replace"), path) if path.exists() else {}


def _latest(rows: list[dict], *keys: str) -> list[dict]:
    """A resumed run repeats the steps after its last checkpoint: of rows with equal keys, keep the last."""
    known = {}
    for i, row in enumerate(rows):
        sure = row.get("step") is not None and ("task" not in row or "member" in row)
        known[tuple(str(row.get(key)) for key in keys) if sure else i] = row
    return list(known.values())


def _episodes(run: Path) -> list[dict]:
    keys = ("phase", "stage", "step", "split", "user", "task", "member")
    return _latest(read_episodes(run / "episodes.jsonl.gz"), *keys)


def _folder(run: Path) -> Path:
    if not Path(run).is_dir():
        raise UserError(f"no run folder at {run}: give a folder that `train` wrote, as in runs/NAME")
    return Path(run)


# ---- the summary as rows of text ----


def _is_number(x) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x)


def _percent(x) -> str:
    return f"{100 * x:.1f} %" if _is_number(x) else "–"


def _success_rows(summary: dict) -> list[dict]:
    """Each success figure of the summary as {name, success, lo, hi, n, pass_k}: fractions, and one text."""
    null = summary.get("null") if isinstance(summary.get("null"), dict) else {}
    found = {name: x for name, x in summary.items() if isinstance(x, dict) and "success" in x}
    found |= {"careless": summary["careless"]} if "careless" in summary else {}
    found |= {f"null: {name}": x for name, x in null.items()}
    rows = []
    for name, x in found.items():
        x = x if isinstance(x, dict) else {"success": x}
        pass_k = x.get("pass_k") if isinstance(x.get("pass_k"), dict) else {}
        figures = {key: x.get(key) if _is_number(x.get(key)) else None for key in ("success", "lo", "hi", "n")}
        text = "  ".join(f"pass^{k} {_percent(v)}" for k, v in sorted(pass_k.items()))
        rows.append({"name": name.replace("_", " "), "pass_k": text, **figures})
    return rows


def _facts(summary: dict) -> list[list[str]]:
    """The rest of the summary as [label, value with its unit]."""
    named = {"wall_s": "wall time", "peak_rss_mb": "peak memory", "sample_tok_s": "sampling"}
    named |= {"train_tok_s": "training"}
    shown = {row["name"] for row in _success_rows(summary)} | {"null"}
    rest = [(key.replace("_", " "), key, value) for key, value in summary.items()]
    return [[named.get(key, name), _value(key, value)] for name, key, value in rest if name not in shown]


def _value(key: str, x) -> str:
    """A value with its unit, which its name tells; a table within keeps the unit of its own name."""
    if isinstance(x, dict):
        inner = {k: key if "rate" in key or "seconds" in key else k for k in x}
        return " · ".join(f"{k.replace('_', ' ')} {_value(inner[k], v)}" for k, v in x.items())
    if not _is_number(x) or isinstance(x, bool) or key == "seed":
        return "–" if x is None else str(x)
    if "rate" in key:
        return _percent(x)
    if key.endswith("tok_s"):
        return f"{x:,.0f} tokens/s"
    if key.endswith("_s") or "seconds" in key:
        return f"{x:.1f} s" if x < 120 else f"{x / 60:.1f} min"
    return f"{x:,.0f} MB" if key.endswith("_mb") else f"{x:,}" if isinstance(x, int) else f"{x:,.4g}"


# ---- curves ----


def _xy(rows: list[dict], key: str, scale: float = 1.0) -> tuple[list, list]:
    rows = [r for r in rows if _is_number(r.get("step")) and _is_number(r.get(key))]
    return [r["step"] for r in rows], [r[key] * scale for r in rows]


def _trailing(y: list[float], window: int) -> list[float]:
    return [sum(y[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(y))]


def _lines(ax, rows: list[dict], scale: float, *series: tuple[str, str, str]) -> None:
    """Each (key, label, ink): the raw values faint, their trailing mean over a 25th of the run on top."""
    for key, label, ink in series:
        x, y = _xy(rows, key, scale)
        if x:
            ax.plot(x, y, color=ink, alpha=0.25, linewidth=1)
            mean, dot = _trailing(y, max(1, len(y) // 25)), "." if len(x) < 4 else None
            ax.plot(x, mean, color=ink, label=label, marker=dot)


def _pair(ax, rows: list[dict], left: tuple[str, str], right: tuple[str, str], scale: float = 1.0) -> None:
    """Two series of unlike units, each (key, axis label), on two axes; `scale` is the left one's."""
    for axis, (key, label), ink, unit in ((ax, left, INK[0], scale), (ax.twinx(), right, INK[1], 1.0)):
        _lines(axis, rows, unit, (key, "_", ink))
        axis.set_ylabel(label, color=ink)
        axis.tick_params(axis="y", colors=ink)
        axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
        axis.grid(False)
    axis.spines["right"].set_visible(True)


def _shares(ax, rows: list[dict], key: str) -> None:
    """Each name's share of a step's counts, stacked; all but the eight commonest go together."""
    counts = {r["step"]: r[key] for r in rows if _is_number(r.get("step")) and isinstance(r.get(key), dict)}
    counts = {step: c for step, c in counts.items() if sum(c.values()) > 0}
    total = {name: sum(c.get(name, 0) for c in counts.values()) for c in counts.values() for name in c}
    names = sorted(total, key=lambda name: -total[name])[:8]
    shares = [[100 * c.get(name, 0) / sum(c.values()) for c in counts.values()] for name in names]
    if len(total) > len(names):
        names.append("others")
        shares.append([100 - sum(column) for column in zip(*shares, strict=True)])
    if counts:
        x = [*counts, max(counts) + 1]
        labels, inks = [name.replace("_", " ") for name in names], [*INK, "#333333"]
        ax.stackplot(x, [y + y[-1:] for y in shares], labels=labels, colors=inks, step="post", alpha=0.85)
        ax.set_ylim(0, 100)
        ax.margins(x=0)


def _success(ax, rl: list[dict], evals: list[dict]) -> None:
    """Training success by step, and every held-out evaluation as a point with its interval."""
    key = "success" if _xy(rl, "success")[0] else "reward"
    _lines(ax, rl, 100, (key, f"training {key}", INK[6]))
    last, series = max(_xy(rl, "step")[0], default=0), {}
    for r in evals:
        if _is_number(r.get("success")):
            step = r["step"] if _is_number(r.get("step")) else last if r.get("stage") == "final" else 0
            ends = [r[k] if _is_number(r.get(k)) else r["success"] for k in ("success", "lo", "hi")]
            y, low, high = (100 * end for end in ends)
            name = f"held out: {r.get('split', '?')}, {r.get('user', '?')} user"
            series.setdefault(name, []).append((step, y, max(0, y - low), max(0, high - y)))
    for i, (name, points) in enumerate(series.items()):
        x, y, below, above = zip(*sorted(points), strict=True)
        ax.plot(x, y, color=INK[i % 6], linewidth=1, alpha=0.35)
        style = {"fmt": "osD^vPX*"[i % 8], "color": INK[i % 6], "capsize": 3, "zorder": 3}
        ax.errorbar(x, y, yerr=[below, above], label=name, **style)
    ax.set_ylim(0, 100)


def _panels(rows: list[dict]) -> list[tuple]:
    """(title, y label, what draws it) for each panel; a pair labels its own axes."""
    sft, rl, evals = ([r for r in rows if r.get("phase") == phase] for phase in ("sft", "rl", "eval"))
    blue, red, green = INK[0], INK[1], INK[2]
    groups = ("all_right", "all right", green), ("all_wrong", "all wrong", red)
    faults = ("user_fault", "user at fault", red), ("malformed", "malformed output", blue)
    gap = ("gap_max", "maximum", red), ("gap_mean", "mean", blue)
    kl, turns = ("kl", "KL to the cold start (nats)"), ("turns", "turns per talk")
    clip, speed = ("clip_frac", "clipped tokens (%)"), ("sample_tok_s", "rollout tokens/s")
    return [
        ("Success", "%", lambda ax: _success(ax, rl, evals)),
        ("Cold start: loss", "nats per token", lambda ax: _lines(ax, sft, 1, ("loss", "_", blue))),
        ("KL and entropy", "", lambda ax: _pair(ax, rl, kl, ("entropy", "entropy (nats)"))),
        ("Length of talks", "", lambda ax: _pair(ax, rl, turns, ("tokens_per_turn", "tokens per turn"))),
        ("Groups without a signal", "% of groups", lambda ax: _lines(ax, rl, 100, *groups)),
        ("Faults", "%", lambda ax: _lines(ax, rl, 100, *faults)),
        ("Clipping and gradient", "", lambda ax: _pair(ax, rl, clip, ("grad_norm", "gradient norm"), 100)),
        ("Sampler against trainer", "|ρ − 1|", lambda ax: _lines(ax, rl, 1, *gap)),
        ("Tool calls", "% of calls", lambda ax: _shares(ax, rl, "tools")),
        ("How conversations end", "% of conversations", lambda ax: _shares(ax, rl, "exits")),
        ("Speed", "", lambda ax: _pair(ax, rl, speed, ("train_tok_s", "trained tokens/s"))),
    ]


def _draw(fig, rows: list[dict]) -> None:
    grid = fig.add_gridspec(3, 4)
    places = [grid[0, :2]] + [grid[i // 4, i % 4] for i in range(2, 12)]
    for place, (title, unit, draw) in zip(places, _panels(rows), strict=True):
        ax, before = fig.add_subplot(place), len(fig.axes)
        draw(ax)
        ax.set_title(title, loc="left", fontweight="bold")
        ax.set_xlabel("cold-start step" if title.startswith("Cold") else "RL step")
        ax.set_ylabel(unit) if unit else None
        if not any(axis.has_data() for axis in fig.axes[before - 1 :]):  # its own, and a twin
            ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", va="center", color="grey")
        if unit.startswith("|") and any(y > 0 for line in ax.lines for y in line.get_ydata()):
            ax.set_yscale("log")
        below = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.17), "ncol": 2}  # a stack is full inside
        if ax.get_legend_handles_labels()[1]:
            ax.legend(**below if ax.collections and not ax.lines else {"loc": "best"})


def curves(run: Path) -> Path:
    """Draw `metrics.jsonl` as `curves.png`: raw values faint, their mean on top, evaluations as points."""
    run = _folder(run)
    rows = _latest(read_metrics(run / "metrics.jsonl"), "phase", "step", "stage", "user", "split")
    import matplotlib  # here, since `show` and reading need no drawing
    from matplotlib.figure import Figure

    style = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
    style |= {"axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False, "legend.fontsize": 8}
    with matplotlib.rc_context(style):
        fig = Figure(figsize=(16, 10), layout="constrained")
        _draw(fig, rows)
        fig.suptitle(
            f"{run.name}: cold start, reinforcement learning, held-out success",
            x=0.01,
            ha="left",
            fontsize=14,
        )
        fig.savefig(run / ".curves.png", dpi=110)
    return (run / ".curves.png").replace(run / "curves.png")  # nobody ever sees half a file


# ---- the page ----


def html(run: Path) -> Path:
    """Write `report.html`: summary, curves and episodes in one file that needs neither network nor server.

    It holds the latest 4,000 episodes, and the tokens of the latest 100 of each phase, to stay small.
    """
    run = _folder(run)
    summary, config, episodes = _object(run / "summary.json"), _object(run / "config.json"), _episodes(run)
    left_out, budget, seen = max(0, len(episodes) - MAX_EPISODES), MAX_TOKENS, {}
    rows = [{"i": i, **episode} for i, episode in enumerate(episodes)][left_out:]
    for row in reversed(rows):
        phase = row.get("phase")
        seen[phase] = seen.get(phase, 0) + 1
        budget -= len(row.get("tokens") or [])
        if seen[phase] > MAX_WITH_TOKENS or budget < 0:
            for key in ("tokens", "roles", "logprobs"):
                row.pop(key, None)
        elif row.get("logprobs"):
            row["logprobs"] = [round(x, 3) if _is_number(x) else None for x in row["logprobs"]]
    data = {
        "run": run.name,
        "success": _success_rows(summary),
        "facts": _facts(summary),
        "left_out": left_out,
    }
    data["config"] = [[key, json.dumps(value)] for key, value in config.items()]
    text = json.dumps(data | {"episodes": rows}, separators=(",", ":")).replace("<", "\\u003c")
    png = run / "curves.png"
    image = base64.b64encode(png.read_bytes()).decode() if png.exists() else ""
    page = PAGE.replace("%STYLE%", STYLE).replace("%SCRIPT%", SCRIPT).replace("%CURVES%", image)
    # The page's security policy runs this one script and loads nothing: an `onerror` could not run either.
    page = page.replace("%HASH%", base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode())
    (run / ".report.html").write_text(page.replace("%DATA%", text), encoding="utf-8")
    return (run / ".report.html").replace(run / "report.html")


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-%HASH%'">
<title>Run report</title><style>%STYLE%</style></head><body>
<header><h1 id="run"></h1><p id="headline"></p></header><main>
<section><h2>Success</h2><div class="scroll"><table id="success"></table></div></section>
<section><h2>The run</h2><dl id="facts"></dl>
<details><summary>Configuration</summary><dl id="config"></dl></details></section>
<section><h2>Curves</h2><img id="curves" alt="Training curves" src="data:image/png;base64,%CURVES%"></section>
<section><h2>Episodes</h2><div id="filters" role="search">
<input id="find" type="search" placeholder="Filter by text" aria-label="Filter by text">
<span id="count" aria-live="polite"></span><span class="soft"><kbd>j</kbd> <kbd>k</kbd> next, previous ·
<kbd>h</kbd> <kbd>l</kbd> in its group · <kbd>/</kbd> filter</span></div>
<div id="both"><div id="list" tabindex="0" role="region" aria-label="Episodes"><table><thead><tr><th>#
<th>phase<th>step<th>kind<th>task<th>exit<th>reward<th>advantage</tr></thead>
<tbody id="rows"></tbody></table></div>
<article id="episode" tabindex="0" aria-label="The chosen episode"></article></div></section>
</main><script type="application/json" id="data">%DATA%</script><script>%SCRIPT%</script></body></html>
"""

STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --ink: #1c2128; --soft: #5d6673;
  --line: #dfe3e8; --accent: #0b62a8; --good: #0a7a50; --bad: #b8371b;
  --user: #0b6fb8; --tool: #8a6a00; --agent: #0a8560 }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --card: #1c2026; --ink: #e4e7eb; --soft: #9aa4b1;
  --line: #323943; --accent: #6cb8f5; --good: #4fcf9b; --bad: #ff8a6b; --user: #62b1f0; --tool: #dfb540;
  --agent: #46c79a } #curves { filter: invert(.89) hue-rotate(180deg) } }
* { box-sizing: border-box }
body { margin: auto; max-width: 1500px; padding: 20px; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { margin: 0; font-size: 26px } h2 { margin: 0 0 12px; font-size: 17px }
h3 { margin: 18px 0 6px; font-size: 14px } p { margin: 4px 0 }
header p, .soft, dt, th { color: var(--soft); font-weight: 400 } #curves { width: 100% }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin: 16px 0 } .scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td, th { padding: 4px 9px 4px 0; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 10px 24px; margin: 0 }
dl .wide { grid-column: span 2 } dt { font-size: 13px } dd { margin: 0; overflow-wrap: anywhere }
.bar { position: relative; height: 14px; min-width: 300px; background: var(--bg) }
.bar i, .bar b { position: absolute; top: 5px; height: 4px; background: var(--accent); opacity: .5 }
.bar b { top: 2px; width: 4px; height: 10px; margin-left: -2px; opacity: 1 }
#filters { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin-bottom: 12px }
#filters .soft { margin-left: auto; font-size: 13px } kbd { border: 1px solid var(--line); padding: 0 5px }
input, select, button, .group a { font: inherit; color: inherit; background: var(--bg); max-width: 190px;
  border: 1px solid var(--line); border-radius: 6px; padding: 3px 8px }
#both { display: grid; grid-template-columns: minmax(0, 11fr) minmax(0, 12fr); gap: 20px }
#list, #episode { height: 82vh; overflow: auto; overflow-wrap: anywhere }
#list th { position: sticky; top: 0; background: var(--card) } #rows tr { cursor: pointer }
#rows td { max-width: 130px; overflow: hidden; text-overflow: ellipsis }
#rows tr[aria-current] { background: color-mix(in srgb, var(--accent) 18%, transparent) }
@media (max-width: 1000px) { #both { grid-template-columns: minmax(0, 1fr) } #list { height: 40vh } }

:focus-visible { outline: 2px solid var(--accent) }
.good.good { color: var(--good) } .bad.bad { color: var(--bad) }
.user { --c: var(--user) } .agent { --c: var(--agent) } .call, .tool { --c: var(--tool) }
.say, .fold { --c: var(--soft); margin: 6px 0; padding: 6px 12px; border-left: 3px solid var(--c);
  max-width: 88%;
  background: color-mix(in srgb, var(--c) 9%, transparent); white-space: pre-wrap; width: fit-content }
.say.user { --c: var(--user) } .say.agent { --c: var(--agent); margin-left: auto }
.fold { --c: var(--tool); margin-left: 12%; font-size: 13px } pre { margin: 6px 0; white-space: pre-wrap }
.who { display: block; font-size: 12px; font-weight: 600; color: var(--c) } summary { cursor: pointer }
.group { display: flex; flex-wrap: wrap; gap: 6px } .group a { text-decoration: none }
.group a[aria-current] { outline: 2px solid var(--accent) }
.tokens { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap }
.tokens span { background: color-mix(in srgb, var(--c, var(--soft)) 20%, transparent); border-radius: 2px;
  box-shadow: inset 1px 0 0 var(--card) } .tokens .agent { border-bottom: 2px solid var(--c) }
.tokens.p span { background: none; color: var(--soft); border: 0 }
.tokens.p span[data-p] { color: var(--ink); background: hsl(var(--h) 75% 50% / .38) }
"""

SCRIPT = r"""
'use strict';
const $ = id => document.getElementById(id), D = JSON.parse($('data').textContent), E = D.episodes;
const FIELDS = ['phase', 'step', 'kind', 'exit', 'reward'];
const ROLES = ['system', 'user', 'tool', 'agent', 'template'];
const percent = x => typeof x == 'number' ? (100 * x).toFixed(1) + ' %' : '–';
const signed = x => typeof x == 'number' ? (x > 0 ? '+' : '') + x.toFixed(2) : '–';
const mood = reward => reward == null ? '' : reward > 0 ? 'good' : 'bad';
const SAME = ['phase', 'stage', 'step', 'split', 'user', 'task'];
const groupOf = e => SAME.map(k => e[k]).join('|');
const groups = new Map();
E.forEach((e, n) => groups.set(groupOf(e), [...groups.get(groupOf(e)) ?? [], n]));
let shown = [], drawn = 0, at = -1, byProbability = false;

function el(tag, set, ...inside) {                    // the only maker of nodes: text never becomes markup
  const node = document.createElement(tag);
  for (const [k, v] of Object.entries(set ?? {})) k in node ? node[k] = v : node.setAttribute(k, v);
  node.append(...inside.map(x => x instanceof Node ? x : String(x ?? '–')));
  return node;
}

function summary() {
  document.title = $('run').textContent = 'Run ' + D.run;
  const [a, b] = ['cold start', 'final'].map(name => D.success.find(r => r.name == name));
  if (!D.success.length) $('headline').textContent = 'Unfinished: this run has no summary yet.';
  if (a && b) $('headline').textContent =
    'Held-out success: ' + percent(a.success) + ' after the cold start, ' +
    percent(b.success) + ' after reinforcement learning.';
  const line = (tag, cells) => $('success').append(el('tr', {}, ...cells.map(x => el(tag, {}, x))));
  if (D.success.length) line('th', ['', 'success', 'interval', 'tasks', '0 to 100 %', 'all of k right']);
  for (const r of D.success) {
    const known = r.lo != null && r.hi != null, bar = el('div', {className: 'bar'});
    const range = el('i'), dot = el('b');
    dot.style.left = 100 * r.success + '%'; range.style.left = 100 * r.lo + '%';
    range.style.width = 100 * (r.hi - r.lo) + '%';
    bar.append(...known ? [range] : [], ...r.success != null ? [dot] : []);
    const interval = known ? percent(r.lo) + ' to ' + percent(r.hi) : '–';
    line('td', [r.name, percent(r.success), interval, r.n, bar, r.pass_k]);
  }
  for (const id of ['facts', 'config']) for (const [k, v] of D[id])
    $(id).append(el('div', {className: v.length > 25 ? 'wide' : ''}, el('dt', {}, k), el('dd', {}, v)));
  if ($('curves').src.endsWith(',')) $('curves').closest('section').remove();
}

function filters() {
  for (const field of FIELDS) {
    const values = [...new Set(E.map(e => String(e[field] ?? '–')))];
    values.sort((a, b) => a - b || a.localeCompare(b));
    const options = values.map(v => el('option', {value: '=' + v}, field + ' ' + v));
    $('count').before(el('select', {id: 'by-' + field, 'aria-label': 'Filter by ' + field, onchange: refresh},
      el('option', {value: ''}, 'any ' + field), ...options));
  }
}

function refresh() {
  const word = $('find').value.toLowerCase();
  const wanted = FIELDS.map(f => [f, $('by-' + f).value]).filter(x => x[1]);
  const said = e => (e.turns ?? []).map(t => t.text);
  const text = e => e.haystack ??= [e.task, e.kind, e.user, e.exit, e.instruction, ...said(e)]
    .join(' ').toLowerCase();
  const fits = e => wanted.every(([f, v]) => '=' + (e[f] ?? '–') == v) && (!word || text(e).includes(word));
  shown = [...E.keys()].filter(n => fits(E[n]));
  $('rows').replaceChildren(); drawn = 0; more();
  $('count').textContent = shown.length + ' of ' + E.length
    + (D.left_out ? '; ' + D.left_out + ' earlier ones are in episodes.jsonl.gz' : '');
}

function more() {                                     // a hundred rows at a time, as the reader gets there
  for (const n of shown.slice(drawn, drawn += 100)) {
    const e = E[n], cells = [e.i, e.phase, e.step, e.kind, e.task, e.exit, e.reward, signed(e.advantage)];
    const row = el('tr', {id: 'row' + n, onclick: () => go(n)});
    row.append(...cells.map(x => el('td', {title: x ?? ''}, x)));
    if (n == at) row.setAttribute('aria-current', 'true');
    row.children[6].className = mood(e.reward); $('rows').append(row);
  }
}

function turn({role, text}) {
  if (role != 'call' && role != 'tool')
    return el('div', {className: 'say ' + role}, el('span', {className: 'who'}, role), text);
  const head = (role == 'call' ? 'calls ' : 'gets ') + String(text).replace(/\s+/g, ' ').slice(0, 90);
  try { text = JSON.stringify(JSON.parse(text), null, 2); } catch {}
  return el('details', {className: 'fold'}, el('summary', {className: 'who'}, head), el('pre', {}, text));
}

function tokens(e) {
  const box = el('div', {className: 'tokens'}), swap = el('button', {onclick: () => paint(!byProbability)});
  const paint = on => { byProbability = on; box.classList.toggle('p', on);
    swap.textContent = on ? 'Show roles' : 'Show probabilities'; };
  e.tokens.forEach((token, i) => {
    const role = ROLES[e.roles?.[i]] ?? 'template', logp = e.logprobs?.[i];
    const p = logp == null ? null : Math.exp(logp);
    const title = role + (p == null ? '' : ', probability ' + p.toFixed(3));
    const piece = el('span', {className: role, title}, String(token).replaceAll('\n', '↵\n'));
    if (p != null) { piece.dataset.p = p; piece.style.setProperty('--h', 130 * p); }
    box.append(piece);
  });
  paint(byProbability);
  const legend = ROLES.flatMap(role => [el('span', {className: role}, ' ' + role + ' '), ' ']);
  const note = 'Underlined: sampled by the policy, the only tokens in the loss. Probability: red 0, green 1.';
  return [el('h3', {}, 'Tokens of the agent’s view'), swap, el('p', {className: 'tokens'}, ...legend),
    el('p', {className: 'soft'}, note), box];
}

function mate(m, n) {
  const {i, member, reward, advantage} = E[m], label = (member ?? '#' + i) + ': ' + (reward ?? 'no reward');
  const here = m == n ? {'aria-current': 'true'} : {};
  return el('a', {href: '#' + i, className: mood(reward), ...here}, label + ', A ' + signed(advantage));
}

function show(n) {
  const e = E[n], names = ['phase', 'stage', 'step', 'split', 'task', 'kind', 'member', 'user', 'exit'];
  const known = names.filter(k => (e[k] ?? '') !== '');
  const facts = known.map(k => el('div', {}, el('dt', {}, k), el('dd', {}, e[k])));
  const reward = el('span', {className: mood(e.reward)}, 'reward ' + (e.reward ?? 'none'));
  const diff = e.diff?.length ? el('ul', {className: 'bad'}, ...e.diff.map(d => el('li', {}, d)))
    : el('p', {className: e.diff ? 'good' : ''}, e.diff ? 'Equal to the goal.' : 'Not recorded.');
  $('episode').replaceChildren(
    el('h2', {}, 'Episode ' + e.i + ': ', reward, ', advantage ' + signed(e.advantage)),
    el('dl', {}, ...facts),
    el('h3', {}, 'Its group: same task, same start (member: reward, advantage)'),
    el('div', {className: 'group'}, ...groups.get(groupOf(e)).map(m => mate(m, n))),
    el('h3', {}, 'What the user wants (hidden from the agent)'), el('p', {}, e.instruction),
    el('h3', {}, 'Final database'), diff, el('h3', {}, 'Conversation'), ...(e.turns ?? []).map(turn),
    ...e.tokens?.length ? tokens(e) : [el('p', {className: 'soft'}, 'Tokens are kept for the latest only.')]);
  $('episode').scrollTop = 0;
}

function go(n, still) {                               // still: the page opens at its top
  while (shown.includes(n) && !$('row' + n)) more();
  $('row' + at)?.removeAttribute('aria-current'); $('row' + n)?.setAttribute('aria-current', 'true');
  at = n; show(n);
  if (still) return;
  $('row' + n)?.scrollIntoView({block: 'nearest'}); history.replaceState(null, '', '#' + E[n].i);
}

const linked = () => E.findIndex(e => '#' + e.i == location.hash);

function press(event) {
  const typing = /INPUT|SELECT/.test(event.target.tagName), arrows = $('list').contains(event.target);
  if (event.key == 'Escape' && typing) $('list').focus({preventScroll: true});
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const arrow = {ArrowDown: 'j', ArrowUp: 'k', ArrowLeft: 'h', ArrowRight: 'l'}[event.key];
  const key = arrows && arrow || event.key;
  if (key == '/') { event.preventDefault(); $('find').focus(); }
  if (!['j', 'k', 'h', 'l'].includes(key) || !E.length) return;
  const ring = 'jk'.includes(key) ? shown : groups.get(groupOf(E[at]));
  const next = ring[Math.max(0, Math.min(ring.length - 1, ring.indexOf(at) + ('jl'.includes(key) ? 1 : -1)))];
  if (next != null) { event.preventDefault(); go(next); }
}

addEventListener('keydown', press);
addEventListener('hashchange', () => { if (linked() >= 0) go(linked()); });
$('find').oninput = refresh;
$('list').onscroll = ({target: t}) => { if (t.scrollTop + t.clientHeight > t.scrollHeight - 400) more(); };
summary(); filters(); refresh();
if (E.length) go(Math.max(linked(), 0), linked() < 0);
else $('both').replaceChildren(el('p', {}, 'No episodes were written yet.'));
"""


# ---- the terminal ----

ANSI = {"user": 34, "agent": 32, "call": 33, "tool": 33, "good": 32, "bad": 31, "soft": 2, "head": 1}


def show(run: Path, episode: int | None = None, file=None) -> None:
    """Print where the report is, the summary, and one episode (default: the last), coloured on a terminal.

    Raises UserError for a folder that is missing or half-written, and for an episode that is not in it.
    """
    run, file = _folder(run), file or sys.stdout
    if not (run / "config.json").exists():
        raise UserError(f"{run} has no config.json, so no run began in it: give the path of a run, as in runs/NAME")
    _, summary, episodes = _object(run / "config.json"), _object(run / "summary.json"), _episodes(run)
    resume = f"continue it with train --resume {run}"
    if not summary and not episodes:
        raise UserError(f"{run} is half-written (no summary, no episodes yet): {resume}")
    if episode is not None and not 0 <= episode < len(episodes):
        raise UserError(f"no episode {episode} in {run}: it has {len(episodes)}, numbered from 0")
    for name in ("report.html", "curves.png"):
        print(run / name, "" if (run / name).exists() else "(not written yet)", file=file)
    for row in _success_rows(summary):
        interval = f"[{_percent(row['lo'])}, {_percent(row['hi'])}]" if row["lo"] is not None else ""
        print(
            f"  {row['name']:<28}{_percent(row['success']):>8}  {interval} {row['pass_k']}".rstrip(),
            file=file,
        )
    facts = "; ".join(f"{label} {value}" for label, value in _facts(summary))
    print(f"  {facts}" if summary else f"  this run has no summary yet: {resume}", file=file)
    number = len(episodes) - 1 if episode is None else episode
    for kind, text in _talk(number, episodes[number]) if episodes else []:
        colour = ANSI.get(kind) if file.isatty() and not os.environ.get("NO_COLOR") else None
        clean = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)  # no escape of a model's own
        print(f"\x1b[{colour}m{clean}\x1b[0m" if colour else clean, file=file)


def _talk(number: int, episode: dict) -> Iterator[tuple[str, str]]:
    """One episode as (kind of line, text)."""
    keys = ("phase", "step", "kind", "task", "exit", "advantage")
    facts = [f"{key} {episode[key]}" for key in keys if episode.get(key) is not None]
    reward = episode.get("reward")
    yield "head", f"\nEpisode {number}: {', '.join(facts)}"
    yield "good" if reward else "bad", f"reward {'none' if reward is None else reward}"
    yield "soft", f"hidden instruction: {episode.get('instruction', '–')}"
    for turn in episode.get("turns") or []:
        role, text = str(turn.get("role")), str(turn.get("text", ""))
        yield role, f"{role:>6}  " + text.replace("\n", "\n        ")
    for line in episode.get("diff") or []:
        yield "bad", f"  differs from the goal: {line}"
