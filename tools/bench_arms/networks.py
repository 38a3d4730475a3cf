"""The networks of the rows V, L and Z of tools/bench.py: facts that both sides share.

This module takes the name of a network, and gives its sizes, its optimizer, and the time of its
steps. ours_networks.py builds it in Keras, and torch_networks.py builds the same one in PyTorch.

    network = find("vit_b16", tiny=False)       # network.batch is 128

This module needs only Python's standard library, because the PyTorch arm may use another
installation.
"""

import dataclasses

DROP = 50  # untimed steps of a stretch
TINY_STEPS = 2
# The settings of the optimizers. Weight decay is of all weights, as Keras does it.
OPTIMIZERS = {
    "sgd": {"lr": 1e-3, "momentum": 0.9},
    "plain sgd": {"lr": 1e-3, "momentum": 0.0},
    "adamw": {"lr": 1e-4, "weight_decay": 0.05},
}
DROPOUT = 0.1  # BERT's, of hidden values and of attention


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and its work.

    Attributes:
      model: the name of the network.
      words: the network in words.
      source: where PyTorch's network is from: a package, or "own" if this repository has it.
      kind: what a row of a batch is: "image" with one label, "mask" for an image with a class for
        each pixel, "text" with one label, "next" for a text with its next tokens, "weights" if the
        inputs are weights.
      size: height and width of an image, or tokens of a text.
      batch: rows of a step.
      steps: timed steps of a stretch, which take about 4 seconds on an H100.
      num_classes: the number of outputs.
      optimizer: a key of OPTIMIZERS.
      vocabulary: the number of tokens.
      width: of hidden values; of recurrent layers, the units.
      heads: the attention heads.
      blocks: the number of blocks.
      mlp: the width inside a block's MLP.
      filters: of a U-Net's first level.
    """

    model: str
    words: str
    source: str
    kind: str
    size: int
    batch: int
    steps: int
    num_classes: int = 1000
    optimizer: str = "sgd"
    vocabulary: int = 0
    width: int = 768
    heads: int = 12
    blocks: int = 12
    mlp: int = 3072
    filters: int = 64

    @property
    def epoch_steps(self) -> int:
        """The steps of an epoch: fewer for images, which ours trains in one execution, for memory.

        Between two epochs the device waits for `fit`, so epochs of a second or more are wanted.
        """
        return self.steps if self.is_of_tokens else min(DROP, self.steps)

    @property
    def is_of_tokens(self) -> bool:
        """True if a row is a text, or has the length of one."""
        return self.kind in ("text", "next", "weights")


NETWORKS = {
    "resnet50": Network("resnet50", "ResNet-50", "torchvision", "image", 224, 256, 100),
    "resnet152": Network("resnet152", "ResNet-152", "torchvision", "image", 224, 128, 75),
    "efficientnetv2b0": Network(
        "efficientnetv2b0", "EfficientNetV2-B0", "timm", "image", 224, 256, 150
    ),
    "densenet121": Network("densenet121", "DenseNet-121", "torchvision", "image", 224, 128, 100),
    "mobilenetv3_large": Network(
        "mobilenetv3_large", "MobileNetV3-Large", "torchvision", "image", 224, 256, 200
    ),
    "convnext_tiny": Network(
        "convnext_tiny", "ConvNeXt-Tiny", "timm", "image", 224, 128, 150, optimizer="adamw"
    ),
    "unet": Network("unet", "U-Net", "own", "mask", 256, 32, 150, num_classes=21),
    "vit_b16": Network("vit_b16", "ViT-B/16", "timm", "image", 224, 128, 100, optimizer="adamw"),
    "bert": Network(
        model="bert",
        words="BERT-base",
        source="transformers",
        kind="text",
        size=128,
        batch=128,
        steps=100,
        num_classes=2,
        optimizer="adamw",
        vocabulary=30_522,
    ),
    # GPT-2 small: causal, pre-norm, a tied head without bias; without dropout on both sides.
    "gpt2": Network(
        model="gpt2",
        words="GPT-2-small decoder",
        source="own",
        kind="next",
        size=2_048,
        batch=8,
        steps=100,
        num_classes=50_257,
        optimizer="adamw",
        vocabulary=50_257,
    ),
    "lstm": Network(
        model="lstm",
        words="LSTM 2 x 512",
        source="own",
        kind="text",
        size=100,
        batch=256,
        steps=250,
        num_classes=10,
        optimizer="adamw",
        vocabulary=20_000,
        width=512,
        blocks=2,
    ),
    # The queries, keys and values are weights, so that the backward pass has all three gradients.
    "attention": Network(
        model="attention",
        words="attention alone",
        source="own",
        kind="weights",
        size=8_192,
        batch=4,
        steps=400,
        optimizer="plain sgd",
    ),
}
NETWORKS["vit_l16"] = dataclasses.replace(
    NETWORKS["vit_b16"],
    model="vit_l16",
    words="ViT-L/16",
    batch=64,
    steps=60,
    width=1024,
    heads=16,
    blocks=24,
    mlp=4096,
)
NETWORKS["bert_512"] = dataclasses.replace(NETWORKS["bert"], size=512, batch=32)

TINY_SIZES = {"image": 32, "mask": 32, "text": 8, "next": 8, "weights": 16}


def find(name: str, *, tiny: bool) -> Network:
    """Returns a network by its key in NETWORKS; a tiny one shows on a CPU that its arms work."""
    network = NETWORKS[name]
    if not tiny:
        return network
    return dataclasses.replace(
        network,
        size=TINY_SIZES[network.kind],
        batch=2,
        steps=TINY_STEPS,
        num_classes=min(10, network.num_classes),
        vocabulary=min(10, network.vocabulary),
        width=16,
        heads=2,
        blocks=2,
        mlp=32,
        filters=4,
    )


def of_settings(settings: dict) -> Network:
    """Returns the network that the settings of an arm describe."""
    network = find(settings["network"], tiny=settings["tiny"])
    return dataclasses.replace(network, batch=settings["batch"], size=settings["size"])


def rates(network: Network, *, steps: int, seconds: float) -> dict:
    """Returns the figures of timed steps: rows and tokens of a second, and the time of a step."""
    rows = steps * network.batch / seconds
    tokens = {"tokens_per_second": rows * network.size} if network.is_of_tokens else {}
    return {"rows_per_second": rows, **tokens, "step_ms": 1e3 * seconds / steps}
