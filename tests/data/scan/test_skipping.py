"""Training with bad_files="skip" on images of which every kind of fault has 1%."""

import keras
import numpy as np
import PIL.Image
import planted
import pytest

from tfaccel import preset, sources
from tfaccel.data.scan.examine import BAD, KINDS
from tfaccel.data.sources.pillow import IMAGE_SUFFIXES

NUM_IMAGES = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """300 images of two classes; of each kind of fault three, where a class folder may hold it."""
    root = tmp_path_factory.mktemp("planted")
    for name in "ab":
        (root / name).mkdir()
    kinds = {}
    for name in planted.FAULTY:
        if name.endswith(IMAGE_SUFFIXES) and not name.endswith(".tif"):  # not TensorFlow's
            kinds.setdefault(planted.kind_of(name), name)
    faulty = [name for name in kinds.values() for _ in range(3)]
    for index in range(NUM_IMAGES):
        name = faulty[index] if index < len(faulty) else None
        suffix = name.rpartition(".")[2] if name else "jpg"
        content = planted.FAULTY[name] if name else planted.JPEG
        (root / "ab"[index % 2] / f"{index:04d}.{suffix}").write_bytes(content)
    num_bad = sum(3 for kind in kinds if KINDS[kind] == BAD)
    return root, num_bad, kinds


@pytest.mark.parametrize("loader", ["auto", "tf_data", "dali_cpu"])
def test_it_trains_to_the_end_on_all_others(setup, folder, loader, caplog):
    root, num_bad, kinds = folder
    assert len(kinds) >= 8
    run = setup(xla=False)
    loader = run.image_folder(
        root, image_size=(16, 16), global_batch_size=64, loader=loader, bad_files="skip"
    )
    assert loader.num_examples == NUM_IMAGES - num_bad
    with run.scope():
        model = keras.Sequential(
            [keras.Input((16, 16, 3)), keras.layers.Flatten(), keras.layers.Dense(2)]
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, "sgd", loss)
    assert np.isfinite(model.fit(loader, epochs=2, verbose=0).history["loss"]).all()
    assert len(model.predict(loader, verbose=0)) == NUM_IMAGES - num_bad
    assert f"{num_bad} of {NUM_IMAGES} examples are skipped" in caplog.text


@pytest.mark.parametrize("loader", ["tf_data", "dali_cpu"])
def test_pairs_of_two_sizes_and_what_is_less_than_its_crop_are_left_out_too(
    setup, tmp_path, loader
):
    sizes = [(9, 8), (9, 8), (7, 8), (9, 8), (6, 7)]
    for index, (height, width) in enumerate(sizes):
        for folder, size in (("in", (width, height)), ("out", (8, 9 if index < 4 else 6))):
            (tmp_path / folder).mkdir(exist_ok=True)
            PIL.Image.new("RGB", size).save(tmp_path / folder / f"{index}.png")
    loader = setup().loader(
        sources.image_pairs(tmp_path / "in", tmp_path / "out"),
        augment=preset("restoration"),
        image_size=(7, 8),
        global_batch_size=2,
        loader=loader,
        bad_files="skip",
    )
    assert loader.num_examples == 3
    assert [batch[0].shape for batch in loader] == [(2, 7, 8, 3)] * 2


@pytest.mark.parametrize(("stored_size", "num_left"), [((40, 40), 8), (None, 5)])
def test_what_is_stored_larger_than_its_crop_is_not_too_small(
    setup, tmp_path, stored_size, num_left
):
    (tmp_path / "a").mkdir()
    for index in range(8):
        side = 20 if index < 3 else 40
        PIL.Image.new("L", (side, side)).save(tmp_path / "a" / f"{index}.png")
    settings = {"image_size": (32, 32), "augment": preset("restoration_eval")}
    settings |= {"bad_files": "skip", "loader": "memory", "stored_size": stored_size}
    assert setup().image_folder(tmp_path, **settings).num_examples == num_left
