"""Images and results in an object store, by one process, against a real server of the S3 protocol."""

from pathlib import Path

import cv2
import pytest
import s3fs
import torch

from brim.errors import ConfigError, ImageError
from brim.segmentation.config import FORMATS, FilesConfig
from brim.segmentation.networks import create_model, save_weights
from brim.segmentation.prediction import ModelLoader, find_inputs, predict_files
from brim.segmentation.scenes import make_cells
from s3_store import FailingProxy, serve_s3

BUCKET = "cells"
NUM = 5
pytestmark = pytest.mark.usefixtures("short_ceiling", "one_thread")


@pytest.fixture(scope="module")
def server():
    with serve_s3() as store:
        store.s3.create_bucket(Bucket=BUCKET)
        yield store


@pytest.fixture
def proxy(server, monkeypatch):
    """The store as the environment names it, through a proxy."""
    with FailingProxy(server.port) as proxy:
        s3fs.S3FileSystem.clear_instance_cache()  # it keeps the endpoint that it saw first
        for name, value in {**server.env, "AWS_ENDPOINT_URL": proxy.endpoint}.items():
            monkeypatch.setenv(name, value)
        yield proxy
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def images(server, tmp_path_factory) -> Path:
    """The same here and in the bucket."""
    path = tmp_path_factory.mktemp("images")
    (path / "sub").mkdir()
    for index in range(NUM):
        file = path / ("sub" if index % 2 else ".") / f"{index}.png"
        cv2.imwrite(str(file), make_cells(5, index, 40, 56)[0])
        server.s3.put_object(Bucket=BUCKET, Key=f"images/{file.relative_to(path).as_posix()}", Body=file.read_bytes())
    server.s3.put_object(Bucket=BUCKET, Key="images/notes.txt", Body=b"no image")
    server.s3.put_object(Bucket=BUCKET, Key="images/.hidden.png", Body=b"no image")
    return path


@pytest.fixture(scope="module")
def loader(tmp_path_factory) -> ModelLoader:
    torch.manual_seed(3)
    weights = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_weights(create_model("unet_tiny"), weights, {})
    return ModelLoader({"unet_tiny": weights}, "cpu", None)


def config(form: str = "geojson") -> FilesConfig:
    return FilesConfig(model="unet_tiny", format=form, strict=True)


def here(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", FORMATS)
def test_results_are_those_of_files(server, proxy, images, loader, tmp_path, form):
    predict_files([images], loader, tmp_path, config(form))

    found = predict_files([f"s3://{BUCKET}/images"], loader, f"s3://{BUCKET}/{form}", config(form))

    assert (found.written, found.failures) == (NUM, {})
    assert server.files(BUCKET, form) == here(tmp_path)


def test_a_large_object_is_read_whole_unless_it_is_larger_than_an_image(server, proxy, images, monkeypatch):
    monkeypatch.setattr("brim.segmentation.images.files.FIRST_BYTES", 100)
    (found,) = find_inputs([f"s3://{BUCKET}/images/0.png"], "out")
    content = (images / "0.png").read_bytes()

    assert found.read(len(content)) == content
    with pytest.raises(ImageError, match=f"{len(content)} bytes are more than"):
        found.read(len(content) - 1)


def test_resume_predicts_only_what_is_not_there(server, proxy, images, loader):
    url = f"s3://{BUCKET}/resumed"
    whole = predict_files([f"s3://{BUCKET}/images"], loader, url, config())
    before = server.files(BUCKET, "resumed")
    server.s3.delete_object(Bucket=BUCKET, Key="resumed/sub/1.geojson")
    proxy.requests.clear()

    found = predict_files([f"s3://{BUCKET}/images"], loader, url, config(), resume=True)

    assert (found.written, found.kept) == (1, NUM - 1)
    assert found.as_dict()["polygons"] == whole.as_dict()["polygons"]
    assert server.files(BUCKET, "resumed") == before
    assert len([request for request in proxy.requests if request.startswith("PUT") and "geojson" in request]) == 1


def test_results_below_the_images_are_not_images(proxy, server, images, loader):
    url = f"s3://{BUCKET}/images/masks"
    for _ in range(2):
        assert predict_files([f"s3://{BUCKET}/images"], loader, url, config("mask")).written == NUM
    with pytest.raises(ConfigError, match=r"images/0.png would replace an input image"):
        predict_files([f"s3://{BUCKET}/images/0.png"], loader, f"s3://{BUCKET}/images", config("mask"))
    assert len(find_inputs([url], url)) == NUM  # asked for
    for key in server.files(BUCKET, "images/masks"):
        server.s3.delete_object(Bucket=BUCKET, Key=f"images/masks/{key}")


@pytest.mark.parametrize("key", ["strange/../up.png", "strange//empty.png"])
def test_a_name_that_no_file_can_have_is_refused(server, proxy, loader, tmp_path, key):
    server.s3.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    try:
        with pytest.raises(ConfigError, match="rename it"):
            find_inputs([f"s3://{BUCKET}/strange"], tmp_path)
    finally:
        server.s3.delete_object(Bucket=BUCKET, Key=key)
