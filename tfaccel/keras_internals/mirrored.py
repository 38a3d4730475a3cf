"""Averages the outputs for each image and its mirror image, in validation and serving.

Takes images and outputs within a model. Two layers do this, one before and one after a network that
is trained with horizontal flips:

    x = WithMirror()(image)         # [n, ...] in training, [2 n, ...] otherwise
    logits = MeanWithMirror()(network(x))       # [n, ...]

This cheap ensemble has been common since Krizhevsky et al., "ImageNet Classification with Deep
Convolutional Neural Networks" (2012), section 4.1. Testing and serving take twice the time. The
layers have no weights. Any program reads a SavedModel with them. To read a `.keras` file, first
call `tfaccel.setup(...)` or `import tfaccel.experiment.models`.
"""

import keras
from keras import layers, ops


@keras.saving.register_keras_serializable("tfaccel")
class WithMirror(layers.Layer):
    """Outside training, appends the images mirrored left to right: n rows become 2 n."""

    def call(self, images, training=False):
        """Takes and returns [rows, height, width, channels]."""
        if training:
            return images
        return ops.concatenate([images, ops.flip(images, axis=2)])


@keras.saving.register_keras_serializable("tfaccel")
class MeanWithMirror(layers.Layer):
    """Outside training, averages the outputs of each image and its mirror: 2 n rows become n."""

    def call(self, outputs, training=False):
        """Takes and returns [rows, ...], in the order that WithMirror makes."""
        if training:
            return outputs
        images, mirrored = ops.split(outputs, 2)
        return (images + mirrored) / 2
