"""Trains a program on stock Keras on one device, and here on replicas, and compares the two.

    wanted = by_stock_keras(program)
    figure, where = difference(here(program, strategy, xla=True), wanted)
    figure <= program.rtol

`PROGRAMS` has the programs of all modules in this folder, by name. tests/step/test_programs.py and
tools/train_programs.py use this.
"""

import contextlib
import importlib
import pathlib
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from programs.program import Program

from tfaccel.config import StepConfig
from tfaccel.runtime.cluster import Cluster
from tfaccel.step import compile_model
from tfaccel.training import methods

MODULES = sorted(
    each.stem
    for each in pathlib.Path(__file__).parent.glob("*.py")
    if each.stem not in ("harness", "program")
)
PROGRAMS = {
    program.name: program
    for module in MODULES
    for program in importlib.import_module(f"programs.{module}").PROGRAMS
}
DEFAULT = StepConfig()
Trained = tuple[dict, list[np.ndarray]]  # logs by name, [epochs] each, and all variables


def made(program: Program) -> keras.Model:
    """Returns the program's model, with the same weights each time."""
    keras.utils.set_random_seed(7)
    return program.make()


def trained(program: Program, model: keras.Model) -> dict:
    """Trains the compiled model; returns its logs by name: [epochs] each."""
    data = program.data()
    if isinstance(data, tf.data.Dataset):  # in batches already
        x, given = data, {}
    else:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        given = {"y": y, "sample_weight": weight, "batch_size": program.batch_size}
    keras.utils.set_random_seed(7)
    history = model.fit(
        x,
        **given,
        epochs=program.epochs,
        shuffle=False,
        verbose=0,
        **program.fit,
    )
    return history.history


def changes(program: Program) -> list:
    """Returns what is done to the model before each time that it is compiled and trained."""
    return [lambda _: None, *([program.again] if program.again else [])]


@contextlib.contextmanager
def updates_in_order() -> Iterator[None]:
    """Within the context, a graph of stock Keras updates and assigns in the program's order.

    TensorFlow loses the order, for one in WGANs (findings/tensorflow_lost_variable_order.sh).
    """
    name = "dependency_optimization"
    before = tf.config.optimizer.get_experimental_options().get(name, True)
    tf.config.optimizer.set_experimental_options({name: False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})


@updates_in_order()
def by_stock_keras(program: Program) -> Trained:
    """Trains the program with stock Keras, on one device without XLA."""
    model = made(program)
    if program.reference is not None:
        return program.reference(model), [np.array(each) for each in model.variables]
    for change in changes(program):
        change(model)
        model.compile(**program.compile())
        model.jit_compile = False
        logs = trained(program, model)
    return logs, [np.array(each) for each in model.variables]


def here(
    program: Program, strategy: tf.distribute.Strategy, *, xla: bool, config: StepConfig = DEFAULT
) -> Trained:
    """Trains the program with tfaccel, on the strategy's replicas."""
    with strategy.scope():
        model = made(program)
    for change in changes(program):
        change(model)
        compile_model(model, strategy, config, xla=xla, **program.compile())
        methods.extend(model, config, guard=contextlib.nullcontext, cluster=Cluster())
        logs = trained(program, model)
    return logs, [np.array(each) for each in model.variables]


def difference(got: Trained, wanted: Trained) -> tuple[float, str]:
    """Returns the largest relative difference of a number in logs and variables, and where it is.

    It is relative to the wanted number plus 0.1, so that numbers near zero are compared too.
    Variables that are no floats may differ: counts of steps, and seeds. Logs may have more names.

    Raises:
      AssertionError: a log is missing, or the numbers of variables or their shapes differ.
    """
    (logs, variables), (wanted_logs, wanted_variables) = got, wanted
    assert set(wanted_logs) <= set(logs), f"logs {sorted(logs)}, expected {sorted(wanted_logs)}"
    assert len(variables) == len(wanted_variables), "the numbers of variables differ"
    both = [(name, logs[name], values) for name, values in wanted_logs.items()]
    both += [
        (f"variable {index}", value, expected)
        for index, (value, expected) in enumerate(zip(variables, wanted_variables, strict=True))
        if value.dtype.kind == "f"
    ]
    return max(((_relative(one, other), name) for name, one, other in both), default=(0.0, ""))


def _relative(got, wanted) -> float:
    """Returns the largest relative difference: infinity if only one of two numbers is finite."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, f"shape {got.shape}, expected {wanted.shape}"
    with np.errstate(invalid="ignore"):
        found = np.abs(got - wanted) / (0.1 + np.abs(wanted))
    alike = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    found = np.where(alike, 0.0, np.where(np.isfinite(found), found, np.inf))
    return float(found.max(initial=0.0))
