"""Counter-based random numbers against the published vectors of Random123, and their moments."""

import numpy as np
import pytest
from scipy import stats

from brim.rf.physics.philox import Purpose, normal, philox, uniform, words

ONES = 0xFFFFFFFF
# Random123, kat_vectors, "philox4x32 10": counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_words(counter, key, expected):
    out = philox(*(np.array([c], np.uint64) for c in counter), seed=key[0] | key[1] << 32)
    assert tuple(int(word[0]) for word in out) == expected


def test_words_are_the_blocks_of_one_keyed_stream():
    index, receiver = 2**40 + 5, 3
    low, high = index & ONES, index >> 32
    key = int(Purpose.LINK) << 16 | receiver
    blocks = [philox(*(np.array([c], np.uint64) for c in (block, key, low, high)), seed=9) for block in range(2)]
    expected = [int(word[0]) for block in blocks for word in block]
    assert words(9, np.array(index), receiver, Purpose.LINK, 7).tolist() == expected[:7]


@pytest.mark.parametrize(
    "other",
    [{"seed": 1 + 2**32}, {"seed": 1 + 2**62}, {"index": 5 + 2**32}, {"receiver": 1}, {"purpose": Purpose.ECHO}],
)
def test_changing_any_part_of_the_key_gives_unrelated_numbers(other):
    key = {"seed": 1, "index": 5, "receiver": 0, "purpose": Purpose.LINK}
    one, two = (
        uniform(k["seed"], np.array(k["index"]), k["receiver"], k["purpose"], 20_000) for k in (key, key | other)
    )
    assert np.isin(one, two).mean() < 1e-3
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / np.sqrt(20_000)


def test_uniform_numbers_are_uniform_and_never_0_or_1():
    draws = uniform(0, np.arange(50_000), 0, Purpose.MESSAGE, 4)
    assert draws.min() > 0
    assert draws.max() < 1
    assert [stats.kstest(draws[:, k], "uniform").pvalue > 0.01 for k in range(4)] == [True] * 4


def test_normal_numbers_are_normal():
    draws = uniform(0, np.arange(100_000), 0, Purpose.LINK, 2)
    z = normal(draws[:, 0], draws[:, 1])
    assert stats.kstest(z, "norm").pvalue > 0.01
    assert abs(z.mean()) < 0.012
    assert abs(z.std() - 1) < 0.01
    assert abs(stats.kurtosis(z)) < 0.06
