"""The probe against a clock that is set by hand, and each change that it makes to a script."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from brim.diagnosis.answer import Diagnosis
from brim.diagnosis.config import WhyConfig
from brim.diagnosis.hook.brim_probe import changes, clock, counting, feeding, sampling, watching
from brim.diagnosis.processes import Run
from brim.diagnosis.runs import Examination, remedies


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def seconds(monkeypatch):
    time = Seconds()
    monkeypatch.setattr(clock, "perf", time)
    return time


def step_clock(**plan):
    return clock.StepClock({"warm_s": 3.0, "watch_s": 4.0, "ceiling_s": 2.0, **plan})


# Seconds by cause


def test_time_belongs_to_the_innermost_span_and_outside_all_to_the_part_of_the_step(seconds):
    watch = step_clock()
    seconds.pass_(1)
    watch.enter("data")
    seconds.pass_(2)
    watch.leave()
    watch.batches, watch.samples = 1, 8
    watch.part("feed")
    seconds.pass_(4)
    watch.begin_forward(True)
    seconds.pass_(8)
    watch.enter("sync")
    seconds.pass_(16)
    watch.leave()
    watch.end_forward()
    seconds.pass_(32)
    watch.step("backward")

    (step,) = watch.tally.steps
    assert step == (63.0, 8, {"after": 1, "data": 2, "feed": 4, "forward": 8, "sync": 16, "compute": 32})
    assert (watch.tally.num_steps, watch.tally.num_samples, watch.cause, watch.samples) == (1, 8, "after", 0)


def test_phases_last_as_long_as_planned(seconds):
    watch, begun = step_clock(), []
    watch.on_phase.append(begun.append)

    for _ in range(14):
        seconds.pass_(1)
        watch.step("optimizer")

    assert begun == ["watch", "ceiling", "ceiling", "count", "done"]  # of slow steps one settles the loaders
    assert [watch.tallies[phase].num_steps for phase in ("warm", "watch", "ceiling", "count")] == [4, 4, 2, 2]


@pytest.mark.parametrize(("passes", "cause"), [(1, "forward"), (2, "evaluation")])
def test_several_passes_without_gradients_are_an_evaluation_and_one_is_part_of_the_step(seconds, passes, cause):
    watch = step_clock()
    watch.step("optimizer")
    watch.batches = 1
    for _ in range(passes):
        watch.enter("data")
        seconds.pass_(1)
        watch.leave()
        watch.begin_forward(False)
        seconds.pass_(10)
        watch.end_forward()
    watch.step("optimizer")

    spent = watch.tallies["warm"].steps[-1][2]
    assert spent[cause] == 10 * passes + (2 if cause == "evaluation" else 0)  # what led to it belongs to it
    assert sum(spent.values()) == 11 * passes


def test_a_better_sign_of_a_step_begins_anew_and_a_worse_one_is_none(seconds):
    watch = step_clock()
    for kind, counted in (("forward", 1), ("forward", 2), ("backward", 1), ("forward", 1), ("optimizer", 1)):
        seconds.pass_(1)
        watch.step(kind)
        assert watch.tally.num_steps == counted
    watch.step("optimizer", "another optimiser")
    assert watch.tally.num_steps == 1


def test_without_a_loader_what_comes_before_the_forward_pass_makes_the_batch(seconds):
    watch = step_clock()
    seconds.pass_(3)
    watch.begin_forward(True)
    watch.end_forward()
    watch.step("backward")

    assert watch.tally.steps[0][2]["between"] == 3


# Loaders and operations


def test_a_batch_has_the_length_of_its_first_tensor_and_a_step_the_rows_of_its_batches():
    watch, dataset = step_clock(), [1, 2]
    watch.facts["loaders"] = {}
    iterator = SimpleNamespace(_dataset=dataset, _num_workers=3, _pin_memory=False)
    for size in (4, 6):
        feeding._note(
            watch, iterator, {"scale": torch.tensor(1.0), "x": [torch.zeros(size, 3)], "y": torch.zeros(size)}
        )

    facts = watch.facts["loaders"][id(dataset)]
    assert (watch.samples, watch.batches) == (10, 2)
    assert (facts["batches"], facts["largest"], facts["rows"], facts["num_workers"]) == (2, 6, 2, 3)
    assert facts["row_bytes"] == (4 + 4 * 3 * 4 + 4 * 4) / 4


def test_operations_arithmetic_and_bytes_are_counted():
    weight, x = torch.ones(16, 4), torch.ones(8, 16)

    with counting._mode() as counter:
        torch.relu(x @ weight).view(-1)

    assert (counter.num, counter.flops) == (2, 2 * 8 * 16 * 4)
    assert counter.bytes == 4 * ((8 * 16 + 16 * 4 + 8 * 4) + 2 * 8 * 4)


def test_kernels_that_overlap_count_once():
    spans = [("CPU", 0, 100), ("CUDA", 0, 10), ("CUDA", 5, 12), ("CUDA", 6, 8), ("CUDA", 20, 30)]
    events = [
        SimpleNamespace(device_type=f"DeviceType.{kind}", time_range=SimpleNamespace(start=a, end=b))
        for kind, a, b in spans
    ]

    assert counting._kernel_s(SimpleNamespace(events=lambda: events)) == pytest.approx(22e-6)


def test_time_is_blamed_on_the_script_s_line_and_the_library_s_function_it_called():
    names = {}
    exec(compile("def call(function):\n    return function()", "/x/site-packages/lib/part.py", "exec"), names)
    watch = step_clock()
    watch.kind, sampler = "optimizer", sampling._Sampler(watch, write=False)

    def step():
        names["call"](sampler._sample)
        return names["call"](lambda: watching.user_site(sys._getframe(1)))

    site, first = step(), step.__code__.co_firstlineno
    watch.facts["step_sites"] = {"optimizer": (__file__, first, "step")}
    step()
    watch.enter("data")
    step(), step()

    assert site == (__file__, first + 2, "step")
    line = (__file__, first + 1, "step", "lib.part.call")
    assert watch.tally.stacks == {("after", *line): 1, ("past", *line): 1, ("data", *line): 2}


def test_what_a_rank_writes_says_who_it_is(monkeypatch):
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    watch = step_clock()
    watch.losses, watch.facts["starved"] = [torch.tensor(2.5), None], 0.25

    found = sampling.result(watch)

    assert [found[name] for name in ("rank", "world", "worker", "starved", "losses")] == [
        5,
        8,
        False,
        0.25,
        [2.5, None],
    ]
    assert sampling.result(watch, whole=False)["losses"] == []


# Changes


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("change", "value", "given", "found"),
    [
        ("batch", 2, {"batch_size": 8}, {"batch_size": 16}),
        ("batch", 4, {"batch_size": 9}, {"batch_size": 9}),  # 64 rows would make one batch
        ("workers", 1, {}, {"num_workers": 1, "persistent_workers": True}),
        ("workers", 3, {"dataset": Endless()}, {"num_workers": 0}),
        ("prefetch", 8, {"num_workers": 1}, {"prefetch_factor": 8, "persistent_workers": True}),
        ("prefetch", 8, {}, {"prefetch_factor": None}),
        ("pinned", True, {}, {"pin_memory": True}),
    ],
)
def test_a_remedy_changes_the_script_s_loader_or_says_that_it_was_not_used(monkeypatch, change, value, given, found):
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    watch = step_clock(change=change, value=value)

    changes.install(watch)
    loader = DataLoader(**{"dataset": TensorDataset(torch.zeros(64)), **given})

    assert {name: getattr(loader, name) for name in found} == found
    unused = found in ({"batch_size": 9}, {"num_workers": 0}, {"prefetch_factor": None})
    assert watch.facts["tried"] == ("not used" if unused else "used")


def test_resident_rows_are_gathered_with_their_labels_from_eight_batches():
    watch, dataset = step_clock(change="resident"), []
    changes.install(watch)
    facts = {"trains": True}
    watch.facts["loaders"] = {id(dataset): facts}
    served = []
    for number in range(9):
        x = torch.arange(4.0) + 4 * number
        facts["_batch"] = [x[:, None], 10 * x]
        served.append(watch.facts["serve"](SimpleNamespace(_dataset=dataset)))

    assert served[:7] == [None] * 7
    for x, y in served[7:]:
        assert x.shape == (4, 1)
        assert torch.equal(10 * x[:, 0], y)
        assert float(x.max()) < 32
    assert watch.facts["tried"] == "used"


def test_bf16_is_of_the_passes_and_gives_float32_back():
    watch = step_clock(change="bf16")
    changes.install(watch)
    layer, x = torch.nn.Linear(64, 3), torch.randn(5, 64)

    found = watch.facts["around_forward"](torch.nn.Linear.__call__, layer, (x,), {})

    assert found.dtype == torch.float32
    assert 0 < float((found - layer(x)).detach().abs().max()) < 0.05


# Remedies

LOADER = {"iterable": False, "num_workers": 0, "pin_memory": False, "largest": 32, "rows": 1000, "row_bytes": 5e5}


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("data", ["num_workers=", "data in memory with brim.Resident (0.5 GB)"]),
        ("launch", ["batch size × 2 (64)", "batch size × 4 (128)", "torch.compile"]),
        ("compute", ["bf16", "channels_last", "torch.compile"]),
        ("gc", []),
    ],
)
def test_remedies_fit_the_limit(limit, words):
    answer = Diagnosis(limit=limit, loader=LOADER)

    found = [remedy.words for remedy in remedies(answer, {}, None)]

    assert [one[: len(start)] for one, start in zip(found, words, strict=True)] == words
    answer.loader = None
    assert [bool(remedy.impossible) for remedy in remedies(answer, {}, ["data", "batch"])] == [True] * 4


def trainer(samples: int, step_s: float, **more):
    steps = [[step_s, samples, {"forward": step_s}]] * 4
    empty = {"num_steps": 0, "num_samples": 0, "steps": [], "epochs": [], "seconds": {}}
    watch = {**empty, "num_steps": 4, "num_samples": 4 * samples, "steps": steps}
    tallies = {"warm": empty, "watch": watch, "ceiling": empty}
    values = {"worker": False, "rank": None, "world": None, "tallies": tallies, "losses": [1.0] * 20, "tried": "used"}
    return {**values, "first_step_s": 100.0, **more}


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Run(results=[trainer(32, 0.1)]), (320.0, "measured", False)),
        (Run(results=[trainer(32, 0.1, rank=r, world=2) for r in (1, 0)]), (640.0, "measured", False)),
        (Run(results=[trainer(32, 0.1), trainer(8, 0.1)]), (320.0, "measured", False)),  # no ranks: the first
        (Run(results=[trainer(32, 0.1, tried="not used")]), (None, "skipped", None)),
        (Run(results=[], exit_code=1, output="a\nRuntimeError: no\n"), (None, "failed", None)),
        (Run(results=[trainer(32, 0.1)], exit_code=1, output="x"), (None, "failed", None)),
        (Run(results=[trainer(32, 0.1, losses=[9.0] * 20)]), (320.0, "measured", True)),
    ],
)
def test_a_remedy_s_rate_is_that_of_its_own_run(monkeypatch, tmp_path, outcome, expected):
    monkeypatch.setattr("brim.diagnosis.runs.run", lambda *_, **__: outcome)
    examination = Examination(["x"], WhyConfig(), tmp_path, deadline=1e12, losses=[1.0] * 20)

    tried = examination._try(remedies(Diagnosis(loader=LOADER), {}, ["data"])[0], 1)

    assert (tried.samples_per_s, tried.status, tried.loss_changed) == (pytest.approx(expected[0]), *expected[1:])
    assert tried.note == ("RuntimeError: no" if not outcome.results else tried.note)


def test_losses_on_resident_rows_are_compared_until_the_rows_come_again(monkeypatch, tmp_path):
    outcome = Run(results=[trainer(32, 0.1, losses=[1.0] * 36)])
    monkeypatch.setattr("brim.diagnosis.runs.run", lambda *_, **__: outcome)
    examination = Examination(["x"], WhyConfig(), tmp_path, deadline=1e12, losses=[1.0] * 16 + [9.0] * 20)

    resident = remedies(Diagnosis(), {}, ["data"])[1]

    assert (resident.change, examination._try(resident, 1).loss_changed) == ("resident", False)


def test_what_cannot_be_tried_is_skipped_with_its_reason(tmp_path):
    answer, first = Diagnosis(), Run(results=[trainer(1, 0.1)])
    for loader in (None, LOADER):
        answer.loader = loader
        Examination(["no-such-program"], WhyConfig(tries=("batch",)), tmp_path, deadline=0.0)._try_all(answer, first)

    assert {tried.status for tried in answer.tried} == {"skipped"}
    no_loader, no_time = "the script has no DataLoader", "no time left; give more seconds"
    assert [tried.note for tried in answer.tried] == [no_loader, no_loader, no_time, no_time]


def test_trainers_are_the_processes_that_made_steps_those_of_ranks_in_order():
    few, many = trainer(1, 0.1), trainer(1, 0.1)
    few["tallies"]["watch"]["num_steps"] = 2
    worker, second, first = (
        trainer(1, 0.1, worker=True),
        trainer(1, 0.1, rank=1, first_step_s=105.0),
        trainer(1, 0.1, rank=0),
    )
    outcome = Run(results=[few, worker, many, second, first], began_s=90.0)

    assert [id(one) for one in outcome.trainers] == [id(one) for one in (first, second, many, few)]
    assert outcome.startup_s == 10.0
