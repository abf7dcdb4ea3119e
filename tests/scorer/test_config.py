import pytest
from pydantic import ValidationError

from scorer.config import Config, cache_dir
from scorer.errors import ConfigError


def settings_file(tmp_path, text):
    path = tmp_path / "prefixrank.toml"
    path.write_text(text)
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path):
    file = settings_file(tmp_path, 'port = 1\nmetrics_port = 1\nhost = "file"\ndrain_seconds = 1.5')
    environ = {"PREFIXRANK_PORT": "2", "PREFIXRANK_METRICS_PORT": "2", "PATH": "/bin"}
    config = Config.read({"port": "3"}, environ, file)
    assert (config.port, config.metrics_port, config.host, config.drain_seconds) == (3, 2, "file", 1.5)


def test_an_absent_flag_hides_nothing():
    assert Config.read({"port": None}, {"PREFIXRANK_PORT": "2"}).port == 2


@pytest.mark.parametrize(
    ("flags", "environ", "text", "told"),
    [
        ({"prot": "1"}, {}, "", "prot (from the command line): unknown setting, got '1'"),
        ({}, {"PREFIXRANK_PROT": "1"}, "", "prot (from the environment): unknown setting, got '1'"),
        ({}, {}, "prot = 1", "prot (from {file}): unknown setting, got 1"),
        ({"port": "high"}, {}, "", "port (from the command line)"),
        ({}, {"PREFIXRANK_PORT": "70000"}, "", "port (from the environment)"),
        ({}, {}, "page_size = 0", "page_size (from {file})"),
        ({}, {"PREFIXRANK_DTYPE": "int3"}, "", "dtype (from the environment)"),
        ({}, {"PREFIXRANK_ALLOW_DOWNLOAD": "perhaps"}, "", "allow_download (from the environment)"),
    ],
)
def test_an_unknown_or_malformed_value_names_its_origin(flags, environ, text, told, tmp_path):
    file = settings_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        Config.read(flags, environ, file)
    assert told.format(file=file) in str(caught.value)


def test_every_bad_setting_is_told_at_once():
    with pytest.raises(ConfigError, match=r"port .*page_size"):
        Config.read({"port": "x", "page_size": "y"}, {})


@pytest.mark.parametrize("text", ["port = ", "= 1", '"\xff"'])
def test_a_file_that_is_no_toml_is_named(tmp_path, text):
    file = settings_file(tmp_path, text)
    with pytest.raises(ConfigError, match=r"cannot read the settings file .*prefixrank\.toml"):
        Config.read({}, {}, file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the settings file"):
        Config.read({}, {}, tmp_path / "none.toml")


def test_it_is_frozen():
    config = Config.read({}, {})
    with pytest.raises(ValidationError):
        config.port = 1


def test_every_setting_is_described():
    assert all(field.description for field in Config.model_fields.values())


def test_converted_models_lie_in_the_users_cache(tmp_path):
    assert cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "prefixrank"
    assert cache_dir({}).parts[-2:] == (".cache", "prefixrank")


def test_tenant_weights_come_as_text_or_as_a_table(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("[tenant_weights]\nads = 2\n", encoding="utf-8")
    assert Config.read({}, {}, file).tenant_weights == {"ads": 2.0}
    assert Config.read({"tenant_weights": "ads=2,search=0.5"}, {}).tenant_weights == {"ads": 2.0, "search": 0.5}


@pytest.mark.parametrize(
    "bad", ["ads", "ads=0", "ads=-1", "ads=much", "ads=nan", "ads=inf", "ads=1e-300", "ads=9e-4", "ads=1001"]
)
def test_a_weight_that_is_none_stops_the_start(bad):
    with pytest.raises(ConfigError, match="tenant_weights"):
        Config.read({"tenant_weights": bad}, {})


@pytest.mark.parametrize(
    "bad",
    [
        *("foo", "localhost", "localhost:4317", "ftp://x:1", "http://", "http://:4317", "http://host", "http://host:0"),
        *("http://host:99999", "http://host:port", "http://host:1/v1/traces", "http://me@host:1", "http://a b:1", ""),
    ],
)
def test_a_collector_that_would_get_no_span_stops_the_start(bad):
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        Config.read({"otlp_endpoint": bad}, {})


@pytest.mark.parametrize("good", ["http://localhost:4317", "https://otel.svc:4317/", "http://[::1]:4317"])
def test_a_collectors_address_is_taken(good):
    assert Config.read({"otlp_endpoint": good}, {}).otlp_endpoint == good
