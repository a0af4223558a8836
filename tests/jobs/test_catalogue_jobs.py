"""What the catalogue promises of jobs, on SQLite and on PostgreSQL alike."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from brim.errors import BrimError, Conflict, TooMany
from brim.jobs.status import RESUMABLE, UNFINISHED, JobProgress
from brim.jobs.store import Output


@dataclass(frozen=True)
class Asked:
    kind: str = "rf.generate"
    name: str = "first"
    config: dict[str, Any] = field(default_factory=dict)


def submit(catalogue, kind="rf.generate", makes="dataset", **options):
    return catalogue.jobs.submit(Asked(kind=kind), makes=makes, **options)[0]


def start(catalogue, job, worker="w0"):
    assert catalogue.jobs.move(job.id, "queued", of={"pending"})
    assert catalogue.jobs.move(job.id, "running", of={"queued"}, worker=worker)


def make_dataset(catalogue, items=5, **options):
    job = submit(catalogue)
    start(catalogue, job)
    assert catalogue.jobs.move(job.id, "completed", of={"running"}, output=Output(items=items, bytes=10), **options)
    return catalogue.datasets.get(job.output_id)


def at_once(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


# Submitting


def test_a_submitted_job_is_pending_and_its_dataset_is_being_written(catalogue):
    job, new = catalogue.jobs.submit(Asked(name="a"), makes="dataset", inputs={"samples": 3})

    assert new
    assert (job.status, job.wanted, job.attempts, job.inputs) == ("pending", "run", 0, {"samples": 3})
    made = catalogue.datasets.get(job.output_id)
    assert (made.name, made.kind, made.state, made.path, made.job_id) == ("a", "rf", "writing", job.out, job.id)
    assert job.out == f"datasets/{job.output_id}"


def test_a_training_job_lists_a_run_of_its_kind(catalogue):
    job = catalogue.jobs.submit(Asked(kind="rf.train", config={"epochs": 2}), makes="run")[0]

    run = catalogue.runs.get(job.output_id)
    assert (run.kind, run.state, run.path, run.config) == ("rf.train", "training", f"runs/{run.id}", {"epochs": 2})


def test_a_job_without_dataset_or_run_writes_under_its_own_id(catalogue):
    job = submit(catalogue, "rf.evaluate", "result")

    assert job.out == f"results/{job.id}"
    assert catalogue.datasets.page().total == catalogue.runs.page().total == 0


def test_equal_keys_at_once_give_one_job(catalogue):
    submit_it = lambda: catalogue.jobs.submit(Asked(), key_hash="k", makes="dataset")  # noqa: E731
    got = at_once(*[submit_it] * 12)

    assert len({job.id for job, _ in got}) == 1
    assert sum(new for _, new in got) == 1
    assert catalogue.datasets.page().total == 1


def test_a_key_seen_before_gives_its_job_even_when_no_more_are_taken(catalogue):
    first, _ = catalogue.jobs.submit(Asked(), key_hash="k")

    with pytest.raises(TooMany, match="1 jobs"):
        catalogue.jobs.submit(Asked(), key_hash="other", limit=1)
    again, new = catalogue.jobs.submit(Asked(name="another body"), key_hash="k", limit=1)

    assert (again.id, new) == (first.id, False)


def test_texts_that_a_database_cannot_hold_are_cleaned_and_odd_numbers_become_null(catalogue):
    job, _ = catalogue.jobs.submit(Asked(name="a\0b\ud800", config={"x": float("nan"), "y": [float("inf"), 1.5]}))

    found = catalogue.jobs.get(job.id)
    assert found.name == "ab?"
    assert found.config == {"x": None, "y": [None, 1.5]}


# What jobs read


def test_inputs_that_cannot_be_used_are_refused_by_their_field(catalogue):
    rf, writing = make_dataset(catalogue), submit(catalogue)
    images = catalogue.datasets.add(name="i", kind="images", path="/i", owned=False, items=1, bytes=1)
    empty = catalogue.datasets.add(name="e", kind="rf", path="/e", owned=False, items=0, bytes=0)

    def refused(error, *ids, **options):
        with pytest.raises(error) as caught:
            submit(catalogue, "rf.train", "run", inputs={"dataset_ids": list(ids)}, reads="rf", **options)
        return caught.value

    assert refused(BrimError, rf.id, "0" * 32).field == "config.dataset_ids[1]"
    assert refused(BrimError, "../../etc\0").field == "config.dataset_ids[0]"
    assert "of kind images, expected rf" in str(refused(BrimError, images.id))
    assert "empty" in str(refused(BrimError, empty.id))
    assert "still being written" in str(refused(Conflict, writing.output_id))
    assert catalogue.jobs.page(kind="rf.train").total == 0


def test_a_run_must_be_there_trained_and_of_the_right_kind(catalogue):
    job = submit(catalogue, "rf.train", "run")

    def evaluate(run_id, reads_run="rf.train"):
        return submit(catalogue, "rf.evaluate", "result", inputs={"run_id": run_id}, reads_run=reads_run)

    with pytest.raises(BrimError, match="names no run"):
        evaluate("f" * 32)
    with pytest.raises(Conflict, match="still training"):
        evaluate(job.output_id)
    start(catalogue, job)
    catalogue.jobs.move(job.id, "completed", of={"running"}, output=Output(items=1, about={"loss": 1.0}))
    with pytest.raises(BrimError, match=r"made by rf\.train, expected segment\.train"):
        evaluate(job.output_id, "segment.train")

    assert evaluate(job.output_id).inputs == {"run_id": job.output_id}
    assert catalogue.runs.get(job.output_id).summary == {"loss": 1.0}


def test_the_evaluation_of_a_run_that_ended_last_is_found(catalogue):
    trained = [submit(catalogue, "rf.train", "run") for _ in range(2)]
    for job in trained:
        start(catalogue, job)
        catalogue.jobs.move(job.id, "completed", of={"running"}, output=Output(items=1))
    run, other = (job.output_id for job in trained)
    jobs = [submit(catalogue, "rf.evaluate", "result", inputs={"run_id": id}) for id in (run, run, run, other)]
    for job in jobs:
        start(catalogue, job)
    first, second, failed, elsewhere = jobs

    assert catalogue.jobs.newest_on_run(run, "rf.evaluate") is None
    for job, end in ((second, "completed"), (first, "completed"), (failed, "failed"), (elsewhere, "completed")):
        assert catalogue.jobs.move(job.id, end, of={"running"})
    assert catalogue.jobs.newest_on_run(run, "rf.evaluate").id == first.id
    assert catalogue.jobs.newest_on_run(other, "rf.evaluate").id == elsewhere.id
    assert catalogue.jobs.newest_on_run(run, "sequence.evaluate") is None
    assert catalogue.jobs.newest_on_run("x\0", "rf.evaluate") is None


def test_a_dataset_that_a_job_may_still_read_cannot_be_deleted(catalogue):
    dataset = make_dataset(catalogue)
    job = submit(catalogue, "rf.train", "run", inputs={"dataset_ids": [dataset.id, dataset.id]}, reads="rf")

    with pytest.raises(Conflict, match="in use by the job"):
        catalogue.datasets.retire(dataset.id)
    catalogue.jobs.want(job.id, "pause")
    assert catalogue.jobs.settle(job.id) == "paused"
    with pytest.raises(Conflict):
        catalogue.datasets.retire(dataset.id)
    assert catalogue.jobs.move(job.id, "cancelled", of={"paused"})
    catalogue.datasets.retire(dataset.id)

    assert catalogue.datasets.forget(dataset.id)
    assert catalogue.datasets.get(dataset.id) is None


def test_a_dataset_is_never_both_deleted_and_given_to_a_job(catalogue):
    def try_submit(id):
        try:
            submit(catalogue, "rf.train", "run", inputs={"dataset_ids": [id]}, reads="rf")
        except BrimError:
            return False
        return True

    def try_retire(id):
        try:
            catalogue.datasets.retire(id)
        except Conflict:
            return False
        return True

    for _ in range(8):
        id = make_dataset(catalogue).id
        assert sum(at_once(lambda id=id: try_submit(id), lambda id=id: try_retire(id))) == 1


# Moving


def test_of_two_competing_moves_one_wins(catalogue):
    for _ in range(5):
        job = submit(catalogue)
        start(catalogue, job)
        move = lambda to, id=job.id: catalogue.jobs.move(id, to, of={"running"})  # noqa: E731

        won = at_once(lambda: move("completed"), lambda: move("failed"))  # noqa: B023

        assert sum(won) == 1
        assert catalogue.jobs.get(job.id).status == ("completed" if won[0] else "failed")


def test_a_move_says_when_and_by_whom(catalogue):
    job = submit(catalogue)
    start(catalogue, job, worker="w3")
    running = catalogue.jobs.get(job.id)
    assert (running.attempts, running.worker) == (1, "w3")
    assert running.created_at <= running.queued_at <= running.started_at

    assert catalogue.jobs.move(job.id, "running", of={"running"}, worker="w1")  # after a crash
    again = catalogue.jobs.get(job.id)
    assert (again.attempts, again.worker, again.started_at) == (2, "w1", running.started_at)

    assert catalogue.jobs.move(job.id, "failed", of={"running"}, error="disk full\0")
    failed = catalogue.jobs.get(job.id)
    assert (failed.error, failed.worker) == ("disk full", None)
    assert failed.finished_at >= failed.started_at


def test_resuming_clears_what_the_end_had_left(catalogue):
    job = submit(catalogue)
    start(catalogue, job)
    catalogue.jobs.move(job.id, "failed", of={"running"}, error="no room", output=Output(items=0))
    assert catalogue.datasets.get(job.output_id) is None  # nothing was made

    assert catalogue.jobs.move(job.id, "queued", of=RESUMABLE, wanted="run")
    queued = catalogue.jobs.get(job.id)
    assert (queued.error, queued.finished_at) == (None, None)

    assert catalogue.jobs.move(job.id, "running", of={"queued"}, worker="w0")
    assert catalogue.datasets.get(job.output_id).state == "writing"  # and it is back under its id


def test_a_result_is_kept_and_the_dataset_becomes_ready(catalogue):
    job = submit(catalogue)
    start(catalogue, job)

    output = Output(items=7, bytes=99, about={"shards": 2})
    assert catalogue.jobs.move(job.id, "completed", of={"running"}, output=output, result={"dataset_id": job.output_id})
    assert not catalogue.jobs.move(job.id, "completed", of={"running"}, output=output)

    assert catalogue.jobs.get(job.id).result == {"dataset_id": job.output_id}
    made = catalogue.datasets.get(job.output_id)
    assert (made.state, made.items, made.bytes, made.about) == ("ready", 7, 99, {"shards": 2})


# Stopping


def test_a_job_that_is_to_stop_neither_starts_nor_completes(catalogue):
    job = submit(catalogue)
    start(catalogue, job)

    assert catalogue.jobs.want(job.id, "cancel")
    assert catalogue.jobs.get(job.id).message == "stopping"
    assert not catalogue.jobs.move(job.id, "completed", of=UNFINISHED)
    assert not catalogue.jobs.move(job.id, "running", of=UNFINISHED, worker="w0")

    assert catalogue.jobs.settle(job.id, Output(items=3, bytes=30)) == "cancelled"
    assert catalogue.datasets.get(job.output_id).state == "partial"
    assert catalogue.jobs.settle(job.id) is None


def test_a_cancel_after_the_end_is_refused(catalogue):
    job = submit(catalogue)
    start(catalogue, job)
    assert catalogue.jobs.move(job.id, "completed", of={"running"})

    assert not catalogue.jobs.want(job.id, "cancel")
    assert not catalogue.jobs.want(job.id, "run")
    assert catalogue.jobs.get(job.id).status == "completed"


def test_cancel_outranks_pause(catalogue):
    job = submit(catalogue)

    assert catalogue.jobs.want(job.id, "pause")
    assert catalogue.jobs.want(job.id, "cancel")
    assert not catalogue.jobs.want(job.id, "pause")
    assert catalogue.jobs.settle(job.id) == "cancelled"


def test_a_paused_job_is_not_finished_and_goes_on(catalogue):
    job = submit(catalogue)
    start(catalogue, job)
    catalogue.jobs.want(job.id, "pause")
    asked_at = catalogue.jobs.get(job.id).stopping_at
    assert catalogue.jobs.settle(job.id, Output(items=1)) == "paused"

    paused = catalogue.jobs.get(job.id)
    assert asked_at is not None
    assert (paused.finished_at, paused.stopping_at, paused.worker) == (None, None, None)
    assert catalogue.jobs.want(job.id, "run")
    assert catalogue.jobs.move(job.id, "queued", of=RESUMABLE)


# JobProgress and deaths


def test_progress_is_shown_and_numbered(catalogue):
    job = submit(catalogue)
    start(catalogue, job)

    catalogue.jobs.tell(job.id, JobProgress(current=3, total=4, rate=2.0, eta_s=0.5, message="making"))

    shown = catalogue.jobs.get(job.id).progress
    assert shown == JobProgress(current=3, total=4, rate=2.0, eta_s=0.5, message="making")
    last = catalogue.events.after(job.id, 0)[-1]
    assert (last.kind, last.data) == ("progress", shown.as_dict())


def test_progress_after_the_end_changes_nothing(catalogue):
    job = submit(catalogue)
    start(catalogue, job)
    catalogue.jobs.move(job.id, "failed", of={"running"}, error="x")
    before = catalogue.jobs.get(job.id)

    catalogue.jobs.tell(job.id, JobProgress(current=9))

    assert catalogue.jobs.get(job.id) == before


def test_deaths_count_until_the_job_gets_on(catalogue):
    job = submit(catalogue)
    start(catalogue, job)
    tell = lambda current: catalogue.jobs.tell(job.id, JobProgress(current=current, total=100))  # noqa: E731

    assert [catalogue.jobs.died(job.id) for _ in range(3)] == [1, 2, 3]
    tell(0)
    assert catalogue.jobs.died(job.id) == 4  # went to where it was, not further
    tell(5)
    assert catalogue.jobs.get(job.id).deaths == 0
    assert catalogue.jobs.died(job.id) == 1
    assert catalogue.jobs.died("0" * 32) == 0


# Listing and removing


def test_pages_are_newest_first_and_filtered(catalogue):
    ids = [submit(catalogue, kind, "result").id for kind in ("rf.evaluate", "segment.tune") * 3]
    catalogue.jobs.move(ids[0], "queued", of={"pending"})

    first, last = (catalogue.jobs.page(page=page, per_page=4) for page in (1, 2))
    assert [row.id for row in first.rows + last.rows] == ids[::-1]
    assert (first.pages, first.total) == (2, 6)
    assert [row.id for row in catalogue.jobs.page(status="queued").rows] == [ids[0]]
    assert catalogue.jobs.page(kind="segment.tune").total == 3
    assert catalogue.jobs.page(page=10**30).rows == []
    assert catalogue.jobs.page(kind="\0\ud800").total == 0


def test_an_odd_id_names_nothing(catalogue):
    for id in ("", "x", "0" * 32, "\0", "\ud800", "A" * 32, "0" * 10**6):
        assert catalogue.jobs.get(id) is None
        assert catalogue.datasets.get(id) is None
        assert catalogue.runs.get(id) is None
        assert catalogue.events.after(id, 0) == []
        assert catalogue.events.heads([id]) == {}


def test_only_what_neither_waits_nor_runs_is_removed(catalogue):
    job = submit(catalogue)
    assert not catalogue.jobs.remove(job.id)
    start(catalogue, job)
    assert not catalogue.jobs.remove(job.id)
    catalogue.jobs.move(job.id, "completed", of={"running"}, output=Output(items=2))

    assert catalogue.jobs.remove(job.id)
    assert catalogue.jobs.get(job.id) is None
    assert catalogue.events.after(job.id, 0) == []
    made = catalogue.datasets.get(job.output_id)
    assert (made.items, made.job_id) == (2, None)


def test_jobs_are_found_by_worker_and_status(catalogue):
    one, two = submit(catalogue), submit(catalogue)
    start(catalogue, one, worker="w7")

    assert [job.id for job in catalogue.jobs.of_worker("w7")] == [one.id]
    assert [job.id for job in catalogue.jobs.unfinished()] == [one.id, two.id]
    assert catalogue.jobs.count_unfinished() == 2
    catalogue.jobs.move(one.id, "completed", of={"running"})
    assert catalogue.jobs.counts() == Counter(completed=1, pending=1)


def test_numbers_are_not_used_again(catalogue):
    first = submit(catalogue)
    catalogue.jobs.move(first.id, "cancelled", of={"pending"})
    catalogue.jobs.remove(first.id)

    assert submit(catalogue).number > first.number


def test_a_job_is_found_by_its_key(catalogue):
    job, _ = catalogue.jobs.submit(Asked(), key_hash="k")

    assert catalogue.jobs.of_key("k").id == job.id
    assert catalogue.jobs.of_key("other") is None


def test_a_dataset_does_not_grow_under_a_job_that_reads_it(catalogue):
    maker = submit(catalogue)
    start(catalogue, maker)
    catalogue.jobs.want(maker.id, "pause")
    catalogue.jobs.settle(maker.id, Output(items=3))
    reads = {"inputs": {"dataset_ids": [maker.output_id]}, "reads": "rf"}
    reader = submit(catalogue, "rf.train", "run", **reads)

    with pytest.raises(Conflict, match="in use by the job"):
        catalogue.jobs.move(maker.id, "pending", of=RESUMABLE, wanted="run")
    assert catalogue.jobs.get(maker.id).status == "paused"
    assert catalogue.datasets.get(maker.output_id).state == "partial"

    catalogue.jobs.move(reader.id, "cancelled", of={"pending"})
    assert catalogue.jobs.move(maker.id, "pending", of=RESUMABLE, wanted="run")
    with pytest.raises(Conflict, match="still being written"):
        submit(catalogue, "rf.train", "run", **reads)

    with pytest.raises(Conflict, match="still being written"):
        catalogue.jobs.move(reader.id, "pending", of=RESUMABLE, wanted="run")  # nor begins to read it again
    assert catalogue.jobs.move(maker.id, "running", of={"pending"}, worker="w0")


def test_a_job_whose_input_is_gone_does_not_go_on(catalogue):
    dataset = make_dataset(catalogue)
    job = submit(catalogue, "rf.train", "run", inputs={"dataset_ids": [dataset.id]}, reads="rf")
    catalogue.jobs.move(job.id, "cancelled", of={"pending"})
    catalogue.datasets.retire(dataset.id)

    with pytest.raises(Conflict, match=r"cannot go on: config\.dataset_ids"):
        catalogue.jobs.move(job.id, "pending", of=RESUMABLE, wanted="run")
    assert catalogue.jobs.get(job.id).status == "cancelled"
