"""What the tests of each kind of tfaccel's own Triton kernels have in common."""

import logging

import keras
import numpy as np
import tensorflow as tf
from conftest import trained_in_bfloat16
from keras import layers

import tfaccel
from tfaccel.keras_internals.layer_paths import layer_paths
from tfaccel.step import functions, in_xla


def uses(monkeypatch, owner, name, function, x, **kernels):
    """Traces a call of `function` in a step with these kernels, and computes it.

    Args:
      monkeypatch: pytest's.
      owner: the module that calls the kernels.
      name: of what it calls.
      function: of x.
      x: a tensor.
      kernels: the argument of `layer_paths` that has them.

    Returns:
      How often the kernels were called, and what `function` returned.
    """
    used, real = [], getattr(owner, name)

    def noted(*args, **kwargs):
        used.append(args)
        return real(*args, **kwargs)

    @tf.function(autograph=False)
    def run(x):
        with layer_paths(xla=True, all_reduce=None, **kernels):
            return function(x)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, noted)
        found = run(x)
    return len(used), found


def check_refusal(kernels, use, caplog):
    """An error of XLA about Triton turns kernels off once, and says so; others do not.

    Args:
      kernels: OwnKernels.
      use: traces something that they compute, and returns how often they were used.
      caplog: pytest's.
    """
    error = "Failed to compile Triton kernel."
    assert not kernels.turned_off_by(error)  # none was used
    asked, forgot = [], []

    def step():
        asked.append(kernels.are_off)
        if len(asked) == 1:
            raise tf.errors.InternalError(None, None, f"{error}\nmore")
        return "done"

    with caplog.at_level(logging.INFO, "tfaccel"):
        assert use() > 0
        assert not kernels.turned_off_by("Out of memory")
        choice = in_xla.Choice(keras.Sequential([layers.Dense(1)]), wanted=True, kernels=[kernels])
        assert choice.run(step, None, forget=lambda: forgot.append(1)) == "done"
    assert (asked, forgot, choice.on) == ([False, True], [1], True)
    assert f"tfaccel's kernels compute {kernels.what}" in caplog.text
    refused = f"no longer compute {kernels.what}, because XLA refused one: {error}"
    assert refused in caplog.text
    assert not kernels.turned_off_by(error)
    assert use() == 0


def labelled_rows():
    """Returns 48 rows of 8 values, and for each the one of three labels that a matrix gives it."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(48, 8)).astype("f4")
    return x, (x @ draw.normal(size=(8, 3))).argmax(1)


def check_training(monkeypatch, kind, make, x, y, *, rtol, num_replicas=1, accumulation_steps=1):
    """A classifier learns the same with kernels as without, in mixed_bfloat16, on any device.

    Args:
      monkeypatch: pytest's.
      kind: a kind of OwnKernels; the others are not used.
      make: returns the classifier.
      x: inputs.
      y: labels.
      rtol: tolerance of the losses; that of the outputs is three times as large.
      num_replicas: of the step.
      accumulation_steps: of the step.
    """
    found = []
    for own in (kind(), None):
        kernels = lambda each, *a, own=own, **k: own if each is kind else None  # noqa: E731
        monkeypatch.setattr(functions, "kernels_on", kernels)
        settings = {"rate": 0.3, "epochs": 4, "accumulation_steps": accumulation_steps}
        model, losses = trained_in_bfloat16(make, x, y, num_replicas, **settings)
        found.append((losses, model.predict(x, batch_size=16, verbose=0)))
        assert own is None or own.is_used
    (losses, outputs), (plain_losses, plain_outputs) = found
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, plain_losses, rtol=rtol)
    np.testing.assert_allclose(outputs, plain_outputs, rtol=3 * rtol, atol=3 * rtol)


def check_training_on_a_gpu(make, x, y, precision, what, caplog, *, rtol):
    """A classifier learns as without XLA, which has no kernels, and the log names them.

    Args:
      make: returns the classifier.
      x: inputs.
      y: labels.
      precision: of `tfaccel.setup`.
      what: the kernels compute.
      caplog: pytest's.
      rtol: tolerance of the losses.
    """
    losses = []
    for xla in (True, False):
        run = tfaccel.setup(precision=precision, xla=xla, gpu_ids=range(1))
        keras.utils.set_random_seed(0)
        with run.scope():
            model = make()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        run.compile(model, keras.optimizers.SGD(0.1), loss)
        found = model.fit(x, y, batch_size=64, epochs=5, shuffle=False, verbose=0)
        losses.append(found.history["loss"])
    assert losses[0][-1] < 0.7 * losses[0][0]
    np.testing.assert_allclose(*losses, rtol=rtol)
    assert f"tfaccel's kernels compute {what}" in caplog.text
