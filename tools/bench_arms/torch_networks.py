"""An arm of tools/bench.py: compiled PyTorch trains a network of networks.py, from the device.

It talks to the driver through protocol.py. Network and loss are compiled together. Attention is
PyTorch's own (`scaled_dot_product_attention`). Images are channels-last, operations in float32 use
TF32, cuDNN searches for the quickest kernels, and the optimizer is fused. The batches are on the
device, and images are normalised and in the dtype that the first layer takes. Settings:

    network, tiny           a key of networks.NETWORKS; true for its tiny size
    dtype                   the dtype of autocasting: "bfloat16"; or "float16", with a loss scale
    mode                    the mode of torch.compile: "default" or "max-autotune"
    attention               "chosen" lets PyTorch choose its kernels of attention; "cudnn"
    batch, size             rows of a step; height and width of images, or tokens of a text
    drop, steps             untimed and timed steps of each stretch
    first_steps, steps_of_mark
                            see torch_arm.timed

It needs no TensorFlow, and may use another installation than the driver.
"""

import torch

from bench_arms import networks, protocol, torch_arm, torch_models
from bench_arms.networks import Network
from bench_arms.torch_arm import DEVICE


def begin(settings: dict) -> protocol.Arm:
    """Makes the network and the batches, and trains the first steps."""
    network = networks.of_settings(settings)
    torch_arm.choose_quick_settings()
    if settings["attention"] == "cudnn":
        allow_only_cudnn_attention()
    dtype = getattr(torch, settings["dtype"])
    model = torch_models.build(network).to(DEVICE, memory_format=layout(network)).train()
    batches = [make_batch(network, dtype) for _ in range(torch_arm.NUM_BATCHES)]
    step = make_step(network, model, dtype, settings["mode"])
    data_mib = sum(each.nbytes for batch in batches for each in batch) / 2**20

    def rates(seconds):
        found = networks.rates(network, steps=settings["steps"], seconds=seconds)
        return found | {"data_mib": data_mib}

    return torch_arm.timed(
        settings,
        step,
        batches,
        rates=rates,
        environment=torch_arm.environment(*sorted({"torch"} | ({network.source} - {"own"}))),
        parameters=sum(each.numel() for each in model.parameters() if each.requires_grad),
    )


def allow_only_cudnn_attention() -> None:
    """Has PyTorch compute attention by cuDNN, which it need not choose by itself."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    for turn_off in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_math_sdp,
    ):
        turn_off(False)


def layout(network: Network) -> torch.memory_format:
    """Returns the memory format of the network and its images."""
    is_of_images = not network.is_of_tokens
    return torch.channels_last if is_of_images else torch.preserve_format


def make_batch(network: Network, dtype: torch.dtype) -> tuple:
    """Returns a random batch on the device: inputs and targets."""
    rows, size = network.batch, network.size
    if network.kind == "weights":  # the inputs are weights of the model
        return torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    if network.kind == "next":
        ids = torch.randint(network.vocabulary, (rows, size + 1), device=DEVICE)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if network.kind == "text":
        inputs = torch.randint(network.vocabulary, (rows, size), device=DEVICE)
    else:
        inputs = torch.randn((rows, 3, size, size), device=DEVICE)
        inputs = inputs.to(dtype, memory_format=layout(network))
    shape = (rows, size, size) if network.kind == "mask" else (rows,)
    return inputs, torch.randint(network.num_classes, shape, device=DEVICE)


def make_step(network: Network, model: torch.nn.Module, dtype: torch.dtype, mode: str):
    """Returns a function that trains one step on a batch."""
    own = networks.OPTIMIZERS[network.optimizer]
    kind = torch.optim.SGD if "momentum" in own else torch.optim.AdamW
    optimizer = kind(model.parameters(), **own, fused=True)

    def loss_of(inputs, targets):
        outputs = model(inputs)
        if network.kind == "weights":
            return outputs
        outputs = getattr(outputs, "logits", outputs)
        if network.kind == "next":
            outputs, targets = outputs.flatten(0, 1), targets.flatten()
        return torch.nn.functional.cross_entropy(outputs, targets)

    return torch_arm.compiled_step(loss_of, optimizer, dtype, mode)


if __name__ == "__main__":
    protocol.serve(begin)
