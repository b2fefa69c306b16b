"""A domain from a file: domains/desk.py is trained and evaluated as it stands, and what a domain lacks is one line."""

import functools
import json
import re
from pathlib import Path

import pytest
from test_domains_wired import refused

import commands
import mua_rl
from config import Config, default_config
from domains import find
from evaluation import fault_of, make_domain, null_baselines
from rollout import Trajectory
from tools import Domain
from user_sim import UNJUDGED

CODE = (Path(__file__).parents[1] / "domains/desk.py").read_text()
TINY = (
    "--threads 1 --layers 2 --width 32 --heads 2 --kv-heads 1 --mlp 32 --sft-steps 2 --sft-talks 2 --steps 1 --tasks 2 "
    "--group-size 2 --max-turns 3 --max-new 8 --user-max-new 8 --slots 4 --eval-every 0 --test-tasks 2 --trials 1"
).split()


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A copy of it in a folder of its own, which is the working directory."""
    (tmp_path / "desk.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "desk.py"


def changed(desk, name, *changes):
    """A copy of the file with some text replaced."""
    text = CODE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (path := desk.with_name(name)).write_text(text)
    return path


def test_the_documented_domain_trains_from_nothing_goes_on_and_is_evaluated_from_another_folder(
    desk, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    monkeypatch.setattr(mua_rl, "tokenizer_texts", functools.partial(mua_rl.tokenizer_texts, n=100))  # a quicker start
    for module in (mua_rl, commands):
        monkeypatch.setattr(module, "null_baselines", functools.partial(null_baselines, n=20))
    mua_rl.main(["train", "--domain", "desk.py", "--run", str(run), *TINY])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["null"]["do_nothing"] == 0 and {"cold_start_scripted", "scripted_user", "greedy"} <= summary.keys()
    assert not {"unseen_user", "unseen_combination", "greedy_unseen_user"} & summary.keys()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    mua_rl.main(["train", "--resume", str(run), "--steps", "2"])
    assert json.loads((run / "checkpoint/state.json").read_text())["step"] == 2
    capsys.readouterr()
    for user in ("scripted", "lm"):
        mua_rl.main(["eval", str(run), "--n", "2", "--trials", "1", "--user", user])
        out = capsys.readouterr().out
        assert re.search(r"^do_nothing +0\.0%", out, re.M) and re.search(r"^success ", out, re.M)
        assert ("user faults" in out) == (user == "lm")
    assert "no script for a stranger user" in refused(["eval", run, "--user", "stranger"], capsys)
    desk.rename(tmp_path / "moved.py")
    assert f"--domain {desk}: there is no such file" in refused(["eval", run, "--user", "scripted"], capsys)


def test_its_baselines_earn_what_its_tasks_say_and_a_careful_clerk_solves_them_all(desk):
    domain = make_domain(Config(domain="desk.py"))
    kinds = [domain.task("test", 3, i).kind for i in range(200)]
    assert null_baselines(domain, 3, n=200) == {"do_nothing": 0.0, "careless": kinds.count("renew") / 200}
    assert 60 < kinds.count("renew") < 140
    domain.baselines = {"careful": lambda rng: domain.demonstrator(rng, "user")}
    assert null_baselines(domain, 3, n=200, split="train") == {"careful": 1.0}


LACKING = {
    "task": ("    def task(", "    def tusk(", "Desk has no task; see docs/domains.md"),
    "policy": ("    policy = ", "    rules = ", "has no policy; see docs/domains.md"),
    "script": ('("scripted",)', "()", "has no script, or does not name it in scripts"),
    "class": ("class Desk(Domain)", "class Desk", "no class derived from tools.Domain"),
    "line": ("import json\n", "import jsn\n", "line 6: ModuleNotFoundError: No module named 'jsn'"),
    "syntax": ("import json\n", "import\n", "line 6: SyntaxError"),
    "sizes": (
        "    def instruction",
        '    sizes = lambda preset: {"wheels": 4}\n\n    def instruction',
        "sizes() don't fit",
    ),
    "val": ('"val": range(7, 8), ', "", "--eval-every 10: desk has no validation split; give 0"),
    "train": ('{"train"', '{"tarin"', "--split train"),
}


@pytest.mark.parametrize("part", LACKING)
def test_what_a_domain_must_have_and_lacks_is_one_line(desk, part, capsys):
    old, new, said = LACKING[part]
    path = changed(desk, f"{part}.py", (old, new))
    assert said in refused(["train", "--domain", path, "--run", "run"], capsys)
    assert not Path("run").exists()


DROPPED = ("    def demonstrator(", "    def unused("), ("    def meaning(", "    def not_used(")


def test_without_demonstrations_a_pretrained_model_is_wanted_and_policy_and_tools_are_shown(desk, capsys):
    bare = changed(desk, "bare.py", *DROPPED)
    args = ["--domain", str(bare)]
    assert default_config(args).sft_steps == 0 and default_config(args).prompts
    assert "--model" in refused(["train", *args], capsys)
    assert "no demonstrations" in refused(["train", *args, "--sft-steps", "5"], capsys)
    assert "no demonstrations" in refused(["sft", *args], capsys)
    domain = make_domain(default_config(args))
    assert "library" in domain.system and [t["function"]["name"] for t in domain.tools] == ["get_loan", "renew_loan"]
    assert make_domain(default_config(["--domain", str(desk)])).tools is None  # by heart


def test_without_a_script_only_models_play_and_baselines_talk_to_nobody(desk, capsys):
    mute = changed(desk, "mute.py", *DROPPED, ('"Hello!", GUIDE, ("scripted",)', '"Hello!", GUIDE, ()'), ("    def script(", "    def x("),
                   ("clerk(rng, 1.0)", "renewing()"), ("class Desk", "def renewing():\n    yield ''\n    yield Call('renew_loan', {'card': '#F15'})\n\n\nclass Desk"))  # fmt: skip
    assert "no script for a scripted user" in refused(["train", "--domain", mute, "--user", "scripted"], capsys)
    domain = make_domain(default_config(["--domain", str(mute)]))
    lucky = [t for i in range(300) if (t := domain.task("test", 0, i)).kind == "renew" and t.wants == "#F15"]
    assert null_baselines(domain, 0, n=300) == {"do_nothing": 0.0, "careless": len(lucky) / 300} and lucky


def test_a_user_is_judged_by_the_script_where_there_is_a_meaning_and_not_at_all_without(desk):
    domain = find("desk.py")()
    task = domain.task("train", 0, 0)
    turns = [("user", "Please renew it."), ("agent", "What is the number of your card?"), ("user", "It is #B99.")]
    talk = [{"role": role, "text": text} for role, text in turns]
    t = Trajectory("", "", "", 0, (), (), (), (), "user_ended", 0.0, (), talk, {"user": "lm"})
    assert fault_of(domain, task, t) == "card"
    domain.meaning = None
    assert fault_of(domain, task, t) == UNJUDGED


def test_sizes_come_before_flags_and_helpers_beside_the_file_are_found(desk):
    desk.with_name("hours.py").write_text("OPEN = 7\n")
    path = changed(desk, "sized.py", ("import json\n", "import json\n\nimport hours\n"),
                   ("    def instruction", '    @classmethod\n    def sizes(cls, preset):\n        return {"max_turns": hours.OPEN}\n\n    def instruction'))  # fmt: skip
    assert default_config(["--domain", str(path)]).max_turns == 7 != default_config([]).max_turns


def test_every_domain_of_ours_is_found_by_its_name():
    for name in ("shop", "retail", "airline", "telecom"):
        assert find(name).name == name and issubclass(find(name), Domain)
