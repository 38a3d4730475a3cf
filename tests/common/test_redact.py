import logging

import pytest

from tfaccel.cli import main
from tfaccel.common.errors import RunError, UserError, tell
from tfaccel.common.redact import Redacted, escaped, redacted, without_userinfo
from tfaccel.common.report import in_lines
from tfaccel.common.tables import as_html, show
from tfaccel.data.scan.report import Fault, write_list
from tfaccel.launch.options import Options


def test_a_config_is_kept_but_for_its_secrets():
    config = {
        "data": {"root": "https://me:pass@host/data", "image_key": "image/encoded", "size": (2, 3)},
        "api_token": "abc",
        "hub": {"access_key": "abc", "PASSWORD": "abc", "secret": None},
        "urls": ["s3://key@bucket/a", "gs://bucket/b"],
    }
    assert redacted(config) == {
        "data": {"root": "https://***@host/data", "image_key": "image/encoded", "size": (2, 3)},
        "api_token": "***",
        "hub": {"access_key": "***", "PASSWORD": "***", "secret": None},
        "urls": ["s3://***@bucket/a", "gs://bucket/b"],
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no https://a:b@h/x?v=1 today", "no https://***@h/x?v=1 today"),
        ("https://h/x?X-Amz-Signature=ab12&v=1", "https://h/x?X-Amz-Signature=***&v=1"),
        ("mail me@host, see /data/train@2", "mail me@host, see /data/train@2"),
    ],
)
def test_urls_lose_user_and_signature(text, shown):
    assert without_userinfo(text) == shown


def test_log_lines_have_no_userinfo(caplog):
    record = logging.LogRecord("tfaccel", 20, "", 1, "at %s", ("https://a:b@h",), None)
    assert Redacted("%(message)s").format(record) == "at https://***@h"


@pytest.mark.parametrize(
    "text",
    [
        "https://me:PASS@host/x",
        "https:/me:PASS@host/x",  # as pathlib writes it
        "/home/a/https:/me:PASS@host/x/y.png",
        "PosixPath('s3:/me:PASS@bucket/x')",
        "https:///me:PASS@host",
        r"https:\/\/me:PASS@host",
        "https://me:PA@SS@host/x",
        "https://me:PA/SS@host/x",
        "hdfs://PASS@host",
    ],
)
def test_no_part_of_a_password_stays(text):
    assert "***@" in without_userinfo(text)
    assert not any(each in without_userinfo(text) for each in ("PA", "SS", "me:"))


@pytest.mark.parametrize(
    "text",
    ["https://host:80/train@2/x", "/data/train@2", "mail me@host", "a: /x@y", "file:/data/a@2"],
)
def test_what_is_no_user_stays(text):
    assert without_userinfo(text) == text


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("a\x1b[2J.png", r"a\x1b[2J.png"),
        ("a\r\x08b\x00", r"a\r\x08b\x00"),
        ("a\u202egnp.exe", r"a\u202egnp.exe"),
        ("a\u2066b\u200b", r"a\u2066b\u200b"),
        ("c1 \x9b31m \x85", r"c1 \x9b31m \x85"),
        ("line\u2028par\u2029", r"line\u2028par\u2029"),
        ("no text \udcff", r"no text \xff"),
        ("ä 漢字 é .png", "ä 漢字 é .png"),
    ],
)
def test_what_a_terminal_obeys_is_readable(text, readable):
    assert escaped(text) == readable
    assert escaped(readable) == readable


def test_every_way_out_shows_names_escaped_and_no_secrets(caplog, capsys, tmp_path):
    name = "a\x1b[31m\u202e https:/me:PASS@host"
    plain = r"a\x1b[31m\u202e https:/***@host"
    assert str(UserError(f"{name} is no file")) == str(RunError(f"{plain} is no file"))
    tell(UserError(name))
    assert capsys.readouterr().err == f"tfaccel: error: {plain}\n"
    show(f"{name}\nnext")
    assert capsys.readouterr().out == f"{plain}\nnext\n"
    assert as_html("<b>\x07\u202e") == r"&lt;b&gt;\x07\u202e"
    assert in_lines("\x1b[1mbold\x1b[0m \x1b]0;title\x07") == r"bold \x1b]0;title\x07"
    logging.getLogger("tfaccel").warning("data: %s in %d", name, 3)  # to whichever handler
    assert caplog.messages == [f"data: {plain} in 3"]
    write_list(tmp_path / "list", [Fault("bad", "empty", name, "no\nbytes\\", 0)])
    said = (tmp_path / "list").read_text()
    assert plain in said.replace("\\\\", "\\")
    assert said.count("\n") == 1


def test_a_name_with_an_end_of_line_is_no_line_of_the_log():
    record = logging.LogRecord("tfaccel", 20, "", 1, "%s", ("a\ntfaccel: error: b\n    c",), None)
    assert Redacted("tfaccel: %(message)s").format(record).split("\n") == [
        "tfaccel: a",
        "  tfaccel: error: b",
        "    c",
    ]


def test_an_unforeseen_error_of_the_command_has_no_secrets(monkeypatch, capsys):
    def fail(_):
        raise KeyError("https://me:PASS@host \x1b[2J")

    monkeypatch.setattr(main, "main", fail)
    with pytest.raises(SystemExit) as raised:
        main.cli()
    assert raised.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert "***@host" in said
    assert "PASS" not in said.rpartition("KeyError")[2]


@pytest.mark.parametrize("engine", ["kubernetes", "slurm"])
def test_a_printed_script_with_a_secret_is_said(engine, caplog, tmp_path, monkeypatch, capsys):
    import importlib

    room = importlib.import_module(f"tfaccel.launch.{engine}")
    monkeypatch.setattr(room, {"kubernetes": "manifest", "slurm": "script"}[engine], lambda *_: "x")
    run = room.launch if hasattr(room, "launch") else room.run
    run(Options(prints=True, log_dir=tmp_path), ["train", "--config.data.root=s3://k:P@b"])
    assert "contain a password or a token" in caplog.text
    caplog.clear()
    run(Options(prints=True, log_dir=tmp_path), ["train", "--config.data.root=/data"])
    assert caplog.text == ""
