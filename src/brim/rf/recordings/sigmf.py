"""SigMF recordings: a `.sigmf-meta` with its `.sigmf-data`, or an archive `.sigmf` that holds both.

Read: every integer and floating type in either byte order, complex or real; captures with their own start, header
bytes and frequency; `core:datetime`, `core:geolocation`, `core:hw`, `core:dataset`. The data is compared
with `core:sha512`. An archive is a tar; its data is read in place.
"""

import hashlib
import json
import re
import tarfile
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from brim.rf.recordings.recording import LIMIT_BYTES, Recording, Samples, check_rate, file_size, unreadable

META, DATA, ARCHIVE = ".sigmf-meta", ".sigmf-data", ".sigmf"
MAX_CAPTURES = 1_000_000
_TYPE = re.compile(r"([cr])([fiu])(8|16|32|64)(?:_([lb]e))?")
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(Z|[+-]\d\d:?\d\d)?")
_SINGLE = {"i8", "u8"}  # no byte order


def read_sigmf(path: Path) -> list[Recording]:
    """Open a recording by either of its files, or all recordings of an archive."""
    if path.name.endswith(ARCHIVE):
        return _read_archive(path)
    stem = path.name.removesuffix(META).removesuffix(DATA)
    meta_path = path.with_name(stem + META)
    if file_size(meta_path) > LIMIT_BYTES:
        raise unreadable(path, "its metadata is larger than 64 MiB")
    meta = _parse(path, meta_path.read_bytes())
    name = _global(path, meta).get("core:dataset")
    data_path = path.with_name(PurePosixPath(str(name)).name if name else stem + DATA)
    return [_recording(path, meta, data_path, 0, file_size(data_path), station=None)]


def _read_archive(path: Path) -> list[Recording]:
    file_size(path)
    try:
        with tarfile.open(path, "r:") as archive:
            members = {member.name: member for member in archive if member.isfile()}
            texts = {}
            for name, member in members.items():
                if name.endswith(META):
                    file = archive.extractfile(member)
                    if file is None or member.size > LIMIT_BYTES:
                        raise unreadable(path, f"its metadata {name} cannot be read")
                    texts[name] = file.read()
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError) as failure:
        raise unreadable(path, f"not a SigMF archive: {failure}") from failure
    if not texts:
        raise unreadable(path, f"an archive without a {META} file")
    out = []
    for name, text in texts.items():
        data = members.get(name.removesuffix(META) + DATA)
        if data is None:
            raise unreadable(path, f"{name} has no {DATA} beside it")
        if data.offset_data + data.size > file_size(path):
            raise unreadable(path, f"{data.name} is cut off")
        out.append(_recording(path, _parse(path, text), path, data.offset_data, data.size, station=None))
    return out


def _parse(path: Path, text: bytes) -> Mapping[str, Any]:
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise unreadable(path, f"its metadata is not valid JSON: {failure}") from failure
    if not isinstance(meta, Mapping):
        raise unreadable(path, "its metadata is no object")
    return meta


def _global(path: Path, meta: Mapping[str, Any]) -> Mapping[str, Any]:
    about = meta.get("global")
    if not isinstance(about, Mapping):
        raise unreadable(path, "its metadata has no global object")
    return about


def _recording(
    path: Path, meta: Mapping[str, Any], data: Path, begin: int, size: int, *, station: str | None
) -> Recording:
    about = _global(path, meta)
    listed = meta.get("captures") or [{}]
    if (
        not isinstance(listed, list)
        or len(listed) > MAX_CAPTURES
        or not all(isinstance(one, Mapping) for one in listed)
    ):
        raise unreadable(path, "its captures are not a list of objects")
    dtype, components = _datatype(path, about.get("core:datatype"))
    if about.get("core:num_channels", 1) != 1:
        raise unreadable(path, f"{about['core:num_channels']} channels; one receiver has one")
    _check_hash(path, about.get("core:sha512"), data, begin, size)
    samples = _samples(path, listed, data, begin, size - _whole(path, about, "core:trailing_bytes"), dtype, components)
    times = [
        (int(one.get("core:sample_start", 0)), read_time(path, one["core:datetime"])) for one in listed if _dated(one)
    ]
    base = _whole(path, listed[0], "core:sample_start")
    epoch = times[0][1][0] if times else 0
    frequencies = {float(one["core:frequency"]) for one in listed if _is_number(one.get("core:frequency"))}
    if len(frequencies) > 1:
        raise unreadable(path, f"its captures are at {len(frequencies)} frequencies; split it into one file for each")
    names = (about.get("brim:station"), station, listed[0].get("brim:station"))
    return Recording(
        path=path,
        format="sigmf",
        samples=samples,
        rate_hz=check_rate(path, about.get("core:sample_rate")),
        centre_hz=frequencies.pop() if frequencies else None,
        station=next((str(name) for name in names if name), None),
        place=_place(path, listed[0].get("core:geolocation", about.get("core:geolocation"))),
        hardware=None if about.get("core:hw") is None else str(about["core:hw"]),
        stamp_samples=np.array([sample - base for sample, _ in times], np.int64),
        stamp_times_s=np.array([second - epoch + fraction for _, (second, fraction, _) in times], np.float64),
        epoch_s=float(epoch),
        stamp_sigma_s=times[0][1][2] if times else 0.0,
        waveform=_label(meta.get("annotations")),
        milliwatt=about.get("brim:unit") == "sqrt(mW)",
    )


def _label(annotations: Any) -> str | None:
    first = annotations[0] if isinstance(annotations, list) and annotations else None
    label = first.get("core:label") if isinstance(first, Mapping) else None
    return label if isinstance(label, str) else None


def _datatype(path: Path, name: Any) -> tuple[str, int]:
    """NumPy's type of a component, and components per sample."""
    match = _TYPE.fullmatch(name) if isinstance(name, str) else None
    if (
        match is None
        or (match[2] == "f") != (match[2] + match[3] in ("f32", "f64"))
        or match[2] + match[3]
        in (
            "i64",
            "u64",
        )
    ):
        raise unreadable(path, f"core:datatype {name!r} is unknown; cf32_le and ci16_le are usual")
    if match[4] is None and match[2] + match[3] not in _SINGLE:
        raise unreadable(path, f"core:datatype {name!r} lacks its byte order, _le or _be")
    return f"{'>' if match[4] == 'be' else '<'}{match[2]}{int(match[3]) // 8}", 2 if match[1] == "c" else 1


def _samples(
    path: Path, captures: list[Any], data: Path, begin: int, size: int, dtype: str, components: int
) -> Samples:
    """Pieces of the file between the headers of captures."""
    width = np.dtype(dtype).itemsize * components
    starts = [_whole(path, one, "core:sample_start") for one in captures]
    headers = [_whole(path, one, "core:header_bytes") for one in captures]
    offset = starts[0]  # samples are numbered from the first capture on
    total = (size - sum(headers)) // width
    if total < 1:
        raise unreadable(path, "no samples in it")
    if any(second <= first for first, second in pairwise(starts)) or starts[-1] - offset >= total:
        raise unreadable(
            path, f"its captures start at samples {starts[:4]}, of {total}; each must start after the last"
        )
    ends = [*(start - offset for start in starts[1:]), total]
    offsets, counts, at = [], [], begin
    for start, end, header in zip(starts, ends, headers, strict=True):
        at += header
        offsets.append(at)
        counts.append(end - (start - offset))
        at += counts[-1] * width
    return Samples(data, dtype, offsets, counts, components=components)


def _whole(path: Path, one: Mapping[str, Any], key: str) -> int:
    value = one.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise unreadable(path, f"{key} {value!r} must be a whole number")
    return value


def _dated(one: Mapping[str, Any]) -> bool:
    return one.get("core:datetime") is not None


def read_time(path: Path, text: Any) -> tuple[int, float, float]:
    """Unix second, fraction, and the standard deviation of what the last digit leaves open."""
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    try:
        if match is None:
            raise ValueError
        year, month, day, hour, minute, second = (int(match[n]) for n in range(1, 7))
        second = int(datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp())
        if match[8] and match[8] != "Z":
            sign = -1 if match[8][0] == "-" else 1
            second -= sign * (int(match[8][1:3]) * 3600 + int(match[8][-2:]) * 60)
    except ValueError as failure:
        raise unreadable(
            path, f"time {text!r} is not understood; write it as 2026-01-31T12:00:00.000000000Z"
        ) from failure
    digits = match[7] or ""
    return second, float(f"0.{digits or 0}"), 0.0 if len(digits) in (0, 9) else 10.0 ** -len(digits) / 12**0.5


def _place(path: Path, value: Any) -> tuple[float, float, float] | None:
    if value is None:
        return None
    point = value.get("coordinates") if isinstance(value, Mapping) and value.get("type") == "Point" else None
    if not isinstance(point, list) or len(point) not in (2, 3) or not all(_is_number(one) for one in point):
        raise unreadable(path, "core:geolocation is no GeoJSON point of longitude, latitude and altitude")
    lon, lat, alt = (*point, 0.0)[:3]
    if not (-90 <= lat <= 90 and -180 <= lon <= 180):
        raise unreadable(path, f"core:geolocation {point} is not on Earth; longitude comes first")
    return float(lat), float(lon), float(alt)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _check_hash(path: Path, stated: Any, data: Path, begin: int, size: int) -> None:
    if stated is None:
        return
    with data.open("rb") as file:
        file.seek(begin)
        digest = _sha512(file, size)
    if digest != str(stated).lower():
        raise unreadable(path, "its data differs from core:sha512; copy it again")


def _sha512(file: BinaryIO, size: int) -> str:
    digest, left = hashlib.sha512(), size
    while left > 0 and (block := file.read(min(left, 1 << 20))):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()
