"""What tools/bench.py measures: the rows, their arms, and how both are run.

Each arm is a process of its own, which stays alive: all are set up once, then timed in turn.

    rows.py           what is compared with what, and the goals
    measure.py        a row: its arms set up, timed in turn, and what came of it
    call.py           what the programs' calls have in common
    arm_process.py    an arm as the driver sees it
    protocol.py       the driver as an arm sees it
    machine.py        its GPUs, and what an arm's process sees of them
    speed_table.py    what the JSON files hold, as Markdown
    timed_fit.py      the arms that are Keras's `fit`: how they are timed, alike
    ours.py           an arm: tfaccel
    keras_resnet.py   an arm: Keras alone, a network of images
    keras_mnist.py    an arm: Keras alone, MNIST from PNG files
    torch_resnet.py   an arm: PyTorch and torchvision

Of tools/bench_cifar.py, whose arms train once and end:

    torch_cifar.py            an arm: PyTorch, as airbench trains CIFAR-10
    torch_cifar_images.py     its images: decoded, and an epoch of them augmented at once
    torch_cifar_network.py    its network, which is tfaccel's
"""
