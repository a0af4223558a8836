"""What a configuration may be: ranges, choices, presets, files of stations."""

from dataclasses import asdict

import pytest

from brim.errors import ConfigError
from brim.rf.config import (
    BUILTIN_STATIONS,
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
    asked |= {"max_frequency_offset_hz": 50.0}
    assert {name: getattr(config, name) for name in asked} == asked
    assert config.num_samples_iq == 200_000
    assert config.max_receivers == 7


def test_the_built_in_network_is_the_published_one():
    assert [tuple(asdict(s).values()) for s in BUILTIN_STATIONS] == [
        ("Aquila di Giaveno", 45.030, 7.270, 600),
        ("Montanaro", 45.234, 7.857, 300),
        ("Torino", 45.044, 7.672, 250),
        ("Coazze", 45.048, 7.238, 700),
        ("Passo del Giovi", 44.561, 8.956, 480),
        ("Genova", 44.395, 8.956, 100),
        ("Milano-Baggio", 45.478, 9.123, 120),
    ]


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


def test_an_unknown_preset_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"bogus.*production.*quality"):
        preset("bogus")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tx_power_dbm", -0.1),
        ("tx_power_dbm", 50.1),
        ("frequency_mhz", 0.0),
        ("frequency_mhz", -145.0),
        ("min_snr_db", 1e3),
        ("min_snr_db", float("nan")),
        ("max_gdop", 0.0),
        ("max_gdop", float("inf")),
        ("inside_ratio", -0.01),
        ("inside_ratio", 1.01),
        ("shadowing_db", -1.0),
        ("clock_sigma_s", -1e-9),
        ("noise_figure_db", -1.0),
        ("max_frequency_offset_hz", -1.0),
        ("duration_s", 0.0),
        ("duration_s", 0.3),
        ("seed", -1),
        ("samples_per_shard", -1),
    ],
)
def test_a_number_out_of_range_is_refused_by_name_and_value(name, value):
    with pytest.raises(ConfigError) as caught:
        GenerateConfig(**{name: value})
    assert (caught.value.field, caught.value.code) == (name, "out_of_range")


@pytest.mark.parametrize("power", [0, 50])
def test_the_ends_of_the_power_range_are_allowed(power):
    assert GenerateConfig(tx_power_dbm=power).tx_power_dbm == power


@pytest.mark.parametrize(
    ("name", "choice"),
    [("waveform", "ssb"), ("loss", "okumura"), ("fading", "nakagami"), ("environment", "sea"), ("dataset_type", "iq")],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(name, choice):
    with pytest.raises(ConfigError, match=f'{name}="{choice}" is unknown'):
        GenerateConfig(**{name: choice})


@pytest.mark.parametrize(
    "change",
    [
        {"tx_power_dbm": "40"},
        {"tx_power_dbm": True},
        {"min_receivers": 3.5},
        {"use_random_receivers": 1},
        {"seed": 1.0},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        GenerateConfig(**change)


@pytest.mark.parametrize("few", [2, 1, 0, -3])
def test_fewer_than_three_receivers_are_refused(few):
    with pytest.raises(ConfigError, match=f"min_receivers={few} must be between 3 and"):
        GenerateConfig(min_receivers=few)


def test_more_receivers_asked_for_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"min_receivers=8.*7 stations"):
        GenerateConfig(min_receivers=8)
    with pytest.raises(ConfigError, match=r"min_receivers=11.*10 random receivers"):
        GenerateConfig(min_receivers=11, use_random_receivers=True)


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(ConfigError, match="tx_power_dbw"):
        from_mapping({"tx_power_dbw": 3.0})
    with pytest.raises(ConfigError, match="alt"):
        from_mapping({"stations": [{"name": "A", "lat": 1.0, "lon": 2.0}]})


def test_a_resolved_configuration_reads_back_equal():
    config = preset("quality", seed=2**62, waveform="am", samples_per_shard=7)
    assert from_mapping(config.as_dict()) == config


def test_options_win_over_the_preset_below_them(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "production"\ntx_power_dbm = 20\n')
    config = from_mapping(read_toml(file))
    assert (config.tx_power_dbm, config.max_gdop, config.use_random_receivers) == (20.0, 100.0, True)


@pytest.mark.parametrize("text", ["tx_power_dbm = ", "preset = 'nothing'"])
def test_a_bad_toml_file_is_refused(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        from_mapping(read_toml(file))


def test_a_missing_toml_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        read_toml(tmp_path / "nowhere.toml")


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


@pytest.mark.parametrize("column", ["name", "lat", "lon", "alt"])
def test_a_missing_column_is_named(tmp_path, column):
    header = "name,lat,lon,alt".replace(column, "other")
    with pytest.raises(ConfigError, match=f"missing column {column}"):
        read_stations(stations_file(tmp_path / "s.csv", *THREE, header=header))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("A,45.5,8.0,10", "'A'.*twice"),
        ("D,45.0,7.0,10", "'A' and 'D'.*same position"),
        ("D,90.5,8.0,10", "lat=90.5"),
        ("D,45.5,180.5,10", "lon=180.5"),
        ("D,45.5,8.0,1e5", "alt=100000"),
        ("D,45.5,8.0,nan", "alt=NaN"),
        ("D,north,8.0,10", "line 5.*north"),
        ("D,45.5,8.0", "line 5.*alt"),
        (",45.5,8.0,10", "name"),
    ],
)
def test_a_bad_station_is_refused(tmp_path, line, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_stations(stations_file(tmp_path / "s.csv", *THREE, line))


@pytest.mark.parametrize("text", ["", "name,lat,lon,alt\n"])
def test_a_file_without_stations_is_refused(tmp_path, text):
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(ConfigError, match="no stations"):
        read_stations(tmp_path / "s.csv")


def test_an_unreadable_stations_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv"):
        read_stations(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match=r"binary\.csv"):
        read_stations(tmp_path / "binary.csv")


def test_fewer_stations_than_receivers_needed_is_refused(tmp_path):
    stations = read_stations(stations_file(tmp_path / "s.csv", *THREE[:2]))
    with pytest.raises(ConfigError, match=r"min_receivers=3.*2 stations"):
        GenerateConfig(stations=stations)


def test_a_network_too_wide_to_hear_one_transmission_is_refused():
    far = tuple(Station(name, lat, lon, 0.0) for name, lat, lon in (("A", 0, 0), ("B", 1, 1), ("C", 0, 40)))
    with pytest.raises(ConfigError, match="km"):
        GenerateConfig(stations=far)
