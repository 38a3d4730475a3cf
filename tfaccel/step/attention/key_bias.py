"""Takes the bias of a layer out of an attention's key, where no softmax changes.

A bias b of the key adds q b to all scores of a row q of the query, whatever the mask is. The
softmax of a row is the same with it, so that the bias's gradient is 0. In a ViT-B/16 this is one of
three biases before each attention: XLA adds each in a kernel, and sums each gradient in another.
"""

import tensorflow as tf

from tfaccel.keras_internals.product_bias import terms_behind, with_sums


def without_bias(key: tf.Tensor) -> tf.Tensor:
    """Returns a key without the bias that a layer has added last, or the key as it is.

    The gradient is that of the key, with which zeros are handed on as the gradient of its bias. If
    something else uses the key, too, TensorFlow sums the gradient of its bias as always.

    Args:
      key: [B, S, K, H], whose scores only a softmax over S reads. Its shape is known when the
        function is traced.
    """
    if not tf.is_symbolic_tensor(key):
        return key
    heads, size = key.shape[2:]
    x, bias = terms_behind(key) or (None, None)
    # Each row of the key has the same bias if a row of x is one of the key, or one head of it.
    if x is None or x.shape[-1] not in (heads * size, size):
        return key

    # x is an argument although it gets no gradient. TensorFlow searches all operations behind a
    # tensor that is used here but is no argument.
    @tf.custom_gradient
    def run(key, x):
        def backward(gradient):
            return with_sums(tf.identity(gradient), tf.zeros_like(bias)), None

        return tf.reshape(x, key.shape), backward

    return run(key, x)
