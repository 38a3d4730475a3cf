"""`tfaccel predict` with networks for masks and restoring networks: which PNG files it writes."""

import shutil

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from keras import layers

from tfaccel import RunError, UserError, preset
from tfaccel.cli import main
from tfaccel.data.source import ArraySource
from tfaccel.export import parity, predict_pictures
from tfaccel.export.asked_images import picture_names
from tfaccel.export.picture_folder import SETTINGS, PictureFolder, is_begun
from tfaccel.export.predict import Export

SIZE = (12, 10)  # height, width


@pytest.fixture(autouse=True)
def no_parity(monkeypatch):
    monkeypatch.setattr(parity.Question, "ask", lambda *_: parity.Parity(1, ()))


@pytest.fixture
def exported(setup, tmp_path):
    """Exports a convolution of random weights, for masks of 4 classes or for images."""

    def export(targets, *, augment="none", seed=1):
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (6, *SIZE, 3), dtype=np.uint8)
        masks = random.integers(0, 4, (6, *SIZE, 1), dtype=np.uint8)
        run, is_mask = setup(), targets == "mask"
        keras.utils.set_random_seed(seed)
        with run.scope():
            conv = layers.Conv2D(4 if is_mask else 3, 3, padding="same")
            model = keras.Sequential([keras.Input((*SIZE, 3)), conv])
        of_classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        run.compile(model, loss=of_classes if is_mask else "mae")
        names = ("road", "sky") if is_mask else ()  # of four classes
        source = ArraySource(images, None, (), masks if is_mask else images, names)
        size = {"image_size": SIZE, "global_batch_size": 4}
        loader = run.loader(source, targets=targets, augment=preset(augment), **size)
        return run.export(model, tmp_path / "export" / str(seed), loader=loader)

    return export


@pytest.fixture
def photos(tmp_path):
    """Files of other sizes in two folders, and one that is no image."""
    random = np.random.default_rng(1)
    for name, size in (("a/1.png", (20, 30)), ("b/1.png", SIZE), ("b/2.png", (8, 6))):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    (tmp_path / "photos/b/broken.png").write_bytes(b"nothing")
    return tmp_path / "photos"


def predict(*arguments):
    return main.main(["predict", *map(str, arguments)])


def test_a_mask_has_the_size_of_its_image_and_the_numbers_of_the_classes(
    exported, photos, tmp_path, capsys
):
    folder = exported("mask")
    assert predict(f"--model={folder.parent}", f"--output={tmp_path / 'masks'}", photos) == 1
    lines = capsys.readouterr().out.splitlines()
    served = tf.saved_model.load(str(folder)).signatures["predict_bytes"]
    for name, line in zip(("a/1.png", "b/1.png", "b/2.png"), lines, strict=False):
        mask = PIL.Image.open(tmp_path / "masks" / name)
        image = PIL.Image.open(photos / name)
        assert (mask.mode, mask.size) == ("P", image.size)
        bytes_ = tf.constant([(photos / name).read_bytes()])
        wanted = served(image_bytes=bytes_)["probabilities"].numpy()[0].argmax(axis=-1)
        rows, columns = (np.arange(n) for n in image.size[::-1])  # the nearest pixel
        rows = ((rows + 0.5) * SIZE[0] / image.size[1]).astype(int)
        columns = ((columns + 0.5) * SIZE[1] / image.size[0]).astype(int)
        np.testing.assert_array_equal(np.array(mask), wanted[rows][:, columns])
        share = np.bincount(wanted.ravel(), minlength=4) / wanted.size
        largest = int(share.argmax())
        called = ["road", "sky", "class 2", "class 3"][largest]
        assert line.startswith(f"{photos / name}: {tmp_path / 'masks' / name}: {called} ")
        assert f": {called} {share[largest]:.1%}" in line
    assert lines[3].startswith(f"{photos / 'b/broken.png'}: not a JPEG or PNG")
    assert not (tmp_path / "masks/b/broken.png").exists()


def test_a_window_that_cuts_keeps_its_own_size(exported, photos, tmp_path):
    folder = exported("mask", augment="restoration_eval")
    names = [str(photos / each) for each in ("a/1.png", "b/1.png")]
    assert predict(f"--model={folder}", f"--output={tmp_path / 'masks'}", *names) == 0
    assert PIL.Image.open(tmp_path / "masks/a/1.png").size == SIZE[::-1]


def test_a_restored_image_is_what_the_signature_answers(exported, photos, tmp_path, capsys):
    folder = exported("image")
    file = photos / "b/1.png"
    assert predict(f"--model={folder}", f"--output={tmp_path / 'out'}", file) == 0
    assert capsys.readouterr().out == f"{file}: {tmp_path / 'out/1.png'}\n"
    served = tf.saved_model.load(str(folder)).signatures["predict_bytes"]
    answer = served(image_bytes=tf.constant([file.read_bytes()]))["image"].numpy()[0]
    written = np.array(PIL.Image.open(tmp_path / "out/1.png"))
    np.testing.assert_allclose(written, answer, atol=0.5)


def test_a_stopped_call_continues(exported, photos, tmp_path, monkeypatch, capsys, caplog):
    folder, output = exported("mask"), tmp_path / "masks"
    (photos / "b/broken.png").unlink()
    arguments = (f"--model={folder}", f"--output={output}", photos)
    assert predict(*arguments) == 0
    files = [output / each for each in ("a/1.png", "b/1.png", "b/2.png")]
    wanted = {each: each.read_bytes() for each in files}
    assert {each for each in output.rglob("*") if each.is_file()} == set(files)
    with pytest.raises(UserError, match="exists; give a new folder"):
        predict(*arguments)
    shutil.rmtree(output)
    capsys.readouterr()

    # A kill leaves what it had written, and a part of the picture that it was writing.
    save = PictureFolder.save

    def killed(self, picture, name):
        if name == "b/1.png":
            (output / ".b.png.1.ab").write_bytes(b"half")
            raise KeyboardInterrupt
        return save(self, picture, name)

    with monkeypatch.context() as patch:
        patch.setattr(PictureFolder, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            predict(*arguments)
    assert files[0].exists()
    assert not files[1].exists()
    capsys.readouterr()

    other = exported("mask", seed=2)
    with pytest.raises(UserError, match="first part of another output: its model differ"):
        predict(f"--model={other}", f"--output={output}", photos)
    with pytest.raises(UserError, match="its folder of the images differ"):
        predict(f"--model={folder}", f"--output={output}", photos / "b")

    assert predict(*arguments) == 0
    assert "continues after 1 image" in caplog.text
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        str(photos / e) for e in ("b/1.png", "b/2.png")
    ]
    assert {each: each.read_bytes() for each in files} == wanted
    assert not is_begun(output)


def test_two_processes_do_not_fill_one_folder(tmp_path):
    folder = PictureFolder(tmp_path / "masks", settings={"model": 1})
    again = PictureFolder(folder.path, settings={"model": 1}).held()
    with folder.held(), pytest.raises(RunError, match="another process writes to"), again:
        pass


def test_a_damaged_note_is_named(tmp_path):
    (tmp_path / SETTINGS).write_text("[]")
    folder = PictureFolder(tmp_path, settings={}).held()
    with pytest.raises(UserError, match=r"predict.json is damaged; remove "), folder:
        pass


def test_many_files_are_asked_in_parts(exported, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(predict_pictures, "BYTES", 2 * 4 * 4 * SIZE[0] * SIZE[1])
    export = Export(exported("mask"))
    asked, answer = [], export._answer

    def counted(image_bytes):
        asked.append(len(image_bytes))
        return answer(image_bytes=image_bytes)

    monkeypatch.setattr(export, "_answer", counted)
    paths = [str(photos / "b/1.png")] * 5
    found = list(
        predict_pictures.write_pictures(
            export, paths, [f"{i}.png" for i in range(5)], tmp_path / "masks"
        )
    )
    assert asked == [2, 2, 1]
    assert [each.written.name for each in found] == [f"{i}.png" for i in range(5)]
    masks = [np.array(PIL.Image.open(each.written)) for each in found]
    assert all(np.array_equal(each, masks[0]) for each in masks)


def test_colours_are_pascal_vocs():
    colours = np.frombuffer(predict_pictures.palette(), np.uint8).reshape(256, 3)
    for number, colour in (
        (0, (0, 0, 0)),
        (1, (128, 0, 0)),
        (2, (0, 128, 0)),
        (3, (128, 128, 0)),
        (15, (192, 128, 128)),
        (20, (0, 64, 128)),
        (255, (224, 224, 192)),
    ):
        assert tuple(colours[number]) == colour
    assert len({tuple(each) for each in colours}) == 256


def test_pictures_keep_the_folders_of_their_images(tmp_path):
    join = lambda *names: [str(tmp_path / each) for each in names]  # noqa: E731
    assert picture_names(join("a/1.jpg", "b/1.PNG")) == ["a/1.png", "b/1.png"]
    assert picture_names(join("a/1.jpg", "a/2.jpg")) == ["1.png", "2.png"]
    assert picture_names(join("a/1.jpg", "a/c/1.jpg")) == ["1.png", "c/1.png"]
    assert picture_names(join("a/1.jpg", "a/1.jpg")) == ["1.png", "1.png"]
    with pytest.raises(UserError, match=r"a/1.jpg and .*a/1.png would both be written as 1.png"):
        picture_names(join("a/1.jpg", "a/1.png"))


def test_calls_that_cannot_be_are_refused(exported, photos, tmp_path):
    folder = exported("mask")
    for arguments, words in (
        ([], "it predicts a mask for each file: add --output=DIR, a new folder for them"),
        (["--output=masks.csv"], "for masks or restored images give --output=DIR, a new folder"),
        (["--output=masks", "--loader=tf_data"], "--loader with --output="),
        (["--output=masks", "--json"], "--json and --output, which writes rows or pictures"),
        ([f"--output={photos}"], "exists; give a new folder"),
    ):
        own = [each.replace("=masks", f"={tmp_path}/masks") for each in arguments]
        with pytest.raises(UserError) as error:
            predict(f"--model={folder}", *own, photos / "b/1.png")
        assert words in str(error.value)
