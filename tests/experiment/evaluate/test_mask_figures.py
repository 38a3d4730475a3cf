"""The figures of masks against loops over pixels."""

import numpy as np

from tfaccel.experiment.evaluate.pixels import iou_of_images, of_masks


def counts_of(masks, found, num_classes, ignored):
    """What the scores count, by a loop over images and classes."""
    counts = np.zeros((len(masks), num_classes, 3), int)
    for index, (mask, other) in enumerate(zip(masks, found, strict=True)):
        valid = mask != ignored
        for each in range(num_classes):
            labelled, said = (mask == each) & valid, (other == each) & valid
            counts[index, each] = (labelled & said).sum(), labelled.sum(), said.sum()
    return counts


def iou(mask, found, each, ignored):
    """Intersection over union of one class in one image or stack of images, or None."""
    pairs = [
        (int(true), int(said))
        for true, said in zip(mask.ravel(), found.ravel(), strict=True)
        if true != ignored
    ]
    both = sum(true == said == each for true, said in pairs)
    either = sum(each in pair for pair in pairs)
    return both / either if either else None


def test_iou_is_that_of_a_loop_over_pixels_without_ignored_ones():
    random = np.random.default_rng(0)
    masks = random.integers(0, 3, (5, 6, 7))
    masks[random.random(masks.shape) < 0.2] = 255
    masks[4] = 255  # an image without a pixel that counts
    found = np.where(random.random(masks.shape) < 0.6, masks % 255, 1)
    counts = counts_of(masks, found, 4, 255)  # class 3 is nowhere
    figures = of_masks(counts)
    wanted = [iou(masks, found, each, 255) for each in range(4)]
    assert wanted[3] is None
    np.testing.assert_allclose(figures.iou[:3], wanted[:3])
    assert np.isnan(figures.iou[3])
    np.testing.assert_allclose(figures.mean_iou, np.mean(wanted[:3]))
    valid = masks != 255
    np.testing.assert_allclose(figures.accuracy, (masks == found)[valid].mean())
    of_images = iou_of_images(counts)
    for index in range(4):
        own = [iou(masks[index], found[index], each, 255) for each in range(4)]
        np.testing.assert_allclose(
            of_images[index], np.mean([each for each in own if each is not None])
        )
    assert np.isnan(of_images[4])


def test_no_pixel_at_all_has_no_figures():
    figures = of_masks(np.zeros((2, 3, 3), int))
    assert np.isnan(figures.mean_iou)
    assert np.isnan(figures.accuracy)
    assert np.isnan(iou_of_images(np.zeros((2, 3, 3), int))).all()
