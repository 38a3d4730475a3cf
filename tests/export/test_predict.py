"""Classes of image files by an export alone; what is wrong with one file is that file's alone."""

import json
import shutil
import struct
import subprocess
import sys
import zlib

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from conftest import compare_here
from keras import layers

import tfaccel
from tfaccel import UserError
from tfaccel.cli import main
from tfaccel.data import sources
from tfaccel.export import parity, predict
from tfaccel.export.asked_images import find_export, image_files
from tfaccel.export.predict import ROWS, Prediction, Predictor

IMAGES = {"image_size": (12, 10), "channels": 1, "global_batch_size": 8, "loader": "memory"}


def small(*head):
    return keras.Sequential([keras.Input((12, 10, 1), name="image"), *head])


@pytest.fixture(scope="module")
def export(folder, tmp_path_factory):
    """A folder of versions: 10, and 9, which is the same but for the names of its classes."""
    versions = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)  # as conftest does it for each test
        run = tfaccel.setup(gpu_ids=())
        with run.scope():
            model = small(layers.Flatten(), layers.Dense(3, kernel_initializer="he_normal"))
        run.compile(model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        test = run.image_folder(folder, **IMAGES)
        run.export(model, versions / "10", loader=test, samples=4)
    shutil.copytree(versions / "10", versions / "9")
    card = json.loads((versions / "10" / "tfaccel.json").read_text())
    (versions / "9" / "tfaccel.json").write_text(json.dumps(card | {"class_names": list("xyz")}))
    return versions


@pytest.fixture(scope="module")
def predictor(export):
    return Predictor(export)


@pytest.fixture
def loaded_before(export, predictor, monkeypatch):
    """The command does not load the export again."""
    monkeypatch.setattr(predict, "Predictor", lambda folder: {export / "10": predictor}[folder])


def png_that_claims(width, height):
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    checksum = struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + checksum


@pytest.fixture
def bad(images, tmp_path):
    """Files that are none, by what is wrong."""
    whole = {}
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP"):
        PIL.Image.fromarray(images[0]).save(tmp_path / f"whole.{kind}", kind)
        whole[kind] = (tmp_path / f"whole.{kind}").read_bytes()
    flipped = bytearray(whole["PNG"])
    flipped[len(flipped) // 2] ^= 255
    deep = tmp_path / "whole.DEEP"
    PIL.Image.fromarray(np.full((9, 9), 999, np.uint16)).save(deep, "PNG")
    content = {
        "deep.png": deep.read_bytes(),
        "cut.png": whole["PNG"][: len(whole["PNG"]) // 2],
        "cut.jpg": whole["JPEG"][:100],
        "cut later.jpg": whole["JPEG"][: -len(whole["JPEG"]) // 4],
        "flipped.png": bytes(flipped),
        "header.png": whole["PNG"][:8],
        "empty.jpg": b"",
        "text.jpg": b"<html>404 not found</html>\n",
        "zeros.png": bytes(100),
        "moving.gif": whole["GIF"],
        "bitmap.png": whole["BMP"],
        "web.jpg": whole["WEBP"],
        "bomb.png": png_that_claims(60_000, 60_000),
        "none.png": png_that_claims(0, 5),
        "negative.png": png_that_claims(2**31 + 5, 1),
    }
    for name, each in content.items():
        (tmp_path / name).write_bytes(each)
    (tmp_path / "folder.png").mkdir()
    return {each: str(tmp_path / each) for each in [*content, "folder.png", "missing.png"]}


def paths_of(folder):
    return [str(each) for each in sorted(folder.rglob("*.png"))]


def answers_of(export, paths):
    encoded = tf.constant([tf.io.read_file(each).numpy() for each in paths])
    served = tf.saved_model.load(export).signatures["predict_bytes"]
    return served(image_bytes=encoded)


def test_classes_and_probabilities_are_the_saved_models(predictor, export, folder):
    paths = paths_of(folder)
    assert len(paths) > ROWS  # more than one request
    received = list(predictor(paths))
    expected = answers_of(export / "10", paths)
    assert [each.path for each in received] == paths
    assert [each.error for each in received] == [None] * len(paths)
    probabilities = np.stack([each.probabilities for each in received])
    np.testing.assert_allclose(probabilities, expected["probabilities"], atol=1e-6)
    assert predictor.class_names == ["a", "b", "c"]
    best = [predictor.class_names[index] for index in probabilities.argmax(axis=1)]
    assert [each.decode() for each in expected["class_name"].numpy()] == best


# What is wrong with a file, and the words that say so.
SAID = {
    "cut.png": "a damaged PNG, or of a kind",
    "cut.jpg": "a damaged JPEG, or of a kind",
    "cut later.jpg": "a damaged JPEG",
    "deep.png": "a PNG with 16-bit samples",
    "flipped.png": "a damaged PNG",
    "header.png": "pixels",
    "empty.jpg": "not a JPEG or PNG file",
    "text.jpg": "not a JPEG or PNG file",
    "zeros.png": "not a JPEG or PNG file",
    "moving.gif": "not a JPEG or PNG file",
    "bitmap.png": "not a JPEG or PNG file",
    "web.jpg": "not a JPEG or PNG file",
    "bomb.png": "more than 89478485 pixels",
    "none.png": "more than 89478485 pixels, or none",
    "negative.png": "more than 89478485 pixels, or none",
    "folder.png": "Is a directory",
    "missing.png": "No such file or directory",
}


def test_each_bad_file_is_an_error_of_its_own_in_plain_words(predictor, bad):
    received = {name: next(predictor([path])) for name, path in bad.items()}
    assert received.keys() == SAID.keys()
    for name, each in received.items():
        assert each.probabilities is None
        assert SAID[name] in each.error, (name, each.error)
        for noise in ("{{", "node", "Graph", "\n", "assertion", "Op:", "[["):
            assert noise not in each.error, (name, each.error)
        assert len(each.error) < 120


def test_the_others_of_the_same_request_are_answered(predictor, bad, folder):
    good = paths_of(folder)[:5]
    mixed = [each for pair in zip(good, list(bad.values())[:5], strict=True) for each in pair]
    received = list(predictor(mixed))
    assert [each.path for each in received] == mixed
    for each, expected in zip(received[::2], predictor(good), strict=True):
        assert each.error is None
        np.testing.assert_allclose(each.probabilities, expected.probabilities, atol=1e-6)
    assert all(each.error and each.probabilities is None for each in received[1::2])


def test_files_that_cannot_be_read_leave_the_rest_in_order(predictor, bad, folder):
    good = paths_of(folder)[:2]
    received = list(predictor([bad["missing.png"], good[0], bad["folder.png"], good[1]]))
    assert [each.error is None for each in received] == [False, True, False, True]
    assert next(predictor([bad["missing.png"]])).error == "No such file or directory"
    assert list(predictor([])) == []


def test_a_jpeg_and_colours_and_any_size_are_taken(predictor, tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (50, 31, 3), dtype=np.uint8)
    PIL.Image.fromarray(colours).save(tmp_path / "photograph.png", "JPEG")
    (received,) = predictor([str(tmp_path / "photograph.png")])
    assert received.probabilities.sum() == pytest.approx(1, abs=1e-5)


# Which export.


def test_the_newest_version_is_taken(export, predictor):
    assert find_export(export) == export / "10"
    (export / "11").mkdir(exist_ok=True)  # which is still being written, or no export
    (export / "12.rejected").mkdir(exist_ok=True)
    assert find_export(export) == export / "10"
    assert find_export(export / "9") == export / "9"
    assert predictor.class_names == ["a", "b", "c"]
    assert Predictor(export / "9").class_names == ["x", "y", "z"]


def test_an_export_below_brackets_answers(export, predictor, names, tmp_path):
    moved = tmp_path / "lr=[0.1]"
    shutil.copytree(export, moved)
    (there,), (here,) = (list(each(names[:1])) for each in (Predictor(moved), predictor))
    np.testing.assert_array_equal(there.probabilities, here.probabilities)


def test_a_folder_without_an_export_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no SavedModel, and no numbered folder with one"):
        Predictor(tmp_path)
    with pytest.raises(UserError, match=r"there is no folder .*nowhere"):
        Predictor(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"a run that has no export yet.*tfaccel export --workdir="):
        Predictor(tmp_path)


def test_a_runs_workdir_stands_for_its_newest_export(export, tmp_path):
    (tmp_path / "export").symlink_to(export)
    assert find_export(tmp_path) == tmp_path / "export" / "10"


def test_a_folder_stands_for_the_images_below_it(folder, tmp_path):
    assert image_files([str(folder)]) == paths_of(folder)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="holds no images"):
        image_files([str(tmp_path)])
    with pytest.raises(UserError, match=r"a.png does not exist, nor do the 1 others"):
        image_files(["a.png", "b.png"])
    whole = paths_of(folder)[0]
    assert image_files(["a.png", whole]) == ["a.png", whole]


@pytest.mark.parametrize("arguments", [["--model=none", "a.png"], ["--model={}", "none.png"]])
def test_mistakes_are_told_before_tensorflow_starts(export, arguments):
    words = [each.format(export) for each in arguments]
    program = (
        f"import sys, tfaccel.cli.main as main\nsys.argv = ['tfaccel', 'predict', *{words}]\n"
        "try: main.cli()\nfinally: assert 'tensorflow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_saved_model_of_another_program_is_refused(tmp_path):
    model = small(layers.Flatten(), layers.Dense(3))
    model.export(tmp_path / "1", verbose=False)
    with pytest.raises(UserError, match=r"tfaccel.json cannot be read .No such file or directory"):
        Predictor(tmp_path)


@pytest.mark.parametrize(
    ("written", "says"),
    [("{", "is no JSON"), ("[]", "is of something else"), ('{"a": 1}', "is of something else")],
)
def test_a_card_that_is_none_is_refused(export, tmp_path, written, says):
    (tmp_path / "saved_model.pb").touch()
    (tmp_path / "tfaccel.json").write_text(written)
    with pytest.raises(UserError, match=f"{says}.*expected the folder of a `tfaccel export`"):
        Predictor(tmp_path)


def test_a_damaged_saved_model_is_refused(export, tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(b"not one")
    card = (export / "9" / "tfaccel.json").read_text()
    (tmp_path / "tfaccel.json").write_text(card)
    with pytest.raises(UserError, match=r"cannot be loaded .*; export it again") as raised:
        Predictor(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("export_decodes_png")
def test_exports_that_do_not_answer_with_classes_are_refused(setup, folder, tmp_path, monkeypatch):
    for compare in ("of_images", "of_inputs"):  # which is not what is shown
        monkeypatch.setattr(parity, compare, lambda *_: parity.Parity(1, ()))
    run = setup()
    with run.scope():
        restoration = small(layers.Conv2D(1, 1))
    run.compile(restoration, loss="mae")
    (tmp_path / "targets").symlink_to(folder / "b")
    pairs = run.loader(sources.image_pairs(folder / "b", tmp_path / "targets"), **IMAGES)
    run.export(restoration, tmp_path / "restoration", loader=pairs, samples=2)
    with run.scope():
        alone = small(layers.Flatten(), layers.Dense(3))
    run.export(alone, tmp_path / "alone")
    for name in ("restoration", "alone"):
        with pytest.raises(UserError, match=r"does not answer with the classes of image files"):
            Predictor(tmp_path / name)


# The command.


def told(capsys, *arguments):
    code = main.main(["predict", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out.splitlines()


@pytest.fixture
def names(folder, tmp_path, monkeypatch):
    """Three images with short paths, below the working folder, and what the export says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").symlink_to(folder)
    return ["images/a/00.png", "images/b/01.png", "images/c/02.png"]


def test_a_line_has_the_path_and_the_likeliest_classes(capsys, export, predictor, names):
    code, lines = told(capsys, f"--model={export}", *names)
    assert code == 0
    assert len(lines) == 3
    for line, each in zip(lines, predictor(names), strict=True):
        order = np.argsort(-each.probabilities)
        said = [f"{'abc'[index]} {each.probabilities[index]:.1%}" for index in order]
        assert line == f"{each.path}: {', '.join(said)}"


@pytest.mark.usefixtures("loaded_before")
def test_top_says_how_many_classes(capsys, export, names):
    for top, expected in ((1, 1), (2, 2), (100, 3)):
        _, (line,) = told(capsys, f"--model={export}", f"--top={top}", names[0])
        assert line.count("%") == expected


@pytest.mark.usefixtures("loaded_before")
def test_json_lines_hold_the_same(capsys, export, predictor, names, bad):
    arguments = [*names, bad["text.jpg"]]
    code, lines = told(capsys, f"--model={export}", *arguments, "--json", "--top=2")
    assert code == 1
    read = [json.loads(each) for each in lines]
    assert [each["path"] for each in read] == arguments
    for line, each in zip(read, predictor(arguments), strict=True):
        assert line == each.as_dict(predictor.class_names, 2)
        assert set(line) == {"path", "error", "classes"}
    assert [len(each["classes"]) for each in read] == [2, 2, 2, 0]
    assert [each["error"] is None for each in read] == [True, True, True, False]
    assert all(0 < each["classes"][0]["probability"] <= 1 for each in read[:3])


@pytest.mark.usefixtures("loaded_before")
def test_a_bad_file_makes_the_exit_code_1_and_the_others_are_printed(capsys, export, names, bad):
    code, lines = told(capsys, f"--model={export}", names[0], bad["missing.png"], names[1])
    assert code == 1
    text = " ".join(line.strip() for line in lines)
    assert f"{bad['missing.png']}: No such file or directory" in text
    assert lines[0].startswith(names[0])
    assert lines[-1].startswith(names[1])


def test_in_a_file_each_image_has_one_line(capsys):
    names = [f"a rather long class name, number {index}" for index in range(5)]
    each = Prediction("photographs/of the sea.jpg", np.full(5, 0.2, np.float32))
    assert "\n" not in each.line(names, 5)


def test_lines_are_within_80_columns_and_words_stay_whole(terminal):
    names = [f"a rather long class name, number {index}" for index in range(5)]
    each = Prediction("photographs/of the sea.jpg", np.full(5, 0.2, np.float32))
    lines = each.line(names, 5).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80
    assert all(line.startswith("  ") for line in lines[1:])
    long = Prediction("/a" * 60, error="not a JPEG or PNG file").line(names, 3)
    assert "/a" * 60 in long
    assert "not a JPEG or PNG file" in long


def test_what_a_terminal_would_obey_is_not_printed():
    assert "\x1b" not in Prediction("a\x1b[2J.png", error="missing").line([], 1)


def test_a_name_that_begins_with_a_tilde_is_a_file(predictor, names, tmp_path, folder):
    (tmp_path / "~nobody").symlink_to(folder)
    received = list(predictor(["~nobody/a/00.png", "~no such user.png"]))
    assert received[0].error is None
    assert received[1].error == "No such file or directory"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no model; e.g. `tfaccel predict --model=runs/a cat.jpg`"),
        (["cat.jpg"], "no model"),
        (["--model=served"], "no files"),
        (["--model=served", "cat.jpg"], "there is no folder served"),
        (["--model=served", "cat.jpg", "--top=0"], "top"),
        (["--model=served", "cat.jpg", "--tpo=1"], "no flag --tpo of"),
    ],
)
def test_mistakes_in_the_call_are_one_sentence(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        main.main(["predict", *arguments])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value).strip()


def test_the_help_is_within_the_terminal(capsys):
    _, lines = told(capsys, "--help")
    assert max(map(len, lines)) <= 100
