"""What people look at: the episode log, `curves.png`, `report.html`, and one episode on a terminal.

Reads the files of a run folder and imports nothing that trains, so a report can be rebuilt anywhere. Any file
may be missing and any number absent: a run that was killed, or never reached RL, still gets a page. The page
is `report_page.html` with the run's data in it: one static file that needs neither network nor server.
Deliberately left out: anything that recomputes a number. What is shown is what was logged, and its trailing mean.
"""

import base64
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from chat import Role, UserError, parse_json

# ---- the files of a run ----


def append_episodes(path: Path, episodes: list[dict]) -> None:
    """Append one gzip member of JSON lines and sync it: a kill can only ever cut the last member."""
    text = "".join(json.dumps(episode) + "\n" for episode in episodes)
    with open(path, "ab") as file:
        file.write(gzip.compress(text.encode(), mtime=0))
        file.flush()
        os.fsync(file.fileno())


def read_episodes(path: Path, needed: bool = False) -> list[dict]:
    """Every whole episode, oldest first; [] where there is no file. NaN reads as None. needed: see `_row`.

    What a kill cut off at the end is left out; a resumed run writes the file anew before it goes on.
    """
    path, lines = Path(path), []
    if not path.exists():
        return []
    try:
        with gzip.open(path) as file:
            for line in file:  # whole lines: what is cut raises instead
                lines.append(line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # cut, within a member or within its header
        if not lines and path.read_bytes()[:2] not in (b"\x1f", b"\x1f\x8b"):
            raise UserError(f"{path} is not an episode log ({error}): move it away, or restore it") from None
    return [_row(line, path, needed) for line in lines]


def read_metrics(path: Path, needed: bool = False) -> list[dict]:
    """Every whole line of `metrics.jsonl`, oldest first; [] where there is no file. NaN reads as None. needed: see `_row`."""
    lines = Path(path).read_text(errors="replace").splitlines(keepends=True) if Path(path).exists() else []
    return [_row(line, path, needed) for line in lines if line.endswith("\n")]  # the last may be cut by a kill


def _row(line: str | bytes, path: Path, needed: bool) -> dict:
    """A line of a log: an object. needed: it says at which step of which phase it was written, as an evaluation's do not."""
    row = _json(line, path)
    placed = isinstance(row, dict) and all(isinstance(row.get(k), t) for k, t in (("phase", str), ("step", int)))
    if not placed and (needed or not isinstance(row, dict)):
        raise UserError(f"{path} holds a line that no run wrote ({str(row)[:40]}): restore it, or train again")
    return row


def _json(text: str | bytes, path: Path):
    try:
        return parse_json(text, parse_constant=lambda _: None)  # NaN is not JSON, and a browser refuses it
    except ValueError as error:
        raise UserError(f"{path} holds broken JSON ({error}): restore it, or train again") from None


def _object(path: Path) -> dict:
    value = _json(path.read_text(errors="replace"), path) if path.exists() else {}
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: restore it, or train again")
    return value


def _folder(run: Path) -> Path:
    if not Path(run).is_dir():
        raise UserError(f"no run folder at {run}: give a folder that `train` wrote, as in runs/NAME")
    return Path(run)


# ---- the summary as rows of text ----


def _is_number(x) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)


def _percent(x) -> str:
    return f"{100 * x:.1f} %" if _is_number(x) else "–"


def _success_rows(summary: dict) -> list[dict]:
    """Each success figure of the summary as {name, success, lo, hi, n, pass_k}: fractions, and one text."""
    found = {name: x for name, x in summary.items() if isinstance(x, dict) and "success" in x}
    found |= {"careless": {"success": summary["careless"]}} if "careless" in summary else {}
    found |= {f"null: {name}": {"success": x} for name, x in (summary.get("null") or {}).items()}
    rows = []
    for name, x in found.items():
        text = "  ".join(f"pass^{k} {_percent(v)}" for k, v in (x.get("pass_k") or {}).items() if k != "1")
        figures = {key: x.get(key) for key in ("success", "lo", "hi", "n")}
        rows.append(figures | {"name": name.replace("_", " "), "pass_k": text})
    return rows


def _facts(summary: dict) -> list[list[str]]:
    """The rest of the summary as [label, value with its unit]."""
    named = {"wall_s": "wall time", "peak_rss_mb": "peak memory", "sample_tok_s": "sampling", "train_tok_s": "training"}
    shown = {"null", "careless"} | {k for k, x in summary.items() if isinstance(x, dict) and "success" in x}
    return [[named.get(k, k.replace("_", " ")), _value(k, x)] for k, x in summary.items() if k not in shown]


def _value(key: str, x) -> str:
    """A value with its unit, which its name tells; what is in a table has the unit of the table's name."""
    if isinstance(x, dict):
        return " · ".join(f"{k.replace('_', ' ')} {_value(key, v)}" for k, v in x.items())
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

INK = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f7f7f #b8a800 #333333".split()  # Okabe and Ito, and greys
GREY = 6
LINES = (  # of the RL steps: title, unit, factor to that unit, {key in metrics.jsonl: label}
    ("KL to the cold start", "nats per token", 1, {"kl": "KL"}),
    ("Entropy", "nats per token", 1, {"entropy": "entropy"}),
    ("Turns of the agent", "turns per conversation", 1, {"turns": "turns"}),
    ("Length of a turn", "tokens", 1, {"tokens_per_turn": "tokens"}),
    ("Groups without a signal", "% of groups", 100, {"all_right": "all right", "all_wrong": "all wrong"}),
    ("Faults", "%", 100, {"user_fault": "user at fault", "malformed": "malformed turns"}),
    ("Clipped tokens", "% of trained tokens", 100, {"clip_frac": "clipped"}),
    ("Gradient norm", "before clipping", 1, {"grad_norm": "norm"}),
    ("Sampler against trainer", "|ρ − 1|", 1, {"gap_mean": "mean", "gap_max": "maximum"}),
    ("Speed", "tokens/s", 1, {"sample_tok_s": "rollout", "train_tok_s": "training"}),
    ("Variety", "different 4-grams", 1, {"unique_4grams": "4-grams"}),
)
SHARES = (("Tool calls", "% of calls", "tools"), ("How conversations end", "% of conversations", "exits"))
DRAWN = 2 + len(LINES) + len(SHARES)  # panels of `curves.png`
KNOWN = {"step", "seconds", "success", "reward"}.union(*(line[-1] for line in LINES))


def panels(rows: list[dict]) -> list[dict]:
    """What `curves.png` and the page draw of the rows of `metrics.jsonl`, as plain data.

    A panel is {title, unit, x (its name), kind: lines | log | shares, lines, points}: lines [{label, ink, x, y, mean}]
    and, for evaluations, points [{label, ink, x, y, lo, hi}]. The first DRAWN are always there; the page also shows the
    others, one for every number that the RL steps logged and that has no panel yet.
    """
    sft, rl, evals = ([r for r in rows if r.get("phase") == phase] for phase in ("sft", "rl", "eval"))

    def over_steps(title: str, unit: str, factor: float, keys: dict[str, str]) -> dict:
        lines = [_line(rl, key, label, ink, factor) for ink, (key, label) in enumerate(keys.items())]
        return _panel(title, unit, lines, "log" if "gap_max" in keys else "lines")

    reward = "success" if any(_is_number(r.get("success")) for r in rl) else "reward"
    others = sorted({key for r in rl for key, value in r.items() if _is_number(value)} - KNOWN)
    return [
        _panel("Success", "%", [_line(rl, reward, f"training {reward}", GREY, 100)], points=_evaluations(evals)),
        _panel("Cold start: loss", "nats per token", [_line(sft, "loss", "loss")], x="cold-start step"),
        *(over_steps(*line) for line in LINES),
        *(_panel(title, unit, _shares(rl, key), "shares") for title, unit, key in SHARES),
        *(over_steps(key.replace("_", " "), "", 1, {key: key}) for key in others),
    ]


def _panel(title: str, unit: str, lines: list, kind: str = "lines", x: str = "RL step", points: list = ()) -> dict:
    lines = [line for line in lines if line["x"]]
    return {"title": title, "unit": unit, "x": x, "kind": kind, "lines": lines, "points": points}


def _short(x: float) -> float:
    return float(f"{x:.5g}")


def _line(rows: list[dict], key: str, label: str, ink: int = 0, factor: float = 1) -> dict:
    """One series and its trailing mean over a 25th of the run."""
    rows = [r for r in rows if _is_number(r.get("step")) and _is_number(r.get(key))]
    y, window = [_short(factor * r[key]) for r in rows], max(1, len(rows) // 25)
    means = [_short(sum(part) / len(part)) for i in range(1, len(y) + 1) if (part := y[max(0, i - window) : i])]
    return {"label": label, "ink": ink, "x": [r["step"] for r in rows], "y": y, "mean": means}


def _shares(rows: list[dict], key: str) -> list[dict]:
    """Each name's share of a step's counts, commonest first; all but eight go together."""
    counts = {r["step"]: Counter(r[key]) for r in rows if _is_number(r.get("step")) and r.get(key)}
    counts = {step: c for step, c in counts.items() if c.total()}
    total = sum(counts.values(), Counter())
    label = {name: name.replace("_", " ") if i < 8 else "others" for i, (name, _) in enumerate(total.most_common())}
    share = lambda name, c: _short(100 * sum(n for one, n in c.items() if label[one] == name) / c.total())
    return [
        {"label": name, "ink": ink, "x": [*counts], "y": [share(name, c) for c in counts.values()]}
        for ink, name in enumerate(dict.fromkeys(label.values()))
    ]


def _evaluations(evals: list[dict]) -> list[dict]:
    """Held-out success in per cent with its interval: one series for each split and user."""
    series = {}
    for r in evals:
        if _is_number(r.get("success")) and _is_number(r.get("step")):
            who, _, greedy = str(r.get("user", "?")).partition(", ")  # "lm, greedy": the agent's decoding
            name = f"{r.get('split', '?')}, {who} user" + ", greedy agent" * bool(greedy)
            one = series.setdefault(
                name, {"label": name, "ink": len(series) % GREY, "x": [], "y": [], "lo": [], "hi": []}
            )
            ends = [r[key] if _is_number(r.get(key)) else r["success"] for key in ("success", "lo", "hi")]
            for key, value in zip(
                ("x", "y", "lo", "hi"), (r["step"], *(_short(100 * end) for end in ends)), strict=True
            ):
                one[key].append(value)
    return list(series.values())


def _draw(ax, panel: dict) -> None:
    """One panel with matplotlib: raw values faint, their mean on top, evaluations as points with intervals."""
    lines, points, stacked = panel["lines"], panel["points"], panel["kind"] == "shares"
    if lines and stacked:
        x, y = lines[0]["x"], [line["y"] + line["y"][-1:] for line in lines]
        ax.stackplot([*x, x[-1] + 1], y, labels=[line["label"] for line in lines], colors=INK, step="post", alpha=0.85)
        ax.margins(x=0)
    if panel["kind"] == "log" and any(y > 0 for line in lines for y in line["y"]):
        ax.set_yscale("log")
    for line in lines if not stacked else ():
        ax.plot(line["x"], line["y"], color=INK[line["ink"]], alpha=0.25, linewidth=1, marker=".", markersize=3)
        ax.plot(line["x"], line["mean"], color=INK[line["ink"]], label=line["label"])
    for p, mark in zip(points, itertools.cycle("s^Dov"), strict=False):
        ax.plot(p["x"], p["y"], marker=mark, color=INK[p["ink"]], linewidth=1, label=p["label"])
        ax.vlines(p["x"], p["lo"], p["hi"], color=INK[p["ink"]])
    if panel["kind"] != "log":
        lowest = min((y for line in lines for y in line["y"]), default=0)
        ax.set_ylim(min(0, 1.05 * lowest), 100 if points or stacked else None)
    ax.set_title(panel["title"], loc="left", fontweight="bold")
    ax.set(xlabel=panel["x"], ylabel=panel["unit"])
    if not lines and not points:
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", va="center", color="grey")
    elif len(lines) + len(points) > 1:
        below = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.22), "ncol": 2}  # a stack is full inside
        ax.legend(**below if stacked else {"loc": "best", "ncol": 1 if len(points) < 4 else 2})


def curves(run: Path) -> Path:
    """Draw `metrics.jsonl` as `curves.png`."""
    run = _folder(run)
    found = panels(read_metrics(run / "metrics.jsonl"))[:DRAWN]
    import matplotlib  # here, since `show` and reading need no drawing
    from matplotlib.figure import Figure

    style = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
    style |= {"axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False, "legend.fontsize": 8}
    with matplotlib.rc_context(style):
        fig = Figure(figsize=(16, 12))
        fig.suptitle(f"{run.name}: cold start, RL, held-out success", x=0.01, ha="left", fontsize=14)
        grid = fig.add_gridspec(4, 4, left=0.05, right=0.99, bottom=0.13, top=0.93, wspace=0.22, hspace=0.4)
        for place, panel in zip([grid[0, :2], *(grid[i // 4, i % 4] for i in range(2, 16))], found, strict=True):
            _draw(fig.add_subplot(place), panel)
        fig.savefig(run / ".curves.png", dpi=110)
    return (run / ".curves.png").replace(run / "curves.png")  # nobody ever sees half a file


# ---- the page ----

PAGE = Path(__file__).with_name("report_page.html")
MAX_EPISODES, MAX_TOKENS, MAX_PROMPT = 4000, 500_000, 200  # on a page; tokens on it; of a system prompt


def html(run: Path) -> Path:
    """Write `report.html`: summary, curves and episodes in one file that needs neither network nor server.

    It holds the latest episodes, and the tokens of the latest of these, so that it stays small and opens at once; of a
    long system prompt, the same everywhere, only the beginning. What a model wrote is data in it: JSON without a "<",
    which the script shows as text; and the page's security policy runs that one script and loads nothing.
    """
    run = _folder(run)
    summary, config = _object(run / "summary.json"), _object(run / "config.json")
    episodes = read_episodes(run / "episodes.jsonl.gz")
    rows, budget = [{"i": i} | e for i, e in enumerate(episodes)][-MAX_EPISODES:], MAX_TOKENS
    for row in reversed(rows):
        tokens = list(zip(*(row.pop(key, None) or () for key in ("tokens", "roles", "logprobs")), strict=False))
        for key in ("ids", "states"):  # for `explain`
            row.pop(key, None)
        n = next((i for i, token in enumerate(tokens) if token[1] not in (Role.SYSTEM, Role.TEMPLATE)), 0)
        if n > MAX_PROMPT:
            tokens[MAX_PROMPT:n] = [(f" [… {n - MAX_PROMPT:,} more tokens of the prompt …] ", Role.SYSTEM, None)]
        budget -= len(tokens)
        row["tokens"] = tokens if budget >= 0 else []
    drawn = panels(read_metrics(run / "metrics.jsonl"))
    data = {"run": run.name, "success": _success_rows(summary), "facts": _facts(summary)}
    data |= {"config": [[key, json.dumps(value)] for key, value in config.items()]}
    data |= {"panels": drawn[:DRAWN], "more": drawn[DRAWN:], "episodes": rows, "left_out": len(episodes) - len(rows)}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = PAGE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (run / ".report.html").write_text(page.replace("%HASH%", digest).replace("%DATA%", text), encoding="utf-8")
    return (run / ".report.html").replace(run / "report.html")


# ---- the terminal ----

ANSI = {"user": 34, "agent": 32, "call": 33, "tool": 33, "good": 32, "bad": 31, "soft": 2, "head": 1}
ANSI |= {"system": 2, "template": 2}  # a token's role, as `explain` paints it


def show(run: Path, episode: int | None = None, file=None) -> None:
    """Print where the report is, the summary, and one episode (default: the last), coloured on a terminal.

    Raises UserError for a folder that is missing or half-written, and for an episode that is not in it.
    """
    run, file = _folder(run), file or sys.stdout
    if not _object(run / "config.json"):
        raise UserError(f"{run} has no config.json, so no run began in it: give the path of a run, as in runs/NAME")
    summary, episodes = _object(run / "summary.json"), read_episodes(run / "episodes.jsonl.gz")
    resume = f"continue it with train --resume {run}"
    if not summary and not episodes:
        raise UserError(f"{run} is half-written (no summary, no episodes yet): {resume}")
    if episode is not None and not 0 <= episode < len(episodes):
        raise UserError(f"no episode {episode} in {run}: it has {len(episodes)}, numbered from 0")
    for name in ("report.html", "curves.png"):
        print(run / name, "" if (run / name).exists() else "(not written yet)", file=file)
    for row in _success_rows(summary):
        interval = f"[{_percent(row['lo'])}, {_percent(row['hi'])}]" if row["lo"] is not None else ""
        print(f"  {row['name']:<28}{_percent(row['success']):>8}  {interval} {row['pass_k']}".rstrip(), file=file)
    facts = "; ".join(f"{label} {value}" for label, value in _facts(summary))
    print(f"  {facts}" if summary else f"  this run has no summary yet: {resume}", file=file)
    number = len(episodes) - 1 if episode is None else episode
    for kind, text in _talk(number, episodes[number]) if episodes else []:
        print(painted(text, kind, file), file=file)


def painted(text: str, kind: str, file) -> str:
    """Text in the colour of its kind, where `file` is a terminal and NO_COLOR is not set."""
    colour = ANSI.get(kind) if file.isatty() and not os.environ.get("NO_COLOR") else None
    clean = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)  # no escape of a model's own
    return f"\x1b[{colour}m{clean}\x1b[0m" if colour else clean


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
