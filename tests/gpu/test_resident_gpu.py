"""A dataset in VRAM, pinned RAM and a window of VRAM: the same batches, in the same order, from the GPU."""

import itertools

import pytest
import torch

from brim.engine.config import TIERS
from brim.engine.device.memory import inject_oom
from brim.engine.rows import resident as module
from brim.engine.rows.files import DatasetSource
from brim.engine.rows.resident import Resident
from brim.engine.rows.source import TensorSource
from brim.engine.storage.writer import ShardWriter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def rows_of(num: int) -> dict[str, torch.Tensor]:
    index = torch.arange(num)
    return {
        "index": index,
        "x": index.float()[:, None] + torch.arange(3) / 10,
        "even": index % 2 == 0,
        "iq": torch.complex(index.float(), -index.float())[:, None].repeat(1, 2),
        "half": index.bfloat16()[:, None].repeat(1, 3),
    }


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetSource:
    path = tmp_path_factory.mktemp("resident") / "data"
    with ShardWriter(path, {}, items_per_shard=700) as out:
        out.append(rows_of(5000), {"t": torch.arange(5000)})
        out.finish()
    return DatasetSource(path)


def batches_of(resident: Resident, epoch: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
    batches = list(resident.epoch(epoch, start))
    torch.cuda.synchronize()
    return [{name: tensor.cpu() for name, tensor in batch.items()} for batch in batches]


@pytest.mark.parametrize("shuffle", [True, False, "blocks"])
@pytest.mark.parametrize("tier", TIERS)
def test_batches_equal_those_on_the_cpu(dataset: DatasetSource, tier: str, shuffle: bool | str) -> None:
    if tier == "window" and shuffle is True:
        pytest.skip("a window shuffles by blocks")
    options = {"batch_size": 96, "shuffle": shuffle, "seed": 5, "rows": torch.arange(0, 5000, 2)}
    with (
        Resident(dataset, device=GPU, tier=tier, **options) as fast,  # type: ignore[arg-type]
        Resident(dataset, device=CPU, tier="vram", **options) as plain,  # type: ignore[arg-type]
    ):
        for epoch, start in ((0, 0), (1, 0), (1, 17)):
            found, expected = batches_of(fast, epoch, start), list(plain.epoch(epoch, start))
            assert len(found) == len(expected)
            for ours, theirs in zip(found, expected, strict=True):
                for name, tensor in theirs.items():
                    assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("chunk_bytes", [1, 2**23])
def test_slow_consumers_never_see_a_batch_overwritten(
    dataset: DatasetSource, tier: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module._CHUNK_BYTES, "cuda", chunk_bytes)
    options = {"tier": tier, "shuffle": "blocks", "block_items": 50, "window_bytes": 1}
    with Resident(dataset, batch_size=32, device=GPU, **options) as resident:  # type: ignore[arg-type]
        for epoch in range(3):
            wrong = torch.zeros((), dtype=torch.int64, device=GPU)
            for batch in resident.epoch(epoch):
                torch.cuda._sleep(200_000)  # the host runs ahead
                wrong += (batch["x"][:, 0] != batch["index"]).sum() + (batch["iq"].real[:, 1] != batch["index"]).sum()
            assert wrong.item() == 0


@pytest.mark.parametrize("tier", TIERS)
def test_a_captured_graph_reads_its_static_inputs(dataset: DatasetSource, tier: str) -> None:
    with Resident(dataset, batch_size=128, device=GPU, tier=tier, shuffle="blocks") as resident:  # type: ignore[arg-type]
        out = resident.static_batch()
        total = torch.zeros((), dtype=torch.int64, device=GPU)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            total += out["index"].sum()
        torch.cuda.current_stream().wait_stream(side)
        total.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total += out["index"].sum()
        total.zero_()
        rest = torch.zeros((), dtype=torch.int64, device=GPU)
        for batch in resident.epoch(0, out=out):
            if len(batch["index"]) == 128:
                graph.replay()
            else:
                rest += batch["index"].sum()
        assert (total + rest).item() == sum(range(5000))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_vram_needs_no_host_sync(dataset: DatasetSource) -> None:
    with Resident(dataset, batch_size=64, device=GPU, tier="vram") as resident:
        out = resident.static_batch()
        next(resident.epoch(0))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in itertools.chain(resident.epoch(1), resident.epoch(2, out=out)):
                pass
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_auto_takes_vram_and_falls_when_it_is_taken(dataset: DatasetSource, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "brim")
    with Resident(dataset, batch_size=64, device=GPU) as resident:
        assert resident.tier == "vram"
    assert torch.cuda.get_device_name(GPU) in caplog.messages[0]
    with Resident(dataset, batch_size=64, device=torch.device("cuda"), preload_to_gpu=False) as resident:
        assert (resident.tier, resident.device) == ("ram", GPU)
    with inject_oom(above=100), Resident(dataset, batch_size=64, device=GPU) as resident:
        assert resident.tier == "ram"
        assert len(torch.cat([batch["index"] for batch in resident.epoch(0)]).unique()) == 5000


def test_real_shortage_falls_down_and_gives_back_what_was_taken(caplog: pytest.LogCaptureFixture) -> None:
    source = TensorSource({"x": torch.zeros(1024, 2**16), "y": torch.zeros(1024, 2**16)})  # 512 MiB
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(GPU)
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction((before + 400 * 2**20) / total, GPU)
    try:
        with Resident(source, batch_size=8, device=GPU, tier="vram") as resident:
            assert resident.tier == "ram"
            assert torch.cuda.memory_allocated(GPU) <= before + 2**20
            assert sum(len(batch["x"]) for batch in resident.epoch(0)) == 1024
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    assert "tier vram did not fit" in caplog.messages[-1]


def test_memory_on_the_device_is_given_back(dataset: DatasetSource) -> None:
    for tier in TIERS:
        before = torch.cuda.memory_allocated(GPU)
        with Resident(dataset, batch_size=64, device=GPU, tier=tier, shuffle="blocks") as resident:
            batch = next(iter(resident.epoch(0)))
        torch.cuda.synchronize()
        del batch, resident
        assert torch.cuda.memory_allocated(GPU) <= before + 2**20
