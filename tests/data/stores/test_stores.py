"""Sources in an object store and on a web server, against the same files on the disk.

The store is of Amazon's kind (moto). Both servers are on this machine's loopback.
"""

import contextlib
import functools
import http.server
import io
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from encoded_images import record

from tfaccel import UserError, sources
from tfaccel.common.errors import RunError
from tfaccel.config import DataConfig
from tfaccel.data.scan.files import scan_files
from tfaccel.data.stores import store as store_lib
from tfaccel.data.stores.cache import COUNT
from tfaccel.data.there import check_there
from tfaccel.experiment.open_data import open_source, open_sources

NUM = 12


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Returns the folder of fetched files, which no other test has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tfaccel" / "stores"


@pytest.fixture(scope="session")
def moto_port():
    pytest.importorskip("s3fs", reason="the extra `remote` is not installed")
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    server = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def s3(moto_port, monkeypatch):
    """Returns s3fs with an empty bucket named "bucket"."""
    import fsspec

    for name, value in {
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "known-to-me",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{moto_port}",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir("bucket")
    yield files
    files.invalidate_cache()
    files.rm("bucket", recursive=True)


class _Handler(http.server.SimpleHTTPRequestHandler):
    asked: list

    def do_GET(self):
        self.server.asked.append(self.path)
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path):
    """Returns a web server of the folder tmp_path/web; `asked` has the paths of its GETs."""
    pytest.importorskip("aiohttp", reason="the extra `remote` is not installed")
    (tmp_path / "web").mkdir()
    handler = functools.partial(_Handler, directory=str(tmp_path / "web"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.asked, server.folder = [], tmp_path / "web"
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def photos(tmp_path):
    """Class folders of JPEGs of several sizes."""
    random = np.random.default_rng(0)
    for index in range(NUM):
        coarse = PIL.Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        image = coarse.resize(random.integers(40, 70, 2).tolist(), PIL.Image.Resampling.BICUBIC)
        path = tmp_path / "photos" / "training" / ("a cat", "dog")[index % 2] / f"{index:02d}.jpg"
        path.parent.mkdir(exist_ok=True, parents=True)
        image.save(path, quality=95)
    return tmp_path / "photos"


def write_list(folder, root):
    root.mkdir()
    shutil.copytree(folder.images.folder, root / "images")
    lines = ["path,label"]
    for file, label in zip(folder.images.files, folder.labels, strict=True):
        name = os.path.relpath(file, folder.images.folder)
        lines.append(f"images/{name},{folder.class_names[label]}")
    (root / "train.csv").write_text("\n".join(lines))


def write_tfrecords(folder, root):
    root.mkdir()
    for shard in range(3):
        with tf.io.TFRecordWriter(str(root / f"train-{shard}")) as writer:
            for index in range(shard, len(folder), 3):
                writer.write(record(folder.images.read(index), folder.labels[index]))


def write_tars(folder, root):
    root.mkdir()
    for shard in range(3):
        with tarfile.open(root / f"train-{shard}.tar", "w") as tar:
            for index in range(shard, len(folder), 3):
                for suffix, data in (
                    ("jpg", folder.images.read(index)),
                    ("cls", str(folder.labels[index]).encode()),
                ):
                    member = tarfile.TarInfo(f"{index:06d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def write_folders(folder, root):
    shutil.copytree(os.path.dirname(folder.images.folder), root)


KINDS = {
    "folders": (write_folders, sources.class_folders, "training"),
    "csv": (write_list, sources.image_list, "train.csv"),
    "tfrecord": (write_tfrecords, sources.tfrecord, "train-*"),
    "webdataset": (write_tars, sources.webdataset, "train-*.tar"),
}


# The others differ in how files are found, which needs no loader.
LOADED = [
    "folders",
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("csv", "tfrecord", "webdataset")),
]


def made(kind, photos, root):
    """Writes the photos in a form, and returns the source of it on the disk."""
    write, open_it, below = KINDS[kind]
    write(sources.class_folders(photos / "training"), root)
    return open_it(str(root / below))


def uploaded(s3, root):
    s3.put(str(root), "bucket/data", recursive=True)
    return "s3://bucket/data"


def epochs_of(run, source, *, num_epochs=2, start=None, **settings):
    settings = {"image_size": (32, 32), "global_batch_size": 5, "augment": "imagenet"} | settings
    loader = run.loader(source, shuffle=True, **settings)
    if start:
        loader.start_at(**start)
    found = []
    for _ in range(num_epochs):
        batches = [[each.numpy() for each in batch] for batch in loader]
        x, y, weight = (np.concatenate(each) for each in zip(*batches, strict=True))
        found.append((x[weight > 0], y[weight > 0]))
    return found


def check_equal(ours, theirs):
    for (x, y), (other, labels) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(x, other)
        np.testing.assert_array_equal(y, labels)


def check_same_bytes(source, local):
    np.testing.assert_array_equal(source.labels, local.labels)
    for index in np.random.default_rng(1).permutation(len(local)):
        assert source.images.read(index) == local.images.read(index)


def fetched(cache):
    return [each for each in cache.rglob("*") if each.is_file() and each.name != COUNT]


def bytes_at_rest(cache):
    """The bytes of the fetched files when no thread fetches ahead any more."""
    before, sizes = None, {}
    while sizes != before:
        time.sleep(0.2)
        before, sizes = sizes, {}
        for each in fetched(cache):
            with contextlib.suppress(FileNotFoundError):  # it has just given way
                sizes[each] = each.stat().st_size
    return sum(sizes.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_store(s3, photos, tmp_path, kind, own_cache):
    local = made(kind, photos, tmp_path / "data")
    url = uploaded(s3, tmp_path / "data")
    _, open_it, below = KINDS[kind]
    files = [each.stat().st_size for each in (tmp_path / "data").rglob("*") if each.is_file()]
    most = max(max(files), sum(files) // 2)
    for cache_gib in (most / 2**30, 1.0):
        source = open_it(f"{url}/{below}", cache_gib=cache_gib)
        assert (source.class_names, source.facts()) == (local.class_names, local.facts())
        check_same_bytes(source, local)
        if cache_gib < 1:
            assert 0 < bytes_at_rest(own_cache) <= most
    before = {each: each.stat().st_ino for each in fetched(own_cache)}
    check_same_bytes(open_it(f"{url}/{below}"), local)
    assert {each: each.stat().st_ino for each in fetched(own_cache)} == before


@pytest.mark.parametrize("kind", LOADED)
def test_a_store_gives_what_the_disk_gives(setup, s3, photos, tmp_path, kind, own_cache):
    local = made(kind, photos, tmp_path / "data")
    url = uploaded(s3, tmp_path / "data")
    _, open_it, below = KINDS[kind]
    source = open_it(f"{url}/{below}")
    loader = "dali_cpu" if kind == "tfrecord" else "tf_data"
    ours = epochs_of(setup(), source, loader=loader)
    check_equal(ours, epochs_of(setup(), local, loader=loader))
    # A resumed run, and one whose store is gone: nothing is fetched again.
    before = {each: each.stat().st_ino for each in fetched(own_cache)}
    again = open_it(f"{url}/{below}")
    resumed = epochs_of(setup(), again, loader=loader, num_epochs=1, start={"epoch": 1})
    check_equal(resumed, ours[1:])
    assert {each: each.stat().st_ino for each in fetched(own_cache)} == before


def test_dali_reads_fetched_files(setup, s3, photos, own_cache):
    local = sources.class_folders(photos / "training")
    files = [os.path.getsize(each) for each in local.images.files]
    url, most = uploaded(s3, photos), sum(sorted(files)[-8:])  # a batch has 5
    source = sources.class_folders(f"{url}/training", cache_gib=most / 2**30)
    settings = {"loader": "dali_cpu"}
    check_equal(epochs_of(setup(), source, **settings), epochs_of(setup(), local, **settings))
    assert 0 < bytes_at_rest(own_cache) <= most


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_that_is_smaller_than_an_epoch(setup, s3, photos, tmp_path, kind, own_cache):
    local = made(kind, photos, tmp_path / "data")
    url = uploaded(s3, tmp_path / "data")
    _, open_it, below = KINDS[kind]
    files = [each.stat().st_size for each in (tmp_path / "data").rglob("*") if each.is_file()]
    most = max(max(files), sum(files) // 2)
    source = open_it(f"{url}/{below}", cache_gib=most / 2**30)
    check_equal(epochs_of(setup(), source), epochs_of(setup(), local))
    assert 0 < bytes_at_rest(own_cache) <= most


def test_a_web_server(web, photos):
    for kind, (_, open_it, below) in KINDS.items():
        local = made(kind, photos, web.folder / kind)
        url = f"{web.url}/{kind}/{below}"
        source = open_it(url)
        assert source.class_names == local.class_names
        check_same_bytes(source, local)
        asked = len(web.asked)
        check_same_bytes(open_it(url), local)
        again = [each for each in web.asked[asked:] if each.endswith((".jpg", ".tar", "-0"))]
        assert not again


def test_by_config(s3, photos, tmp_path):
    made("csv", photos, tmp_path / "data")
    url = uploaded(s3, tmp_path / "data")
    data = DataConfig(root=url, source="csv", train="train.csv", validation_split=0.25)
    check_there(data, "train")
    train, test = open_sources(data)
    assert (len(train), len(test)) == (9, 3)
    data = DataConfig(root=url, source="csv", train="nested/train.csv", images="images")
    lines = (tmp_path / "data" / "train.csv").read_text().replace("images/", "")
    s3.pipe("bucket/data/nested/train.csv", lines.encode())
    assert len(open_source(data, "train").images.read(3)) > 100


def test_a_local_list_of_urls(s3, photos, tmp_path):
    url = uploaded(s3, photos)
    names = [f"{url}/training/dog/{each:02d}.jpg" for each in (1, 3)]
    (tmp_path / "list.csv").write_text(f"path,label\n{names[0]},a\n{names[1]},b\n")
    source = sources.image_list(tmp_path / "list.csv")
    assert source.images.read(1) == (photos / "training" / "dog" / "03.jpg").read_bytes()
    (tmp_path / "list.csv").write_text(f"path,label\n{names[0]},a\n/data/3.jpg,b\n")
    with pytest.raises(UserError, match=r"line 3 of .* has /data/3.jpg, but the first image be"):
        sources.image_list(tmp_path / "list.csv")


def test_a_changed_file_is_fetched_again(s3, photos):
    url = uploaded(s3, photos)
    source = sources.class_folders(f"{url}/training")
    before = source.images.read(0), source.stamps()
    s3.pipe(source.images.files[0], bytes(len(before[0])))  # the size stays
    source = sources.class_folders(f"{url}/training")
    assert source.images.read(0) == bytes(len(before[0]))
    assert source.stamps() != before[1]


def test_a_vanished_file(setup, s3, photos):
    url = uploaded(s3, photos)
    source = sources.class_folders(f"{url}/training")
    name = source.images.files[7]
    assert name in source.images.name(7)
    s3.rm(name)
    with pytest.raises(UserError, match=f"{name} .*no such file in the store"):
        epochs_of(setup(), source, num_epochs=1, loader="tf_data", augment="none")
    ((x, _),) = epochs_of(setup(), source, num_epochs=1, loader="tf_data", bad_files="skip")
    assert len(x) == NUM - 1


def test_the_audit_of_a_store(s3, photos, tmp_path):
    url = uploaded(s3, photos)
    s3.pipe("bucket/data/training/dog/99.jpg", b"not an image")
    source = sources.class_folders(f"{url}/training")
    for reused in (0, NUM + 1):
        report = scan_files(source, num_workers=2, progress=False)
        assert report.bad_ids.tolist() == [NUM]
        assert report.num_reused == reused


def test_missing_places(s3, photos):
    uploaded(s3, photos)
    for url, said in (
        ("s3://no-such-bucket/x", "s3://no-such-bucket/x cannot be read: there is no such bucket"),
        ("s3://bucket/none", "s3://bucket/none cannot be read: nothing is there; give the URL"),
        ("s3://bucket/data", "holds the folder 'a cat'; .* is s3://bucket/data/training the image"),
        ("s3://bucket/data/training/dog", "holds the file '01.jpg'; expected one folder per class"),
        ("abc://bucket/data", "abc://bucket/data is of a kind that fsspec does not know"),
        ("zip://x::s3://bucket/data", "is a chain of URLs"),
    ):
        with pytest.raises(UserError, match=said):
            sources.class_folders(url)
    for pattern in ("s3://bucket/data/none-*", "s3://bucket/data/none.tar"):
        with pytest.raises(UserError, match=r"no shard matches|does not exist; give the URL"):
            sources.webdataset(pattern)
    with pytest.raises(UserError, match=r"image list s3://bucket/none.csv does not exist"):
        sources.image_list("s3://bucket/none.csv")
    with pytest.raises(UserError, match="a URL is for the sources csv, folders, tfrecord, webdata"):
        open_source(DataConfig(root="s3://bucket/data", source="arrays"), "train")
    with pytest.raises(UserError, match="no path below s3://bucket/data"):
        open_source(DataConfig(root="s3://bucket/data", train="../x"), "train")
    for source, name in (("folders", "none"), ("csv", "none.csv"), ("tfrecord", "none-*")):
        with pytest.raises(UserError, match="s3://bucket/data/none"):
            check_there(DataConfig(root="s3://bucket/data", source=source, train=name), "train")


def test_missing_credentials_and_rights(s3, photos, monkeypatch):
    uploaded(s3, photos)
    monkeypatch.setattr(store_lib, "PAUSES_S", ())
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3.clear_instance_cache()
    with pytest.raises(UserError, match="without credentials; set AWS_ACCESS_KEY_ID and AWS_SECR"):
        sources.class_folders("s3://bucket/data/training")
    s3.clear_instance_cache()


def test_an_unreachable_server_and_its_password(monkeypatch, web):
    monkeypatch.setattr(store_lib, "PAUSES_S", (0.01,))
    with pytest.raises(
        RunError, match=r"http://\*\*\*@127.0.0.1:1/x cannot be read .*kept"
    ) as error:
        sources.class_folders("http://me:PASS@127.0.0.1:1/x")
    assert "PASS" not in str(error.value)


def test_a_server_that_fails_at_times(web, photos, monkeypatch):
    monkeypatch.setattr(store_lib, "PAUSES_S", (0.01, 0.01))
    shutil.copytree(photos, web.folder / "photos")
    source = sources.class_folders(f"{web.url}/photos/training")
    handler, failures = web.RequestHandlerClass.func, [500, 503]
    do_get = handler.do_GET

    def failing(self):
        if failures:
            self.send_error(failures.pop())
        else:
            do_get(self)

    monkeypatch.setattr(handler, "do_GET", failing)
    assert source.images.read(1) == (photos / "training" / "a cat" / "02.jpg").read_bytes()
    failures += [500] * 5
    with pytest.raises(RunError, match=r"cannot be read .*500.*start again: what was fetched"):
        source.images.read(5)


def test_without_the_extra(monkeypatch):
    monkeypatch.setattr(store_lib, "is_installed", lambda library: False)
    with pytest.raises(UserError, match=r"s3://b/x needs fsspec; add .*tfaccel\[remote\]"):
        sources.class_folders("s3://b/x")


@pytest.mark.slow
def test_the_end_of_python_does_not_wait(s3, photos):
    """A process that has asked for far more than it reads ends at once."""
    url = uploaded(s3, photos)
    program = f"""
import sys
from tfaccel import sources
import numpy as np
source = sources.class_folders("{url}/training")
source.images.ahead(np.arange(len(source)))
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True)
    assert done.returncode == 3, done.stderr.decode()


@pytest.mark.slow
def test_a_run_from_the_command(s3, tmp_path, own_cache):
    """Trains, continues and evaluates with images of a store, with a cache that is too small."""
    digits = tmp_path / "digits"
    for index in range(60):
        for split in ("training", "testing"):
            path = digits / split / str(index % 3) / f"{index:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(index).integers(0, 80, (28, 28), dtype=np.uint8)
            pixels[:, 9 * (index % 3) : 9 * (index % 3) + 9] += 120
            PIL.Image.fromarray(pixels).save(path)
    url = uploaded(s3, digits)

    def tfaccel(*arguments):
        command = [sys.executable, "-m", "tfaccel", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    workdir = f"--workdir={tmp_path / 'run'}"
    settings = [f"--config.data.root={url}", "--config.data.store_cache_gib=0.00003", workdir]
    settings += ["--config.data.global_batch_size=10", "--config.data.loader=tf_data"]
    for epochs in (1, 2):
        own = [*settings, f"--config.train.epochs={epochs}"]
        said = tfaccel("train", "--config=configs/digits.py", "--resume=auto", *own)
    assert "epoch 2" in said.lower() or "Epoch 2" in said
    assert bytes_at_rest(own_cache) <= 0.00003 * 2**30
    assert f"{url}/testing" in tfaccel("evaluate", workdir)
