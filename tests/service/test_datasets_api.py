"""Datasets over HTTP: brought as files, listed, previewed, deleted; nothing lands where it should not."""

import io
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_api import JOBS, TOKEN, Answer, Api
from PIL import Image

from brim.jobs.store import Output
from waiting import until

BOUNDARY = "a-boundary"
Part = tuple[str, str | None, bytes]  # field, file name, content


def picture(width: int = 6, height: int = 4, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (10, 200, 30)).save(out, kind)
    return out.getvalue()


def array(*shape: int, **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, np.random.default_rng(0).normal(size=shape).astype(np.float32), **options)
    return out.getvalue()


def multipart(parts: Sequence[Part]) -> bytes:
    body = b""
    for field, name, content in parts:
        file = "" if name is None else f'; filename="{name}"'
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"{file}\r\n\r\n'
        body += head.encode() + content + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


def upload(api: Api, parts: Sequence[Part], *, body: bytes | None = None) -> Answer:
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    return api.post("/api/datasets", multipart(parts) if body is None else body, headers=headers)


NAMED: list[Part] = [("name", None, b"night sky"), ("kind", None, b"images")]
SEQUENCES: list[Part] = [("name", None, b"steps"), ("kind", None, b"sequences")]


def test_images_with_masks_are_brought_listed_previewed_and_deleted(api):
    pictures: list[Part] = [("images", "a.png", picture()), ("images", "b b.png", picture(9, 7))]
    masks: list[Part] = [("masks", "a.png", picture()), ("masks", "b b.png", picture(9, 7))]

    answer = upload(api, [*pictures, *masks, *NAMED])

    made = answer.json
    assert answer.status == 201, made
    assert answer.headers["location"] == f"/api/datasets/{made['id']}"
    assert (made["name"], made["kind"], made["state"], made["items"]) == ("night sky", "images", "ready", 2)
    assert made["about"] == {"masks": True}
    assert "path" not in made
    assert api.get("/api/datasets").json["datasets"] == [made]
    assert api.get(f"/api/datasets/{made['id']}/preview").json == {
        "kind": "images",
        "items": [{"name": "a.png", "width": 6, "height": 4}, {"name": "b b.png", "width": 9, "height": 7}],
    }
    folder = api.settings.data / "datasets" / made["id"]
    assert sorted(file.name for file in folder.rglob("*.png")) == ["a.png", "a.png", "b b.png", "b b.png"]

    assert api.delete(f"/api/datasets/{made['id']}").status == 204
    assert not folder.exists()
    assert api.get(f"/api/datasets/{made['id']}").status == 404
    assert left(api) == []


def left(api: Api) -> list[Path]:
    """What uploads left behind."""
    return [*(api.settings.data / "uploads").iterdir(), *(api.settings.data / "trash").iterdir()]


def test_an_archive_is_packed_with_its_split(api):
    text = b"@classLabel true x y\n@data\n1,2:3,4:x\n5,6:7,8:y\n"

    made = upload(api, [*SEQUENCES, ("sequences", "a_TRAIN.ts", text), ("sequences", "a_TEST.ts", text)])

    assert made.status == 201, made.text
    assert made.json["items"] == 4
    refused = upload(api, [*SEQUENCES, ("sequences", "a.ts", text.replace(b"@data", b""))])
    assert (refused.status, refused.json["field"]) == (409, "sequences")


def test_sequences_are_packed(api):
    files: list[Part] = [("sequences[]", f"{n}.npy", array(5 + n, 3)) for n in range(4)]
    labels: Part = ("labels", "labels.csv", b"file,label\n0.npy,walk\n1.npy,walk\n2.npy,run\n3.npy,run\n")

    made = upload(api, [*SEQUENCES, *files, labels])

    assert made.status == 201, made.json
    assert (made.json["items"], made.json["kind"]) == (4, "sequences")
    assert made.json["about"]["frames"] == 26
    items = api.get(f"/api/datasets/{made.json['id']}/preview?limit=2").json["items"]
    assert items == [{"id": "0.npy", "frames": 5, "label": "walk"}, {"id": "1.npy", "frames": 6, "label": "walk"}]
    assert left(api) == []


@pytest.mark.parametrize(
    "name",
    [
        *("../a.png", "/etc/passwd", "a/b.png", "..", ".hidden.png", "a\\b.png", "C:a.png", "", "x" * 201, "a\0.png"),
        *("-rf.png", "a.png.", "a.png ", "a:b.png", "a|b.png"),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(api, name):
    answer = upload(api, [*NAMED, ("images", name, picture())])

    assert answer.status in (400, 422), name
    assert left(api) == []
    assert list((api.settings.data / "datasets").iterdir()) == []


BAD: list[tuple[list[Part], int, str]] = [
    ([*NAMED, ("images", "a.png", b"no picture")], 409, "images"),
    ([*NAMED, ("images", "a.png", b"")], 409, "images"),
    ([*NAMED, ("images", "a.txt", picture())], 409, "images"),
    ([*NAMED, ("images", "a.png", picture()), ("images", "A.PNG", picture())], 409, "images"),
    ([*NAMED, ("images", "a.png", picture()), ("masks", "b.png", picture())], 409, "images"),
    ([*NAMED, ("images", "a.png", picture()), ("sequences", "a.npy", array(3, 2))], 409, "sequences"),
    ([*NAMED, ("images", "a.png", picture()), ("labels", "l.csv", b"x")], 409, "labels"),
    (NAMED, 409, "images"),
    ([("kind", None, b"images"), ("images", "a.png", picture())], 422, "name"),
    ([("name", None, b""), *NAMED[1:], ("images", "a.png", picture())], 422, "name"),
    ([("name", None, b"x" * 201), *NAMED[1:], ("images", "a.png", picture())], 422, "name"),
    ([("name", None, b"a\0b"), *NAMED[1:], ("images", "a.png", picture())], 422, "name"),
    ([*NAMED, ("name", None, b"again")], 422, "name"),
    ([NAMED[0], ("images", "a.png", picture())], 422, "kind"),
    ([NAMED[0], ("kind", None, b"rf"), ("images", "a.png", picture())], 422, "kind"),
    ([*NAMED, ("path", None, b"/etc")], 422, "path"),
    ([*NAMED, ("images", "\u00fc" * 140 + ".png", picture())], 422, "images"),  # 284 bytes: no file system takes it
    ([*SEQUENCES, ("sequences", "a.npy", b"no array")], 409, "sequences"),
    ([*SEQUENCES, ("sequences", "a.npy", b"\x93NUMPY\x01\x00" + b"\xff" * 90)], 409, "sequences"),
    ([*SEQUENCES, ("sequences", "a.npy", array(3))], 409, "sequences"),
    ([*SEQUENCES, ("sequences", "a.npy", array(3, 2)), ("sequences", "b.npy", array(3, 5))], 409, "sequences"),
    ([*SEQUENCES, ("sequences", "a.npy", array(3, 2)), ("labels", "l", b"\xff\xfe")], 409, "sequences"),
]


@pytest.mark.parametrize(("parts", "status", "field"), BAD, ids=range(len(BAD)))
def test_what_makes_no_dataset_is_refused_and_leaves_nothing(api, parts, status, field):
    answer = upload(api, parts)

    assert (answer.status, answer.json["field"]) == (status, field), answer.json
    assert left(api) == []
    assert list((api.settings.data / "datasets").iterdir()) == []
    assert api.get("/api/datasets").json["total"] == 0


def test_an_array_of_python_objects_is_never_unpickled(api):
    out = io.BytesIO()
    np.save(out, np.array([{"a": 1}, None], dtype=object), allow_pickle=True)

    answer = upload(api, [*SEQUENCES, ("sequences", "a.npy", out.getvalue())])

    assert (answer.status, answer.json["field"]) == (409, "sequences")


def test_what_is_no_form_is_refused(api):
    whole = multipart([*NAMED, ("images", "a.png", picture())])

    for body in (
        b"",
        b"no form",
        whole[:-30],
        whole.replace(b"form-data", b"other"),
        b"--a-boundary\r\n" + b"x" * 9000,
    ):
        assert upload(api, [], body=body).status == 400, body[:40]
    for kind, status in (
        ("application/json", 415),
        ("multipart/form-data", 400),
        ("", 415),
        ("multipart/mixed; boundary=a", 415),
    ):
        assert api.post("/api/datasets", whole, headers={"Content-Type": kind}).status == status, kind
    assert left(api) == []


def test_too_many_bytes_or_files_are_refused(api_with):
    with api_with(max_upload_bytes=20_000, max_upload_files=3) as api:
        assert upload(api, [*NAMED, ("images", "a.png", bytes(30_000))]).status == 413
        answer = upload(api, [*NAMED, *[("images", f"{n}.png", picture()) for n in range(4)]])
        assert (answer.status, answer.json["field"]) == (422, "images")
        assert left(api) == []


def test_an_upload_that_does_not_fit_on_the_disk_is_refused(api, monkeypatch, tmp_path):
    (tmp_path / "free").write_text(str(2**20 + 100))
    monkeypatch.setenv("BRIM_FREE_BYTES_FILE", str(tmp_path / "free"))

    assert upload(api, [*NAMED, ("images", "a.png", picture() + bytes(1000))]).status == 507
    assert left(api) == []


def test_leftovers_of_an_upload_that_was_cut_short_go_at_the_next_start(api_with, tmp_path):
    folder = tmp_path / "data" / "uploads" / ("0" * 32) / "images"
    folder.mkdir(parents=True)
    (tmp_path / "data" / "uploads" / "other.packing").mkdir()
    with api_with() as api:
        assert [path.name for path in left(api)] == ["other.packing"]


def test_a_dataset_in_use_cannot_be_deleted(api):
    from brim.rf import from_mapping
    from brim.rf.generation.dataset import generate

    dataset = api.add_dataset(path="datasets/made", items=12)
    generate(from_mapping({}), api.settings.data / "datasets" / "made", 12, device="cpu")
    job = api.submit({"job_name": "uses it", "config": {"dataset_ids": [dataset.id], "epochs": 1}})

    answer = api.delete(f"/api/datasets/{dataset.id}")
    assert answer.status == 409
    assert "uses it" in answer.json["detail"]

    preview = api.get(f"/api/datasets/{dataset.id}/preview?limit=3").json
    assert [item["index"] for item in preview["items"]] == [0, 1, 2]
    first = preview["items"][0]
    assert first["receivers_heard"] == len(first["receivers"]) > 0
    assert -90 <= first["transmitter"]["lat_deg"] <= 90
    assert first["snr_db"] == max(one["snr_db"] for one in first["receivers"])
    assert first["gdop"] > 0
    assert first["bound_m"] > 0

    api.post(f"{JOBS}/{job['id']}/cancel")
    assert api.delete(f"/api/datasets/{dataset.id}").status == 204


def test_a_dataset_by_reference_is_only_forgotten(api, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture())
    dataset = api.add_dataset(kind="images", path=str(folder), owned=False, items=1)

    assert str(folder) not in api.get(f"/api/datasets/{dataset.id}").body.decode()
    assert api.delete(f"/api/datasets/{dataset.id}").status == 204
    assert (folder / "a.png").exists()


def test_a_dataset_whose_files_are_gone_says_so_without_saying_where(api, tmp_path):
    dataset = api.add_dataset(name="moved", path=str(tmp_path / "gone"), owned=False)

    answer = api.get(f"/api/datasets/{dataset.id}/preview")

    assert answer.status == 409
    assert "moved" in answer.json["detail"]
    assert str(tmp_path) not in answer.json["detail"]


def test_a_run_shows_the_end_of_its_metrics(api):
    from brim.jobs.kinds import Spec

    row, _ = api.catalogue.jobs.submit(Spec("rf.train", "a run", {"epochs": 3}), makes="run")
    phase = api.settings.data / "runs" / row.output_id / "train"
    phase.mkdir(parents=True)
    lines = "".join(f'{{"step": {n}, "loss": {1 / (n + 1)}}}\n' for n in range(300))
    (phase / "metrics.jsonl").write_text(lines + '{"step": 300, "lo')

    shown = api.get(f"/api/runs/{row.output_id}").json

    assert (shown["name"], shown["state"], shown["job_id"]) == ("a run", "training", row.id)
    assert [line["step"] for line in shown["metrics"]] == list(range(101, 300))
    assert shown["metrics"][0]["phase"] == "train"
    api.catalogue.jobs.move(row.id, "running", of=["pending"])
    api.catalogue.jobs.move(row.id, "completed", of=["running"], output=Output(items=300, about={"best_val_loss": 1.5}))
    assert api.get("/api/runs").json["runs"][0]["summary"]["best_val_loss"] == 1.5


def test_a_client_that_hangs_up_in_the_middle_leaves_nothing(api):
    body = multipart([*NAMED, ("images", "a.png", picture() + bytes(200_000))])
    head = (
        f"POST /api/datasets HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", api.port)) as connection:
        connection.sendall(head.encode() + body[:100_000])
        until(lambda: left(api))
    until(lambda: left(api) == [])

    assert api.get("/api/datasets").json["total"] == 0


def test_curl_brings_images(api, tmp_path):
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    for n in range(3):
        (tmp_path / f"{n}.png").write_bytes(picture() + bytes(700_000))
    files = [part for n in range(3) for part in ("-F", f"images=@{tmp_path / f'{n}.png'}")]
    command = ["curl", "-sS", "-H", f"Authorization: Bearer {TOKEN}", "-F", "name=by curl", "-F", "kind=images", *files]

    done = subprocess.run([*command, f"http://127.0.0.1:{api.port}/api/datasets"], capture_output=True, check=True)

    assert b'"items":3' in done.stdout
