"""The commands of radio data on URLs, as others build on them: the same bytes, JSON and exit codes as on a disk."""

import time
from pathlib import Path
from types import SimpleNamespace

import cli_commands
import pytest
import s3fs
import torch
from cli_commands import answer, without_times

from brim.cli import main
from brim.engine.storage import places
from s3_store import SECRET, serve_s3
from test_docs import blocks_of, run_block

torch.set_num_threads(1)  # small batches: a second thread only competes

SAMPLES = 48


@pytest.fixture(scope="module")
def server():
    with serve_s3() as store:
        store.s3.create_bucket(Bucket="bucket")
        yield store


@pytest.fixture(autouse=True)
def _in_environment(server, monkeypatch):
    s3fs.S3FileSystem.clear_instance_cache()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    file = tmp_path_factory.mktemp("config") / "quick.toml"
    file.write_text("duration_s = 0.2\nsamples_per_shard = 8\n")
    return ["--config", str(file), "--device", "cpu"]


@pytest.fixture(scope="module")
def here(options, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("here") / "data"
    assert main(["rf", "generate", "--out", str(out), "--samples", str(SAMPLES), *options]) == 0
    return out


@pytest.fixture
def there(here, server) -> str:
    """The same dataset in the store, copied by a client that is not brim's."""
    for file in here.rglob("*"):
        if file.is_file():
            server.s3.upload_file(str(file), "bucket", f"copy/{file.relative_to(here)}")
    return "s3://bucket/copy"


def refused(*argv) -> str:
    message = cli_commands.refused(*argv)
    assert SECRET not in message
    return message


def shards(path: Path) -> dict[str, bytes]:
    return {f"shards/{file.name}": file.read_bytes() for file in (path / "shards").iterdir()}


def test_generate_puts_the_bytes_of_a_disk_into_a_store_and_resumes_there(here, options, server):
    url = "s3://bucket/made"
    first = answer("rf", "generate", "--out", url, "--samples", "20", *options)
    assert (first["dataset"], first["accepted"]) == (url, 20)
    assert "is not empty; " in refused("rf", "generate", "--out", url, "--samples", "20", *options)

    answer("rf", "generate", "--out", f"{url}/", "--samples", SAMPLES, *options, "--resume")

    files = server.files("bucket", "made/")
    del files["manifest.json"]
    assert files == shards(here)


def test_a_file_url_is_a_directory(options, here, tmp_path):
    url = f"file://{tmp_path}/a%20b"
    answer("rf", "generate", "--out", url, "--samples", SAMPLES, *options)
    assert shards(tmp_path / "a b") == shards(here)


def test_inspect_and_export_read_a_url(here, there, tmp_path):
    page = tmp_path / "report.html"
    found, expected = (answer("rf", "inspect", where, "--report", page) for where in (there, here))
    assert found | {"dataset": ""} == expected | {"dataset": ""}
    assert found["dataset"] == there

    sizes = [
        answer("rf", "export", where, "--format", "parquet", "--out", tmp_path / name)["records"]
        for where, name in ((there, "a"), (here, "b"))
    ]
    assert sizes[0] == sizes[1]
    assert {file.name for file in (tmp_path / "a").iterdir()} == {file.name for file in (tmp_path / "b").iterdir()}


def test_training_and_evaluating_read_urls(here, there, tmp_path):
    losses = []
    for where, name in ((there, "a"), (here, "b")):
        argv = ("--out", tmp_path / name, "--epochs", "1", "--batch-size", "16", "--device", "cpu")
        losses.append(answer("rf", "train", where, *argv)["best_val_loss"])
    assert losses[0] == losses[1]
    found = [answer("rf", "evaluate", tmp_path / "a", where, "--device", "cpu") for where in (there, here)]
    assert without_times(found[0]) == without_times(found[1])


def test_what_a_store_refuses_ends_with_2_and_is_not_asked_again(options, there, server, monkeypatch):
    generate = ("rf", "generate", "--samples", "8", *options, "--out")
    pauses: list[float] = []
    monkeypatch.setattr(places, "time", SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=pauses.append))
    assert "no such bucket" in refused(*generate, "s3://nobodys/data")
    assert "no such bucket" in refused("rf", "inspect", "s3://nobodys/data")
    assert "has no manifest.json" in refused("rf", "inspect", "s3://bucket/nothing")
    assert "credentials do not belong" in refused(*generate, f"s3://key:{SECRET}@bucket/data")
    assert "names no bucket" in refused(*generate, "s3://")
    with server.guarded("s3:GetObject", "s3:ListBucket") as keys, pytest.MonkeyPatch.context() as patch:
        s3fs.S3FileSystem.clear_instance_cache()
        for name, value in keys.items():
            patch.setenv(name, value)
        assert "no permission to write" in refused(*generate, "s3://bucket/new")
    assert pauses == []
    assert server.files("bucket", "new/") == {}


@pytest.mark.long
def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "storage.md").read_text()
    blocks = [block for block in blocks_of(page) if not block.skipped and "pip install" not in block.code]
    assert [block.language for block in blocks] == ["sh", "python"]
    monkeypatch.chdir(tmp_path)

    for block in blocks:
        assert run_block(block, tmp_path) is None, block.code
