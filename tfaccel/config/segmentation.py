"""The names of segmentation networks: a decoder's and a backbone's, such as "unet_resnet50".

backbone_name("unet_resnet50")          # "resnet50"
backbone_name("resnet50")               # "resnet50": it has no decoder
is_of_decoder("decoder_1_up")           # True: no layer of a backbone has such a name
"""

from collections.abc import Collection

DECODERS = ("unet", "deeplab")
# The layers with weights that a decoder adds; the last one, to the classes, is "logits".
DECODER_LAYERS = "decoder_"


def backbone_name(name: str) -> str:
    """Returns the backbone's part of a network's name; the whole name if there is no decoder."""
    decoder, _, backbone = name.partition("_")
    return backbone if decoder.lower() in DECODERS else name


def network_names(backbones: Collection[str]) -> list[str]:
    """Returns the names of all segmentation networks that these backbones can have."""
    return [f"{decoder}_{backbone}" for decoder in DECODERS for backbone in backbones]


def is_of_decoder(layer: str) -> bool:
    """Returns whether a layer of this name is a decoder's, so that no backbone has it."""
    return layer.startswith(DECODER_LAYERS)
