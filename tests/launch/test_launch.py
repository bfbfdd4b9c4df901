"""`xsp run`: somebody's script, as it is."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from depth import deep

pytest.importorskip("torch")

import xsp
from xsp.cli import main
from xsp.health import health

TRAIN = """
    import sys, torch
    from torch import nn
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = nn.CrossEntropyLoss()
    print("args", sys.argv[1:], __name__)

    def train_one():
        optimizer.zero_grad()
        loss_of(model(torch.randn(4, 8)), torch.tensor([0, 1, 0, 1])).backward()
        optimizer.step()

    for _ in range(30):
        train_one()
"""


def run(tmp_path: Path, script: str, *options: str, args: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "xsp.cli", "run", "--quiet", "--out", str(tmp_path / "run"), *options, str(path)]
    return subprocess.run([*command, *args], capture_output=True, text=True, cwd=tmp_path)


def kinds(trace: xsp.Trace) -> list[str]:
    return [
        row[0] for row in trace.sql("SELECT kind FROM merged WHERE level = 20 ORDER BY start_ns, kind DESC").fetchall()
    ]


@pytest.mark.slow
def test_a_step_of_training_goes_from_the_first_call_to_the_optimizers_step(tmp_path):
    done = run(tmp_path, TRAIN, args=("--epochs", "1"))
    assert (done.returncode, done.stdout) == (0, "args ['--epochs', '1'] __main__\n")
    trace = xsp.load(tmp_path / "run")
    assert kinds(trace) == ["step", "forward", "forward", "backward", "optimizer"]
    assert trace.run["steps"]["seen"] == 30


@pytest.mark.slow
def test_options_of_the_program_are_not_taken_for_abbreviations_of_xsp(tmp_path):
    done = run(tmp_path, "import sys; print(sys.argv[1:])", args=("--o", "1", "--lev", "2", "-q", "--quiet"))
    assert (done.returncode, done.stdout) == (0, "['--o', '1', '--lev', '2', '-q', '--quiet']\n")


@pytest.mark.slow
def test_an_option_of_xsp_after_the_program_is_the_program_s_and_is_said_to_be(tmp_path):
    """A program that refused `--out` was said to have called no module of torch."""
    parser = "import argparse; parser = argparse.ArgumentParser(); parser.add_argument({!r}); parser.parse_args()"
    hint = "--out was given to the program: to give it to xsp, type it before the program, xsp run --out …"
    done = run(tmp_path, parser.format("--epochs"), args=("--out", "there"))
    assert done.returncode == 2
    assert done.stderr.endswith(f"xsp: the program ended with code 2 before its first step; {hint}\n")
    done = run(tmp_path, parser.format("--epochs"), "--overwrite", args=("--rounds", "1"))
    assert done.stderr.endswith("xsp: the program ended with code 2 before its first step\n")
    for text, is_told in (("print(1)", True), (parser.format("--out"), False)):
        script = tmp_path / "own.py"
        script.write_text(text)
        command = [sys.executable, "-m", "xsp.cli", "run", str(script), "--out", "there"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, hint in done.stderr) == (0, is_told)


def test_an_option_before_the_program_is_written_in_full(tmp_path, capsys):
    (tmp_path / "script.py").write_text("raise RuntimeError")
    assert main(["run", "--ev", "3", f"{tmp_path}/script.py"]) == 2
    assert capsys.readouterr().err == "xsp: error: unrecognized arguments: --ev; see `xsp run --help`\n"


@pytest.mark.slow
def test_of_a_short_training_whose_optimizer_never_steps_it_says_that_all_of_it_looks_like_one_step(tmp_path):
    script = """
        import torch
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(20):
            net(torch.ones(2, 4)).sum().backward()
    """
    assert "no torch optimizer stepped; give --step" in run(tmp_path, script).stderr


@pytest.mark.slow
def test_gradients_that_are_computed_before_there_is_an_optimizer_say_nothing_of_the_training(tmp_path):
    script = """
        import torch
        net = torch.nn.Linear(4, 4)
        for _ in range(6):
            net(torch.ones(2, 4)).sum().backward()
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(30):
            optimizer.zero_grad()
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    """
    assert run(tmp_path, script).returncode == 0
    trace = xsp.load(tmp_path / "run")
    assert max(kind["steps"] for kind in trace.run["kinds"]) >= 29
    assert not [note["text"] for note in trace.run.notes if "trains without a torch optimizer" in note["text"]]


@pytest.mark.slow
def test_a_short_training_by_hand_has_steps_and_is_told_where_they_end(tmp_path):
    script = """
        import torch
        net = torch.nn.Linear(4, 4)
        for _ in range(20):
            net(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                for each in net.parameters():
                    each -= 0.01 * each.grad
    """
    assert run(tmp_path, script).returncode == 0
    trace = xsp.load(tmp_path / "run")
    assert trace.run.steps.seen >= 16
    assert any("trains without a torch optimizer" in note["text"] for note in trace.run.notes)


@pytest.mark.slow
def test_a_step_of_inference_is_a_call_also_for_a_model_left_in_training_mode(tmp_path):
    script = """
        import torch
        model = torch.nn.Linear(8, 8)
        for _ in range(30):
            model(torch.randn(4, 8))
    """
    assert run(tmp_path, script).returncode == 0
    trace = xsp.load(tmp_path / "run")
    assert kinds(trace) == ["step", "forward"]
    assert any("model.eval()" in finding.text for finding in health(trace))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["train_one", "call"])
def test_a_step_is_what_the_user_names(tmp_path, step):
    assert run(tmp_path, TRAIN, "--step", step).returncode == 0
    expected = ["step", "forward", "forward", "backward", "optimizer"] if step == "train_one" else ["step", "forward"]
    assert kinds(xsp.load(tmp_path / "run")) == expected


def test_a_function_that_the_script_does_not_have_is_refused(tmp_path):
    done = run(tmp_path, TRAIN, "--step", "train_two")
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no such function" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_script_that_raises_has_its_own_traceback_and_code_and_its_steps_are_kept(tmp_path):
    done = run(tmp_path, TRAIN + "    raise ValueError('mine')\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert done.stderr.splitlines()[-1] == "ValueError: mine"
    assert "xsp" not in done.stderr
    assert xsp.load(tmp_path / "run").run["steps"]["seen"] == 30


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code", "says"), [("sys.exit(3)", 3, ""), ("sys.exit('no')", 1, "no\n")])
def test_a_script_that_exits_has_its_own_code(tmp_path, end, code, says):
    done = run(tmp_path, TRAIN + f"    {end}\n")
    assert (done.returncode, done.stderr) == (code, says)
    assert xsp.load(tmp_path / "run").run["finished"] is True


@pytest.mark.slow
def test_a_script_that_profiles_itself_lends_its_steps(tmp_path):
    script = """
        import torch, xsp
        model = torch.nn.Linear(8, 8)
        with xsp.profile("own", out="never") as prof:
            for _ in range(30):
                with prof.step():
                    model(torch.randn(4, 8))
                    model(torch.randn(4, 8))
    """
    assert run(tmp_path, script).returncode == 0
    assert kinds(xsp.load(tmp_path / "run")) == ["step", "forward", "forward"]
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_a_script_that_cannot_take_turns_is_run_once_per_level(tmp_path):
    done = run(tmp_path, TRAIN, "--once-each")
    assert (done.returncode, done.stdout.count("args")) == (0, 4)
    trace = xsp.load(tmp_path / "run")
    assert [rung.level for rung in trace.rungs] == [20, 30, 40, 70]
    assert min(rung.steps for rung in trace.rungs) >= 12
    assert trace.sql("SELECT count(*) FROM merged WHERE level = 30 AND true_ns IS NULL").fetchall() == [(0,)]


@pytest.mark.parametrize("spelling", [("--once-each",), ("--levels", "once-each")])
def test_once_per_level_can_be_said_as_an_option_and_as_levels(capsys, spelling):
    assert main(["run", *spelling, "--counters", "train.py"]) == 2
    assert "omit --once-each" in capsys.readouterr().err


PARALLEL = """
    import threading, torch
    from torch import nn
    torch.manual_seed(0)
    class One(nn.Sequential): pass
    class Two(nn.Sequential): pass
    models = [One(nn.Conv2d(16, 64, 3)), Two(nn.Conv2d(16, 96, 5))]
    x = torch.randn(4, 16, 64, 64)
    def both():
        barrier = threading.Barrier(2)
        def work(model):
            barrier.wait()
            with torch.no_grad():
                for _ in range(3):
                    model(x)
        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    for _ in range(60):
        both()
"""


@pytest.mark.slow
def test_what_is_ambiguous_is_decided_by_the_serialised_re_run(tmp_path):
    assert run(tmp_path, PARALLEL, "--step", "both", "--every", "2", "--resolve").returncode == 0
    rules = dict(
        xsp.load(tmp_path / "run")
        .sql(
            "SELECT coalesce(parent_rule, 'none'), count(*) FROM spans WHERE type = 'convolution' AND timed GROUP BY 1"
        )
        .fetchall()
    )
    if len(rules) == 1 and "containment" in rules:
        pytest.skip("on this machine the two threads never ran at the same time")
    assert rules.get("serialised", 0) > rules.get("none", 0), rules


@pytest.mark.parametrize(("content", "says"), [deep(None, "cannot be read"), ("def", "is not valid Python")])
def test_what_is_no_script_is_refused_in_one_line(tmp_path, content, says):
    path = tmp_path / "script.py"
    if content is not None:
        path.write_text(content)
    command = [sys.executable, "-m", "xsp.cli", "run", "--out", str(tmp_path / "run"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "says"),
    [
        (12, "interrupted; what was recorded is in here: `xsp report here`"),
        (0, "interrupted before the first step was stored: there is nothing in here to show"),
    ],
)
@pytest.mark.parametrize("around", [(), ("torchrun", "--standalone", "--nproc-per-node", "1")])
def test_an_interrupt_is_followed_by_where_the_run_is_and_what_to_type(tmp_path, before, says, around):
    script = f"""
        import torch, time
        model = torch.nn.Linear(4, 2)
        for _ in range({before}):
            model(torch.ones(1, 4))
        print("now", flush=True)
        time.sleep(100)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "xsp.cli", "run", "--levels", "M", "--warmup", "0", "--out", "here", *around]
    with subprocess.Popen(
        [*command, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as started:
        assert any(line == "now\n" for line in started.stdout)
        started.send_signal(signal.SIGINT)
        said = started.communicate(timeout=120)[1].splitlines()
    assert started.returncode == -signal.SIGINT
    assert said[-1] == f"xsp: {says}"
    assert around or "KeyboardInterrupt" in said
