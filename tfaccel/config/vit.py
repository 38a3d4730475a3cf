"""The settings of a Vision Transformer: its sizes by name, and the fields of `config.vit`.

sizes_of("vit_small", VitConfig(depth=6))     # Sizes(width=384, depth=6, heads=6, ...)
check_vit("vit_small", VitConfig(), image_size=(30, 30))      # UserError
"""

import dataclasses

from tfaccel.common.checks import check_choice, check_int, check_number, check_optional_ints
from tfaccel.common.errors import UserError
from tfaccel.config.documented import documented

POOLINGS = ("mean", "class_token")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a Vision Transformer.

    Attributes:
      width: values of a token.
      depth: the number of blocks, each of an attention and an MLP.
      heads: heads of an attention; each has width / heads values.
      mlp_width: values of the hidden layer of an MLP.
    """

    width: int
    depth: int
    heads: int
    mlp_width: int


# "base" and "large" are those of Dosovitskiy et al. (2021), table 1; "tiny" and "small" are those
# of Touvron et al. (2021) and of Steiner et al. (2022).
VITS = {
    "vit_tiny": Sizes(192, 12, 3, 768),
    "vit_small": Sizes(384, 12, 6, 1536),
    "vit_base": Sizes(768, 12, 12, 3072),
    "vit_large": Sizes(1024, 24, 16, 4096),
}


@documented
@dataclasses.dataclass(frozen=True)
class VitConfig:
    """The Vision Transformer of model.name=vit_tiny, vit_small, vit_base or vit_large."""

    patch_size: int = 16
    """Side of a patch in pixels. Each patch is a token, so both sides of image_size must be
    multiples of it. A half of it gives four times as many tokens."""
    width: int | None = None
    """Values of a token. None takes those of model.name: 192, 384, 768 or 1024."""
    depth: int | None = None
    """Number of blocks. Each has an attention and an MLP. None takes the number of model.name: 12,
    or 24 for vit_large."""
    heads: int | None = None
    """Heads of an attention. They divide the width among them. None takes the number of model.name:
    3, 6, 12 or 16."""
    mlp_width: int | None = None
    """Values of an MLP's hidden layer. None takes those of model.name, which are 4 times its own
    width."""
    pooling: str = "mean"
    """How tokens become one vector: "mean" or "class_token". "mean" averages all of them (Beyer et
    al. 2022, arXiv:2205.01580). "class_token" takes one that is learned and no patch (Dosovitskiy
    et al. 2021, arXiv:2010.11929)."""
    dropout: float = 0.0
    """Part of the values that training sets to 0. It is applied to the tokens with their positions,
    after each attention, and after both layers of each MLP. The scores of attentions have no
    dropout, as in Dosovitskiy et al. 2021, so cuDNN's flash kernels compute them."""
    stochastic_depth: float = 0.0
    """Probability with which training leaves out the last block, e.g. 0.1. It rises linearly from 0
    for the first block. It is drawn for each image, and for attention and MLP apart (Huang et al.
    2016, arXiv:1603.09382)."""

    def __post_init__(self):
        """Checks every field."""
        check_int("patch_size", self.patch_size, at_least=1)
        check_optional_ints(self, "width", "depth", "heads", "mlp_width")
        check_choice("pooling", self.pooling, POOLINGS)
        check_number("dropout", self.dropout, at_least=0, below=1)
        check_number("stochastic_depth", self.stochastic_depth, at_least=0, below=1)


def is_vit(name: str) -> bool:
    """Returns whether a model's name, in any case, is that of a Vision Transformer."""
    return name.lower() in VITS


def sizes_of(name: str, vit: VitConfig) -> Sizes:
    """Returns the sizes of a model's name, with those that the config changes."""
    own = VITS[name.lower()]
    given = {each.name: getattr(vit, each.name) for each in dataclasses.fields(Sizes)}
    return dataclasses.replace(own, **{key: each for key, each in given.items() if each})


def check_vit(name: str, vit: VitConfig, *, image_size: tuple[int, int]) -> None:
    """Raises UserError unless the settings suit the model of that name and the images."""
    if not is_vit(name):
        for each in dataclasses.fields(VitConfig):
            if (value := getattr(vit, each.name)) != each.default:
                raise UserError(
                    f"vit.{each.name}={value!r} with model.name={name!r}, which has no such "
                    f"setting; remove it, or set model.name to one of {', '.join(VITS)}"
                )
        return
    size = vit.patch_size
    if any(side % size for side in image_size):
        near = ",".join(str(max(1, round(side / size)) * size) for side in image_size)
        height, width = image_size
        raise UserError(
            f"vit.patch_size={size} does not divide image_size={height},{width}; use images whose "
            f"sides are multiples of {size}, such as image_size={near}, or another patch_size"
        )
    sizes = sizes_of(name, vit)
    if sizes.width % sizes.heads:
        raise UserError(
            f"{name} has a width of {sizes.width} and {sizes.heads} heads, which cannot divide it "
            "evenly; set vit.width to a multiple of vit.heads (a head of 64 values is usual)"
        )
