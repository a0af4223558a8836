"""Audio: spectra against their definition, and recordings as people have them."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
from scipy.fft import dct

from brim.errors import BrimError
from brim.sequences import Corpus, pack
from brim.sequences.config import SourceConfig
from brim.sequences.corpus.acoustics import mel_bank, num_frames, spectra
from brim.sequences.corpus.audio import resample

CPU = torch.device("cpu")
SOURCE = SourceConfig(device="cpu")


def tone(hz, seconds=0.5, rate=16_000, level=0.5):
    return (level * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def noise(seconds=0.4, seed=0):
    return (0.1 * np.random.default_rng(seed).normal(size=int(16_000 * seconds))).astype(np.float32)


def test_a_frame_is_the_log_mel_spectrum_of_its_window():
    signal = noise()

    (frames,) = spectra([torch.from_numpy(signal)], SOURCE, CPU)

    middle = 20 * 160
    window = signal[middle - 200 : middle + 200] * np.hanning(401)[:400]
    power = np.abs(np.fft.rfft(window, 512) * 2 / np.hanning(401)[:400].sum()) ** 2
    np.testing.assert_allclose(frames[20], np.log(power @ mel_bank(SOURCE).numpy() + 1e-8), rtol=1e-3, atol=1e-3)
    assert len(frames) == num_frames(len(signal), SOURCE) == 40


def test_mel_bands_are_triangles_of_sum_1_evenly_spaced_in_mel():
    mels = np.linspace(2595 * np.log10(1 + 20 / 700), 2595 * np.log10(1 + 8000 / 700), 66)
    edges = 700 * (10 ** (mels / 2595) - 1)
    frequency = np.arange(257) * 16_000 / 512
    bank = np.stack([np.interp(frequency, edges[band : band + 3], [0, 1, 0]) for band in range(64)], 1)
    narrow = bank.sum(0) == 0
    bank[np.abs(frequency[:, None] - edges[1:-1]).argmin(0)[narrow], np.flatnonzero(narrow)] = 1

    np.testing.assert_allclose(mel_bank(SOURCE), bank / bank.sum(0), atol=1e-6)


def test_silence_is_the_floor_and_frames_come_every_hop():
    slow = replace(SOURCE, sample_rate=8000, window_ms=32, hop_ms=16)

    (silent,) = spectra([torch.zeros(8001)], slow, CPU)

    assert silent.shape == (1 + 8000 // 128, 64)
    torch.testing.assert_close(silent, torch.full_like(silent, np.log(1e-8)))


def test_a_tone_is_loudest_in_its_band_and_ten_times_louder_is_20_db():
    edges = 700 * (10 ** (np.linspace(2595 * np.log10(1 + 20 / 700), 2595 * np.log10(1 + 8000 / 700), 66) / 2595) - 1)
    for hz in (300.0, 1000.0, 3000.0):
        loud, quiet = spectra([torch.from_numpy(tone(hz, level=level)) for level in (0.5, 0.05)], SOURCE, CPU)

        band = int(loud[20].argmax())
        assert edges[band] < hz < edges[band + 2]
        assert float(loud[20, band] - quiet[20, band]) == pytest.approx(2 * np.log(10), abs=0.01)


def test_a_recording_has_the_same_frames_alone_and_among_others():
    signals = [torch.from_numpy(noise(seconds, seed)) for seed, seconds in enumerate((0.3, 0.01, 1.2))]

    together = spectra(signals, SOURCE, CPU)

    for signal, frames in zip(signals, together, strict=True):
        torch.testing.assert_close(spectra([signal], SOURCE, CPU)[0], frames, rtol=1e-6, atol=1e-6)


def test_cepstral_coefficients_are_the_cosine_transform_of_the_log_spectrum():
    signal = torch.from_numpy(noise())

    (mel,), (mfcc,) = (spectra([signal], replace(SOURCE, features=kind), CPU) for kind in ("logmel", "mfcc"))

    np.testing.assert_allclose(mfcc, dct(mel.numpy(), norm="ortho", axis=1)[:, :20], atol=1e-4)


@pytest.fixture
def folder(tmp_path):
    """Recordings as people have them, with classes in sub-folders."""
    path = tmp_path / "audio"
    for name in ("low", "high"):
        (path / name).mkdir(parents=True)
    soundfile.write(path / "low" / "plain.wav", tone(300), 16_000)
    soundfile.write(path / "low" / "fast.flac", tone(300, rate=44_100), 44_100)
    soundfile.write(path / "low" / "eight_bits.wav", tone(300), 16_000, subtype="PCM_U8")
    soundfile.write(path / "high" / "stereo.ogg", np.stack([tone(3000)] * 2, 1), 16_000)
    soundfile.write(path / "high" / "clipped.wav", np.clip(8 * tone(800), -1, 1), 16_000)
    return path


def test_channels_are_averaged(tmp_path):
    one, both = tone(1000), np.stack([tone(1000), np.zeros(8000)], 1)
    for name, samples in (("a.wav", one), ("b.wav", both)):
        soundfile.write(tmp_path / name, samples, 16_000)

    pack(tmp_path, tmp_path / "out", source=SOURCE)

    mono, stereo = (Corpus.open(tmp_path / "out").sequence(row)[20].float().max() for row in (0, 1))
    assert float(mono - stereo) == pytest.approx(np.log(4), abs=0.01)  # half the amplitude


def test_another_rate_keeps_what_is_below_half_of_it_and_nothing_above():
    kept, gone = (resample(tone(hz, rate=44_100), 44_100, 16_000) for hz in (1000, 15_000))

    np.testing.assert_allclose(kept[100:-100], tone(1000)[100:-100], atol=0.01)
    assert np.abs(gone[100:-100]).max() < 0.01  # else it would be heard at 1000 Hz


def test_loud_quiet_and_oddly_written_recordings_are_used(tmp_path):
    """With an odd chunk before the samples, or without their number, as a pipe leaves it."""
    for name, level in (("loud", 1.0), ("quiet", 1e-3)):
        soundfile.write(tmp_path / f"{name}.wav", tone(1000, level=level), 16_000)
    whole = (tmp_path / "loud.wav").read_bytes()
    odd = whole[:36] + b"LIST" + (5).to_bytes(4, "little") + b"INFO.\0" + whole[36:]
    (tmp_path / "odd.wav").write_bytes(odd[:4] + (len(odd) - 8).to_bytes(4, "little") + odd[8:])
    (tmp_path / "odd_and_short.wav").write_bytes(odd[:-1000])
    (tmp_path / "pipe.wav").write_bytes(whole[:4] + b"\xff" * 4 + whole[8:40] + b"\xff" * 4 + whole[44:])

    report = pack(tmp_path, tmp_path / "out", source=SOURCE)

    assert [(one.file, "truncated" in one.fault) for one in report.skipped] == [("odd_and_short.wav", True)]
    assert Corpus.open(tmp_path / "out").ids == ("loud.wav", "odd.wav", "pipe.wav", "quiet.wav")
    assert "clipped" not in " ".join(report.notes)


def spoil(path):
    soundfile.write(path / "low" / "silent.wav", np.zeros(4000, np.float32), 16_000)
    whole = (path / "low" / "plain.wav").read_bytes()
    (path / "low" / "truncated.wav").write_bytes(whole[: len(whole) // 2])
    flac = (path / "low" / "fast.flac").read_bytes()
    (path / "low" / "truncated.flac").write_bytes(flac[: len(flac) // 2])
    (path / "low" / "empty.wav").write_bytes(whole[:44].replace(len(whole[44:]).to_bytes(4, "little"), bytes(4)))
    (path / "low" / "text.wav").write_text("not audio")


def test_recordings_are_packed_at_one_rate_in_one_channel(tmp_path, folder):
    report = pack(folder, tmp_path / "out", source=SOURCE)

    corpus = Corpus.open(tmp_path / "out")
    assert corpus.classes == ("high", "low")
    assert corpus.dim == 64
    assert corpus.lengths.tolist() == [50] * 5
    plain, fast = (corpus.sequence(corpus.ids.index(f"low/{name}")).float() for name in ("plain.wav", "fast.flac"))
    band = int(plain[25].argmax())
    assert band == int(fast[25].argmax())
    assert float((plain[25] - fast[25])[band].abs()) < 0.05
    words = "\n".join(report.notes)
    for text in (
        "64 log mel bands every 10 ms",
        "1 files are resampled from 44100 Hz",
        "1 files have 2 channels, which are averaged",
        "1 files have 8 bits per sample, such as low/eight_bits.wav",
        "high/clipped.wav is clipped",
    ):
        assert text in words
    assert words.count("is clipped") == 1


def test_bad_recordings_are_listed_and_the_rest_goes_on(tmp_path, folder):
    spoil(folder)

    report = pack(folder, tmp_path / "out", source=SOURCE)

    skipped = {one.file: one.fault for one in report.skipped}
    assert set(skipped) == {
        f"low/{name}" for name in ("silent.wav", "truncated.wav", "truncated.flac", "empty.wav", "text.wav")
    }
    assert "is silent" in skipped["low/silent.wav"]
    assert "is truncated" in skipped["low/truncated.wav"]
    assert "audio (Format not recognised);" in skipped["low/text.wav"]
    assert report.items == 5
    assert all(";" in fault for fault in skipped.values())  # each says what helps


def test_a_stopped_packing_of_audio_goes_on_with_the_same_settings_alone(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("brim.sequences.corpus.packing.CHUNK_BYTES", 1)
    calls = iter([False, False] + [True] * 100)

    pack(folder, tmp_path / "out", source=SOURCE, stop=lambda: next(calls))
    with pytest.raises(BrimError, match="was begun with audio"):
        pack(folder, tmp_path / "out", source=replace(SOURCE, window_ms=30), resume=True)
    report = pack(folder, tmp_path / "out", source=SOURCE, resume=True)

    assert (report.complete, report.items) == (True, 5)


def test_what_is_not_installed_is_said(tmp_path, folder, monkeypatch):
    with pytest.raises(BrimError, match=r"no config\.json|needs the package transformers"):
        pack(folder, tmp_path / "out", source=replace(SOURCE, speech_model=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(BrimError, match=r"pip install 'brim\[audio\]'"):
        pack(folder, tmp_path / "out", source=SOURCE)
