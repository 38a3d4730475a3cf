"""Programs as people write them (tests/programs): N replicas train as stock Keras on one device.

The default suite runs a sample. `-m slow` runs every program on 1, 2 and 3 replicas, with XLA and
without.
"""

import contextlib
import importlib
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import strategy_of
from programs.program import Program

from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.runtime.cluster import Cluster
from tfaccel.step import compile_model
from tfaccel.training import methods

FOLDER = pathlib.Path(__file__).parents[1] / "programs"
MODULES = sorted(each.stem for each in FOLDER.glob("*.py") if each.stem != "program")
PROGRAMS = {
    program.name: program
    for module in MODULES
    for program in importlib.import_module(f"programs.{module}").PROGRAMS
}
# The programs that do not train as they should yet, and how they fail: on 2 and 3 replicas, with
# XLA and without, unless ON_ONE says otherwise. A program that is mended fails its test until its
# line is removed here.
FAILS: dict[str, str] = {
    "mean teacher": "the copy is averaged with the weights from before the update",
    # These are wrong silently, unless a comment says more.
    "SimCLR": "all_gather in a step returns this replica's rows only",
    "SimCLR, loss by row": "all_gather in a step returns this replica's rows only",
    "BYOL": "the target is averaged with the weights from before the update",
    "MoCo": "keys are not gathered, the key encoder is averaged with the weights from before",
    "Barlow twins": "all_gather in a step returns this replica's rows only",
    "Siamese with triplet loss": "the gradient of a vector is divided by the number of replicas",
    "supervised contrastive": "all_gather in a step returns this replica's rows only",
    "SAM": "the first gradient, which moves the weights, is that of this replica's rows",
    "SAM with all_reduce": "all_reduce in a step returns this replica's value",
    # InaccessibleTensorError: "<tf.Tensor 'cond/Identity:0'> is out of scope".
    "DQN": "raises, because variables are assigned inside tf.cond",
    # With XLA wrong silently, without XLA InvalidArgumentError at the index of a row.
    "mixup in the step": "all_gather in a step returns this replica's rows only",
    "clipping by hand": "each replica clips the gradient of its own rows",
    # Only on one replica with XLA: "'Variable' object has no attribute 'op'".
    "learning rate by hand": "with XLA, a Keras variable in the logs raises AttributeError",
    # With XLA on two and three replicas InvalidArgumentError: a variable of another device.
    "accumulation by hand": "a plain tf.Variable is not the replica's own",
    "accumulation in weights": "each replica applies sums with the gradient of its own rows",
    "DDPM": "the copy is averaged with the weights from before the update",
    "VQ-VAE": "each has the codes of its own rows, then averaged; silent",
    "VQ-VAE with all_reduce": "the replica context sums nothing, silently",
    "adversarial autoencoder": "weights are right, the log `loss` is 0",
    "text classification, LSTM": "wrong silently: Keras's Adam squares the gradients of a repeated "
    "token one by one; several replicas add them up before",
    "sequence tagging": "refused: a loss is masked",
    "sequence tagging, weighted metrics": "refused: a loss is masked",
    "named entity recognition": "wrong, with a warning: a mean of the replicas' masked means",
    "masked language model": "refused: a loss is masked",
    "masked language model, own train_step": "wrong silently: a sum over rows is divided by the "
    "number of replicas",
    "translation transformer": "refused: a loss is masked",
    "translation transformer, own loss and metric": "wrong, with a warning: a mean of the "
    "replicas' masked means",
    "CTC in a layer": "wrong silently: add_loss of one number a row is a sum over rows, which is "
    "divided by the number of replicas",
    "U-Net with ignore_class": "refused: a loss is masked",
    "loss summed": "refused: the loss has reduction='sum'",
    "loss by the sum of the weights": "refused: the loss has reduction='mean_with_sample_weight'",
    "hand-masked loss": "wrong silently: a mean of the replicas' masked means",
    "Dice loss by hand": "wrong, with a warning: a mean of the replicas' Dice losses",
    "Dice loss of Keras": "refused: the loss has axis=None, over the whole batch",
    "compute_average_loss": "wrong silently: rows are divided by the global batch, then by the "
    "number of replicas",
    "stateful LSTM": "refused: the state is not the model's variable",
}
RAISES = (
    AssertionError,
    AttributeError,
    UserError,
    ValueError,
    TypeError,
    tf.errors.InvalidArgumentError,
)
ON_ONE = {"learning rate by hand"}  # with XLA only; right on 2 and 3 replicas
SAMPLE = ("LoRA",)


def made(program: Program) -> keras.Model:
    """Returns the program's model, with the same weights each time."""
    keras.utils.set_random_seed(7)
    return program.make()


def trained(program: Program, model: keras.Model) -> dict:
    """Trains the compiled model; returns its logs by name: [epochs] each."""
    data = program.data()
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    keras.utils.set_random_seed(7)
    history = model.fit(
        x,
        y,
        sample_weight=weight,
        batch_size=program.batch_size,
        epochs=program.epochs,
        shuffle=False,
        verbose=0,
        **program.fit,
    )
    return history.history


def changes(program: Program) -> list:
    """Returns what is done to the model before each time that it is compiled and trained."""
    return [lambda _: None, *([program.again] if program.again else [])]


def by_stock_keras(program: Program) -> tuple[dict, list[np.ndarray]]:
    """Returns logs and weights of the program on stock Keras, on one device without XLA."""
    model = made(program)
    if program.reference is not None:
        return program.reference(model), [np.array(each) for each in model.variables]
    for change in changes(program):
        change(model)
        model.compile(**program.compile())
        model.jit_compile = False
        logs = trained(program, model)
    return logs, [np.array(each) for each in model.variables]


def here(program: Program, num_replicas: int, *, xla: bool) -> tuple[dict, list[np.ndarray]]:
    """Returns the same of tfaccel, on CPU replicas."""
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        model = made(program)
    for change in changes(program):
        change(model)
        compile_model(model, strategy, StepConfig(), xla=xla, **program.compile())
        methods.extend(model, StepConfig(), guard=contextlib.nullcontext, cluster=Cluster())
        logs = trained(program, model)
    return logs, [np.array(each) for each in model.variables]


def check(program: Program, num_replicas: int, *, xla: bool) -> None:
    """Raises AssertionError unless logs and variables are those of stock Keras."""
    wanted_logs, wanted = by_stock_keras(program)
    logs, variables = here(program, num_replicas, xla=xla)
    tolerance = {"rtol": program.rtol, "atol": program.rtol / 10}
    assert set(wanted_logs) <= set(logs), (set(wanted_logs), set(logs))
    for name, values in wanted_logs.items():
        np.testing.assert_allclose(logs[name], values, **tolerance, err_msg=name)
    assert len(variables) == len(wanted)
    for index, (value, expected) in enumerate(zip(variables, wanted, strict=True)):
        if value.dtype.kind == "f":  # counts of steps and seeds may differ
            np.testing.assert_allclose(value, expected, **tolerance, err_msg=f"variable {index}")


def cases():
    """Yields (name, number of replicas, XLA), a sample of which is run by default."""
    for name in PROGRAMS:
        for num_replicas in (1, 2, 3):
            for xla in (False, True):
                is_one_with_xla = num_replicas == 1 and xla
                is_sample = name in SAMPLE and (num_replicas, xla) == (2, False)
                marks = [] if is_sample else [pytest.mark.slow]
                if name in FAILS and (num_replicas > 1 if name not in ON_ONE else is_one_with_xla):
                    marks.append(pytest.mark.xfail(strict=True, reason=FAILS[name], raises=RAISES))
                yield pytest.param(name, num_replicas, xla, marks=marks)


@pytest.mark.parametrize(("name", "num_replicas", "xla"), cases())
def test_a_program_trains_on_replicas_as_with_stock_keras(name, num_replicas, xla):
    check(PROGRAMS[name], num_replicas, xla=xla)
