"""What the catalogue promises of jobs, on SQLite and on PostgreSQL alike."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from desk import Asked

from brim.errors import BrimError, Conflict, TooMany
from brim.jobs.status import RESUMABLE, STATUSES, UNFINISHED, JobProgress
from brim.jobs.store import Output
from brim.jobs.store.tables import SILENT_S

FIRST = Asked("rf.generate", "first", {})


def submit(catalogue, kind="rf.generate", makes="dataset", **options):
    return catalogue.jobs.submit(Asked(kind, "first", {}), makes=makes, **options)[0]


def start(catalogue, job, worker="w0"):
    assert catalogue.jobs.move(job.id, "queued", of={"pending"})
    assert catalogue.jobs.move(job.id, "running", of={"queued"}, worker=worker)


def begun(catalogue, kind="rf.generate", makes="dataset", **options):
    """A job that runs."""
    job = submit(catalogue, kind, makes, **options)
    start(catalogue, job)
    return job


def done(catalogue, kind="rf.generate", makes="dataset", items=5, **options):
    """A job that has completed."""
    job = begun(catalogue, kind, makes, **options)
    assert catalogue.jobs.move(job.id, "completed", of={"running"}, output=Output(items=items, bytes=10))
    return job


def at(catalogue, status):
    """A job with that status."""
    job = submit(catalogue)
    if status in ("paused", "cancelled"):
        catalogue.jobs.want(job.id, "pause" if status == "paused" else "cancel")
        assert catalogue.jobs.settle(job.id) == status
    elif status != "pending":
        catalogue.jobs.move(job.id, status, of={"pending"})
    assert catalogue.jobs.get(job.id).status == status
    return job


def at_once(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


# Submitting


def test_a_submitted_job_is_pending_and_its_dataset_is_being_written(catalogue):
    job, new = catalogue.jobs.submit(FIRST, makes="dataset", inputs={"samples": 3}, submitted_by="ada")

    assert new
    assert (job.status, job.wanted, job.attempts, job.inputs) == ("pending", "run", 0, {"samples": 3})
    assert job.submitted_by == "ada"
    made = catalogue.datasets.get(job.output_id)
    assert (made.name, made.kind, made.state, made.path, made.job_id) == ("first", "rf", "writing", job.out, job.id)
    assert (made.owned, job.out) == (True, f"datasets/{job.output_id}")


def test_a_training_lists_a_run_of_its_kind_and_another_writes_under_its_own_id(catalogue):
    job = catalogue.jobs.submit(Asked("rf.train", "t", {"epochs": 2}), makes="run")[0]
    other = submit(catalogue, "rf.evaluate", "result")

    run = catalogue.runs.get(job.output_id)
    assert (run.kind, run.state, run.path, run.config) == ("rf.train", "training", f"runs/{run.id}", {"epochs": 2})
    assert other.out == f"results/{other.id}"
    assert (catalogue.datasets.page().total, catalogue.runs.page().total) == (0, 1)


def test_equal_keys_at_once_give_one_job(catalogue):
    got = at_once(*[lambda: catalogue.jobs.submit(FIRST, key_hash="k", makes="dataset")] * 12)

    assert len({job.id for job, _ in got}) == 1
    assert sum(new for _, new in got) == 1
    assert catalogue.datasets.page().total == 1


def test_a_key_seen_before_gives_its_job_even_when_no_more_are_taken(catalogue):
    first, _ = catalogue.jobs.submit(FIRST, key_hash="k", limit=1)
    done(catalogue)  # does not count

    with pytest.raises(TooMany, match="1 jobs"):
        catalogue.jobs.submit(FIRST, key_hash="other", limit=1)
    again, new = catalogue.jobs.submit(Asked("rf.generate", "another body", {}), key_hash="k", limit=1)

    assert (again.id, new) == (first.id, False)
    assert catalogue.jobs.of_key("k").id == first.id
    assert catalogue.jobs.of_key("other") is None


def test_texts_that_a_database_cannot_hold_are_cleaned_and_odd_numbers_become_null(catalogue):
    asked = Asked("rf.generate", "a\0b\ud800", {"x": float("nan"), "y": [float("inf"), 1.5]})

    found = catalogue.jobs.get(catalogue.jobs.submit(asked)[0].id)

    assert found.name == "ab?"
    assert found.config == {"x": None, "y": [None, 1.5]}


# What jobs read


def test_inputs_that_cannot_be_used_are_refused_by_their_field(catalogue):
    rf, writing = done(catalogue).output_id, submit(catalogue)
    images = catalogue.datasets.add(name="i", kind="images", path="/i", owned=False, items=1, bytes=1)
    empty = catalogue.datasets.add(name="e", kind="rf", path="/e", owned=False, items=0, bytes=0)

    def refused(error, *ids, **options):
        with pytest.raises(error) as caught:
            submit(catalogue, "rf.train", "run", inputs={"dataset_ids": list(ids)}, reads="rf", **options)
        return caught.value

    assert refused(BrimError, rf, "0" * 32).field == "config.dataset_ids[1]"
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


def test_the_evaluation_of_a_run_that_completed_last_is_found(catalogue):
    run, other = (done(catalogue, "rf.train", "run").output_id for _ in range(2))
    jobs = [begun(catalogue, "rf.evaluate", "result", inputs={"run_id": id}) for id in (run, run, run, other)]
    first, second, failed, elsewhere = jobs
    assert catalogue.jobs.newest_on_run(run, "rf.evaluate") is None

    for job, end in ((second, "completed"), (first, "completed"), (failed, "failed"), (elsewhere, "completed")):
        assert catalogue.jobs.move(job.id, end, of={"running"}, result={"place": jobs.index(job)})

    assert catalogue.jobs.newest_on_run(run, "rf.evaluate").id == first.id
    assert catalogue.jobs.newest_on_run(other, "rf.evaluate").id == elsewhere.id
    assert catalogue.jobs.newest_on_run(run, "sequence.evaluate") is None
    assert catalogue.jobs.newest_on_run("x\0", "rf.evaluate") is None
    both = catalogue.jobs.results_on_runs([run, other], "rf.evaluate")
    assert both == {run: {"place": 0}, other: {"place": 3}}
    assert catalogue.jobs.results_on_runs([run], "rf.evaluate").keys() == {run}


def test_a_dataset_that_a_job_may_still_read_cannot_be_deleted(catalogue):
    dataset = done(catalogue).output_id
    job = submit(catalogue, "rf.train", "run", inputs={"dataset_ids": [dataset, dataset]}, reads="rf")

    with pytest.raises(Conflict, match="in use by the job"):
        catalogue.datasets.retire(dataset)
    assert catalogue.datasets.retire(done(catalogue).output_id)  # another, which nobody reads
    catalogue.jobs.want(job.id, "pause")
    assert catalogue.jobs.settle(job.id) == "paused"
    with pytest.raises(Conflict):
        catalogue.datasets.retire(dataset)
    assert catalogue.jobs.move(job.id, "cancelled", of={"paused"})
    catalogue.datasets.retire(dataset)

    assert catalogue.datasets.forget(dataset)
    assert catalogue.datasets.get(dataset) is None


def test_a_dataset_is_never_both_deleted_and_given_to_a_job(catalogue):
    def works(call):
        try:
            call()
        except BrimError:
            return False
        return True

    for _ in range(8):
        id = done(catalogue).output_id
        read = lambda id=id: submit(catalogue, "rf.train", "run", inputs={"dataset_ids": [id]}, reads="rf")  # noqa: E731
        delete = lambda id=id: catalogue.datasets.retire(id)  # noqa: E731
        assert sum(at_once(lambda: works(read), lambda: works(delete))) == 1  # noqa: B023


def test_a_dataset_does_not_grow_under_a_job_that_reads_it(catalogue):
    maker = begun(catalogue)
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
    dataset = done(catalogue).output_id
    job = submit(catalogue, "rf.train", "run", inputs={"dataset_ids": [dataset]}, reads="rf")
    catalogue.jobs.move(job.id, "cancelled", of={"pending"})
    catalogue.datasets.retire(dataset)

    with pytest.raises(Conflict, match=r"cannot go on: config\.dataset_ids"):
        catalogue.jobs.move(job.id, "pending", of=RESUMABLE, wanted="run")
    assert catalogue.jobs.get(job.id).status == "cancelled"


# What each status allows


def test_the_table_of_what_each_status_allows(catalogue):
    """Whether a pause or cancel is noted, whether a resume is, whether the job may be removed, and what it stops as."""
    allowed = {}
    for status in STATUSES:
        stops = [catalogue.jobs.want(at(catalogue, status).id, wanted) for wanted in ("pause", "cancel")]
        assert stops[0] == stops[1]
        settled = []
        for wanted in ("pause", "cancel"):
            job = at(catalogue, status)
            catalogue.jobs.want(job.id, wanted)
            settled.append(catalogue.jobs.settle(job.id))
        resumes = catalogue.jobs.want(at(catalogue, status).id, "run")
        allowed[status] = stops[0], resumes, catalogue.jobs.remove(at(catalogue, status).id), *settled

    stoppable = (True, False, False, "paused", "cancelled")
    assert allowed == {
        "pending": stoppable,
        "queued": stoppable,
        "running": stoppable,
        "paused": (False, True, True, None, None),
        "failed": (False, True, True, None, None),
        "cancelled": (False, True, True, None, None),
        "completed": (False, False, True, None, None),
    }


def test_cancel_outranks_pause(catalogue):
    job = submit(catalogue)

    assert catalogue.jobs.want(job.id, "pause")
    assert catalogue.jobs.want(job.id, "cancel")
    assert not catalogue.jobs.want(job.id, "pause")
    assert catalogue.jobs.settle(job.id) == "cancelled"


def test_of_two_competing_moves_one_wins(catalogue):
    for _ in range(5):
        job = begun(catalogue)
        move = lambda to, id=job.id: catalogue.jobs.move(id, to, of={"running"})  # noqa: E731

        won = at_once(lambda: move("completed"), lambda: move("failed"))  # noqa: B023

        assert sum(won) == 1
        assert catalogue.jobs.get(job.id).status == ("completed" if won[0] else "failed")


# Moving


def test_a_move_says_when_and_by_whom(catalogue, clock):
    job = submit(catalogue)
    for clock.now_s, status in ((1001.0, "queued"), (1002.0, "running"), (1003.0, "running")):  # after a crash: again
        assert catalogue.jobs.move(job.id, status, of=UNFINISHED, worker=None if status == "queued" else "w3")
    again = catalogue.jobs.get(job.id)
    assert (again.attempts, again.worker) == (2, "w3")
    assert (again.created_at, again.queued_at, again.started_at, again.updated_at) == (1000, 1001, 1002, 1003)

    clock.now_s = 900.0  # the machine's clock was put back
    assert catalogue.jobs.move(job.id, "failed", of={"running"}, error="disk full\0")
    failed = catalogue.jobs.get(job.id)
    assert (failed.error, failed.worker, failed.started_at, failed.finished_at) == ("disk full", None, 1002, 1002)


def test_an_end_leaves_no_rate_and_no_message_and_resuming_clears_the_failure(catalogue):
    job = begun(catalogue)
    catalogue.jobs.tell(job.id, JobProgress(current=3, total=9, rate=2.0, eta_s=3.0, message="making"))
    failure = {"field": None, "code": "disk", "hint": ""}
    catalogue.jobs.move(job.id, "failed", of={"running"}, error="no room", failure=failure, output=Output(items=0))
    failed = catalogue.jobs.get(job.id)
    assert failed.failure == failure
    assert failed.progress == JobProgress(current=3, total=9)
    assert catalogue.datasets.get(job.output_id) is None  # nothing was made

    assert catalogue.jobs.move(job.id, "queued", of=RESUMABLE, wanted="run")
    queued = catalogue.jobs.get(job.id)
    assert (queued.error, queued.failure, queued.finished_at, queued.current) == (None, None, None, 3)
    assert catalogue.jobs.move(job.id, "running", of={"queued"}, worker="w0")
    assert catalogue.datasets.get(job.output_id).state == "writing"  # and it is back under its id


@pytest.mark.parametrize("items", [7, 0])
def test_a_result_is_kept_and_the_dataset_becomes_ready(catalogue, items):
    job = begun(catalogue)

    output = Output(items=items, bytes=99, about={"shards": 2})
    assert catalogue.jobs.move(job.id, "completed", of={"running"}, output=output, result={"dataset_id": job.output_id})
    assert not catalogue.jobs.move(job.id, "completed", of={"running"}, output=output)

    assert catalogue.jobs.get(job.id).result == {"dataset_id": job.output_id}
    made = catalogue.datasets.get(job.output_id)
    assert (made.state, made.items, made.bytes, made.about) == ("ready", items, 99, {"shards": 2})


def test_an_output_whose_files_are_damaged_stays_as_it_was_listed(catalogue):
    job = begun(catalogue)
    catalogue.jobs.want(job.id, "pause")
    catalogue.jobs.settle(job.id, Output(items=3, bytes=30))

    assert catalogue.jobs.move(job.id, "cancelled", of={"paused"}, output=Output(items=None))

    kept = catalogue.datasets.get(job.output_id)
    assert (kept.state, kept.items, kept.bytes) == ("partial", 3, 30)


# Stopping


def test_a_job_that_is_to_stop_neither_starts_nor_completes(catalogue, clock):
    job = begun(catalogue)

    assert catalogue.jobs.settle(job.id, Output(items=1)) is None  # nobody asked yet
    assert catalogue.jobs.want(job.id, "pause")
    clock.now_s += 5
    assert catalogue.jobs.want(job.id, "cancel")
    assert catalogue.jobs.get(job.id).stopping_at == 1000  # when a stop was first asked for
    catalogue.jobs.tell(job.id, JobProgress(current=4, message="making"))
    assert (catalogue.jobs.get(job.id).message, catalogue.jobs.get(job.id).current) == ("stopping", 4)
    assert not catalogue.jobs.move(job.id, "completed", of=UNFINISHED)
    assert not catalogue.jobs.move(job.id, "running", of=UNFINISHED, worker="w0")

    assert catalogue.jobs.settle(job.id, Output(items=3, bytes=30)) == "cancelled"
    assert catalogue.datasets.get(job.output_id).state == "partial"
    cancelled, paused = catalogue.jobs.get(job.id), catalogue.jobs.get(at(catalogue, "paused").id)
    assert (cancelled.finished_at, cancelled.stopping_at, cancelled.worker) == (1005, None, None)
    assert paused.finished_at is None


# Progress and deaths


def test_progress_is_shown_and_numbered_until_the_end(catalogue):
    job = begun(catalogue)

    catalogue.jobs.tell(job.id, JobProgress(current=3, total=4, rate=2.0, eta_s=0.5, message="making"))

    shown = catalogue.jobs.get(job.id).progress
    assert shown == JobProgress(current=3, total=4, rate=2.0, eta_s=0.5, message="making")
    last = catalogue.events.after(job.id, 0)[-1]
    assert (last.kind, last.data) == ("progress", shown.as_dict())
    assert last.data["percent"] == 75

    catalogue.jobs.move(job.id, "failed", of={"running"}, error="x")
    before = catalogue.jobs.get(job.id)
    catalogue.jobs.tell(job.id, JobProgress(current=9))
    assert catalogue.jobs.get(job.id) == before


def test_deaths_count_until_the_job_gets_on(catalogue):
    job = begun(catalogue)

    assert [catalogue.jobs.died(job.id) for _ in range(3)] == [1, 2, 3]
    catalogue.jobs.tell(job.id, JobProgress(current=0, total=100))
    assert catalogue.jobs.died(job.id) == 4  # went to where it was, not further
    catalogue.jobs.tell(job.id, JobProgress(current=5, total=100))
    assert catalogue.jobs.get(job.id).deaths == 0
    assert catalogue.jobs.died(job.id) == 1
    assert catalogue.jobs.died("0" * 32) == 0


# Listing and removing


def test_pages_are_newest_first_and_filtered(catalogue):
    ids = [submit(catalogue, kind, "result").id for kind in ("rf.evaluate", "segment.tune") * 3]
    odd = catalogue.jobs.submit(Asked("rf.measure", "100% Night", {}))[0].id

    first, last = (catalogue.jobs.page(page=page, per_page=4) for page in (1, 2))
    assert [row.id for row in first.rows + last.rows] == [odd, *ids[::-1]]
    assert (first.pages, first.total) == (2, 7)
    assert catalogue.jobs.page(kind="segment.tune").total == 3
    assert [row.id for row in catalogue.jobs.page(name="0% nIGHT").rows] == [odd]
    assert catalogue.jobs.page(name="1%t").total == 0  # no pattern
    assert catalogue.jobs.page(page=10**30).rows == []
    assert catalogue.jobs.page(kind="\0\ud800").total == 0


def test_a_running_job_of_which_nobody_tells_is_shown_as_queued(catalogue, clock):
    job = begun(catalogue)
    shown = lambda: (catalogue.jobs.get(job.id).shown_status, catalogue.jobs.counts())  # noqa: E731
    listed = lambda status: catalogue.jobs.page(status=status).total  # noqa: E731

    clock.now_s += SILENT_S
    assert (shown(), listed("running"), listed("queued")) == (("running", {"running": 1}), 1, 0)
    clock.now_s += 0.1
    assert (shown(), listed("running"), listed("queued")) == (("queued", {"queued": 1}), 0, 1)
    catalogue.jobs.tell(job.id, JobProgress(current=1))
    assert (shown(), listed("running"), listed("queued")) == (("running", {"running": 1}), 1, 0)


def test_an_odd_id_names_nothing(catalogue):
    for id in ("", "x", "0" * 32, "\0", "\ud800", "A" * 32, "0" * 32 + "\n", "0" * 10**6):
        assert catalogue.jobs.get(id) is None
        assert catalogue.datasets.get(id) is None
        assert catalogue.runs.get(id) is None
        assert catalogue.events.after(id, 0) == []
        assert catalogue.events.heads([id]) == {}


def test_a_row_is_found_by_the_beginning_of_its_id_if_no_other_begins_so(catalogue):
    ids = [letters.ljust(32, "0") for letters in ("abcd1", "abcd2", "abc")]
    for id in ids:
        catalogue.datasets.add(name="d", kind="rf", path=f"/{id}", owned=False, items=1, bytes=1, id=id)
    find = catalogue.datasets.find

    assert [find(text).id for text in ("abcd1", "abcd2", ids[0], "abc0")] == [ids[0], ids[1], ids[0], ids[2]]
    assert [find(text) for text in ("abc", "abce", "bcd1", "ABCD1", "abc%", "")] == [None] * 6
    with pytest.raises(Conflict, match="several ids begin with abcd"):
        find("abcd")


def test_a_removed_job_takes_its_events_along_and_leaves_what_it_made(catalogue):
    job = done(catalogue, items=2)

    assert catalogue.jobs.remove(job.id)

    assert catalogue.jobs.get(job.id) is None
    assert catalogue.events.after(job.id, 0) == []
    made = catalogue.datasets.get(job.output_id)
    assert (made.items, made.job_id) == (2, None)
    assert submit(catalogue).number > job.number  # numbers are not used again


def test_jobs_are_found_by_worker_and_counted_by_status(catalogue):
    one, two = submit(catalogue), submit(catalogue)
    start(catalogue, one, worker="w7")

    assert [job.id for job in catalogue.jobs.of_worker("w7")] == [one.id]
    assert [job.id for job in catalogue.jobs.unfinished()] == [one.id, two.id]
    assert catalogue.jobs.count_unfinished() == 2
    catalogue.jobs.move(one.id, "completed", of={"running"})
    assert catalogue.jobs.counts() == Counter(completed=1, pending=1)
