"""Readers against files written here, and clocks against the rate that made their stamps."""

import json
import struct
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from made_recordings import EPOCH, STATIONS, encode, write_kiwi, write_sigmf, write_sites

from brim.errors import ConfigError
from brim.rf.measurement.receivers import open_receivers, utc
from brim.rf.recordings import Clock, Site, fit_clock, match_site, named_in, open_recordings, read_sites
from brim.rf.recordings.kiwi import week_start_s
from brim.rf.recordings.sigmf import read_time

RNG = np.random.default_rng(3)
IQ = (RNG.uniform(-1, 1, 6_000) + 1j * RNG.uniform(-1, 1, 6_000)) * 0.9


def opened(path):
    (recording,), refused = open_recordings([path])
    assert refused == []
    return recording


def refusal(path):
    recordings, (refused,) = open_recordings([path])
    assert recordings == []
    return refused.reason


# SigMF

TYPES = ["cf32_le", "cf32_be", "cf64_le", "cf64_be", "ci32_le", "ci32_be", "ci16_le", "ci16_be", "ci8", "cu32_le"]
TYPES += ["cu32_be", "cu16_le", "cu16_be", "cu8"]


@pytest.mark.parametrize("datatype", TYPES)
def test_every_type_of_sample_is_read(tmp_path, datatype):
    path = write_sigmf(tmp_path / "x", IQ, 48_000.0, f"{EPOCH}.5Z", datatype=datatype, place=STATIONS["ALFA"])

    recording = opened(path)

    expected = IQ if datatype[1] == "f" else IQ / 2
    np.testing.assert_allclose(recording.samples.complex(1_000, 500), expected[1_000:1_500], atol=0.012)
    assert recording.place == STATIONS["ALFA"]
    assert (recording.epoch_s, recording.stamp_times_s[0]) == (1_769_860_800.0, 0.5)


def test_real_samples_are_read_as_a_real_part(tmp_path):
    recording = opened(write_sigmf(tmp_path / "x", IQ, 48_000.0, None, datatype="ri16_le"))

    np.testing.assert_allclose(recording.samples.complex(0, 6_000).real, IQ.real / 2, atol=1e-4)
    assert recording.is_real


def test_captures_skip_their_headers_and_keep_their_times(tmp_path):
    path = write_sigmf(tmp_path / "x", IQ, 1_000.0, f"{EPOCH}Z")
    data = path.with_suffix(".sigmf-data")
    data.write_bytes(b"h" * 16 + data.read_bytes()[: 8 * 2_000] + b"h" * 24 + data.read_bytes()[8 * 2_000 :])
    meta = json.loads(path.read_text())
    del meta["global"]["core:sha512"]
    first = meta["captures"][0] | {"core:header_bytes": 16, "core:sample_start": 100}  # of what is not in the file
    second = {"core:sample_start": 2_100, "core:datetime": f"{EPOCH[:-2]}05Z", "core:header_bytes": 24}
    meta["captures"] = [first, second]
    path.write_text(json.dumps(meta))

    recording = opened(path)

    np.testing.assert_allclose(recording.samples.complex(1_500, 1_000), IQ[1_500:2_500], atol=1e-6)
    assert recording.stamp_samples.tolist() == [0, 2_000]
    assert recording.stamp_times_s.tolist() == [0.0, 5.0]
    (receiver,), _ = open_receivers([path], [Site(name="x", lat=1.0, lon=2.0, alt=0.0)])
    assert receiver.clock.problems == ("1 gaps between captures",)
    assert [receiver.clock.time_s(sample) for sample in (1_999, 2_000, 2_500)] == pytest.approx([1.999, 5.0, 5.5])
    assert receiver.clock.end_s == pytest.approx(9.0)


def test_a_time_in_the_middle_tells_when_the_recording_began(tmp_path):
    path = write_sigmf(tmp_path / "x", IQ, 1_000.0, None, place=STATIONS["ALFA"])
    meta = json.loads(path.read_text())
    meta["captures"].append({"core:sample_start": 2_000, "core:datetime": f"{EPOCH}.5Z"})
    path.write_text(json.dumps(meta))

    (receiver,), left_out = open_receivers([path, path.with_suffix(".sigmf-data")], [])

    assert left_out == []  # the two files of one recording
    assert utc(receiver, receiver.start_s) == "2026-01-31T11:59:58.500000Z"
    assert "given twice" in open_receivers([path, path], [])[1][0].reason


def test_an_archive_is_read_in_place(tmp_path):
    path = write_sigmf(tmp_path / "x", IQ, 48_000.0, f"{EPOCH}Z", **{"core:hw": "an antenna"})
    other = write_sigmf(tmp_path / "y", IQ[::-1], 24_000.0, f"{EPOCH}Z", datatype="ci16_le")
    archive = tmp_path / "both.sigmf"
    with tarfile.open(archive, "w") as tar:
        for file in (path, path.with_suffix(".sigmf-data"), other, other.with_suffix(".sigmf-data")):
            tar.add(file, f"both/{file.name}")

    (recording, second), _ = open_recordings([archive])

    np.testing.assert_allclose(second.samples.complex(5, 100), IQ[-6:-106:-1] / 2, atol=1e-4)
    assert (recording.rate_hz, second.rate_hz) == (48_000.0, 24_000.0)
    np.testing.assert_allclose(recording.samples.complex(10, 100), IQ[10:110], atol=1e-6)
    assert recording.hardware == "an antenna"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda meta: meta["global"].update({"core:sha512": "0" * 128}), "differs from core:sha512"),
        (lambda meta: meta["global"].update({"core:datatype": "cf16_le"}), "core:datatype 'cf16_le' is unknown"),
        (lambda meta: meta["global"].update({"core:datatype": "ci16"}), "byte order"),
        (lambda meta: meta["global"].update({"core:num_channels": 2}), "2 channels"),
        (lambda meta: meta["captures"][0].update({"core:datetime": "yesterday"}), "'yesterday' is not understood"),
        (lambda meta: meta["captures"][0].update({"core:geolocation": {"type": "Point"}}), "GeoJSON point"),
    ],
)
def test_metadata_that_cannot_be_used_is_refused_in_words(tmp_path, change, words):
    path = write_sigmf(tmp_path / "x", IQ, 48_000.0, f"{EPOCH}Z")
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))

    assert words in refusal(path)


@pytest.mark.parametrize(
    ("text", "second", "fraction", "sigma_s"),
    [
        ("2026-01-31T12:00:00.123456789Z", 1_769_860_800, 0.123456789, 0.0),
        ("2026-01-31T14:00:00+02:00", 1_769_860_800, 0.0, 0.0),
        ("2026-01-31T06:30:00-0530", 1_769_860_800, 0.0, 0.0),
        ("2026-01-31 12:00:00.25", 1_769_860_800, 0.25, 0.01 / 12**0.5),  # what the last digit leaves open
    ],
)
def test_times_are_utc_or_say_how_far_from_it(text, second, fraction, sigma_s):
    assert read_time(Path("x"), text) == pytest.approx((second, fraction, sigma_s))


def test_bytes_behind_the_samples_are_none(tmp_path):
    path = write_sigmf(tmp_path / "x", IQ, 48_000.0, None, **{"core:trailing_bytes": 80})
    assert len(opened(path).samples) == 6_000 - 10


# WAV, raw and lists


def test_a_kiwi_file_gives_samples_station_and_frequency(tmp_path):
    path = write_kiwi(tmp_path / "20260131T120000Z_77500_ALFA_iq.wav", IQ, 12_000.0, 0.25)

    recording = opened(path)

    scale = np.abs(np.stack([IQ.real, IQ.imag])).max() / 0.5
    np.testing.assert_allclose(recording.samples.complex(700, 900) * scale, IQ[700:1_600], atol=1e-3)
    assert (recording.station, recording.centre_hz, recording.format) == ("ALFA", 77_500.0, "kiwi")


def test_an_old_position_fix_is_said_and_makes_the_clock_less_certain(tmp_path):
    sites = read_sites(write_sites(tmp_path / "s.csv"))
    sigma_s = []
    for age in (30, 45):
        path = write_kiwi(tmp_path / f"20260131T120000Z_77500_ALFA{age}_iq.wav", IQ, 12_000.0, 0.25, age=age)
        (receiver,), _ = open_receivers([path], sites)
        sigma_s.append(receiver.sigma_s)
        assert ("last position fix up to 45 s old" in receiver.problems) == (age == 45)
    assert sigma_s == pytest.approx([3e-6, 4.5e-6], rel=0.01)  # 0.1 ppm since then


def test_an_ordinary_wav_file_may_say_when_and_where_it_was_tuned(tmp_path):
    moment = struct.pack("<8H", 2026, 1, 6, 31, 12, 0, 5, 250)  # a Saturday
    write_wav(
        tmp_path / "a.wav",
        IQ,
        extra=b"auxi" + struct.pack("<I", 36) + moment + bytes(16) + struct.pack("<I", 7_100_000),
    )

    recording = opened(tmp_path / "a.wav")

    assert (recording.format, recording.centre_hz, recording.rate_hz) == ("wav", 7.1e6, 48_000.0)
    assert recording.epoch_s + recording.stamp_times_s[0] == pytest.approx(1_769_860_805.25)


@pytest.mark.parametrize(("date", "second"), [("20260131T120000", 561_618), ("20140301T000000", 518_416)])
def test_the_week_of_a_stamp_is_that_of_the_files_name_with_its_leap_seconds(date, second):
    moment = datetime.strptime(date, "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp()
    for late in (-3_600, 0, 3_600):  # the file's name may be older or younger than its stamps
        week_s = week_start_s(date, np.array([second + late]))
        assert week_s + second == moment  # 18 s apart from GPS time, 16 in 2014
    assert week_start_s(None, np.array([second])) == 0


@pytest.mark.parametrize(("kind", "dtype"), [(1, "u1"), (1, "<i4"), (3, "<f4"), (3, "<f8"), (0xFFFE, "<i2")])
def test_wav_files_of_other_types_behind_chunks_of_odd_length(tmp_path, kind, dtype):
    bits, name = 8 * np.dtype(dtype).itemsize, {"u1": "cu8", "<f4": "cf32_le", "<f8": "cf64_le", "<i4": "ci32_le"}
    data = encode(IQ, name.get(dtype, "ci16_le"))
    head = struct.pack("<HHIIHH", kind, 2, 48_000, 48_000 * bits // 4, bits // 4, bits) + bytes(8) + b"\1" + bytes(15)
    chunks = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", 40) + head
    chunks += b"data" + struct.pack("<I", 0xFFFFFFFF) + data  # as it is streamed
    (tmp_path / "a.wav").write_bytes(b"RIFF\xff\xff\xff\xffWAVE" + chunks)

    recording = opened(tmp_path / "a.wav")

    expected = IQ if kind == 3 else IQ / 2
    np.testing.assert_allclose(recording.samples.complex(0, len(IQ)), expected, atol=0.012)
    assert len(recording.stamp_samples) == 0


@pytest.mark.parametrize(("channels", "bits", "words"), [(1, 16, "1 channel; IQ has two"), (2, 24, "24 bits")])
def test_other_sound_files_are_refused(tmp_path, channels, bits, words):
    width = channels * bits // 8
    head = struct.pack("<IHHIIHH", 16, 1, channels, 8_000, 8_000 * width, width, bits)
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF\0\0\0\0WAVEfmt " + head + b"data" + struct.pack("<I", 48) + bytes(48))

    assert words in refusal(path)


def test_stereo_audio_is_told_from_iq(tmp_path):
    sound = np.cumsum(RNG.normal(size=40_000))
    sound -= np.convolve(sound, np.ones(100) / 100, "same")
    write_wav(tmp_path / "sound.wav", sound * (1 + 0.9j) + 0.05j * RNG.normal(size=40_000))
    write_wav(tmp_path / "iq.wav", np.resize(IQ, 40_000))
    (tmp_path / "list.csv").write_text(
        f"file,station,lat,lon,start,centre_hz\nsound.wav,A,1,2,{EPOCH}Z,1e6\niq.wav,B,1,3,{EPOCH}Z,1e6\n"
    )

    receivers, left_out = open_receivers([tmp_path / "list.csv"], [])

    assert [one.name for one in receivers] == ["B"]
    assert [(one.name, "stereo audio" in one.reason) for one in left_out] == [("A", True)]


def write_wav(path, iq, extra=b""):
    data = np.round(np.stack([iq.real, iq.imag], -1) / np.abs(iq).max() * 20_000).astype("<i2").tobytes()
    head = struct.pack("<IHHIIHH", 16, 1, 2, 48_000, 192_000, 4, 16)
    path.write_bytes(b"RIFF\0\0\0\0WAVEfmt " + head + extra + b"data" + struct.pack("<I", len(data)) + data)


def test_each_raw_file_has_its_own_line_of_a_list(tmp_path):
    kinds = {"a.cu8": "cu8", "b.cs16": "ci16_le", "c.cf32": "cf32_le"}
    for name, kind in kinds.items():
        (tmp_path / name).write_bytes(encode(IQ if kind == "cf32_le" else IQ * 2, kind))
    (tmp_path / "recordings.csv").write_text(
        "recording,name,lat,lon,alt,start_time,sample_rate,center_hz\n"
        f"a.cu8,ALFA,46,8,400,{EPOCH}.25Z,250000,7.1e6\nb.cs16,BRAVO,47,9,,{EPOCH[:-2]}07+00:00,125000,\nc.cf32,X\n"
    )
    (tmp_path / "c.csv").write_text("file,station,rate\nc.cf32,CHARLIE,1000\n")  # its own

    beside, refused = open_recordings([tmp_path / name for name in kinds])
    listed, _ = open_recordings([tmp_path / "recordings.csv"])

    assert refused == []
    assert [one.station for one in (*beside, *listed)] == ["ALFA", "BRAVO", "CHARLIE", "ALFA", "BRAVO"]
    assert [one.place for one in beside] == [(46.0, 8.0, 400.0), (47.0, 9.0, 0.0), None]
    assert [(one.rate_hz, one.centre_hz) for one in beside] == [(250e3, 7.1e6), (125e3, None), (1e3, None)]
    assert [float(one.epoch_s + one.stamp_times_s[0]) - 1_769_860_800 for one in listed] == [0.25, 7.0]
    for one in beside:
        np.testing.assert_allclose(one.samples.complex(5, 50), IQ[5:55], atol=0.02)


def test_raw_samples_need_a_rate(tmp_path):
    (tmp_path / "a.cu8").write_bytes(bytes(100))

    assert "without a sample rate" in refusal(tmp_path / "a.cu8")


# Stations


def test_the_longest_name_in_a_files_name_counts_and_one_in_its_metadata_more(tmp_path):
    sites = [Site(name=name, lat=1.0, lon=2.0, alt=0.0) for name in ("North1", "north12", "north")]
    files = {"2026-NORTH12-1.wav": "north12", "north1_north12x.wav": "North1", "xnorth2.wav": "north"}

    assert {file: named_in(tmp_path / file, sites).name for file in files} == files
    assert named_in(tmp_path / "other.wav", sites) is None
    recording = opened(write_sigmf(tmp_path / "north12", IQ, 48_000.0, None, station="north1"))
    assert match_site(recording, sites).name == "North1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name,lat,lon,alt,gian_db\na,1,2,3,4\n", "unknown column 'gian_db'; did you mean gain_db"),
        ("name,lat,lon,alt\na,1,,3\n", "line 2: no lon"),
        ("name,lat,lon,alt\na,1,2,3\nA,1,2,3\n", "twice"),
        ("name,lat,lon,alt,delay_us\na,1,2,3,x\n", "expected a number"),
    ],
)
def test_a_stations_file_that_is_wrong_says_where(tmp_path, text, words):
    path = tmp_path / "s.csv"
    path.write_text(text)

    with pytest.raises(ConfigError) as failure:
        read_sites(path)
    assert words in str(failure.value)


# Clocks


def stamps(rate_hz=12_001.08, num=700, start_s=1_000.0, noise_s=1e-7):
    at = np.arange(num) * 512
    return at, start_s + at / rate_hz + np.random.default_rng(5).normal(size=num) * noise_s


def fitted(at, times) -> Clock:
    clock = fit_clock(at, times, int(at[-1]) + 512, 12_000.0)
    assert isinstance(clock, Clock), clock
    return clock


def check(clock, rate_hz=12_001.08, start_s=1_000.0):
    assert clock.rate_hz == pytest.approx(rate_hz, rel=2e-9)
    assert clock.time_s(100_000) == pytest.approx(start_s + 100_000 / rate_hz, abs=5e-8)


def test_the_true_rate_is_fitted_behind_stale_and_repeated_stamps():
    at, times = stamps()
    times[:3] = 5.0, 5.0, 900.0
    times[300:302] = times[299]

    clock = fitted(at, times)

    check(clock)
    assert "3 stale time stamps at the start" in clock.problems
    assert any("2 of them repeated" in problem for problem in clock.problems)


def test_many_stale_stamps_at_the_start_are_no_second_line():
    samples = np.arange(700) * 512
    times = 100 + samples / 12_001.1
    times[:40] -= 300
    clock = fit_clock(samples, times, 700 * 512, 12_000.0)
    assert len(clock.lines) == 1
    assert clock.start_s == pytest.approx(100 + 40 * 512 / 12_001.1, abs=1e-6)
    assert clock.problems == ("40 stale time stamps at the start",)


@pytest.mark.parametrize("scatter", ["normal", "rounded", "each twice", "a second off for a while"])
def test_stamps_of_other_firmware_give_the_line_too(scatter):
    """Stamps that scatter by 30 µs or count 0.1 ms, that come with every second block, or are wrong for seconds."""
    at, times = stamps(noise_s=3e-5 if scatter == "normal" else 0.0)
    if scatter == "rounded":
        times = np.floor(times * 1e4) / 1e4 + 0.5e-4
    elif scatter == "each twice":
        times[1::2] = times[:-1:2]
    elif scatter == "a second off for a while":
        times[300:420] += 1.0

    clock = fitted(at, times)

    assert len(clock.lines) == 1
    assert clock.rate_hz == pytest.approx(12_001.08, rel=3e-7)
    for block in (50, 350, 650):
        assert clock.time_s(at[block]) == pytest.approx(1_000.0 + at[block] / 12_001.08, abs=6e-6)


@pytest.mark.parametrize(("sign", "word"), [(1, "+42.663 ms): gap in"), (-1, "-42.663 ms): repeat in")])
def test_a_lost_or_repeated_block_is_a_jump_and_a_second_line(sign, word):
    at, times = stamps()
    times[400:] += sign * 512 / 12_001.08

    clock = fitted(at, times)

    check(clock)
    assert [line.first for line in clock.lines] == [0, 400 * 512]
    assert clock.time_s(600 * 512) == pytest.approx(times[600], abs=1e-6)
    assert any(word in problem for problem in clock.problems)


def test_the_end_of_the_week_is_bridged():
    at, times = stamps(start_s=604_790.0)

    clock = fitted(at, times % 604_800)

    assert clock.rate_hz == pytest.approx(12_001.08, rel=2e-9)
    assert clock.time_s(600 * 512) - clock.time_s(0) == pytest.approx(600 * 512 / 12_001.08, abs=1e-6)
    assert "the GPS week ends in this recording" in clock.problems


def test_a_rate_that_drifts_over_minutes_bends_the_line():
    at, times = stamps(num=14_000)
    times = times + 3e-10 * (times - times[0]) ** 2  # 0.36 ppm over ten minutes

    clock = fitted(at, times)

    errors = [clock.time_s(at[n]) - times[n] for n in range(100, 14_000, 700)]
    assert np.abs(errors).max() < 1e-6
    assert np.abs(clock.bend_s).max() > 5e-6
    again = [clock.sample_at(clock.time_s(at[n]), clock.lines[0]) - at[n] for n in range(100, 14_000, 700)]
    assert np.abs(again).max() < 1e-4  # the bend is a tenth of a sample, and is taken off again


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda at, times: np.random.default_rng(1).uniform(0, 1e5, len(at)), "do not advance"),
        (lambda at, times: times + np.random.default_rng(1).normal(size=len(at)) * 2e-3, "time stamps"),
        (lambda at, times: times[:4], "too few"),
        (lambda at, times: at / 11_900.0, "wrong rate: its stamps give 11900.0 Hz"),
    ],
)
def test_stamps_that_are_no_clock_are_refused_in_words(spoil, words):
    at, times = stamps()
    times = spoil(at, times)

    reason = fit_clock(at[: len(times)], times, 360_000, 12_000.0)

    assert isinstance(reason, str)
    assert words in reason
