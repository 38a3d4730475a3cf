"""The rows and arms of tools/bench.py, and the code that runs them.

Each arm is a process that stays alive. The driver, tools/bench.py, sets up all arms of a row once,
and then times them in turn.

    rows.py           the rows: what is compared, and the goals
    measure.py        measures a row: sets up its arms, times them in turn, computes the ratio
    call.py           the parts that the command lines of the programs share
    arm_process.py    an arm, seen from the driver
    protocol.py       the driver, seen from an arm
    machine.py        the GPUs of the machine, and the environment of an arm's process
    time_limit.py     how long the parts of a call may take
    arm_lines.py      what each arm of a row reached, as lines of text
    speed_table.py    the table of all JSON files, as Markdown
    timed_fit.py      times the arms that use Keras's `fit`, all in the same way
    ours.py           an arm: tfaccel
    keras_resnet.py   an arm: Keras alone, an image network
    keras_mnist.py    an arm: Keras alone, MNIST from PNG files
    torch_arm.py      what the arms of PyTorch share: their timed loop, and figures
    torch_resnet.py   an arm: PyTorch and torchvision

The rows V and L train the networks of networks.py, which has their sizes:

    ours_networks.py    an arm: tfaccel; keras_networks.py builds its networks
    torch_networks.py   an arm: PyTorch; torch_models.py builds its networks

The arms of tools/bench_cifar.py train once and end:

    torch_cifar.py            an arm: PyTorch, which trains CIFAR-10 as airbench does
    torch_cifar_images.py     decodes the images, and augments a whole epoch at once
    torch_cifar_network.py    the network, which is the same as tfaccel's
"""
