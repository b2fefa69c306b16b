"""The numbers and figures of docs/tutorial.md: from REINFORCE to GRPO in four steps, and the main job's evidence.

    python bench/tutorial_plots.py      prints the tables; writes docs/figures/

The four steps are measured in the world of tests/test_enumerated.py, whose every conversation is listed with its
probability: the expected reward J, its gradient and the KL to the start are exact, only the training is sampled.
"""

import csv
import dataclasses
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_enumerated import CONSTANT, END, TAKE, TinyChat, conversation, every_path  # noqa: E402

from chat import Role  # noqa: E402
from grpo import advantages, grpo_loss, make_batch, token_weights  # noqa: E402

JAMS = (0.05, 0.2, 0.4)  # three tasks: how often the tool jams
G, BATCHES, SEEDS = 8, 24, 8
FREE = dataclasses.replace(CONSTANT, tasks=len(JAMS), group_size=G, clip_low=1.0, clip_high=math.inf)  # no clip, no KL


class Tasks:
    """All conversations of the three tasks as tensors: which decision each token was, P of what was not the agent's."""

    def __init__(self):
        found = [(jams, tape, t) for jams in JAMS for tape, t in every_path(lambda tape, j=jams: conversation(tape, j))]
        seen = {s: i for i, s in enumerate(dict.fromkeys(s for _, tape, _ in found for s, _ in tape.decisions))}
        self.talks = [t for *_, t in found]
        self.reward = torch.tensor([t.reward for t in self.talks])
        self.task = torch.tensor([JAMS.index(jams) for jams, *_ in found])
        self.nature = torch.tensor([tape.nature for _, tape, _ in found])
        self.picks = [[2 * seen[s] + (token == END) for s, token in tape.decisions] for _, tape, _ in found]
        self.padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in self.picks], True, 2 * len(seen))
        g = torch.Generator().manual_seed(0)
        self.start = torch.randn(len(seen), 2, generator=g)  # as in the tests: better than chance, far from perfect
        for s, i in seen.items():
            self.start[i, int(s[-1] in (TAKE, TinyChat.words["taken"]))] += 1.5

    def logp(self, theta: torch.Tensor) -> torch.Tensor:
        """log π of every decision there is, one after the other."""
        return theta.log_softmax(-1).view(-1)

    def P(self, theta: torch.Tensor) -> torch.Tensor:
        """The probability of each conversation."""
        return self.nature * torch.cat([self.logp(theta), torch.zeros(1)])[self.padded].sum(1).exp()

    def J(self, theta: torch.Tensor) -> torch.Tensor:
        """The expected reward, mean over tasks: exact."""
        return (self.P(theta) * self.reward).sum() / len(JAMS)

    def kl(self, theta: torch.Tensor) -> float:
        """KL(π_θ ‖ start) over whole conversations, nats, mean over tasks: exact."""
        P, Q = self.P(theta), self.P(self.start)
        return float((P * (P / Q).log()).sum() / len(JAMS))

    def batch(self, theta: torch.Tensor, step: "Step", cfg, generator: torch.Generator):
        """G sampled conversations of each task as the trainer's Batch, and which decision each target was."""
        P, logp, rows, A, drawn = self.P(theta.detach()), self.logp(theta).tolist(), [], [], []
        for task in range(len(JAMS)):
            members = torch.multinomial(P * (self.task == task), cfg.group_size, True, generator=generator).tolist()
            rewards = [float(self.reward[i]) + step.bonus for i in members]
            A += advantages(rewards, step.credit) if step.credit else rewards
            drawn += members
        for i in drawn:
            noted = iter(self.picks[i])
            logprobs = tuple(logp[next(noted)] if role == Role.AGENT else math.nan for role in self.talks[i].roles)
            rows.append(dataclasses.replace(self.talks[i], logprobs=logprobs))
        batch = make_batch(rows, A, token_weights(rows, cfg))
        picks = torch.tensor([p for i in drawn for p in self.picks[i]])
        if cfg.kl:
            batch = dataclasses.replace(batch, ref=self.logp(self.start)[picks])
        return batch, picks


class Step(NamedTuple):
    """One of the four steps: what it adds."""

    name: str
    credit: str  # A: one of Config.advantage, or "" for the bare reward
    bonus: float = 0.0  # reward that every conversation gets, whatever it did
    reuse: int = 1  # updates from each batch
    changes: dict = {}  # noqa: RUF012 (never written to)


CLIP = {"clip_low": 0.2, "clip_high": 0.28}
STEPS = (
    Step("1 REINFORCE: A = r", ""),
    Step("1 the same, every reward 1 higher", "", bonus=1.0),
    Step("2 baseline: A = r − mean of the others", "rloo"),
    Step("2 the same, every reward 1 higher", "rloo", bonus=1.0),
    Step("2 baseline and std: A = (r − mean)/std", "grpo"),
    Step("3 each batch used 8 times, no clip", "grpo", reuse=8),
    Step("3 each batch used 8 times, clip", "grpo", reuse=8, changes=CLIP),
    Step("4 the same with KL, β = 0.1", "grpo", reuse=8, changes=CLIP | {"kl": 0.1}),
)


def train(tasks: Tasks, step: Step, seed: int, batches: int = BATCHES) -> tuple[list[float], float]:
    """J after each batch, and the KL to the start in the end. Adam, as in the real job."""
    cfg, generator = dataclasses.replace(FREE, **step.changes), torch.Generator().manual_seed(seed)
    theta = tasks.start.clone().requires_grad_()
    optimizer, J = torch.optim.Adam([theta], lr=0.1), [float(tasks.J(theta.detach()))]
    for _ in range(batches):
        batch, picks = tasks.batch(theta, step, cfg, generator)
        for _ in range(step.reuse):
            loss, _ = grpo_loss(tasks.logp(theta)[picks], batch, cfg)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        J.append(float(tasks.J(theta.detach())))
    return J, tasks.kl(theta.detach())


def noise(tasks: Tasks, step: Step, batches: int = 200) -> float:
    """How many batches must be averaged until the gradient's noise is no larger than the gradient: the trace of the
    covariance over the squared norm of the mean.
    """
    generator, grads = torch.Generator().manual_seed(0), []
    theta = tasks.start.clone().requires_grad_()
    for _ in range(batches):
        batch, picks = tasks.batch(theta, step, FREE, generator)
        loss, _ = grpo_loss(tasks.logp(theta)[picks], batch, FREE)
        grads.append(torch.autograd.grad(loss, theta)[0].view(-1))
    grads = torch.stack(grads)
    exact = grads.mean(0).square().sum() - grads.var(0).sum() / batches  # the mean's own noise taken off
    return float(grads.var(0).sum() / exact)


def noise_table() -> list[str]:
    """How noisy the gradient of one batch is, at the start."""
    tasks = Tasks()
    lines = [f"| {step.name} | {noise(tasks, step):.2f} |" for step in STEPS[:5]]
    return ["| A | noise / signal |", "|---|---|", *lines]


def training_table() -> tuple[list[str], dict[str, list[float]]]:
    """How the steps train, and each one's mean curve."""
    tasks, curves = Tasks(), {}
    lines = [f"| | J after {BATCHES // 4} batches | J after {BATCHES} | worst of {SEEDS} seeds | KL to the start |"]
    lines += ["|---|---|---|---|---|"]
    for step in STEPS:
        runs = [train(tasks, step, seed) for seed in range(SEEDS)]
        curve = [sum(column) / SEEDS for column in zip(*(J for J, _ in runs), strict=True)]
        worst, kl = min(J[-1] for J, _ in runs), sum(kl for _, kl in runs) / SEEDS
        lines.append(f"| {step.name} | {curve[BATCHES // 4]:.3f} | {curve[-1]:.3f} | {worst:.3f} | {kl:.2f} |")
        curves[step.name] = curve
    return lines, curves


def squeezed_table() -> list[str]:
    """How far one single batch carries the policy, with and without the clip."""
    tasks = Tasks()
    lines = [
        "| updates from one batch | J, no clip | J, clip | KL moved, no clip | KL moved, clip |",
        "|---|---|---|---|---|",
    ]
    for reuse in (1, 8, 32):
        steps = [STEPS[-3]._replace(reuse=reuse), STEPS[-2]._replace(reuse=reuse)]
        runs = [[train(tasks, step, seed, 1) for seed in range(SEEDS)] for step in steps]
        J, kl = (
            [sum(x) / SEEDS for x in column]
            for column in zip(*[([J[-1] for J, _ in r], [k for _, k in r]) for r in runs], strict=True)
        )
        lines.append(f"| {reuse} | {J[0]:.3f} | {J[1]:.3f} | {kl[0]:.2f} | {kl[1]:.2f} |")
    return lines


def plot_steps(curves: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure  # the tables need no drawing

    figure = Figure(figsize=(8, 4.2))
    axis = figure.add_subplot()
    for name, curve in curves.items():
        axis.plot(
            curve,
            label=name,
            ls="--" if "higher" in name or "no clip" in name else ":" if "std" in name else "-",
            color=f"C{int(name[0])}",
            alpha=0.5 + 0.5 * ("higher" not in name),
        )
    axis.set(xlabel=f"batches ({len(JAMS)} tasks × {G} conversations)", ylabel="expected reward J, exact")
    axis.set_title(f"The enumerated world, mean of {SEEDS} seeds")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def plot_evidence(rows: list[dict], path: Path) -> None:
    """The main job's success by test, one bar a seed, with its 95 % interval."""
    from matplotlib.figure import Figure

    tests = {
        "cold_start": "cold start", "final": "after GRPO", "unseen_user": "unseen user", "scripted_user": "scripted user",
        "unseen_combination": "unseen pairs\nof wishes", "unseen_names": "unseen names",
    }  # fmt: skip
    figure = Figure(figsize=(8, 4.2))
    axis = figure.add_subplot()
    for i, row in enumerate(rows):
        y, lo, hi = ([100 * float(row[f"{test}_{key}"]) for test in tests] for key in ("success", "lo", "hi"))
        error = [[a - b for a, b in zip(y, lo, strict=True)], [b - a for a, b in zip(y, hi, strict=True)]]
        x = [k + 0.27 * (i - 1) for k in range(len(tests))]
        axis.bar(x, y, 0.25, yerr=error, capsize=2, color=f"C{i}", label=f"seed {row['seed']}")
    best = 100 * max(float(v) for row in rows for k, v in row.items() if k.startswith("null_"))
    axis.axhline(best, color="grey", ls=":", label=f"best null baseline, {best:.1f} %")
    axis.set_xticks(range(len(tests)), tests.values(), fontsize=8)
    axis.set(ylabel="success, %", ylim=(0, 100))
    axis.legend(fontsize=8, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    figures = ROOT / "docs" / "figures"
    figures.mkdir(exist_ok=True)
    training, curves = training_table()
    print("\n\n".join("\n".join(table) for table in (noise_table(), training, squeezed_table())))
    plot_steps(curves, figures / "reinforce_to_grpo.png")
    with open(ROOT / "docs" / "evidence" / "main_job.csv") as file:
        plot_evidence(list(csv.DictReader(file)), figures / "main_job_tests.png")


if __name__ == "__main__":
    main()
