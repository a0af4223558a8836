"""What the head decides: the same dataset whatever order, deaths and copies there are, and errors that end it."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from inline_pool import InlinePool

from brim.engine.storage import Dataset
from brim.errors import ClusterError, ConfigError, DatasetError, NothingAccepted, OutOfMemory, StorageError
from brim.rf import generate
from brim.rf.generation import head as module
from brim.rf.generation.accounting import DeviceAccount
from brim.rf.generation.attempts import Block
from brim.rf.generation.worker import MakeShards

SAMPLES = 23


def shards(path):
    return {file.name: file.read_bytes() for file in sorted((path / "shards").iterdir())}


@pytest.fixture(scope="module")
def config(config):
    """Six shards of at most four samples."""
    return replace(config, samples_per_shard=4)


@pytest.fixture(scope="module")
def reference(config, tmp_path_factory):
    """What one device makes."""
    out = tmp_path_factory.mktemp("one") / "data"
    generate(config, out, SAMPLES, device="cpu")
    return out


@pytest.fixture(autouse=True)
def no_ceiling(monkeypatch):
    """It takes a second, and says nothing here."""
    monkeypatch.setattr(module.PoolHead, "_close_accounts", lambda self: None)


@pytest.mark.parametrize("seed", range(3))
def test_bytes_do_not_depend_on_order_deaths_or_copies(config, reference, tmp_path, seed):
    pool = InlinePool(1 + seed % 4, seed=seed, losses=0.1 * (seed % 3))

    report = generate(config, tmp_path / "many", SAMPLES, pool=pool)

    assert shards(tmp_path / "many") == shards(reference)
    one, many = (Dataset(path).manifest for path in (reference, tmp_path / "many"))
    told = {"created", "report"}
    assert {key: value for key, value in many.items() if key not in told} == {
        key: value for key, value in one.items() if key not in told
    }
    assert (report.accepted, report.workers) == (SAMPLES, 1 + seed % 4)


def test_workers_that_are_gone_had_a_ceiling_too(config, tmp_path, monkeypatch):
    """The mean of those known, for each of three; memory and batch are the largest."""
    found = []

    def look(head):
        sizes = {"stages": {}, "peak_bytes": 9}
        known = [DeviceAccount(ceiling=ceiling, batch_size=4, **sizes) for ceiling in (200.0, 100.0, None)]
        head.accounts = [*known, DeviceAccount(ceiling=None, stages={}, batch_size=2, peak_bytes=3)]
        account = head.account()
        found.append((account.ceiling, account.batch_size, account.peak_bytes, head.ceiling(900, 4.0).share))

    monkeypatch.setattr(module.PoolHead, "_close_accounts", look)
    generate(config, tmp_path / "many", SAMPLES, pool=InlinePool(3))

    assert found == [(450.0, 4, 9, 0.5)]


def test_workers_that_do_not_see_the_place_send_their_bytes(config, reference, tmp_path, monkeypatch):
    @contextmanager
    def unseen(head):
        head.token = "shards/.999999.00000000.tmp"  # nobody writes it
        yield

    monkeypatch.setattr(module.PoolHead, "_shared", unseen)
    generate(config, tmp_path / "many", SAMPLES, pool=InlinePool(2))

    assert shards(tmp_path / "many") == shards(reference)


def test_workers_gate_too_where_the_head_is_too_slow(config, reference, tmp_path, monkeypatch):
    monkeypatch.setattr("brim.rf.generation.attempts.FIRST_BLOCK", 16)
    monkeypatch.setattr("brim.rf.generation.attempts.LAST_BLOCK", 16)
    pool = InlinePool(3, losses=0.1, seed=3)

    generate(config, tmp_path / "many", SAMPLES, pool=pool)

    assert any(isinstance(task, Block) for _, task in pool.given)
    assert shards(tmp_path / "many") == shards(reference)


def test_when_nothing_is_left_the_oldest_range_is_given_out_again(config, reference, tmp_path):
    class Stuck(InlinePool):
        def step(self, worker):
            if worker != 0 or not isinstance(self.alive[0][0][1], MakeShards):  # the first never ends what it makes
                super().step(worker)

    pool = Stuck(2)

    generate(config, tmp_path / "many", SAMPLES, pool=pool)

    assert shards(tmp_path / "many") == shards(reference)
    held = [
        one.number for worker, task in pool.given if worker == 0 and isinstance(task, MakeShards) for one in task.ranges
    ]
    again = [
        one.number for worker, task in pool.given if worker == 1 and isinstance(task, MakeShards) for one in task.ranges
    ]
    assert held
    assert set(held) <= set(again)


def test_a_range_that_kills_every_worker_is_given_up_with_the_reason(config, tmp_path):
    with pytest.raises(ClusterError, match=r"shard 2 failed 4 times.*died: of chance"):
        generate(config, tmp_path / "many", SAMPLES, pool=InlinePool(3, poison=2))

    left = Dataset(tmp_path / "many")
    left.verify()
    assert len(left) == 8


def test_without_workers_it_ends_and_goes_on_later(config, reference, tmp_path):
    pool = InlinePool(2, losses=0.3, seed=4, replaces=False)

    with pytest.raises(ClusterError, match="no worker is left"):
        generate(config, tmp_path / "many", SAMPLES, pool=pool)

    generate(config, tmp_path / "many", SAMPLES, pool=InlinePool(2))
    assert shards(tmp_path / "many") == shards(reference)


@pytest.mark.parametrize(
    ("error", "family"), [(StorageError("disk full"), StorageError), (OutOfMemory("too large"), OutOfMemory)]
)
def test_what_would_fail_again_is_told(config, tmp_path, error, family):
    with pytest.raises(family, match=str(error)):
        generate(config, tmp_path / "many", SAMPLES, pool=InlinePool(2, fail=error))


def test_device_types_are_not_mixed_unless_allowed(config, reference, tmp_path):
    kinds = ("cpu a", "cpu b")
    with pytest.raises(ClusterError, match=r"2 types \(cpu a: w0; cpu b: w1\)"):
        generate(config, tmp_path / "many", SAMPLES, pool=InlinePool(2, kinds=kinds))
    assert not (tmp_path / "many").exists()

    generate(config, tmp_path / "many", SAMPLES, pool=InlinePool(2, kinds=kinds), allow_mixed=True)
    assert shards(tmp_path / "many") == shards(reference)  # both are this CPU


@pytest.mark.parametrize("after", [0, 4])
def test_a_stopped_run_is_usable_and_continues_to_the_same_bytes(config, reference, tmp_path, after):
    pool = InlinePool(3, seed=after)
    stopped = generate(config, tmp_path / "many", SAMPLES, pool=pool, stop=lambda: pool.made >= after)  # of 6 shards

    assert stopped.stopped
    left = Dataset(tmp_path / "many")
    left.verify()
    assert len(left) == stopped.accepted < SAMPLES
    continued = generate(config, tmp_path / "many", SAMPLES, pool=InlinePool(2))
    assert (continued.accepted, continued.stopped) == (SAMPLES, False)
    assert shards(tmp_path / "many") == shards(reference)


def test_what_one_device_began_many_finish_and_the_other_way_round(config, reference, tmp_path):
    generate(config, tmp_path / "a", 13, device="cpu")
    generate(config, tmp_path / "a", SAMPLES, pool=InlinePool(2))
    generate(config, tmp_path / "b", 13, pool=InlinePool(2))
    generate(config, tmp_path / "b", SAMPLES, device="cpu")

    assert shards(tmp_path / "a") == shards(tmp_path / "b") == shards(reference)


def test_what_is_there_already_needs_no_workers(config, reference):
    pool = InlinePool(2)

    report = generate(config, reference, SAMPLES, pool=pool)

    assert (report.accepted, pool.workers) == (SAMPLES, 0)


def test_what_cannot_be_is_refused_before_workers_start(config, reference, tmp_path):
    hopeless = replace(config, tx_power_dbm=0.0, min_snr_db=60.0)
    pool = InlinePool(2)
    with pytest.raises(ConfigError, match="samples=0"):
        generate(config, tmp_path / "many", 0, pool=pool)
    with pytest.raises(DatasetError, match="not empty"):
        generate(config, reference, SAMPLES, pool=pool, resume=False)
    with pytest.raises(DatasetError, match="already holds 23"):
        generate(config, reference, 20, pool=pool)
    with pytest.raises(NothingAccepted):
        generate(hopeless, tmp_path / "many", 20, pool=pool)
    assert pool.workers == 0
    assert not (tmp_path / "many").exists()


def test_progress_comes_at_least_once_a_second_and_never_goes_back(config, tmp_path):
    seen = []
    generate(config, tmp_path / "many", SAMPLES, pool=InlinePool(2), progress=seen.append)

    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert seen[-1].done == SAMPLES
    assert all(one.total == SAMPLES for one in seen)
