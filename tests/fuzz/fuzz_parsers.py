"""Every parser of bytes from outside: valid seeds, a call, and the errors it may answer with.

A new parser is one more entry in PARSERS.
"""

import asyncio
import csv
import io
import json
import random
import struct
import tarfile
import tempfile
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from PIL import Image
from safetensors.torch import save

from brim.cli.client import read_events
from brim.config import read, settings
from brim.engine.storage import Dataset, LocalPlace, ShardEntry, ShardWriter, Stored
from brim.engine.storage.shard_file import read_header
from brim.errors import BrimError
from brim.jobs.kinds.bodies import read_body
from brim.rf.config import GenerateConfig, from_mapping, read_stations, read_toml
from brim.rf.location.evaluate import parse_observations
from brim.rf.measurement.receivers import open_receivers
from brim.rf.recordings.kiwi import read_wav
from brim.rf.recordings.opening import read_listing
from brim.rf.recordings.sigmf import read_sigmf
from brim.segmentation.images import image_size
from brim.segmentation.images.reading import read_image
from brim.sequences.config import SequenceConfig, SourceConfig
from brim.sequences.corpus.archives import parse_archive
from brim.sequences.corpus.audio import decode, read_headers
from brim.sequences.corpus.labels import read_csv
from brim.sequences.corpus.npy import parse as parse_npy
from brim.sequences.corpus.packed import Corpus, _build_table
from brim.sequences.corpus.packing import pack
from brim.sequences.corpus.source import Skipped
from brim.sequences.corpus.synthetic import make_sequences
from brim.sequences.corpus.tables import read_npz
from brim.sequences.corpus.tables import read_table as read_sequence_table
from brim.sequences.evaluation.runs import read_about, read_tensors
from brim.service.access import Access
from brim.service.api.auth import Gate
from brim.service.api.body import Unreadable, Upload, boundary_of, parse
from brim.service.api.routes.predict import SegmentForm
from brim.service.prediction.request import FormReader

MAX_PIXELS = 2**16
BOUNDARY = b"boundary"
TOKEN = "the-token-that-no-damage-guesses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    name: str
    seeds: Callable[[], Sequence[bytes]]
    call: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = (BrimError,)  # others are bugs
    tokens: Sequence[bytes] = ()  # words of the format
    is_json: bool = False  # half of the inputs keep the form of JSON and have other values
    weight: float = 1.0  # share of all inputs, relative to the others


@cache
def folder() -> Path:
    """A folder for parsers of files, in memory where there is such a disk."""
    return Path(tempfile.mkdtemp(prefix="brim-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))


def file_of(data: bytes, name: str) -> Path:
    (folder() / name).write_bytes(data)
    return folder() / name


# Images


def images() -> list[bytes]:
    rng = np.random.default_rng(0)
    grey = Image.fromarray(rng.integers(0, 255, (9, 13), np.uint8))
    colours = Image.fromarray(rng.integers(0, 255, (8, 16, 3), np.uint8))
    deep = Image.fromarray(rng.integers(0, 2**16, (5, 7), np.uint16))

    def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
        out = io.BytesIO()
        image.save(out, kind, **options)
        return out.getvalue()

    files = [saved(image, kind) for image in (grey, colours) for kind in ("PNG", "JPEG", "TIFF", "BMP", "GIF", "PPM")]
    files += [saved(colours, "TIFF", compression=name) for name in ("tiff_deflate", "tiff_lzw", "packbits")]
    files += [saved(deep, "PNG"), saved(deep, "TIFF"), saved(colours, "TIFF", save_all=True, append_images=[colours])]
    files += [saved(colours, "JPEG", progressive=True), saved(colours, "TIFF", big_tiff=True)]
    files += [b"P5\n# a comment\n3 2\n255\n123456", b"P2 2 1 9 1 2", b"P6 1 1\n65535\n123456"]
    array = np.asarray(colours)
    for layout in ({"planarconfig": "separate"}, {"tile": (16, 16)}, {"bigtiff": True, "byteorder": ">"}):
        out = io.BytesIO()
        tifffile.imwrite(
            out, np.moveaxis(array, 2, 0) if "planarconfig" in layout else array, photometric="rgb", **layout
        )
        files.append(out.getvalue())
    planes = np.moveaxis(array, 2, 0)
    for options in (
        {"ome": True, "metadata": {"axes": "CYX", "PhysicalSizeX": 0.5, "Channel": {"Name": ["a", "b", "c"]}}},
        {"imagej": True, "metadata": {"axes": "CYX", "unit": "um"}, "resolution": (2, 2)},
        {"metadata": {"axes": "ZYX"}, "compression": "deflate", "predictor": True},
        {"compression": "zstd", "tile": (16, 16)}, {"compression": "jpeg"}, {"compression": "jpeg2000"},
    ):  # fmt: skip
        tifffile.imwrite(out := io.BytesIO(), planes, photometric="minisblack", **options)
        files.append(out.getvalue())
    return [*files, saved(colours, "WEBP", lossless=True), saved(colours, "JPEG2000")]


def read_sized(data: bytes) -> None:
    """Pixels as many as the header says."""
    size = image_size(data, "x")
    assert read_image(data, max_pixels=MAX_PIXELS).shape[1::-1] == size


# Sequences


TS_FILES = [
    b"@problemName a\n@timeStamps false\n@classLabel true a b\n@data\n1.0,2.0:3,4:a\n# x\n5,?:6,nan:b\n",
    b"@timestamps true\n@targetlabel true\n@data\n(0,1.5),(1,2.5):0.25\n",
]
ARFF_FILES = [
    b"@relation a\n@attribute x1 numeric\n@attribute x2 numeric\n@attribute target {1,2}\n@data\n1,2,1\n3,?,2\n",
    b"@attribute m relational\n@attribute t0 numeric\n@end m\n@attribute c {a,b}\n@data\n'1,2\\n3,4',a\n\"5\\n6\",b\n",
]
SEQUENCE_TABLES = [b"id,time,x,y,label\n1,0,1.5,2,a\n1,1,2.5,3,a\n2,0,1,1,b\n", b"1;2\n3;4\n", b"x\ty\n1\t2\n"]


def npz_files() -> list[bytes]:
    files = []
    stack = np.ones((3, 4, 2), np.float32)
    contents = ({"a": stack[0], "b": stack[1]}, {"X_train": stack, "y_train": np.arange(3), "X_test": stack})
    for arrays, write in ((contents[0], np.savez), (contents[1], np.savez_compressed)):
        write(out := io.BytesIO(), **arrays)
        files.append(out.getvalue())
    return files


def audio_files() -> list[bytes]:
    files = []
    for channels, width, rate in ((1, 2, 16_000), (2, 1, 8_000), (1, 3, 44_100)):
        with wave.open(out := io.BytesIO(), "wb") as file:
            file.setparams((channels, width, rate, 0, "NONE", ""))
            file.writeframes(bytes(range(1, 121)) * channels)
        files.append(out.getvalue())
    return files


def read_audio(data: bytes) -> object:
    """The header, and the samples where it is good; faults are answers, not errors."""
    name = file_of(data, "audio.wav").name
    (header,) = read_headers(folder(), [name], SourceConfig(device="cpu"))
    if isinstance(header, Skipped):
        raise BrimError(header.fault)
    samples = decode(header)
    if isinstance(samples, str):
        raise BrimError(samples)
    return samples


def npy_files() -> list[bytes]:
    arrays = [np.ones((3, 2), np.float32), np.arange(12).reshape(4, 3), np.ones((5, 2), ">f8"), np.ones((2, 2), "<f2")]
    arrays += [np.asfortranarray(np.ones((3, 4), np.float32)), np.zeros(5), np.array([[None]]), np.array([["a"]])]
    files = []
    for array in arrays:
        out = io.BytesIO()
        np.save(out, array)
        files.append(out.getvalue())
    np.lib.format.write_array(out := io.BytesIO(), np.ones((2, 3), np.float32), version=(2, 0))
    return [*files, out.getvalue()]


def tables() -> list[bytes]:
    columns = {
        "ids": ["a.npy", "b.npy"], "starts": [0, 3], "lengths": [3, 2], "labels": [0, -1], "split": ["train", ""],
        "classes": ["x"],
    }  # fmt: skip
    return [json.dumps(columns).encode()]


def read_table(data: bytes) -> object:
    """As packed.py does, for which any of these errors is an altered table."""
    try:
        return _build_table(json.loads(data), 5)
    except (ValueError, KeyError, TypeError, RuntimeError):
        return None


def runs() -> list[bytes]:
    about = {
        "format_version": 1, "kind": "sequence-train", "mode": "supervised", "classes": ["a", "b"], "held_out": ["x"],
        "corpus": {"name": "c"}, "training": {"batch_size": 4}, "outputs": 2, "model": SequenceConfig(dim=3).as_dict(),
    }  # fmt: skip
    return [json.dumps(about).encode()]


# Datasets


def tensor_files() -> list[bytes]:
    return [save({"frames": torch.ones(3, 2), "label": torch.arange(3)}), save({"x": torch.ones(1).half()}, {"a": "b"})]


def read_shard_header(data: bytes) -> object:
    file = file_of(data, "shard")
    return read_header(
        Stored(LocalPlace(file.parent), file.name),
        ShardEntry(name="shard", items=3, bytes=len(data), sha256="", totals={}),
    )


def manifests() -> list[bytes]:
    out = folder() / "dataset"
    if not out.exists():
        with ShardWriter(out, {"kind": "rf"}, items_per_shard=2) as writer:
            writer.append({"x": torch.ones(3, 2)}, {"tried": torch.arange(3)})
            writer.finish()
    return [(out / "manifest.json").read_bytes()]


def read_manifest(data: bytes) -> object:
    out = folder() / "dataset"
    (out / "manifest.json").write_bytes(data)
    dataset = Dataset(out)
    return [dataset.shard(number) for number in range(len(dataset.shards))]


def corpora() -> list[bytes]:
    out = folder() / "corpus"
    if not out.exists():
        pack(make_sequences(folder() / "npy", 4, 2, 2, mean_length=5), out, shard_bytes=64)
    return [(out / "manifest.json").read_bytes()]


def read_corpus(data: bytes) -> object:
    out = folder() / "corpus"
    (out / "manifest.json").write_bytes(data)
    return Corpus.open(out).sequence(3)


# Requests


def form(*parts: tuple[str, bytes]) -> bytes:
    lines = [b'--%s\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n' % (BOUNDARY, name.encode(), body)
             for name, body in parts]  # fmt: skip
    return b"".join([*lines, b"--" + BOUNDARY + b"--\r\n"])


def forms() -> list[bytes]:
    file = 'name="file"; filename="a.png"\r\nContent-Type: image/png'
    fields = [('name="threshold"', b"0.25"), ('name="detect_holes"', b"true"), ('name="model"', b"m")]
    return [form((file, b"\x89PNG" * 9), *fields), form(('name="images[]"; filename="x"', b"\r\n--bound"))]


def uploads() -> list[bytes]:
    texts = [('name="name"', b"cells"), ('name="kind"', b"images"), ('name="labels"; filename="l.csv"', b"file,label")]
    images = [('name="images"; filename="a b.png"', b"123"), ('name="masks[]"; filename="x"', b"\r\n--bound")]
    return [form(*texts, *images), form(*images)]


def read_form(data: bytes) -> object:
    rng = random.Random(data)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(4)))
    parts = FormReader(BOUNDARY, settings(SegmentForm), ("file", "images"), 3, 500)
    for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
        parts.feed(data[start:stop])
    parts.finish()
    return read(SegmentForm, parts.values, "")


def read_upload(data: bytes) -> object:
    out = folder() / "upload"
    try:
        with Upload(out, BOUNDARY, max_files=3, min_free_bytes=0) as upload:
            upload.feed(data)
            upload.finish()
        inside = {path.relative_to(out).parts[0] for path in out.rglob("*") if path.is_file()}
        assert inside <= {"images", "masks", "sequences", "labels.csv"}
        return upload.texts
    finally:
        for path in sorted(out.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        out.rmdir()


def requests() -> list[bytes]:
    """None of them has the token."""
    known = (
        b"Host: localhost:8000\nOrigin: http://localhost:8000\nAuthorization: Bearer wrong\nCookie: a=b; brim_session=x"
    )
    return [
        b"GET /?token=wrong&x=1\n" + known,
        b"POST /api/x\nHost: [::1]:80\nCookie: brim_session",
        b"GET /health\n" + known,
    ]


def pass_gate(data: bytes) -> object:
    """Only /health is reached without the token."""
    head, *lines = data.split(b"\n")
    method, _, target = head.partition(b" ")
    path, _, query = target.partition(b"?")
    pairs = [line.partition(b": ") for line in lines]
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http", "method": method.decode("latin-1"), "path": path.decode("latin-1"), "query_string": query,
        "headers": [(name, value) for name, _, value in pairs],
    }  # fmt: skip
    gate = Gate(app, Access(Path("/nowhere"), TOKEN), hosts={"localhost", "[::1]"})
    _loop().run_until_complete(gate(scope, receive, send))
    assert set(reached) <= {"/health"}
    return reached


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def jobs() -> list[bytes]:
    bodies: list[dict[str, Any]] = [
        {"dataset_name": "d", "num_samples": 10, "dataset_type": "feature_based", "config": {"tx_power_dbm": 30.0}},
        {"job_name": "t", "config": {"dataset_ids": ["abc"], "batch_size": 32, "epochs": 2, "learning_rate": 0.001}},
        {"kind": "segment.train", "name": "s", "config": {"dataset_ids": ["abc"], "model": "unet_tiny", "size": 64}},
        {"kind": "sequence.train", "name": "q", "config": {"dataset_ids": ["abc"], "mode": "supervised", "seed": 3}},
        {"kind": "rf.generate", "name": "g", "config": {"num_samples": 3, "seed": 1}, "devices": "all"},
    ]
    return [json.dumps(body).encode() for body in bodies]


def observations() -> list[bytes]:
    stations = [
        {"name": name, "lat": 45 + k / 10, "lon": 7.5 + k / 10, "alt": 200.0, "rssi_dbm": -90.0 - k, "snr_db": 12.0,
         "arrival_difference_us": k * 1.5}
        for k, name in enumerate("abcd")
    ]  # fmt: skip
    means = {"features": {"rssi_dbm": {"mean": -80.0, "std": 1.0, "min": -82.0, "max": -79.0}}}
    other = [{**station, **means} for station in stations[:3]]
    many = {"observations": [{"id": "x", "reference": "a", "stations": stations}, {"stations": other}]}
    return [json.dumps(value).encode() for value in (many, {"stations": stations})]


def tables_of_stations() -> list[bytes]:
    out = io.StringIO()
    rows = [["name", "lat", "lon", "alt"], *([f"s{k}", 45 + k / 10, 7.5 - k / 20, 100 * k] for k in range(4))]
    csv.writer(out).writerows(rows)
    return [out.getvalue().encode()]


EVENTS = [
    b'id: 1\nevent: status\ndata: {"status": "running"}\n\n: keep\n\n',
    b'id: 2\ndata: {"current": 1,\ndata: "total": 3}\n\n',
    b'event: progress\r\ndata: {"percent": null}\r\n\r\n',
]
TYPES = [b"multipart/form-data; boundary=abc", b'multipart/form-data; boundary="a b"; x=1']

_JSON_TOKENS = (b"{", b"}", b"[" * 2000, b"null", b"NaN", b"1e999", b'"\\ud800"', b"9" * 5000, b"-0", b'":', b",")


def kiwi_files() -> list[bytes]:
    """A KiwiSDR recording of 16 blocks, and an ordinary one with a start."""
    head = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 2, 12_000, 48_000, 4, 16)
    blocks = [
        b"kiwi" + struct.pack("<IBBII", 10, 1, 0, 370_000, n * 42_666_667) + b"data" + struct.pack("<I", 64) + bytes(64)
        for n in range(16)
    ]
    auxi = b"auxi" + struct.pack("<I8H8HI", 36, 2026, 1, 6, 31, 12, 0, 0, 250, *[0] * 8, 7_100_000)
    bodies = [head + b"".join(blocks), head + auxi + b"data" + struct.pack("<I", 256) + bytes(256)]
    return [b"RIFF" + struct.pack("<I", len(body)) + body for body in bodies]


def sigmf_metas() -> list[bytes]:
    place = {"type": "Point", "coordinates": [8.8, 46.5, 400.0]}
    captures = [
        {"core:sample_start": 0, "core:datetime": "2026-01-31T12:00:00.5Z", "core:frequency": 7.1e6,
         "core:geolocation": place, "core:header_bytes": 4},
        {"core:sample_start": 20, "core:datetime": "2026-01-31T12:00:00.75+01:00"},
    ]  # fmt: skip
    about = {"core:datatype": "ci16_le", "core:sample_rate": 48_000, "core:version": "1.2.0", "core:hw": "x"}
    return [json.dumps({"global": about, "captures": captures, "annotations": []}).encode()]


def sigmf_archives() -> list[bytes]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in (("x/x.sigmf-meta", sigmf_metas()[0]), ("x/x.sigmf-data", bytes(400))):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return [out.getvalue()]


def timed(path: Path) -> object:
    """A recording with its clock, as measuring opens it."""
    receivers, _ = open_receivers([path], [])
    return receivers


def read_meta(data: bytes) -> object:
    file_of(bytes(400), "x.sigmf-data")
    return read_sigmf(file_of(data, "x.sigmf-meta"))


PARSERS = (
    Parser(name="image size", seeds=images, call=lambda data: image_size(data, "x"), weight=4,
           tokens=(b"\xff\xc0", b"\xff\x01", b"IHDR", b"II*\0", b"MM\0+", b"#" * 300, b"\n# ")),
    Parser(name="image", seeds=images, call=read_sized, weight=3,
           tokens=(b"\xff\xd9", b"\xff\xda", b"IDAT", b"IEND", b"tRNS", b'SizeC="9"', b'IFD="', b"images=99")),
    Parser(name="npy", seeds=npy_files, call=parse_npy, tokens=(b"'descr'", b"(", b"-1", b"9" * 30, b"'|O'", b"'<f8'")),
    Parser(name="safetensors", seeds=tensor_files, call=lambda data: read_tensors(file_of(data, "w.safetensors")),
           tokens=(b'"dtype":"F64"', b"[0,0]", b"[-1,8]", b"18446744073709551615")),
    Parser(name="shard header", seeds=tensor_files, call=read_shard_header,
           tokens=(b'"dtype":"F64"', b"[0,0]", b"[-1,8]", b"1e400", b"18446744073709551615")),
    Parser(name="manifest", seeds=manifests, call=read_manifest, is_json=True, tokens=_JSON_TOKENS),
    Parser(name="corpus", seeds=corpora, call=read_corpus, is_json=True, tokens=_JSON_TOKENS),
    Parser(name="corpus table", seeds=tables, call=read_table, is_json=True, tokens=_JSON_TOKENS),
    Parser(name="run.json", seeds=runs, call=lambda data: read_about(file_of(data, "run.json").parent), is_json=True,
           tokens=_JSON_TOKENS),
    Parser(name="labels.csv", seeds=lambda: [b"file,label,split\na.npy,x,train\nb/c.npy,\"y\"\"\",test\n"],
           call=lambda data: read_csv(file_of(data, "labels.csv")), tokens=(b'"', b"\0", b"\r", b"," * 200)),
    Parser(name="stations.csv", seeds=tables_of_stations, call=lambda data: read_stations(file_of(data, "s.csv")),
           tokens=(b'"', b"\0", b"nan", b"inf", b"," * 200, b"9" * 500)),
    Parser(name="config.toml", seeds=lambda: [b"frequency_mhz = 145.0\nseed = 3\nloss = \"free_space\"\n"],
           call=lambda data: from_mapping(read_toml(file_of(data, "c.toml"))),
           tokens=(b"nan", b"-1", b"[" * 800, b"\"", b"2020-01-01", b"1e400", b"stations = [1]", b"preset = 1\n")),
    Parser(name="observations", seeds=observations, is_json=True, tokens=_JSON_TOKENS, weight=0.5,
           call=lambda data: parse_observations(parse(data), GenerateConfig()), errors=(BrimError, Unreadable)),
    Parser(name="kiwi wav", seeds=kiwi_files, weight=0.5,
           call=lambda data: (read_wav(file_of(data, "a.wav")), timed(file_of(data, "a.wav"))),
           tokens=(b"kiwi", b"data", b"fmt ", b"auxi", b"RF64", b"\xff\xff\xff\xff", b"\0\0\0\0")),
    Parser(name="sigmf", seeds=sigmf_metas, call=read_meta, is_json=True, tokens=_JSON_TOKENS, weight=0.5),
    Parser(name="sigmf archive", seeds=sigmf_archives, weight=0.3,
           call=lambda data: read_sigmf(file_of(data, "x.sigmf")), tokens=(b"ustar", b"\0" * 512, b"0" * 11, b"x/x")),
    Parser(name="recordings.csv", weight=0.5,
           seeds=lambda: [b"file,station,lat,lon,start,rate_hz,centre_hz\na.cu8,A,1,2,2026-01-31T12:00:00Z,1e6,1e8\n"],
           call=lambda data: read_listing(file_of(data, "r.csv")), tokens=(b'"', b"\0", b"nan", b"," * 200)),
    Parser(name="job body", seeds=jobs, call=lambda data: read_body(parse(data)), errors=(BrimError, Unreadable),
           is_json=True, tokens=_JSON_TOKENS),
    Parser(name="request gate", seeds=requests, call=pass_gate, weight=0.5,
           tokens=(b"brim_session=", b"token=", b"%00", b"Bearer ", b"/health", b"\nHost: x", b"]", b":", b"\xff")),
    Parser(name="content type", seeds=lambda: TYPES, errors=(BrimError, Unreadable), weight=0.5,
           call=lambda data: boundary_of(data.decode("latin-1")), tokens=(b";", b'"', b"\\", b"=", b"boundary*=''x")),
    Parser(name="multipart form", seeds=forms, call=read_form, errors=(BrimError, Unreadable),
           tokens=(b"\r\n", b"--boundary", b"--boundary--", b"filename*=utf-8''%ff", b'name="', b"\r\nX: y")),
    Parser(name="upload", seeds=uploads, call=read_upload, errors=(BrimError, Unreadable), weight=0.3,
           tokens=(b"\r\n", b"--boundary", b"--boundary--", b"..", b"/", b"\0", "ü".encode() * 150, b'filename="')),
    Parser(name="events", seeds=lambda: EVENTS, call=lambda data: list(read_events(io.BytesIO(data))),
           tokens=(b"data: {}\n\n", b"\n\n", b"\r", b":", b"id", b"data: [1]\n\n", b"data: \xff\n\n")),
    Parser(name="archive .ts", seeds=lambda: TS_FILES, weight=0.7,
           call=lambda data: parse_archive(data.decode("utf-8", "replace"), "a.ts", ".ts"),
           tokens=(b":", b",", b"nan", b"?", b"@data\n", b"(1,2)", b"@timeStamps true\n", b"1e999", b"#")),
    Parser(name="archive .arff", seeds=lambda: ARFF_FILES, weight=0.7,
           call=lambda data: parse_archive(data.decode("utf-8", "replace"), "a.arff", ".arff"),
           tokens=(b"'", b'"', b"\\n", b"@attribute x relational\n", b"@data\n", b"?", b"%", b"{")),
    Parser(name="archive .tsv", seeds=lambda: [b"1\t0.5\t-1e3\t2\n2\t1\tNaN\tNaN\n"], weight=0.3,
           call=lambda data: parse_archive(data.decode("utf-8", "replace"), "a.tsv", ".tsv"),
           tokens=(b"\t", b"nan", b"?", b",", b"1e999", b"\t" * 300)),
    Parser(name="npz", seeds=npz_files, call=lambda data: read_npz(io.BytesIO(data), "a.npz"), weight=0.5,
           tokens=(b"PK\x01\x02", b"'descr'", b"-1", b"9" * 30, b"'|O'", b"'<U8'", b"X_train", b"lengths")),
    Parser(name="table of sequences", seeds=lambda: SEQUENCE_TABLES, weight=0.2,
           call=lambda data: read_sequence_table(data, "a.csv", ".csv"),
           tokens=(b'"', b"\0", b"nan", b";", b"," * 200, b"id", b"9" * 500, b"\n\n", b"1e999")),
    Parser(name="audio", seeds=audio_files, call=read_audio, weight=0.1,
           tokens=(b"data", b"fmt ", b"LIST", b"\xff\xff\xff\xff", b"RIFX", b"\0\0\0\0")),
)  # fmt: skip
