import pathlib

import pytest

from tfaccel import UserError, sources
from tfaccel.cli.main import main
from tfaccel.common.local_path import local_path
from tfaccel.config import DataConfig
from tfaccel.experiment.models.weights import begin_from
from tfaccel.experiment.open_data import open_source
from tfaccel.training.workdir import check_usable

URLS = [
    "s3://bucket/images",
    "gs://bucket/images",
    "https://host/x.zip",
    "hdfs://host:8020/images",
    "abfss://box@account.dfs.core.windows.net/images",
    "dbfs:/images",
]


@pytest.mark.parametrize("url", URLS)
def test_a_url_is_said_to_be_one(url):
    shown = url.replace(":/", "://").replace("///", "//").replace("box@", "***@")
    for given in (url, pathlib.Path(url), pathlib.Path("/data") / url):
        with pytest.raises(UserError) as error:
            local_path(given)
        assert str(error.value).startswith(
            f"{shown} is a URL; tfaccel reads and writes only files of"
        )


@pytest.mark.parametrize("url", ["file:///data/a", "file:/data/a", "file://localhost/data/a"])
def test_a_file_url_is_said_with_its_path(url):
    with pytest.raises(UserError, match=r"is a URL; give only the path: /data/a$"):
        local_path(url)


@pytest.mark.parametrize("url", ["s3:/me:PASS@bucket/x", "GS:/bucket/x", "Https://bucket/x"])
def test_a_misspelled_url_is_said_as_typed(url):
    scheme = url.partition(":")[0]
    words = f"{scheme}:/.*bucket/x'; did you mean '{scheme.lower()}://.*bucket/x'\\?$"
    for call, named in (
        (lambda: open_source(DataConfig(root=url), "train"), "^data.root='"),
        (lambda: sources.class_folders(url), "^'"),
        (lambda: sources.image_list(url), "^'"),
    ):
        with pytest.raises(UserError, match=named + words) as error:
            call()
        assert "PASS" not in str(error.value)
    with pytest.raises(UserError, match="is a URL"):
        local_path(url)


def test_paths_stay_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for each in ("a:b/c", "C:/x", "/data/run:1/x", "x/lr=[0.1]", ".", "a b"):
        assert local_path(each) == pathlib.Path(each)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    assert local_path("s3:/bucket") == pathlib.Path("s3:/bucket")


def test_other_words_that_are_no_path(monkeypatch):
    with pytest.raises(UserError, match="contains a zero byte"):
        local_path("/a\0b")
    with pytest.raises(UserError, match="give the path in full"):
        local_path("~no-such-user-here/x")


def test_a_password_is_not_shown():
    with pytest.raises(UserError) as error:
        local_path("https://me:PASS@host/x")
    assert "PASS" not in str(error.value)


@pytest.mark.parametrize(
    "use",
    [
        lambda url: sources.class_folders(pathlib.Path(url)),
        sources.npy_folders,
        lambda url: sources.image_list(pathlib.Path(url)),
        lambda url: sources.tfrecord(pathlib.Path(url)),
        lambda url: sources.webdataset(pathlib.Path(url)),
        sources.arrays,
        lambda url: sources.image_pairs(url, "/"),
        lambda url: sources.image_pairs("/", url),
        lambda url: sources.tfrecord(__file__, index_dir=url),
        lambda url: sources.tfrecord([__file__, f"{url}/train-*"]),
        lambda url: open_source(DataConfig(root="/", train=url), "train"),
        lambda url: check_usable(pathlib.Path(url), resume="auto"),
        lambda url: begin_from(url, None),
    ],
)
def test_every_place_that_takes_a_path_says_so(use):
    with pytest.raises(UserError, match=r"s3://bucket/x.* is a URL"):
        use("s3://bucket/x")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--config=s3://bucket/c.py"],
        ["train", "--config=configs/digits.py", "--workdir=s3://bucket/x"],
        ["predict", "--model=s3://bucket/x", "a.jpg"],
        ["predict", "--model=x", "s3://bucket/a.jpg"],
        ["export", "--workdir=s3://bucket/x"],
        ["plot", "s3://bucket/x"],
    ],
)
def test_every_command_says_so(arguments):
    with pytest.raises(UserError, match="is a URL"):
        main(arguments)
