"""The networks of networks.py in PyTorch: those of a library, as its users take them, or our own.

    model = build(networks.find("vit_b16", tiny=False))

Dropout and stochastic depth are those of keras_networks.py. It needs no TensorFlow.
"""

import torch
from torch import nn
from torch.nn import functional

from bench_arms.networks import DROPOUT, Network

TORCHVISION = {
    "resnet50": "resnet50",
    "resnet152": "resnet152",
    "mobilenetv3_large": "mobilenet_v3_large",
    "densenet121": "densenet121",
}
TIMM = {
    # keras.applications has these rates, too.
    "efficientnetv2b0": ("tf_efficientnetv2_b0", {"drop_rate": 0.2, "drop_path_rate": 0.2}),
    "convnext_tiny": ("convnext_tiny", {}),
    "vit_b16": ("vit_base_patch16_224", {}),
    "vit_l16": ("vit_large_patch16_224", {}),
}


def build(network: Network) -> nn.Module:
    """Builds a network with random weights."""
    if network.source == "timm":
        return of_timm(network)
    if network.source == "torchvision":
        import torchvision

        name = TORCHVISION[network.model]
        return torchvision.models.get_model(name, weights=None, num_classes=network.num_classes)
    return OWN[network.model](network)


def of_timm(network: Network) -> nn.Module:
    """Builds a network of timm."""
    import timm

    name, settings = TIMM[network.model]
    if network.model in ("vit_b16", "vit_l16"):
        settings = {
            "img_size": network.size,
            "embed_dim": network.width,
            "depth": network.blocks,
            "num_heads": network.heads,
            "mlp_ratio": network.mlp / network.width,
        }
    return timm.create_model(name, pretrained=False, num_classes=network.num_classes, **settings)


def bert(network: Network) -> nn.Module:
    """Builds BERT of transformers, which has its dropout and its pooler."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=network.vocabulary,
        hidden_size=network.width,
        num_hidden_layers=network.blocks,
        num_attention_heads=network.heads,
        intermediate_size=network.mlp,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        num_labels=network.num_classes,
        attn_implementation="sdpa",
    )
    return BertForSequenceClassification(config)


class UNet(nn.Module):
    """A U-Net of four levels and a bottom, with two convolutions in each."""

    def __init__(self, network: Network):
        """Makes the layers."""
        super().__init__()
        widths = [network.filters * 2**level for level in range(5)]
        before = [3, *widths[:-1]]
        self.down = nn.ModuleList(map(twice, before, widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * each, each, 2, stride=2) for each in reversed(widths[:4])
        )
        self.join = nn.ModuleList(twice(2 * each, each) for each in reversed(widths[:4]))
        self.logits = nn.Conv2d(network.filters, network.num_classes, 1)

    def forward(self, x):
        """Takes [batch, 3, height, width], and returns logits for each pixel."""
        kept = []
        for level, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return self.logits(x)


def twice(before: int, filters: int) -> nn.Module:
    """Returns two convolutions, each with batch norm."""
    parts = []
    for each in (before, filters):
        parts += [nn.Conv2d(each, filters, 3, padding=1, bias=False)]
        parts += [nn.BatchNorm2d(filters), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)


class GPT2(nn.Module):
    """A causal decoder of GPT-2's shape: pre-norm, GELU, a tied head, no dropout."""

    def __init__(self, network: Network):
        """Makes the layers."""
        super().__init__()
        self.tokens = nn.Embedding(network.vocabulary, network.width)
        self.positions = nn.Parameter(torch.empty(network.size, network.width))
        for each in (self.tokens.weight, self.positions):
            nn.init.trunc_normal_(each, std=0.02)
        self.blocks = nn.ModuleList(Block(network) for _ in range(network.blocks))
        self.norm = nn.LayerNorm(network.width)

    def forward(self, ids):
        """Takes [batch, tokens], and returns [batch, tokens, vocabulary]."""
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


class Block(nn.Module):
    """A pre-norm block: causal attention, then an MLP with GELU."""

    def __init__(self, network: Network):
        """Makes the layers."""
        super().__init__()
        width = network.width
        self.heads = network.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, network.mlp), nn.GELU(), nn.Linear(network.mlp, width)
        )

    def forward(self, x):
        """Takes and returns [batch, tokens, width]."""
        batch, length, width = x.shape
        heads = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.inputs(self.norms[0](x)).view(heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class Recurrent(nn.Module):
    """LSTMs over embedded tokens, with a head on the last state."""

    def __init__(self, network: Network):
        """Makes the layers."""
        super().__init__()
        width = network.width
        self.embedding = nn.Embedding(network.vocabulary, width)
        self.lstm = nn.LSTM(width, width, network.blocks, batch_first=True)
        self.logits = nn.Linear(width, network.num_classes)

    def forward(self, ids):
        """Takes [batch, tokens], and returns [batch, classes]."""
        x, _ = self.lstm(self.embedding(ids))
        return self.logits(x[:, -1])


class Attention(nn.Module):
    """Attention whose queries, keys and values are weights, so that it has all its gradients."""

    def __init__(self, network: Network):
        """Makes the queries, keys and values: [batch, heads, tokens, width of a head]."""
        super().__init__()
        width = network.width // network.heads
        shape = (network.batch, network.heads, network.size, width)
        self.num_tokens = network.batch * network.size
        self.inputs = nn.ParameterList(0.05 * torch.randn(shape) for _ in range(3))

    def forward(self, zero):
        """Returns the mean square of the attention."""
        dtype = torch.get_autocast_dtype(self.inputs[0].device.type)
        query, key, value = (each.to(dtype) for each in self.inputs)
        y = functional.scaled_dot_product_attention(query, key, value)
        return zero + y.float().square().sum() / self.num_tokens


OWN = {"bert": bert, "unet": UNet, "gpt2": GPT2, "lstm": Recurrent, "attention": Attention}
