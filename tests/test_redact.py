import logging

import pytest

from tfaccel.redact import Redacted, redacted, without_userinfo


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
