"""Vowels of several speakers, from WAV files to a table of scores in which no speaker is both trained on and tested on.

python examples/sequence_speakers.py [DIR]     about ten seconds on one CPU core; needs pip install 'brim[audio]'
"""

import csv
import sys
import wave
from pathlib import Path

import numpy as np

from brim.sequences import SequenceTraining, pack, train

RATE_HZ = 16_000
VOWELS = {"a": (800, 1200), "e": (400, 2200), "i": (280, 2500), "o": (450, 850)}  # first two formants, Hz
SPEAKERS, TAKES = 6, 5


def main(out: Path) -> None:
    """Work in `out`: write recordings, pack them, cross-validate over speakers, show the table."""
    audio, corpus, run = out / "audio", out / "corpus", out / "run"
    if not audio.exists():
        write_recordings(audio)

    packed = pack(audio, corpus, resume=True)
    print(f"{packed.items} recordings, {packed.frames} frames; {packed.notes[0]}")

    config = SequenceTraining(mode="supervised", method="rocket", groups="speaker", folds=3)
    report = train(corpus, run, config, resume=True)
    assert report.cross_validation is not None
    for name, score in report.cross_validation["scores"].items():
        mean, std, low, high = (score[key] for key in ("mean", "std", "low", "high"))
        print(f"{name:<9} {mean:.3f} ± {std:.3f}, 95 % interval {low:.3f} to {high:.3f}")
    print((run / "table.tex").read_text())


def write_recordings(folder: Path) -> None:
    """Write SPEAKER_VOWEL_TAKE.wav and a labels.csv with a column for the speaker."""
    folder.mkdir(parents=True)
    rows = [("file", "label", "speaker")]
    for speaker in range(SPEAKERS):
        for vowel in VOWELS:
            for take in range(TAKES):
                name = f"s{speaker}_{vowel}_{take}.wav"
                with wave.open(str(folder / name), "wb") as file:
                    file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
                    file.writeframes((32767 * speak(speaker, vowel, take)).astype("<i2").tobytes())
                rows.append((name, vowel, f"s{speaker}"))
    with (folder / "labels.csv").open("w", newline="") as opened:
        csv.writer(opened).writerows(rows)


def speak(speaker: int, vowel: str, take: int) -> np.ndarray:
    """(N,) samples within ±1: pulses at the speaker's pitch through two resonances that their vocal tract shifts."""
    voice, own = np.random.default_rng(speaker), np.random.default_rng((speaker, *vowel.encode(), take))
    pitch_hz, tract = voice.uniform(90, 240), voice.uniform(0.9, 1.15)
    seconds = own.uniform(0.3, 0.6)
    time_s = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    phase = np.cumsum(pitch_hz * (1 + 0.1 * np.sin(2 * np.pi * 3 * time_s + own.uniform(0, 6))) / RATE_HZ)
    sound = np.diff(np.floor(phase), prepend=0.0) + 0.01 * own.normal(size=len(time_s))
    spectrum, frequency = np.fft.rfft(sound), np.fft.rfftfreq(len(sound), 1 / RATE_HZ)
    for formant_hz in VOWELS[vowel]:
        centre = formant_hz * tract * own.uniform(0.95, 1.05)
        spectrum = spectrum / (1 - (frequency / centre) ** 2 + 1j * frequency * 120 / centre**2)
    sound = np.fft.irfft(spectrum, len(sound))
    sound *= np.sin(np.pi * np.arange(len(sound)) / len(sound))
    loudest: np.ndarray = 0.5 * sound / np.abs(sound).max()
    return loudest


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "speakers-example"))
