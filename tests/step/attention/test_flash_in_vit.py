"""The product's own Vision Transformer in a compiled step: cuDNN gets each of its attentions."""

import cudnn_stand_in
import keras
import numpy as np
import pytest
from conftest import compiled

from tfaccel.config import VitConfig
from tfaccel.experiment import models
from tfaccel.step.attention import flash
from tfaccel.step.attention.choose import Attentions

SHAPE = (8, 8, 3)


def vit(**settings):
    sizes = {"patch_size": 4, "width": 16, "depth": 1, "heads": 2, "mlp_width": 24}
    return lambda: models.build(
        "vit_tiny", image_shape=SHAPE, num_outputs=3, vit=VitConfig(**(sizes | settings))
    )


def trained(make, num_replicas=1, **settings):
    """Returns a model after three steps, and the losses of them."""
    keras.utils.set_random_seed(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = compiled(make, num_replicas, optimizer=keras.optimizers.SGD(0.5), loss=loss, **settings)
    random = np.random.default_rng(0)
    images = random.standard_normal((8, *SHAPE)).astype(np.float32)
    labels = random.integers(0, 3, 8)
    return model, [float(model.train_on_batch(images, labels)) for _ in range(3)]


@pytest.fixture
def counted(monkeypatch):
    """The attentions that cuDNN gets, for which a stand-in computes, in bfloat16."""
    asked = []

    class Counted(Attentions):
        def _why_not(self, query, *args, **kwargs):
            why = super()._why_not(query, *args, **kwargs)
            asked.append((tuple(query.shape), why))
            return why

    monkeypatch.setattr(flash, "call_module", cudnn_stand_in.call_module)
    attend = Counted()
    monkeypatch.setattr("tfaccel.step.functions.attentions_on", lambda *args, **kwargs: attend)
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield asked
    keras.config.set_dtype_policy("float32")


def test_cudnn_gets_the_attention_also_with_dropout(counted):
    make = vit(pooling="class_token", dropout=0.1, stochastic_depth=0.1)
    _, losses = trained(make)
    assert counted
    assert set(counted) == {((8, 5, 2, 8), None)}  # four patches and the class token
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "class_token"])
def test_two_replicas_train_as_one(pooling):
    one, losses = trained(vit(pooling=pooling, depth=2), xla=False)
    two, losses_of_two = trained(vit(pooling=pooling, depth=2), num_replicas=2, xla=False)
    np.testing.assert_allclose(losses_of_two, losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    for mine, other in zip(two.trainable_variables, one.trainable_variables, strict=True):
        for replica in mine._value.values:
            np.testing.assert_allclose(replica, other, rtol=0, atol=1e-5, err_msg=mine.path)
