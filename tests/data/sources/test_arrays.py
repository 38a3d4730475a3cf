import numpy as np
import pytest

from tfaccel import UserError
from tfaccel.data.sources import arrays, npy_folders

IMAGES = np.arange(3 * 4 * 5 * 3, dtype=np.uint8).reshape(3, 4, 5, 3)
LABELS = np.array([2, 0, 2])


def test_takes_arrays_without_copying_them():
    source = arrays(IMAGES, LABELS)
    assert source.images is IMAGES
    assert source.labels.dtype == "int32"
    assert source.labels.tolist() == [2, 0, 2]
    assert source.class_names == ("0", "1", "2")


def test_grey_images_get_a_channel_and_columns_of_labels_lose_theirs():
    source = arrays(IMAGES[..., 0], LABELS[:, None], class_names=["x", "y", "z", "never"])
    np.testing.assert_array_equal(source.images, IMAGES[..., :1])
    assert source.labels.shape == (3,)
    assert source.class_names == ("x", "y", "z", "never")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_any_number_of_channels_and_three_dtypes_are_taken(tmp_path, dtype):
    images = np.concatenate([IMAGES, IMAGES], axis=-1)[..., :5].astype(dtype)
    assert arrays(images, LABELS).images is images
    for index, name in enumerate("aba"):
        (tmp_path / name).mkdir(exist_ok=True)
        np.save(tmp_path / name / f"{index}.npy", images[index])
    found = npy_folders(tmp_path).images
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, images[[0, 2, 1]])


def test_maps_files_and_a_folder_of_them(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    np.save(tmp_path / "labels.npy", LABELS)
    for source in (
        arrays(tmp_path),
        arrays(str(tmp_path / "images.npy"), tmp_path / "labels.npy"),
        arrays(tmp_path, LABELS),
    ):
        assert isinstance(source.images, np.memmap)
        np.testing.assert_array_equal(source.images, IMAGES)
        assert source.labels.tolist() == [2, 0, 2]


def test_pairs_have_targets_and_no_labels(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    np.save(tmp_path / "targets.npy", IMAGES[..., 0])
    for source in (arrays(IMAGES, targets=IMAGES[..., 0]), arrays(tmp_path)):
        np.testing.assert_array_equal(source.targets, IMAGES[..., :1])
        assert source.labels is None


@pytest.mark.parametrize(
    ("images", "settings", "words"),
    [
        (IMAGES, {}, "received neither labels nor targets"),
        (IMAGES, {"labels": LABELS, "targets": IMAGES}, "received both labels and targets"),
        (
            IMAGES / 255,
            {"labels": LABELS},
            "images are float64; expected uint8 in 0..255, uint16 or float32: use",
        ),
        (IMAGES.astype(int), {"labels": LABELS}, "images are int64"),
        (IMAGES[0, 0], {"labels": LABELS}, "images have the shape (5, 3); expected [num_examples"),
        (IMAGES.astype(">u2"), {"labels": LABELS}, "images are uint16; expected"),
        (IMAGES[:0], {"labels": LABELS[:0]}, "at least one example"),
        (IMAGES, {"labels": LABELS[:2]}, "labels have the shape (2,); expected (3,)"),
        (IMAGES, {"labels": np.eye(3)}, "labels.argmax(axis=1)"),
        (IMAGES, {"labels": LABELS / 1.0}, "labels are float64; expected whole numbers"),
        (IMAGES, {"labels": LABELS - 1}, "labels[1]: the label is -1"),
        (IMAGES, {"labels": LABELS, "class_names": ("x", "y")}, "labels go up to 2, but there"),
        (
            IMAGES,
            {"targets": IMAGES[:, :3]},
            "targets have the shape (3, 3, 5, 3) and images (3, 4",
        ),
    ],
)
def test_says_what_is_wrong_with_an_array(images, settings, words):
    with pytest.raises(UserError) as error:
        arrays(images, **settings)
    assert words in str(error.value)


def test_names_files_at_fault(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    np.savez(tmp_path / "all.npz", IMAGES)
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "images.npy").read_bytes()[:150])
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("image.npy", "does not exist; did you mean 'images.npy'"),
        ("all.npz", "is an archive and cannot be mapped; save each of its arrays"),
        ("objects.npy", "objects.npy cannot be read"),
        ("cut.npy", "cut.npy cannot be read"),
        ("empty", "has no images.npy"),
        ("", "neither labels nor targets"),
    ):
        with pytest.raises(UserError) as error:
            arrays(tmp_path / name)
        assert words in str(error.value), name


def test_loads_class_folders_of_arrays(tmp_path):
    for index, name in enumerate(("b/0", "a/0", "a/1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / f"{name}.npy", IMAGES[index])
    source = npy_folders(tmp_path)
    np.testing.assert_array_equal(source.images, IMAGES[[1, 2, 0]])
    assert source.labels.tolist() == [0, 0, 1]
    assert source.class_names == ("a", "b")

    np.save(tmp_path / "b" / "1.npy", IMAGES[0, :2])
    with pytest.raises(UserError, match=r"1.npy is uint8 \(2, 5, 3\); expected uint8 of the shape"):
        npy_folders(tmp_path)
    (tmp_path / "b" / "1.npy").rename(tmp_path / "b" / "1.png")
    with pytest.raises(UserError, match=r"'1.png', which is not an image; expected only im"):
        npy_folders(tmp_path)
