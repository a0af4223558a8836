"""Several processes that train as one: what is whose, what an item gets, and what two real ranks do together."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from brim.engine.config import TIERS, BucketConfig, Tier
from brim.engine.rows.buckets import Bucketed
from brim.engine.rows.order import Shuffle
from brim.engine.rows.ragged import RaggedResident, part_of
from brim.engine.rows.ragged_tiers import RaggedTensors
from brim.engine.rows.resident import Resident
from brim.engine.rows.source import TensorSource
from brim.engine.training import ranks as joining
from brim.engine.training.rank_share import Dropout, Share, computing, cut, drawn
from brim.engine.training.ranks import Ranks, joined
from brim.errors import ConfigError
from torchruns import alone, differences, torchrun

CPU = torch.device("cpu")
SCENES = Path(__file__).with_name("two_ranks.py")


class Apart(Ranks):
    """One rank of several, looked at by itself: the others would say what it says."""

    def greatest(self, *values: int) -> list[int]:
        """As if all were alike."""
        return list(values)


def apart(size: int) -> list[Ranks]:
    return [Apart(device=CPU, rank=rank, size=size) for rank in range(size)]


# What is whose


def test_a_batch_without_own_items_has_the_next_one_stand_in() -> None:
    order = torch.tensor([0, 2, 4, 1, 3, 5])

    part = cut(order, torch.tensor([3, 3]), apart(2)[1])

    assert part.items.tolist() == [0, 0, 1, 2]  # 1 stands in for the first batch
    assert part.stops.tolist() == [1, 4]
    assert [len(part.share(apart(2)[1], batch).places) for batch in (0, 1)] == [0, 3]


def test_a_batch_without_own_sequences_has_the_shortest_own_one_stand_in() -> None:
    mine, lengths = torch.tensor([False, True, False, True, False]), torch.tensor([4, 9, 3, 7, 8])

    without, mixed = (part_of(Bucketed(8, torch.tensor(items)), mine, lengths) for items in ([4, 0, 2], [4, 3, 1]))

    assert (without.length, without.items.tolist()) == (8, [3])
    assert (mixed.length, mixed.items.tolist()) == (8, [3, 1])
    assert part_of(Bucketed(3, torch.tensor([2])), mine, lengths).length == 7


@pytest.mark.parametrize(("tier", "shuffle"), [("vram", True), ("ram", True), ("window", "blocks"), ("ram", False)])
@pytest.mark.parametrize("size", [2, 3])
def test_shares_of_a_resident_are_its_batches(tier: Tier, shuffle: Shuffle, size: int) -> None:
    data = {"x": torch.randn(101, 3), "label": torch.arange(101)}
    options: dict[str, Any] = {
        "batch_size": 9, "device": CPU, "tier": tier, "seed": 4, "shuffle": shuffle, "rows": torch.arange(3, 101),
        "block_items": 16,
    }  # fmt: skip
    with Resident(TensorSource(data), **options) as whole:
        expected = list(whole.epoch(1))
    parts, held = [], []
    for ranks in apart(size):
        with Resident(TensorSource(data), **options, ranks=ranks) as resident:
            shares = [resident.share(1, number) for number in range(resident.num_batches)]
            parts.append(list(zip(shares, resident.epoch(1), strict=True)))
            held.append(resident.bytes)
    for number, batch in enumerate(expected):
        assert _joined([part[number] for part in parts], len(batch["label"])) == batch["label"].tolist()
    assert max(held) <= whole.bytes / size * 1.05


def _joined(parts: list[tuple[Share | None, dict[str, Tensor]]], count: int) -> list[int]:
    labels = torch.full((count,), -1)
    for share, batch in parts:
        assert share is not None
        assert share.count == count
        labels[share.places] = batch["label"][: len(share.places)]
    return labels.tolist()


@pytest.mark.parametrize("tier", ["vram", "ram", "window"])
def test_shares_of_sequences_are_their_batches(tier: Tier) -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (23,), generator=rng).tolist()
    source = RaggedTensors([torch.full((num, 2), float(at)) for at, num in enumerate(lengths)])
    options: dict[str, Any] = {"buckets": BucketConfig(batch_size=4), "device": CPU, "tier": tier, "seed": 2}
    with RaggedResident(source, **options) as whole:
        expected = list(whole.epoch(0))
    parts = []
    for ranks in apart(2):
        own = torch.arange(23) % 2 == ranks.rank
        with RaggedResident(source, **options, ranks=ranks, own=own) as resident:
            shares = [resident.share(0, number) for number in range(resident.num_batches)]
            parts.append(list(zip(shares, resident.epoch(0), strict=True)))
    for number, batch in enumerate(expected):
        found = torch.full_like(batch["frames"], -1)
        for share, mine in (part[number] for part in parts):
            assert share is not None
            if len(share.places):
                found[share.places] = mine["frames"]
        assert torch.equal(found, batch["frames"])


def test_more_ranks_than_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 rows to train on are too few for 4 ranks"):
        Resident(TensorSource({"x": torch.ones(3, 1)}), batch_size=2, device=CPU, ranks=apart(4)[0])


# What an item gets


@pytest.mark.parametrize(("shape", "axis"), [((6, 5), 0), ((3, 6, 4), 1), ((2, 3, 12, 1), 2)])
def test_what_shares_draw_is_what_the_batch_draws(shape: tuple[int, ...], axis: int) -> None:
    def make(whole: tuple[int, ...]) -> Tensor:
        return torch.randn(whole, generator=torch.Generator().manual_seed(1))

    whole = make(shape)
    for ranks in apart(2):
        share = Share(ranks, 6, torch.tensor([0, 3, 4] if ranks.main else [1, 2, 5]))
        rows = share.rows(shape[axis] // 2, CPU)
        mine = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
        with computing(share):
            assert torch.equal(drawn(make, mine, axis), whole.index_select(axis, rows))


def test_a_share_loses_to_dropout_what_it_would_lose_in_the_batch() -> None:
    x, drop = torch.randn(7, 33), Dropout(0.3)
    torch.manual_seed(2)
    expected = functional.dropout(x, 0.3)
    torch.manual_seed(2)
    assert torch.equal(drop(x), expected)
    places = torch.tensor([1, 4, 6])
    torch.manual_seed(2)
    with computing(Share(apart(2)[0], 7, places)):
        assert torch.equal(drop(x[places]), expected[places])


# By itself


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "two"), ("RANK", "5"), ("RANK", "2")])
def test_a_place_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    place = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", name: value}
    for key, text in place.items():
        monkeypatch.setenv(key, text)
    with pytest.raises(ConfigError, match=f"{name}={value}"), joined("cpu"):
        pass


def test_ranks_take_the_gpus_of_their_machine_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"WORLD_SIZE": "16", "RANK": "11", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert joining._place({**known, "LOCAL_RANK": "3"}) == (11, 16, 3)
    assert joining._place(known) == (11, 16, 11)  # all on one machine
    assert joining._place({"RANK": "3"}) == (0, 1, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(joining, "resolve_device", torch.device)

    names = ["auto", "cuda", "cuda:1", "cpu"]
    assert [str(joining._device(name, 6)) for name in names] == ["cuda:2", "cuda:2", "cuda:1", "cpu"]


def test_all_ranks_take_the_lowest_tier_that_one_of_them_needs() -> None:
    class Beside(Apart):
        """Another rank has room for a window only."""

        def greatest(self, *values: int) -> list[int]:
            asked.append(values)
            return [TIERS.index("window")] if len(asked) == 1 else list(values)

    asked: list[tuple[int, ...]] = []
    source = TensorSource({"x": torch.randn(40, 3)})
    with Resident(source, batch_size=8, device=CPU, tier="vram", ranks=Beside(device=CPU, rank=0, size=2)) as data:
        assert (asked[0], data.tier) == ((TIERS.index("vram"),), "window")


# Two real ranks


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks left, and a run of one process beside it."""
    path = tmp_path_factory.mktemp("scenes")
    (path / "one").mkdir()
    (path / "two").mkdir()
    for code, _, err in (alone(SCENES, path / "one"), torchrun(SCENES, path / "two")):
        assert code == 0, err
    return path, [json.loads((path / "two" / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_two_ranks_have_the_losses_of_one_process(scenes: Any) -> None:
    assert differences(scenes[0] / "one/run/train", scenes[0] / "two/run/train") < 1e-5


def test_norms_and_contrasts_are_over_the_whole_batch(scenes: Any) -> None:
    for saw in scenes[1]:
        assert saw["norms"]["gradient"] < 1e-12
        assert saw["norms"]["statistics"] < 1e-12


def test_a_stand_in_counts_for_nothing(scenes: Any) -> None:
    assert all(saw["empty"]["gradient"] < 1e-12 for saw in scenes[1])


def test_what_rank_0_makes_or_refuses_is_known_to_all(scenes: Any) -> None:
    first, second = (saw["words"] for saw in scenes[1])
    assert first["error"] == "ConfigError: depth=-1 must be at least 0"
    assert second["error"] == "RankLost: rank 0 failed: depth=-1 must be at least 0"
    assert (second["made"], second["all"], second["greatest"]) == (0, [0, 1], [1, 5])


def test_a_bad_row_of_another_rank_is_named_and_ends_all(tmp_path: Path) -> None:
    code, _, err = torchrun(SCENES, tmp_path, "7")  # row 7 is rank 1's
    assert code != 0
    assert 'field "x" of that batch holds NaN or Inf' in err
    assert "learning rate" not in err
