import PIL.Image
import PIL.ImageFile
import planted
import pytest

from tfaccel.data.scan.examine import KINDS, examine, strict


def kinds(data, suffix=""):
    with strict():
        return [kind for kind, _ in examine(data, suffix=suffix)[0]]


@pytest.mark.parametrize("name", planted.FAULTY)
def test_each_fault_is_named_and_no_other(name):
    assert kinds(planted.FAULTY[name], "." + name.split(".")[1]) == [planted.kind_of(name)]


def test_every_kind_of_bytes_is_planted():
    assert set(map(planted.kind_of, planted.FAULTY)) == set(KINDS) - planted.NOT_OF_BYTES


@pytest.mark.parametrize("suffix", [".jpg", ".JPEG", ".jfif", ".mpo", ".dat", ""])
def test_names_that_fit_or_say_nothing(suffix):
    assert kinds(planted.JPEG, suffix) == []


def test_several_faults_are_all_named():
    assert kinds(planted.GIF, ".jpg") == ["wrong_extension", "unsupported"]
    assert kinds(planted.rotated("TIFF"), ".jpg") == [
        "wrong_extension",
        "unsupported",
        "exif_rotated",
    ]


def test_causes_are_one_line_and_do_not_change():
    with strict():
        for data in planted.FAULTY.values():
            first, again = (examine(data, suffix="") for _ in range(2))
            assert first == again
            assert not any("\n" in cause or "0x7" in cause for _, cause in first[0])


def test_nothing_that_the_program_has_set_hides_a_fault(monkeypatch):
    # A line that many training programs have; it would hide every file that is cut short.
    monkeypatch.setattr(PIL.ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 100)
    assert kinds(planted.FAULTY["truncated.jpg"]) == ["truncated"]
    assert kinds(planted.JPEG) == []
    assert PIL.ImageFile.LOAD_TRUNCATED_IMAGES
    assert PIL.Image.MAX_IMAGE_PIXELS == 100
