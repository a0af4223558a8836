"""What a configuration may be: ranges, choices, presets, files of stations."""

import pytest

from brim.errors import ConfigError
from brim.rf.config import (
    GenerateConfig,
    Station,
    from_mapping,
    preset,
    read_stations,
    read_toml,
)

THREE = ["A,45.0,7.0,100", "B,45.2,7.5,200", "C,44.8,7.3,150"]


def stations_file(path, *lines, header="name,lat,lon,alt"):
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return path


def test_defaults_are_the_built_in_network_without_a_preset():
    config = GenerateConfig()
    asked = {"frequency_mhz": 145.0, "tx_power_dbm": 40.0, "min_snr_db": 5.0, "max_gdop": 50.0, "min_receivers": 3}
    asked |= {"use_random_receivers": False, "inside_ratio": 0.7, "dataset_type": "feature_based", "waveform": "nbfm"}
    asked |= {"loss": "log_distance", "shadowing_db": 6.0, "noise_figure_db": 6.0, "environment": "residential"}
    asked |= {"fading": "rayleigh", "rician_k_db": 6.0, "clock_sigma_s": 1e-6, "loss_exponent": 3.0}
    asked |= {"max_frequency_offset_hz": 50.0, "duration_s": 1.0, "tx_antenna_m": 2.0, "rx_antenna_m": 30.0}
    asked |= {"blocked_delay_us": 1.0, "blocked_loss_db": 10.0, "terrain_relief_m": 100.0, "impulse_db": 40.0}
    assert {name: getattr(config, name) for name in asked} == asked
    assert config.num_samples_iq == 200_000
    assert config.max_receivers == 7


@pytest.mark.parametrize(
    ("name", "power", "snr", "gdop", "fewest"), [("production", 50, 5, 100, 3), ("quality", 40, 10, 20, 4)]
)
def test_presets_are_the_promised_ones(name, power, snr, gdop, fewest):
    config = preset(name)
    assert config.use_random_receivers
    assert (config.tx_power_dbm, config.min_snr_db, config.max_gdop, config.min_receivers) == (power, snr, gdop, fewest)
    assert config.max_receivers == 10
    changed = {"use_random_receivers", "tx_power_dbm", "min_snr_db", "max_gdop", "min_receivers"}
    default = GenerateConfig().as_dict()
    assert {k for k, v in config.as_dict().items() if v != default[k]} <= changed


def test_more_receivers_asked_for_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"min_receivers=8.*7 stations"):
        GenerateConfig(min_receivers=8)
    with pytest.raises(ConfigError, match=r"min_receivers=11.*10 random receivers"):
        GenerateConfig(min_receivers=11, use_random_receivers=True)


def test_a_resolved_configuration_reads_back_equal():
    config = preset("quality", seed=2**62, waveform="am", samples_per_shard=7)
    assert from_mapping(config.as_dict()) == config


def test_options_win_over_the_preset_below_them(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "production"\ntx_power_dbm = 20\n')
    config = from_mapping(read_toml(file))
    assert (config.tx_power_dbm, config.max_gdop, config.use_random_receivers) == (20.0, 100.0, True)


@pytest.mark.parametrize(
    ("changes", "is_fixed"),
    [
        ({}, False), ({"clock": "drift"}, True), ({"clock": "drift", "clock_sigma_s": 0.0}, False),
        ({"terrain": "fractal"}, True), ({"station_gain_db": 1.0}, True), ({"shadowing_distance_m": 500.0}, True),
        ({"shadowing_distance_m": 500.0, "use_random_receivers": True}, False),
    ],
)  # fmt: skip
def test_an_environment_is_fixed_where_stations_keep_something(changes, is_fixed):
    assert GenerateConfig(**changes).is_fixed_environment is is_fixed


def test_stations_are_read_from_csv(tmp_path):
    stations = read_stations(stations_file(tmp_path / "s.csv", *THREE))
    assert stations == (
        Station("A", 45.0, 7.0, 100.0),
        Station("B", 45.2, 7.5, 200.0),
        Station("C", 44.8, 7.3, 150.0),
    )
    assert GenerateConfig(stations=stations).max_receivers == 3


def test_columns_may_come_in_any_order_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "s.csv"
    file.write_text("lon,alt,lat,name\n7.0,100,45.0,A\n7.5,200,45.2,B\n", encoding="utf-8-sig")
    assert read_stations(file)[0] == Station("A", 45.0, 7.0, 100.0)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("A,45.5,8.0,10", "'A'.*twice"),
        ("D,45.0,7.0,10", "'A' and 'D'.*same position"),
        ("D,90.5,8.0,10", "line 5.*lat=90.5"),
        ("D,north,8.0,10", "line 5.*north"),
        ("D,45.5,8.0", "line 5.*alt"),
    ],
)
def test_a_bad_station_is_refused(tmp_path, line, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_stations(stations_file(tmp_path / "s.csv", *THREE, line))


def test_a_network_too_wide_to_hear_one_transmission_is_refused():
    far = tuple(Station(name, lat, lon, 0.0) for name, lat, lon in (("A", 0, 0), ("B", 1, 1), ("C", 0, 40)))
    with pytest.raises(ConfigError, match="km"):
        GenerateConfig(stations=far)
