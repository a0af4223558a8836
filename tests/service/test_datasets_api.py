"""Datasets over HTTP: brought as files, listed, previewed, deleted; nothing lands where it should not."""

import io

import numpy as np
import pytest
from live_api import FORM, JOBS, Answer, Api, Part, array, multipart, picture

from waiting import until

DATASETS = "/api/datasets"
NAMED: list[Part] = [("name", None, b"night sky"), ("kind", None, b"images")]
SEQUENCES: list[Part] = [("name", None, b"steps"), ("kind", None, b"sequences")]


def upload(api: Api, parts: list[Part]) -> Answer:
    return api.send(DATASETS, *parts)


def is_clean(api: Api) -> bool:
    """Whether nothing is stored, nor left of what was not."""
    stored = list((api.settings.data / "datasets").iterdir())
    return api.uploads() == stored == [] and api.get(DATASETS).json["total"] == 0


def test_images_with_masks_are_brought_listed_previewed_and_deleted(api):
    pictures: list[Part] = [("images", "a.png", picture()), ("images", "b b.png", picture(9, 7))]
    masks: list[Part] = [("masks", name, content) for _, name, content in pictures]

    answer = upload(api, [*pictures, *masks, *NAMED])

    made = answer.json
    assert answer.status == 201, made
    assert answer.headers["location"] == f"{DATASETS}/{made['id']}"
    assert (made["name"], made["kind"], made["state"], made["items"]) == ("night sky", "images", "ready", 2)
    assert made["about"] == {"masks": True}
    assert made["bytes"] == sum(len(content) for _, _, content in (*pictures, *masks))
    assert "path" not in made
    assert api.get(DATASETS).json["datasets"] == [made]
    assert [api.get(f"{DATASETS}?kind={kind}").json["total"] for kind in ("images", "rf")] == [1, 0]
    assert api.get(f"{DATASETS}/{made['id']}/preview").json == {
        "kind": "images",
        "items": [{"name": "a.png", "width": 6, "height": 4}, {"name": "b b.png", "width": 9, "height": 7}],
    }
    assert len(api.get(f"{DATASETS}/{made['id']}/preview?limit=1").json["items"]) == 1
    folder = api.settings.data / "datasets" / made["id"]
    assert sorted(file.name for file in folder.rglob("*.png")) == ["a.png", "a.png", "b b.png", "b b.png"]

    assert api.delete(f"{DATASETS}/{made['id']}").status == 204
    assert not folder.exists()
    assert api.get(f"{DATASETS}/{made['id']}").status == 404
    assert api.uploads() == []


def test_sequences_are_packed_with_their_labels_or_their_split(api):
    files: list[Part] = [("sequences[]", f"{n}.npy", array(5 + n, 3)) for n in range(4)]
    labels: Part = ("labels", "labels.csv", b"file,label\n0.npy,walk\n1.npy,walk\n2.npy,run\n3.npy,run\n")
    made = upload(api, [*SEQUENCES, *files, labels])
    text = b"@classLabel true x y\n@data\n1,2:3,4:x\n5,6:7,8:y\n"
    archive = upload(api, [*SEQUENCES, ("sequences", "a_TRAIN.ts", text), ("sequences", "a_TEST.ts", text)])

    assert (made.status, archive.status) == (201, 201), (made.body, archive.body)
    assert (made.json["items"], made.json["kind"], archive.json["items"]) == (4, "sequences", 4)
    assert made.json["about"]["frames"] == 26
    items = api.get(f"{DATASETS}/{made.json['id']}/preview?limit=2").json["items"]
    assert items == [{"id": "0.npy", "frames": 5, "label": "walk"}, {"id": "1.npy", "frames": 6, "label": "walk"}]
    assert api.uploads() == []


@pytest.mark.parametrize(
    "name",
    [
        *("../a.png", "/etc/passwd", "a/b.png", "..", ".hidden.png", "a\\b.png", "C:a.png", "", "x" * 201, "a\0.png"),
        *("-rf.png", "a.png.", "a.png ", "a|b.png", "\u00fc" * 140 + ".png"),  # 284 bytes: no file system takes it
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(api, name):
    answer = upload(api, [*NAMED, ("images", name, picture())])

    assert answer.status in (400, 422), name
    assert is_clean(api)


BAD: list[tuple[list[Part], int, str]] = [
    ([*NAMED, ("images", "a.png", b"no picture")], 409, "images"),
    ([*NAMED, ("images", "a.txt", picture())], 409, "images"),
    ([*NAMED, ("images", "a.png", picture()), ("images", "A.PNG", picture())], 409, "images"),
    ([*NAMED, ("images", "a.png", picture()), ("masks", "b.png", picture())], 409, "images"),
    ([*NAMED, ("images", "a.png", picture()), ("sequences", "a.npy", array(3, 2))], 409, "sequences"),
    (NAMED, 409, "images"),
    ([("kind", None, b"images"), ("images", "a.png", picture())], 422, "name"),
    ([("name", None, b"a\0b"), *NAMED[1:], ("images", "a.png", picture())], 422, "name"),
    ([*NAMED, ("name", None, b"again")], 422, "name"),
    ([*NAMED, ("path", None, b"/etc")], 422, "path"),
    ([*SEQUENCES, ("sequences", "a.npy", b"\x93NUMPY\x01\x00" + b"\xff" * 90)], 409, "sequences"),
    ([*SEQUENCES, ("sequences", "a.npy", array(3, 2)), ("labels", "l", b"\xff\xfe")], 409, "sequences"),
]


@pytest.mark.parametrize(("parts", "status", "field"), BAD, ids=range(len(BAD)))
def test_what_makes_no_dataset_is_refused_and_leaves_nothing(api, parts, status, field):
    answer = upload(api, parts)

    assert (answer.status, answer.json["field"]) == (status, field), answer.json
    assert is_clean(api)


def test_an_array_of_python_objects_is_never_unpickled(api):
    out = io.BytesIO()
    np.save(out, np.array([{"a": 1}, None], dtype=object), allow_pickle=True)

    answer = upload(api, [*SEQUENCES, ("sequences", "a.npy", out.getvalue())])

    assert (answer.status, answer.json["field"]) == (409, "sequences")


def test_what_is_no_form_is_refused(api):
    whole = multipart([*NAMED, ("images", "a.png", picture())])
    other = whole.replace(b"form-data", b"other")

    for body in (b"", b"no form", whole[:-30], other, b"--a-boundary\r\n" + b"x" * 9000):
        assert api.post(DATASETS, body, headers=FORM).status == 400, body[:40]
    for kind, status in (("application/json", 415), ("multipart/form-data", 400), ("multipart/mixed; boundary=a", 415)):
        assert api.post(DATASETS, whole, headers={"Content-Type": kind}).status == status, kind
    assert is_clean(api)


def test_too_many_bytes_or_files_or_too_little_room_on_the_disk_are_refused(api_with, monkeypatch, tmp_path):
    with api_with(max_upload_bytes=20_000, max_upload_files=3) as api:
        assert upload(api, [*NAMED, ("images", "a.png", bytes(30_000))]).status == 413
        answer = upload(api, [*NAMED, *[("images", f"{n}.png", picture()) for n in range(4)]])
        assert (answer.status, answer.json["field"]) == (422, "images")
        (tmp_path / "free").write_text(str(api.settings.min_free_bytes + 100))
        monkeypatch.setenv("BRIM_FREE_BYTES_FILE", str(tmp_path / "free"))
        assert upload(api, [*NAMED, ("images", "a.png", picture() + bytes(1000))]).status == 507
        assert is_clean(api)
        (tmp_path / "free").write_text(str(2**30))
        assert upload(api, [*NAMED, *[("images", f"{n}.png", picture()) for n in range(3)]]).status == 201


def test_a_dataset_in_use_cannot_be_deleted(api):
    dataset = api.write_dataset("made", 12)
    job = api.submit({"job_name": "uses it", "config": {"dataset_ids": [dataset], "epochs": 1}})

    answer = api.delete(f"{DATASETS}/{dataset}")
    assert (answer.status, "uses it" in answer.json["detail"]) == (409, True)
    preview = api.get(f"{DATASETS}/{dataset}/preview?limit=3").json
    assert [item["index"] for item in preview["items"]] == [0, 1, 2]
    first = preview["items"][0]
    assert first["receivers_heard"] == len(first["receivers"]) > 0
    assert 43 < first["transmitter"]["lat_deg"] < 47
    assert 5 < first["transmitter"]["lon_deg"] < 10
    assert first["snr_db"] == max(one["snr_db"] for one in first["receivers"])

    api.post(f"{JOBS}/{job['id']}/cancel")
    assert api.delete(f"{DATASETS}/{dataset}").status == 204


def test_a_dataset_by_reference_is_only_forgotten_and_nobody_is_told_where_it_is(api, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture())
    dataset = api.add_dataset(kind="images", path=str(folder), owned=False, items=1)
    moved = api.add_dataset(name="moved", path=str(tmp_path / "gone"), owned=False)

    assert str(folder) not in api.get(f"{DATASETS}/{dataset.id}").body.decode()
    assert api.delete(f"{DATASETS}/{dataset.id}").status == 204
    assert (folder / "a.png").exists()
    answer = api.get(f"{DATASETS}/{moved.id}/preview")
    assert (answer.status, "moved" in answer.json["detail"]) == (409, True)
    assert str(tmp_path) not in answer.json["detail"]


def test_a_client_that_hangs_up_in_the_middle_leaves_nothing(api):
    body = multipart([*NAMED, ("images", "a.png", picture() + bytes(200_000))])
    with api.connect("POST", DATASETS, body, upto=100_000):
        until(api.uploads)
    until(lambda: is_clean(api))
