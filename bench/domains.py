"""How quick and how small τ²-bench's worlds are.

python bench/domains.py --data DIR [--json FILE]
"""

import argparse
import gc
import json
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chat import UserError
from domains.replay import DOMAINS

WORLDS = 1000


def measure(name: str, data: str | None) -> list[dict]:
    """One domain's figures. Calls are the gold ones of all tasks; a goal check follows all gold calls of the task."""
    tracemalloc.start()
    domain = DOMAINS[name](data)
    base = tracemalloc.get_traced_memory()[0]
    ids = domain.ids("base")
    tasks = [domain.task("base", 0, i) for i in range(len(ids))]
    for task in tasks:
        domain.goal(task)
    gc.collect()
    began = tracemalloc.get_traced_memory()[0]
    worlds = [domain.world(tasks[i % len(ids)]) for i in range(WORLDS)]
    fresh = tracemalloc.get_traced_memory()[0] - began
    for world in worlds:
        play_gold(world)
    played = tracemalloc.get_traced_memory()[0] - began
    tracemalloc.stop()

    reset, worlds = timed(lambda: [domain.world(task) for task in tasks])
    calls, _ = timed(lambda: [play_gold(world) for world in worlds])
    check, _ = timed(lambda: [world.reward() for world in worlds])
    n = sum(len(world.calls) for world in worlds)
    slowest = max(min(timed(world.reward)[0] for _ in range(10)) for world in worlds)  # min: other programs run too
    return [
        figure(name, "calls", n / calls, "1/s"),
        figure(name, "reset", reset / len(tasks) * 1e6, "µs", 1000),
        figure(name, "goal check, mean", check / len(tasks) * 1e6, "µs", 1000),
        figure(name, "goal check, slowest task", slowest * 1e6, "µs", 1000),
        figure(name, "base with tasks not yet read", base / 2**20, "MiB"),
        figure(name, f"{WORLDS} worlds, before", fresh / 2**20, "MiB", base / 2**20, "one copy of the base"),
        figure(name, f"{WORLDS} worlds, after the gold calls", played / 2**20, "MiB"),
    ]


def play_gold(world) -> None:
    for action in world.task.gold:
        world.execute(action.requestor, action.name, action.arguments)


def timed(function) -> tuple[float, object]:
    """→ (seconds, result)."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def figure(domain: str, name: str, value: float, unit: str, below: float | None = None, against: str = "") -> dict:
    """A measured value and, if one was promised, the bound it must stay below."""
    promise = None if below is None else f"< {below:.4g} {unit}"
    met = None if below is None else value < below
    return {
        "name": f"{domain}: {name}",
        "value": round(value, 3),
        "unit": unit,
        "against": against,
        "promise": promise,
        "met": met,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with τ²-bench's data (or TAU2_DATA_DIR)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    try:
        figures = [f for name in DOMAINS for f in measure(name, options.data)]
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for f in figures:
        verdict = "" if f["promise"] is None else f"{f['promise']:<12} {'met' if f['met'] else 'MISSED'}"
        print(f"{f['name']:<45} {f['value']:>12,.2f} {f['unit']:<4} {verdict} {f['against']}".rstrip())
    if options.json:
        options.json.write_text(json.dumps(figures, ensure_ascii=False, indent=1))
    return int(any(f["met"] is False for f in figures))


if __name__ == "__main__":
    sys.exit(main())
