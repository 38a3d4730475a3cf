"""Tells how pixels were normalised for the ImageNet weights of `keras.applications`.

Takes the name of a constructor or of a model, in any case; gives mean and std for a loader.

    pixels = trained_on("resnet50")             # Pixels(mean=(0.485, ...), std=(...), order="bgr")

Source: Keras 3.15, keras/src/applications. Each module's `preprocess_input` tells, or, if that
changes nothing, the layers that `include_preprocessing=True` puts first.
"""

import dataclasses
import re

from tfaccel.config.segmentation import backbone_name


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How pixels are normalised: (pixel / 255 - mean) / std.

    Attributes:
      mean: of red, green and blue, for pixels in 0..1.
      std: likewise.
      order: of the colours, "rgb" or "bgr".
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    order: str = "rgb"

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest value of a pixel."""
        pairs = list(zip(self.mean, self.std, strict=True))
        return min((0 - mean) / std for mean, std in pairs), max(
            (1 - mean) / std for mean, std in pairs
        )

    @property
    def settings(self) -> str:
        """Mean and std in words."""
        return f"mean={_listed(self.mean)} and std={_listed(self.std)}"

    @property
    def flags(self) -> str:
        """Mean, std and order as flags of `tfaccel train`."""
        order = "" if self.order == "rgb" else f" --config.model.weights_order={self.order}"
        mean, std = (",".join(f"{each:.6g}" for each in values) for values in (self.mean, self.std))
        return f"--config.data.mean={mean} --config.data.std={std}{order}"


def _listed(values: tuple[float, ...]) -> str:
    return f"({', '.join(f'{each:.6g}' for each in values)})"


_TO_ONE = Pixels((0.5,) * 3, (0.5,) * 3)  # -1 to 1
_BY_128 = Pixels((128 / 255,) * 3, (128 / 255,) * 3)  # pixel / 128 - 1
_OF_IMAGENET = Pixels((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Caffe's pixels: 0 to 255 minus ImageNet's mean, blue first.
_AS_CAFFE = Pixels((123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255,) * 3, order="bgr")

# The names have only their letters and digits. EfficientNetB0 to B7 are not here, because these
# models always scale their pixels themselves.
_FAMILIES = (
    (r"resnet(50|101|152)v2", _TO_ONE),
    (r"resnet(50|101|152)", _AS_CAFFE),
    (r"resnet(50|101|152)v15", _OF_IMAGENET),  # not Keras's; torchvision's and timm's weights
    (r"vgg(16|19)", _AS_CAFFE),
    (r"densenet(121|169|201)", _OF_IMAGENET),
    (r"mobilenet(v2|v3(small|large))?(\d{6,})?", _TO_ONE),  # a model is mobilenetv2_1.00_224
    (r"inceptionv3|inceptionresnetv2|xception|nasnet(mobile|large)?", _TO_ONE),
    (r"efficientnetv2b[0-3]", _OF_IMAGENET),
    (r"efficientnetv2[sml]", _BY_128),
    (r"convnext(tiny|small|base|large|xlarge)", _OF_IMAGENET),
)


def trained_on(name: str) -> Pixels | None:
    """Returns the pixels of a network's ImageNet weights; None for an unknown network.

    The name is that of a constructor ("ResNet50") or of its model ("mobilenetv2_1.00_224"). For a
    network for masks ("unet_resnet50") they are its backbone's.
    """
    plain = re.sub(r"[^a-z0-9]", "", backbone_name(name).lower())
    return next((pixels for each, pixels in _FAMILIES if re.fullmatch(each, plain)), None)
