"""tfaccel/experiment/models/cifar_resnet.py in PyTorch: the same layers, initializers and outputs.

    network = make_network(width=1.0, num_classes=10)           # 22.4 M parameters
    logits = mean_with_mirrored(network, images)                # for testing

Batch norm has epsilon 0.001, as in Keras. Each batch contributes a tenth to the moving statistics.
"""

import torch
from torch import nn
from torch.nn import functional

STEM, WIDTHS = 64, (192, 576, 768)


def make_network(*, width: float, num_classes: int) -> nn.Module:
    """Returns the network, with channels-last weights in float32.

    Args:
      width: a factor for all numbers of channels; 1 except in tests.
      num_classes: the number of logits.
    """
    stem, *widths = (round(width * each) for each in (STEM, *WIDTHS))
    layers = [*_convolution(3, stem), _Residual(stem)]
    for channels_in, channels in zip([stem, *widths], widths, strict=False):
        layers += [*_convolution(channels_in, channels, pools=True), _Residual(channels)]
    layers += [_NinthOfMax(), nn.Linear(widths[-1], num_classes)]
    network = nn.Sequential(*layers)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(network[-1].bias)
    return network.to(memory_format=torch.channels_last)


def mean_with_mirrored(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Returns the mean logits of each image and its mirror image, in float32.

    Args:
      network: the network, in evaluation mode.
      images: [rows, 3, height, width].
    """
    logits = network(torch.cat([images, images.flip(3)])).float()
    return sum(logits.chunk(2)) / 2


def _convolution(channels_in: int, channels: int, *, pools: bool = False) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
    pool = [nn.MaxPool2d(2)] if pools else []
    return [convolution, *pool, nn.BatchNorm2d(channels, eps=1e-3), nn.GELU()]


class _Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        first = _convolution(channels, channels)
        *second, self.activation = _convolution(channels, channels)
        self.branch = nn.Sequential(*first, *second)

    def forward(self, x):
        return self.activation(x + self.branch(x))


class _NinthOfMax(nn.Module):
    def forward(self, x):
        # Not amax: if it is compiled in half precision, its gradient finds no value that equals the
        # maximum, and divides 0 by 0 (PyTorch 2.11).
        return functional.max_pool2d(x, x.shape[2:]).flatten(1) / 9
