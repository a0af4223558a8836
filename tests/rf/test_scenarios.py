"""Effects of real networks, each against its formula or an independent computation."""

import dataclasses

import numpy as np
import pytest
import scipy.special
from scipy import stats

from brim.errors import ConfigError
from brim.rf.config import FRACTAL, PRESETS, GenerateConfig, Station, preset
from brim.rf.physics.diffraction import EFFECTIVE_RADIUS_M, bullington_db, knife_edge_db, smooth_earth_db
from brim.rf.physics.geometry import ecef
from brim.rf.physics.paths import read_paths
from brim.rf.physics.scene import make_scenes, max_echo_s
from brim.rf.physics.terrain import HeightMap, terrain_of

ATTEMPTS = np.arange(20_000)


@pytest.mark.parametrize("name", [*PRESETS, "default"])
def test_a_scene_is_the_same_in_any_batch(name):
    config = GenerateConfig() if name == "default" else preset(name)
    whole, parts = make_scenes(config, np.arange(30)), make_scenes(config, np.array([17, 3]))

    for field in dataclasses.fields(whole):
        assert np.array_equal(getattr(whole, field.name)[[17, 3]], getattr(parts, field.name)), field.name


# Diffraction


def test_a_knife_edge_loses_what_the_fresnel_integral_says():
    v = np.linspace(-0.7, 6, 200)
    sine, cosine = scipy.special.fresnel(v)
    exact = -20 * np.log10(np.hypot(1 - cosine - sine, cosine - sine) / 2)
    assert knife_edge_db(v) == pytest.approx(exact, abs=0.35)
    assert knife_edge_db(np.array([-2.0, -0.8])).tolist() == [0, 0]


@pytest.mark.parametrize("frequency_mhz", [145.0, 433.0, 1_300.0])
def test_behind_the_horizon_the_field_falls_at_the_rate_of_the_first_airy_root(frequency_mhz):
    heights = np.full(2, 40.0)
    near, far = smooth_earth_db(frequency_mhz, np.array([200e3, 300e3]), heights, heights)
    wave = 2 * np.pi * frequency_mhz * 1e6 / 299_792_458.0
    root = -scipy.special.ai_zeros(1)[0][0]
    turns = (wave * EFFECTIVE_RADIUS_M / 2) ** (1 / 3) * 100e3 / EFFECTIVE_RADIUS_M
    expected = 20 / np.log(10) * root * np.sin(np.pi / 3) * turns - 10 * np.log10(300 / 200)
    assert far - near == pytest.approx(expected, rel=0.01)


def test_height_gain_is_that_of_the_airy_function():
    frequency_mhz, heights = 145.0, np.array([100.0, 800.0])
    low, high = smooth_earth_db(frequency_mhz, np.full(2, 400e3), np.full(2, 50.0), heights)
    wave = 2 * np.pi * frequency_mhz * 1e6 / 299_792_458.0
    root = -scipy.special.ai_zeros(1)[0][0]
    y = heights * (2 * wave**2 / EFFECTIVE_RADIUS_M) ** (1 / 3)
    gain = 20 * np.log10(np.abs(scipy.special.airy(-root + y * np.exp(1j * np.pi / 3))[0]))
    assert low - high == pytest.approx(gain[1] - gain[0], abs=1.0)


@pytest.mark.parametrize(("share", "top", "heights"), [(0.5, 250.0, (30.0, 30.0)), (0.25, 400.0, (30.0, 300.0))])
def test_bullington_is_the_knife_edge_where_there_is_one(share, top, heights):
    d, points = 20e3, 399
    profile = np.zeros(points)
    profile[round(share * (points + 1)) - 1] = top
    one, two = share * d, (1 - share) * d
    line = heights[0] + share * (heights[1] - heights[0])
    v = (top + one * two / (2 * EFFECTIVE_RADIUS_M) - line) * np.sqrt(2 * d / (299_792_458.0 / 145e6 * one * two))
    edge = knife_edge_db(np.array(v))
    expected = edge + (1 - np.exp(-edge / 6)) * (10 + 0.02 * 20)

    ends = np.array([heights[0]]), np.array([heights[1]])
    assert bullington_db(145.0, np.array([d]), profile[None], *ends) == pytest.approx(expected, abs=0.05)
    assert bullington_db(145.0, np.array([d]), profile[None, ::-1], *ends[::-1]) == pytest.approx(expected, abs=0.05)


def test_a_map_hides_what_is_behind_its_hills_seen_from_either_end():
    wall = np.zeros((2, 66))
    wall[:, 16] = 400.0  # where the sixteenth of 64 points of a profile lies
    ground = HeightMap(45.0, 7.0, (1.0, 0.2 / 65), wall)
    here, there = (
        (np.array([lat]), np.array([lon]), np.array([h])) for lat, lon, h in ((45.1, 7, 30), (45.3, 7.2, 300))
    )
    d = np.array([20e3])
    expected = bullington_db(145.0, d, wall[:1, 1:-1], np.array([30.0]), np.array([300.0]))

    assert expected > 20
    assert ground.diffraction_db(145.0, d, here, there) == pytest.approx(expected, abs=1e-6)
    assert ground.diffraction_db(145.0, d, there, here) == pytest.approx(expected, abs=1e-6)


def test_the_horizon_silences_some_of_the_built_in_stations():
    level, round_ = (make_scenes(GenerateConfig(horizon=horizon), ATTEMPTS[:3000]) for horizon in (False, True))
    assert np.array_equal(level.transmitter, round_.transmitter)
    extra = round_.loss_db - level.loss_db
    horizon_m = np.sqrt(2 * EFFECTIVE_RADIUS_M) * (
        np.sqrt(level.receivers[..., 2] + 30) + np.sqrt(level.transmitter[:, 2:] + 2)
    )
    assert extra.min() == 0
    assert (extra[level.range_m > horizon_m] > 5).all()
    assert round_.present.sum(-1).mean() == pytest.approx(5.68, abs=0.1)
    assert level.present.sum(-1).mean() > 6.9


# Terrain


def test_fractal_terrain_has_its_relief_and_its_spectrum():
    ground = terrain_of(GenerateConfig(terrain=FRACTAL, terrain_relief_m=200.0, seed=4))
    assert ground is not None
    assert ground.heights.std() == pytest.approx(200.0, rel=0.15)  # the deepest valleys are cut off
    assert ground.heights.min() == 0
    steps = [np.abs(ground.heights[k:] - ground.heights[:-k]).mean() for k in (2, 16)]
    assert np.log2(steps[1] / steps[0]) / 3 == pytest.approx(0.5, abs=0.2)  # exponent 3 over the plane


def test_stations_and_transmitters_stand_on_the_ground_and_hills_hide_them():
    config = GenerateConfig(terrain=FRACTAL, terrain_relief_m=200.0)
    ground, scenes = terrain_of(config), make_scenes(config, ATTEMPTS[:500])
    assert ground is not None
    for places in (scenes.transmitter, scenes.receivers[0]):
        assert places[:, 2] == pytest.approx(ground.at(places[:, 0], places[:, 1]))
    plain = make_scenes(GenerateConfig(), ATTEMPTS[:500])
    assert (scenes.loss_db - plain.loss_db).mean() > 5


def test_heights_between_points_are_interpolated():
    ground = HeightMap(45.0, 7.0, (0.5, 0.25), np.array([[0.0, 10.0], [20.0, 70.0]]))
    lat, lon = np.array([45.0, 45.25, 45.5, 44.0]), np.array([7.125, 7.0, 7.25, 7.0])
    assert ground.at(lat, lon).tolist() == [5, 10, 70, 0]


def tile(folder, name="N45E007.hgt", height=300, hole=False):
    heights = np.full((1201, 1201), height, ">i2")
    if hole:
        heights[600, 600] = -32768
    heights.tofile(folder / name)


def test_srtm_tiles_are_joined_with_north_above_and_west_to_the_left(tmp_path):
    row, column = np.mgrid[:1201, :1201]
    for south in (33, 34, 35):
        for west in (70, 71, 72):
            ((35 - south) * 1000 + row // 12 + column // 120).astype(">i2").tofile(tmp_path / f"S{south}W0{west}.hgt")
    stations = tuple(Station(f"S{n}", -33.7 - n / 10, -70.6 - n / 10, 2_500.0) for n in range(3))
    ground = terrain_of(GenerateConfig(terrain=str(tmp_path), stations=stations))
    assert ground is not None
    # a quarter of a degree from the northern edge of a tile, half of one from its western edge
    assert ground.at(np.array([-33.25, -32.25]), np.array([-70.5, -71.5])) == pytest.approx([1030, 2030])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "holds no height maps"),
        (tile, "covers 45.00 to 46.00° N and 7.00 to 8.00° E"),
        (lambda folder: (folder / "N45E007.hgt").write_bytes(b"short"), "cannot be read"),
        (lambda folder: (folder / "map.tif").write_bytes(b"II*\0garbage"), "map.tif cannot be read"),
    ],
)
def test_maps_that_do_not_fit_are_refused(tmp_path, make, said):
    make(tmp_path)
    with pytest.raises(ConfigError, match=said):
        make_scenes(GenerateConfig(terrain=str(tmp_path)), ATTEMPTS[:5])


def geotiff(folder, heights, *, epsg=4326, nodata=None):
    """0.01° from 6° E and 47° N on; keys of the GeoTIFF standard, written without our reader's help."""
    tifffile = pytest.importorskip("tifffile")
    keys = (1, 1, 0, 3, 1024, 0, 1, 2, 1025, 0, 1, 1, 2048, 0, 1, epsg)
    tags = [(33550, "d", 3, (0.01, 0.01, 0.0), True), (33922, "d", 6, (0, 0, 0, 6.0, 47.0, 0), True)]
    tags += [(34735, "H", len(keys), keys, True)] + ([] if nodata is None else [(42113, "s", 0, nodata, True)])
    tifffile.imwrite(folder / "map.tif", heights, extratags=tags)
    return GenerateConfig(terrain=str(folder / "map.tif"))


def test_a_geotiff_has_its_heights_where_its_tags_say(tmp_path):
    ground = terrain_of(geotiff(tmp_path, np.arange(400, dtype=np.int16)[:, None].repeat(500, 1) // 4))
    assert ground is not None
    assert (ground.north, ground.west) == pytest.approx((46.995, 6.005))
    assert ground.at(np.array([46.995, 45.995]), np.array([7.0, 8.0])) == pytest.approx([0, 25], abs=1e-6)


@pytest.mark.parametrize(
    ("void", "options", "said"),
    [
        (-32768, {}, "1 points without a height, the first at 44.99"),
        (3.4e38, {}, "1 points without a height"),
        (np.nan, {}, "1 points without a height"),
        (0, {"nodata": "0"}, "1 points without a height"),
        (50, {"epsg": 4267}, "not in degrees of WGS-84"),
    ],
)
def test_a_geotiff_with_holes_or_of_another_datum_is_refused(tmp_path, void, options, said):
    heights = np.full((400, 500), 50, np.float32)
    heights[200, 200] = void
    with pytest.raises(ConfigError, match=said):
        terrain_of(geotiff(tmp_path, heights, **options))


def test_holes_and_stations_under_ground_are_refused(tmp_path):
    config = GenerateConfig(terrain=str(tmp_path / "a"))
    for name, hole, height in (("a", True, 50), ("b", False, 900)):
        (tmp_path / name).mkdir()
        for lat in (43, 44, 45, 46):
            for lon in (6, 7, 8, 9):
                tile(tmp_path / name, f"N{lat}E{lon:03}.hgt", height, hole)
    with pytest.raises(ConfigError, match="points without a height"):
        terrain_of(config)
    with pytest.raises(ConfigError, match="is under ground"):
        terrain_of(dataclasses.replace(config, terrain=str(tmp_path / "b")))


# Shadowing, blocked paths, echoes, clocks, gains, power


def test_shadowing_of_a_station_is_correlated_over_its_distance():
    distance_m, near = 2_000.0, []
    for seed in range(150):
        config = GenerateConfig(shadowing_distance_m=distance_m, seed=seed)
        scenes = make_scenes(config, ATTEMPTS[:60])
        flat = scenes.transmitter[:, :2] * [111_200.0, 111_300.0 * np.cos(np.radians(44.97))]
        apart = np.linalg.norm(flat[:, None] - flat[None], axis=-1)
        i, j = np.nonzero((apart > 0) & (apart < 6 * distance_m))
        near.append(np.stack([apart[i, j], (scenes.shadowing_db[i] * scenes.shadowing_db[j]).mean(-1) / 36.0]))
    apart, product = np.concatenate(near, 1)
    for low, high in ((0, 0.5), (0.5, 1), (1, 2), (3, 6)):
        inside = (apart >= low * distance_m) & (apart < high * distance_m)
        expected = np.exp(-apart[inside] / distance_m).mean()
        assert product[inside].mean() == pytest.approx(expected, abs=0.12)
    assert scenes.shadowing_db.std() == pytest.approx(6.0, abs=0.8)


def test_blocked_links_are_later_by_an_exponential_law_and_weaker():
    config = GenerateConfig(blocked_share=0.3, blocked_delay_us=2.0, blocked_loss_db=12.0)
    open_, scenes = make_scenes(GenerateConfig(), ATTEMPTS), make_scenes(config, ATTEMPTS)
    assert scenes.blocked.mean() == pytest.approx(0.3, abs=0.005)
    excess = scenes.echo_delay_s[..., 0]
    assert (excess[~scenes.blocked] == 0).all()
    late_us = excess[scenes.blocked] * 1e6
    assert stats.kstest(late_us, "expon", (0, 2.0)).pvalue > 0.01
    assert (open_.power_dbm - scenes.power_dbm)[scenes.blocked] == pytest.approx(12.0)
    assert scenes.echo_delay_s.max() <= max_echo_s(config)


def test_dense_echoes_have_the_delay_spread_of_their_law():
    scenes = make_scenes(GenerateConfig(echo_spread_us=0.5), ATTEMPTS)
    delay_us = scenes.echo_delay_s[..., 1:].ravel() * 1e6
    assert stats.kstest(delay_us[delay_us < 9.2 * 1.15], "expon", (0, 2.3 * 0.5)).statistic < 0.005
    assert scenes.path_power.sum(-1) == pytest.approx(1.0)
    share = np.log(scenes.path_power[..., 1] / scenes.path_power[..., 0])
    slope = np.polyfit(scenes.echo_delay_s[..., 1].ravel() * 1e6, share.ravel(), 1)[0]
    assert slope == pytest.approx(-(2.3 - 1) / (2.3 * 0.5), rel=0.02)


def test_clocks_are_constant_or_drift_or_mean_nothing():
    clock = {
        kind: make_scenes(GenerateConfig(clock=kind, clock_sigma_s=1e-6), ATTEMPTS).clock_error_s
        for kind in ("sample", "station", "drift", "none")
    }
    assert np.ptp(clock["station"], axis=0).max() == 0
    assert len(np.unique(clock["station"])) == 7
    steps = np.abs(np.diff(clock["drift"], axis=0))
    assert steps.max() < 1e-9
    assert np.ptp(clock["drift"], axis=0).mean() > 0.2e-6
    assert stats.kstest(clock["none"][:, 0], "uniform", (-1e-3, 2e-3)).pvalue > 0.01
    assert clock["sample"].std() == pytest.approx(1e-6, rel=0.02)


def test_drift_has_its_standard_deviation_over_networks():
    spread = [
        make_scenes(GenerateConfig(clock="drift", seed=seed), ATTEMPTS[::5000]).clock_error_s for seed in range(60)
    ]
    assert np.std(spread) == pytest.approx(1e-6, rel=0.1)


def test_a_station_keeps_its_gain_error_and_samples_have_their_power():
    plain = make_scenes(GenerateConfig(), ATTEMPTS)
    gained = make_scenes(GenerateConfig(station_gain_db=4.0), ATTEMPTS)
    gain = gained.power_dbm - plain.power_dbm
    assert np.ptp(gain, axis=0).max() < 1e-9
    assert 1 < gain[0].std() < 9
    spread = make_scenes(GenerateConfig(power_spread_db=10.0), ATTEMPTS)
    offset = spread.power_dbm - plain.power_dbm
    assert np.ptp(offset, axis=1).max() < 1e-9
    assert stats.kstest(offset[:, 0], "uniform", (-10, 20)).pvalue > 0.01
    assert spread.tx_power_dbm - 40.0 == pytest.approx(offset[:, 0])


def of_place(seed, place_seed):
    """What stations hear from each place and their clocks, apart from the transmitters' places: (kinds, R)."""
    common = {"seed": seed, "environment_seed": place_seed, "clock": "station", "station_gain_db": 4.0}
    scenes = make_scenes(GenerateConfig(**common, shadowing_db=0.0), ATTEMPTS[:1])
    gain_db = (scenes.power_dbm + scenes.loss_db - 40.0)[0]
    ground = terrain_of(GenerateConfig(seed=seed, environment_seed=place_seed, terrain=FRACTAL))
    assert ground is not None
    return np.stack([gain_db, scenes.clock_error_s[0] * 1e6, ground.heights[:7, 0]])


def test_an_environment_stays_from_seed_to_seed_unless_it_has_none():
    assert of_place(1, 5) == pytest.approx(of_place(2, 5), abs=1e-6)
    for other in (of_place(1, 6), of_place(1, None), of_place(2, None)):
        assert (np.abs(other - of_place(1, 5)).max(-1) > 0.1).all()


@pytest.mark.parametrize("changes", [{"station_gain_db": 6.0, "shadowing_db": 0.0}, {"shadowing_distance_m": 500.0}])
def test_random_receivers_have_gains_and_maps_of_their_own_in_every_sample(changes):
    scenes = make_scenes(preset("production", **changes), ATTEMPTS[:2_000])
    drawn = (scenes.power_dbm + scenes.loss_db - 50.0)[:, :5]
    assert drawn.std() == pytest.approx(6.0, rel=0.05)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(5)).max() < 0.1
    assert abs(np.corrcoef(drawn[1:, 0], drawn[:-1, 0])[0, 1]) < 0.1


# Paths of a ray tracer


def traced(folder, **changes):
    """Three receivers, two transmitters: a direct path and one 2 µs later; the last link has only the later one."""
    config = GenerateConfig()
    receiver = np.array([[45.0, 7.5, 200.0], [45.2, 7.9, 300.0], [44.8, 7.8, 100.0]])
    transmitter = np.array([[45.05, 7.7, 150.0], [45.1, 7.6, 250.0]])
    here = np.stack(ecef(*(receiver + np.array([0, 0, config.rx_antenna_m])).T), -1)
    there = np.stack(ecef(*(transmitter + np.array([0, 0, config.tx_antenna_m])).T), -1)
    straight = np.linalg.norm(there[:, None] - here, axis=-1) / 299_792_458.0
    delay, gain = np.stack([straight, straight + 2e-6], -1), np.full((2, 3, 2), -100.0)
    gain[..., 1] = -103.0
    gain[1, 2, 0] = -np.inf
    arrays = {"transmitter": transmitter, "receiver": receiver, "delay_s": delay, "gain_db": gain} | changes
    file = folder / "paths.npz"
    np.savez(file, **{name: value for name, value in arrays.items() if value is not None})
    return file


def with_paths(file):
    return GenerateConfig(paths=str(file), stations=read_paths(str(file)).stations, shadowing_db=6.0)


def test_traced_paths_are_what_arrives(tmp_path):
    scenes = make_scenes(with_paths(traced(tmp_path)), ATTEMPTS[:200])
    first = np.isclose(scenes.transmitter[:, 0], 45.05)
    assert 60 < first.sum() < 140
    clear = -10 * np.log10(1e-10 + 10**-10.3)
    assert scenes.loss_db[first] == pytest.approx(clear)
    assert scenes.loss_db[~first, 2] == pytest.approx(103.0)
    assert scenes.echo_delay_s[first, 0, :2] * 1e6 == pytest.approx(np.tile([0.0, 2.0], (first.sum(), 1)), abs=1e-3)
    assert scenes.blocked[~first].tolist() == [[False, False, True]] * (~first).sum()
    assert scenes.echo_delay_s[~first, 2, 0] * 1e6 == pytest.approx(2.0, abs=1e-3)
    assert (scenes.shadowing_db == 0).all()
    assert scenes.path_power.sum(-1) == pytest.approx(1.0)


def test_the_four_strongest_paths_count_in_the_order_they_arrive(tmp_path):
    delay = np.tile([5e-4, 3e-4, 2e-4, 6e-4, 1e-4, 4e-4], (2, 3, 1))
    gain = np.tile([-90.0, -101.0, -95.0, -96.0, -99.0, -93.0], (2, 3, 1))
    found = read_paths(str(traced(tmp_path, delay_s=delay, gain_db=gain)))

    assert found.delay_s[0, 0].tolist() == [2e-4, 4e-4, 5e-4, 6e-4]
    assert 10 * np.log10(found.gain[0, 0]) == pytest.approx([-95, -93, -90, -96])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"delay_s": None}, "has no array delay_s"),
        ({"delay_s": np.zeros((3, 2, 2))}, "expected \\(transmitters, receivers, paths\\)"),
        ({"gain_db": np.zeros((2, 3))}, "expected 3 axes"),
        ({"delay_s": np.full((2, 3, 2), 1e-9)}, "faster than light"),
        ({"delay_s": np.full((2, 3, 2), 1.0)}, "µs after the straight line"),
        ({"gain_db": np.full((2, 3, 2), 20.0)}, "gains above 0 dB"),
        ({"transmitter": np.array([[50.0, 7.0, 0.0], [45.0, 7.5, 0.0]])}, "outside the box|faster than light"),
    ],
)
def test_files_of_paths_that_make_no_sense_are_refused(tmp_path, changes, said):
    file = traced(tmp_path, **changes)
    with pytest.raises(ConfigError, match=said):
        make_scenes(with_paths(file), ATTEMPTS[:5])


def test_traced_paths_may_be_hdf5_and_nothing_else_is_taken_for_them(tmp_path):
    h5py = pytest.importorskip("h5py")
    file, other = traced(tmp_path), tmp_path / "paths.h5"
    with h5py.File(other, "w") as written:
        written.update(np.load(file))
    one, same = (make_scenes(with_paths(path), ATTEMPTS[:20]) for path in (file, other))
    assert np.array_equal(one.echo_delay_s, same.echo_delay_s)
    for name, content in (("zip.npz", b"PK\3\4xx"), ("bad.h5", b"xx"), ("none.npz", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_paths(str(tmp_path / name))
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ConfigError, match="one array without a name"):
        read_paths(str(tmp_path / "array.npy"))


def test_paths_exclude_random_receivers():
    with pytest.raises(ConfigError, match="excludes random receivers"):
        GenerateConfig(paths="x.npz", use_random_receivers=True)
