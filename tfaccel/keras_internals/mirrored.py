"""Two views of each image outside training: itself and its mirror, whose outputs are averaged.

Two layers, one before and one after a network that is trained with horizontal flips:

    x = WithMirror()(image)         # [n, ...] in training, else [2 n, ...]
    logits = MeanWithMirror()(network(x))       # [n, ...]

A cheap ensemble, common since Krizhevsky et al., "ImageNet Classification with Deep Convolutional
Neural Networks" (2012), section 4.1; testing and serving take twice the time. The layers carry no
weights. A SavedModel with them is read anywhere; a `.keras` file after `tfaccel.setup(...)`, or
`import tfaccel.experiment.models`.
"""

import keras
from keras import layers, ops


@keras.saving.register_keras_serializable("tfaccel")
class WithMirror(layers.Layer):
    """Outside training, appends the images mirrored left to right: 2 n rows of n."""

    def call(self, images, training=False):
        """Takes and returns [rows, height, width, channels]."""
        if training:
            return images
        return ops.concatenate([images, ops.flip(images, axis=2)])


@keras.saving.register_keras_serializable("tfaccel")
class MeanWithMirror(layers.Layer):
    """Outside training, the mean of each image's outputs and its mirror's: n rows of 2 n."""

    def call(self, outputs, training=False):
        """Takes and returns [rows, ...], in the order of WithMirror."""
        if training:
            return outputs
        images, mirrored = ops.split(outputs, 2)
        return (images + mirrored) / 2
