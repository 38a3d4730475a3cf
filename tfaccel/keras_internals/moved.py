"""Private modules that lie elsewhere in Keras 3.16 than in Keras 3.15.

A name of these modules is imported from here: `from tfaccel.keras_internals.moved import core`.
The day that pyproject.toml no longer allows Keras 3.15, the second half goes.
"""

try:
    from keras.src.backend.tensorflow.ops import core, nn, numpy  # Keras 3.16
except ImportError:
    from keras.src.backend.tensorflow import core, nn, numpy  # Keras 3.15

Variable = core.Variable

__all__ = ["Variable", "core", "nn", "numpy"]
