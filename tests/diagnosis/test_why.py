"""Scripts with known faults, scripts that misbehave, and the accounting itself."""

import json
import re
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from brim.cli import main
from brim.diagnosis import scratch as scratch_room
from brim.diagnosis.answer import Diagnosis, SourceLine, Tried, diagnose, limit_of, loss_changed, window
from brim.diagnosis.config import WhyConfig
from brim.diagnosis.hook.brim_probe.sampling import _is_logging as is_logging
from brim.diagnosis.page import page
from brim.diagnosis.processes import HOOK, run
from brim.diagnosis.runs import examine
from brim.diagnosis.scratch import scratch
from brim.diagnosis.words import lines

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FAULTS = {
    "slow_getitem": "data", "no_workers": "data", "collate_copies": "data", "python_augmentation": "data",
    "shared_lock": "data", "copies": "copy", "item_calls": "sync", "tiny_batches": "launch", "gc_storm": "gc",
    "checkpoints": "checkpoint", "evaluations": "evaluation", "uneven_ranks": "communication",
    "fp32_convolutions": "compute", "healthy": "compute",
}  # fmt: skip


def command_of(name: str) -> list[str]:
    return [*(TORCHRUN if name == "uneven_ranks" else [sys.executable]), f"{name}.py"]


def blamed_line(name: str) -> int | None:
    text = (SCRIPTS / f"{name}.py").read_text().splitlines()
    return next((number for number, line in enumerate(text, 1) if "# BLAME" in line), None)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a script into an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def save(code: str) -> list[str]:
        (tmp_path / "train.py").write_text(textwrap.dedent(code))
        return [sys.executable, "train.py"]

    return save


# Scripts with known faults


def left_behind(script: Path) -> list[str]:
    """Command lines of living processes that run the script."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            text = (file.parent / "cmdline").read_text()
            found += [text] if "\0train.py\0" in text and file.readlink() == script.parent else []
    return found


def check_fault(name: str) -> Diagnosis:
    answer = examine(command_of(name), WhyConfig(seconds=8, tries=()), SCRIPTS)

    assert answer.limit == FAULTS[name], lines(answer)
    assert sum(answer.waiting.values()) == pytest.approx(answer.step_s, rel=0.05)
    if (line := blamed_line(name)) is not None:
        place = next(place for place in answer.where if place.cause == answer.limit)
        assert Path(place.file).name == f"{name}.py"
        assert abs(place.line - line) <= 1  # samples prefer lines whose library releases the lock
    return answer


def test_a_slow_dataset_in_workers_is_named_with_its_line():
    answer = check_fault("slow_getitem")

    assert answer.loader["num_workers"] == 2
    assert answer.ceiling_share < 0.5


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(FAULTS) - {"slow_getitem"}))
def test_the_cause_is_named(name):
    answer = check_fault(name)

    if name == "healthy":
        assert answer.ceiling_share >= 0.95


@pytest.mark.long
def test_remedies_are_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(SCRIPTS)
    report = tmp_path / "why.html"

    command = ["--", *command_of("no_workers")]
    code = main(["why", "--seconds", "30", "--try", "data", "--json", "--report", str(report), *command])
    answer = json.loads(capsys.readouterr().out)

    assert code == 0
    resident = answer["tried"][-1]
    assert (resident["status"], resident["loss_changed"]) == ("measured", False)
    assert resident["samples_per_s"] > 2 * answer["samples_per_s"]
    assert "no_workers.py:14" in report.read_text()


# Scripts that misbehave

STEPS = """
    import os, sys, time, torch
    torch.set_num_threads(1)
    from torch.utils.data import DataLoader, TensorDataset
    data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
    one, two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in (one, two)]
    loaders = DataLoader(data, batch_size=16), DataLoader(data, batch_size=16)
"""
ARGUMENT = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.parse_args()
"""
DAEMON = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
"""


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("import os\nraise SystemExit(2 + int(os.environ['BRIM_WHY']))", 3, "exit code 3"),
        (ARGUMENT, 2, "--data"),
        ("input()", 1, "standard input is empty"),
        ("print('hello')", 0, "without a training step"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", 139, "exit code 139"),
        (DAEMON, 0, "run it in the foreground"),
        ("import sitecustomize_that_is_not_there", 1, "ModuleNotFoundError"),
    ],
    ids=["fails", "needs an argument", "reads standard input", "never steps", "crashes", "daemonises", "bad import"],
)  # fmt: skip
def test_a_script_without_an_answer_keeps_its_exit_code(write, capfd, code, exit_code, said):
    command = write(code)

    assert main(["why", "--seconds", "5", "--", *command]) == exit_code

    assert said in capfd.readouterr().err
    assert left_behind(Path("train.py").absolute()) == []


def test_a_script_that_never_steps_is_ended(write, monkeypatch):
    monkeypatch.setattr("brim.diagnosis.runs.START_S", -7.0)

    answer = examine(write("import time\ntime.sleep(600)"), WhyConfig(seconds=4))

    assert (answer.exit_code, answer.samples_per_s) == (1, None)
    assert "no step within" in answer.message


def test_a_program_that_does_not_exist_is_one_sentence(capfd):
    assert main(["why", "--", "no-such-program"]) == 2

    assert "no-such-program: no such program" in capfd.readouterr().err


def test_a_block_of_a_notebook_is_watched():
    code = STEPS + (
        "    import brim\n"
        "    with brim.why() as w:\n"
        "        for x, y in list(loaders[0]) * 10:\n"
        "            time.sleep(0.02)\n"
        "            for part in (0, 8):\n"
        "                torch.nn.functional.cross_entropy(two(one(x[part:][:8])), y[part:][:8]).backward()\n"
        "            optimizers[1].step()\n"
        "    answer = w.report()\n"
        "    assert answer.limit == 'data', answer\n"
        "    assert round(answer.samples_per_s * answer.step_s) == 8 + 8, answer\n"  # gradients are accumulated
        "    weights = torch.zeros(8, 2, requires_grad=True)\n"
        "    with brim.why() as w:\n"
        "        for _ in range(40):\n"
        "            out = x @ weights\n"  # a network that is no module
        "            time.sleep(0.02)\n"
        "            out.square().mean().backward()\n"
        "    answer = w.answer()\n"
        "    assert (answer.limit, round(answer.samples_per_s * answer.step_s)) == ('compute', 16), answer\n"
    )

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)

    assert ("waiting for data" in done.stdout, done.returncode) == (True, 0), done.stderr


WATCHED = """
    import gc, io, sys
    from brim.diagnosis.hook.brim_probe import feeding, watching
    from brim.diagnosis.hook.brim_probe.clock import StepClock

    clock = StepClock({"warm_s": 1000.0, "watch_s": 1000.0, "ceiling_s": 0.0})
    feeding.install(clock)
    watching.install(clock)
    gc.disable()
    net = torch.nn.Linear(8, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)  # reads its counters
    for number in range(4):
        for x, y in loaders[0]:
            loss = torch.nn.functional.cross_entropy(net(x.double().float()), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item(), loss.item()
        torch.save(net, io.BytesIO())
        with torch.no_grad():
            for x, y in DataLoader(TensorDataset(*data.tensors), batch_size=32):
                net(x)
    tally = clock.tallies["warm"]
    causes = ["sync", "copy", "checkpoint", "forward", "backward", "optimizer", "data", "evaluation"]
    assert set(causes) <= {cause for cause, seconds in tally.seconds.items() if seconds > 0}, tally.seconds
    found = [(cause, what, int(calls)) for (cause, what, *_), (calls, _) in tally.sites.items()]
    print(sorted(found), clock.kind, tally.num_steps, tally.num_samples, tally.epochs, len(clock.losses))
"""


def test_calls_are_counted_by_cause_and_line_and_steps_by_the_optimiser():
    code = textwrap.dedent(STEPS + WATCHED)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    sites = [("checkpoint", "torch.save", 4), ("copy", "double", 15), ("copy", "float", 15), ("sync", "item", 32)]
    # before the first step of an optimiser, backward passes were taken for steps: its batch and copies do not count
    assert done.stdout.strip() == f"{sites} optimizer 16 240 [4, 8, 12] 16"


# Scratch


def test_files_are_as_they_were(tmp_path):
    (tmp_path / "kept").write_text("before")

    with scratch(tmp_path) as place:
        subprocess.run(
            [*place.prefix, "sh", "-c", "echo after > kept; echo new > new"], cwd=place.directory, check=True
        )

    assert place.kind in ("overlay", "copy")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "before")]


def test_without_an_overlay_a_small_folder_is_copied_and_a_large_one_is_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_room, "_overlay", lambda *_: None)
    (tmp_path / "file").write_text("before")
    (tmp_path / "link").symlink_to("file")

    with scratch(tmp_path) as place:
        (place.directory / "link").write_text("after")
        assert (place.kind, "dropped" in place.sentence) == ("copy", True)
    assert not place.directory.exists()
    assert (tmp_path / "file").read_text() == "before"

    monkeypatch.setattr(scratch_room, "COPY_FILES", 1)
    with scratch(tmp_path) as place:
        assert (place.kind, place.directory, "as always" in place.sentence) == ("none", tmp_path, True)


def test_a_run_keeps_the_end_of_what_was_written_and_puts_the_probe_before_the_paths_that_were_set(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    plan = {"watch_s": 1.0, "ceiling_s": 1.0}

    done = run(["sh", "-c", "seq 3000; echo $PYTHONPATH; exit 3"], plan, tmp_path, start_limit_s=60.0, limit_s=60.0)

    assert done.output.splitlines()[-2:] == ["3000", f"{HOOK}:/theirs"]
    assert (done.exit_code, len(done.output) <= 4000, done.left_behind) == (3, True, 0)


# Accounting


def test_the_largest_cause_that_matters_is_the_limit():
    assert limit_of({"data": 0.4, "sync": 0.1, "compute": 0.5}) == "data"
    assert limit_of({"data": 0.05, "launch": 0.3, "compute": 0.65}) == "compute"
    small = {"data": 0.1, "compute": 0.9}
    assert limit_of(small) == "data"
    assert limit_of(small, ceiling_share=0.97) == "compute"  # the fixed batch is no faster
    assert limit_of(small, starved=0.5) == "compute"  # on a busy machine small shares mean nothing
    assert limit_of({"launch": 0.5, "compute": 0.5}, ceiling_share=0.99) == "launch"


def test_whole_epochs_are_counted():
    steps = [[1.0, 8, {"compute": 1.0}]] * 3 + [[5.0, 8, {"compute": 1.0, "evaluation": 4.0}]]
    tally = {"steps": steps * 3, "epochs": [3, 7], "num_steps": 12, "num_samples": 96, "seconds": {}}

    num, step_s, samples, parts = window(tally)

    assert (num, step_s, samples, parts["evaluation"]) == (4, 2.0, 32, 4.0)


def test_losses_are_compared_with_their_noise():
    losses = [2.3 + 0.1 * (k % 3) for k in range(30)]

    assert loss_changed(losses, [loss + 0.001 for loss in losses]) is False
    assert loss_changed(losses, [loss + 1 for loss in losses]) is True
    assert loss_changed(losses, [float("nan")] * 30) is True
    assert loss_changed(losses, losses[:3]) is None
    steady = [2.3 + 0.001 * (k % 3) for k in range(30)]
    assert loss_changed(steady, [loss * 1.01 for loss in steady]) is False  # beyond the noise, and below 2 %
    assert loss_changed(steady, [loss * 1.03 for loss in steady]) is True
    noisy = [0.0, 4.6] * 15
    assert loss_changed(noisy, [loss * 1.03 for loss in noisy]) is False


def test_two_mean_losses_differ_by_three_standard_errors_of_their_difference():
    """Fifty losses of 2 ± 0.1 each: their scatter is 0.101, and √(2 · 0.101² / 50) = 0.0202 that of the difference."""
    losses = [1.9, 2.1] * 25

    assert loss_changed(losses, [loss + 0.05 for loss in losses]) is False
    assert loss_changed(losses, [loss + 0.07 for loss in losses]) is True
    assert loss_changed(losses, [loss - 0.07 for loss in losses]) is True


LIBRARY_CALLS = [
    "numpy.lib._npyio_impl.savez", "json.dump", "torch.utils.tensorboard.writer.add_scalar",
    "numpy.lib._npyio_impl.load", "json.decoder.raw_decode", "torch.nn.functional.linear",
]  # fmt: skip


def empty_tally() -> dict:
    lists = {name: [] for name in ("steps", "epochs", "sites", "stacks")}
    return {"num_steps": 0, "num_samples": 0, "elapsed_s": 0.0, "seconds": {}, **lists}


def result_on_gpu(**parts: float) -> dict:
    """Ten steps of 10 ms on a GPU, 3 ms of which are kernels; on one fixed batch they take 4 ms."""
    watch = {**empty_tally(), "num_steps": 10, "num_samples": 320, "steps": [[0.01, 32, parts]] * 10}
    ceiling = {**empty_tally(), "num_steps": 10, "num_samples": 320, "elapsed_s": 0.04, "steps": [[0.004, 32, {}]] * 10}
    return {
        "pid": 1, "worker": False, "rank": None, "world": None, "kind": "optimizer", "loaders": [], "drawn": [],
        "tallies": {"warm": empty_tally(), "watch": watch, "ceiling": ceiling}, "device": {"type": "cuda"},
        "operations": {"device_s": 0.003}, "memory": 1 << 30,
    }  # fmt: skip


def test_work_behind_the_step_makes_no_batch():
    result = result_on_gpu(between=0.004, forward=0.006) | {"device": {"type": "cpu"}}
    site = ["/x/train.py", 9, "<module>", ""]
    result["tallies"]["watch"]["stacks"] = [["past", *site, 30], ["after", *site, 10]]

    waiting = diagnose([result]).waiting

    assert waiting["launch"] == pytest.approx(0.003)
    assert waiting["data"] == pytest.approx(0.001)


def test_numbers_of_the_loader_the_roofs_and_the_picture_are_shares_and_means():
    result = result_on_gpu(data=0.002, forward=0.008) | {"device": {"type": "cpu"}}
    result["loaders"] = [{"trains": True, "batches": 9, "num_workers": 2, "dataset": "mine"},
                         {"trains": True, "batches": 1, "num_workers": 0}, {"batches": 50}]  # fmt: skip
    result["operations"] = {"num": 4.0, "overhead_s": 2.5e-4, "flops": 2e6, "roof_flops": 1e9, "bytes": 6e6,
                            "roof_bytes": 2e9}  # fmt: skip
    result["drawn"] = [[["data", 0.0, 0.05]], [["data", 0.0, 0.002], ["forward", 0.002, 0.011]], []]
    fetched = ({"batches": 2, "fetch_s": 0.5, "collate_s": 0.1}, {"batches": 8, "fetch_s": 1.5, "collate_s": 0.1})
    workers = [{"worker": True, "parent": 1, "fetch": one, "tallies": {}} for one in fetched]
    other = {"worker": True, "parent": 2, "fetch": {"batches": 1, "fetch_s": 99.0, "collate_s": 0.0}, "tallies": {}}

    answer = diagnose([result, *workers, other])

    assert (answer.loader["dataset"], answer.loader["fetch_s"]) == ("mine", pytest.approx(0.2))
    assert (answer.loader["collate_s"], answer.loader["wait_s"]) == pytest.approx((0.02, 0.002))
    assert answer.compute == pytest.approx({"arithmetic": 0.25, "bandwidth": 0.375})
    assert (answer.waiting["launch"], answer.waiting["compute"]) == pytest.approx((0.001, 0.007))
    assert answer.samples_per_s == pytest.approx(3200)
    assert answer.timeline[-1] == ["forward", 0.002, 0.011]


def test_the_ceiling_is_the_trimmed_mean_of_the_fixed_batch_and_of_its_own_size():
    result = result_on_gpu(data=0.005, forward=0.005) | {"device": {"type": "cpu"}}
    result["loaders"] = [{"trains": True, "batches": 1, "num_workers": 0}]
    times = [0.004] * 18 + [0.0001, 0.5]
    result["tallies"]["ceiling"] |= {
        "num_steps": 20, "num_samples": 20 * 48, "steps": [[1.0, 48, {"forward": one, "data": 1.0}] for one in times],
    }  # fmt: skip

    answer = diagnose([result])

    assert answer.ceiling_samples_per_s == pytest.approx(48 / 0.004)
    assert answer.ceiling_share == pytest.approx(3200 / 12000)


def test_what_a_line_computes_to_read_a_value_is_synchronising():
    result = result_on_gpu(between=0.006, forward=0.004) | {"device": {"type": "cpu"}}
    line, other = ["/x/train.py", 9, "accuracy"], ["/x/train.py", 20, "<module>"]
    watch = result["tallies"]["watch"]
    watch["stacks"] = [["past", *line, "", 20], ["past", *line, "torchmetrics.update", 5], ["past", *other, "", 5]]
    watch["sites"] = [["sync", "item", *line, 5120, 0.01], ["sync", "item", *other, 1, 0.01]]

    waiting = diagnose([result]).waiting

    assert waiting["sync"] == pytest.approx(0.004)
    assert waiting["launch"] == pytest.approx(0.002)


def test_writing_a_file_is_logging_and_reading_one_is_not(tmp_path):
    script = tmp_path / "json_logging.py"
    script.write_text("batch = json.load(open(name))\nwith open(name, 'wb') as f: f.write(loss)\n")
    result = result_on_gpu(after=0.004, forward=0.006) | {"device": {"type": "cpu"}}
    result["tallies"]["watch"]["stacks"] = [["past", str(script), 2, "f", "", 3], ["past", str(script), 1, "f", "", 1]]

    assert diagnose([result]).waiting["checkpoint"] == pytest.approx(0.003)
    assert [name for name in LIBRARY_CALLS if is_logging(name)] == LIBRARY_CALLS[:3]


def test_lines_of_launches_are_those_of_the_network_and_evaluation_makes_its_own_batches():
    result = result_on_gpu(data=0.001, evaluation=0.003, forward=0.006) | {"device": {"type": "cpu"}}
    result["operations"] = {"num": 100.0, "overhead_s": 5e-5}
    result["tallies"]["watch"]["stacks"] = [
        ["data", "/x/train.py", 30, "validate", "", 9], ["data", "/x/train.py", 10, "<module>", "", 5],
        ["evaluation", "/x/train.py", 31, "validate", "", 30], ["forward", "/x/train.py", 12, "<module>", "", 60],
        ["forward", "/x/train.py", 13, "<module>", "", 20],
    ]  # fmt: skip

    lines = {place.cause: place.line for place in diagnose([result]).where}

    assert lines == {"launch": 12, "evaluation": 31, "compute": 12, "data": 10}


def test_a_fixed_batch_that_was_disturbed_is_no_ceiling():
    parts = {"data": 0.002, "forward": 0.008}
    result = result_on_gpu(**parts) | {"device": {"type": "cpu"}, "loaders": [{"trains": True, "batches": 1,
                                       "num_workers": 0}]}  # fmt: skip
    for fixed_s, share in ((0.0075, 0.75), (0.02, 0.8)):
        result["tallies"]["ceiling"]["steps"] = [[fixed_s, 32, {"forward": fixed_s}]] * 10

        assert diagnose([result]).ceiling_share == pytest.approx(share)


def test_where_ranks_wait_is_named():
    results = []
    for rank, parts in enumerate(({"data": 0.009, "backward": 0.001}, {"forward": 0.001, "backward": 0.009})):
        result = result_on_gpu(**parts) | {"device": {"type": "cpu"}, "pid": rank, "rank": rank, "world": 2}
        result["tallies"]["watch"]["stacks"] = [[cause, "/x/train.py", 7 + rank, "f", "", 9] for cause in parts]
        results.append(result)

    answer = diagnose(results)

    assert answer.limit == "communication"
    places = {place.cause: (place.line, place.share) for place in answer.where}
    assert places["communication"] == (8, pytest.approx(0.4))
    assert places["data"] == (7, pytest.approx(0.45))
    assert answer.samples_per_s == pytest.approx(6400)
    assert [rank["own_s"] for rank in answer.ranks] == pytest.approx([0.01, 0.002])
    assert "rank 0 needs 10 ms for its own part of a step, the quickest 2 ms" in answer.notes[-1]


@pytest.mark.parametrize(
    ("parts", "limit"),
    [
        ({"data": 0.006, "forward": 0.004}, "data"),
        ({"sync": 0.008, "forward": 0.002}, "sync"),
        ({"checkpoint": 0.007, "sync": 0.002, "forward": 0.001}, "checkpoint"),
        ({"forward": 0.01}, "launch"),
        ({"data": 0.006, "gc": 0.003, "forward": 0.001}, "data"),  # more than the device was idle
    ],
)
def test_idle_time_of_a_gpu_goes_to_what_the_host_did(parts, limit):
    answer = diagnose([result_on_gpu(**parts)])

    assert answer.limit == limit
    assert sum(answer.waiting.values()) == pytest.approx(0.01)
    assert min(answer.waiting.values()) >= 0
    assert answer.waiting["compute"] == pytest.approx(0.003)
    assert answer.gpu["busy"] == pytest.approx(0.3)
    assert answer.ceiling_share == pytest.approx(0.4)


def test_an_answer_in_words_and_as_a_page():
    answer = Diagnosis(
        samples_per_s=218.0, ceiling_samples_per_s=780.0, ceiling_share=0.28, limit="data", step_s=0.1, steps=50,
        waiting={"data": 0.07, "sync": 0.01, "compute": 0.02}, timeline=[["data", 0.0, 0.07], ["forward", 0.07, 0.1]],
        where=[SourceLine("data", "/x/train.py", 48, "load", 0.7, "PIL.Image.resize")],
        tried=[Tried("pin_memory=True", 220.0, "measured", False), Tried("prefetch", 300.0, "measured", True),
               Tried("num_workers=12", 540.0, "measured", False), Tried("bf16", None, "failed", None, "no <time>")],
    )  # fmt: skip

    text = lines(answer)

    assert text[0] == "218 samples/s. The device could do 780 on this step: you get 28%."
    assert "70%  waiting for data: PIL.Image.resize (/x/train.py:48)" in text[1]
    assert (
        "First fix: num_workers=12 → 540 samples/s, measured, loss equal within noise. Then: prefetch → 300 samples/s, "
        "measured, the loss changes." in text
    )
    assert "pin_memory=True: no gain, 220 samples/s measured." in text
    assert "bf16: failed, no <time>." in text
    assert "no &lt;time&gt;" in page(answer)
    assert "<time>" not in page(answer)
    assert page(Diagnosis.from_dict(json.loads(json.dumps(answer.as_dict())))) == page(answer)


def test_a_page_draws_a_step_and_its_mean_to_scale_and_the_ranks_in_milliseconds():
    answer = Diagnosis(
        samples_per_s=218.0, step_s=0.1, steps=50, timeline=[["feed", 0.0, 0.07], ["backward", 0.07, 0.2]],
        waiting={"data": 0.025, "compute": 0.075}, ranks=[{"rank": 1, "own_s": 0.01, "step_s": 0.025}],
    )  # fmt: skip

    drawn = page(answer)

    bars = re.findall(r'--(\w+)\)" x="([\d.]+)" y="(?:20|72)" width="([\d.]+)" height="24"', drawn)
    assert [(colour, float(left), float(wide)) for colour, left, wide in bars] == [
        ("b", 0, 378), ("a", 378, 702), ("a", 0, 405), ("b", 405, 135),  # 1080 units for 0.2 s
    ]  # fmt: skip
    assert [f"{share} {name}" in drawn for share, name in (("75%", "computing"), ("25%", "waiting"))] == [True, True]
    assert re.sub("<[^>]*>", " ", drawn[drawn.index("10 ms") :]).split()[:4] == ["10", "ms", "25", "ms"]


def test_what_is_typed_is_measured_and_the_answer_is_a_page_and_json(tmp_path, monkeypatch, capsys):
    found = Diagnosis(samples_per_s=218.0, step_s=0.1, steps=50, exit_code=3, message="it failed")
    asked = []
    monkeypatch.setattr("brim.diagnosis.runs.examine", lambda *given, **_: asked.append(given) or found)
    words = ["why", "--seconds", "2m", "--try", "precision,data", "--json", "--report", str(tmp_path / "why.html")]

    assert main([*words, "--", "python", "train.py", "--lr=1"]) == 3

    shown = capsys.readouterr()
    assert asked == [(["python", "train.py", "--lr=1"], WhyConfig(seconds=120.0, tries=("precision", "data")))]
    assert (json.loads(shown.out)["samples_per_s"], "it failed" in shown.err) == (218.0, True)
    assert "218" in (tmp_path / "why.html").read_text()
    assert main([*words[:-1], str(tmp_path / "none" / "why.html"), "--", "python"]) == 2
    assert "is not a file in an existing directory" in capsys.readouterr().err
