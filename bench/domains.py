"""How quick and how small τ²-bench's worlds are.

python bench/domains.py --data DIR [--quick] [--json FILE]
"""

import argparse
import gc
import sys
import time
import tracemalloc

from measure import finish, row, start

from chat import UserError
from domains.replay import DOMAINS


def measure(name: str, data: str | None, quick: bool) -> list[dict]:
    """One domain's rows. Calls are the gold ones of all tasks; a goal check follows all gold calls of the task."""
    tracemalloc.start()
    domain = DOMAINS[name](data)
    base = tracemalloc.get_traced_memory()[0]
    n = min(5 if quick else 10**9, len(domain.ids("base")))
    tasks, copies = [domain.task("base", 0, i) for i in range(n)], 20 if quick else 1000
    for task in tasks:
        domain.goal(task)
    gc.collect()
    began = tracemalloc.get_traced_memory()[0]
    worlds = [domain.world(tasks[i % n]) for i in range(copies)]
    fresh = tracemalloc.get_traced_memory()[0] - began
    for world in worlds:
        play_gold(world)
    played = tracemalloc.get_traced_memory()[0] - began
    tracemalloc.stop()

    reset, worlds = timed(lambda: [domain.world(task) for task in tasks])
    calls, _ = timed(lambda: [play_gold(world) for world in worlds])
    check, _ = timed(lambda: [world.reward() for world in worlds])
    made = sum(len(world.calls) for world in worlds)
    slowest = max(min(timed(world.reward)[0] for _ in range(10)) for world in worlds)  # min: other programs run too
    micro, mebi = 1e6 / n, 1 / 2**20
    below = lambda what, value, unit, bound: row(
        f"{name}: {what}", value, unit, None, f"< {bound:g} {unit}", value < bound
    )
    return [
        row(f"{name}: calls", made / calls, "1/s"),
        below("reset", reset * micro, "µs", 1000),
        below("goal check, mean", check * micro, "µs", 1000),
        below("goal check, slowest task", slowest * 1e6, "µs", 1000),
        row(f"{name}: base with tasks not yet read", base * mebi, "MiB"),
        below(f"{copies} worlds, before (one copy of the base)", fresh * mebi, "MiB", round(base * mebi, 3)),
        row(f"{name}: {copies} worlds, after the gold calls", played * mebi, "MiB"),
    ]


def play_gold(world) -> None:
    for action in world.task.gold:
        world.execute(action.requestor, action.name, action.arguments)


def timed(function) -> tuple[float, object]:
    """→ (seconds, result)."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with τ²-bench's data (or TAU2_DATA_DIR)")
    o = start(parser, None)
    try:
        rows = [r for name in DOMAINS for r in measure(name, o.data, o.quick)]
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    finish(rows, o)


if __name__ == "__main__":
    main()
