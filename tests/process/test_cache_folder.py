import pathlib

from tfaccel.process.cache_folder import cache_folder


def test_the_users_own_choice_or_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/elsewhere")
    assert cache_folder("index") == tmp_path / "elsewhere" / "tfaccel" / "index"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder("index") == pathlib.Path(tmp_path, ".cache", "tfaccel", "index")
