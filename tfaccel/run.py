"""The Python API: what a Keras script adds to train on tfaccel.

run = tfaccel.setup(gpu_ids=[0], precision="mixed_float16", memory="growth")
train = run.image_folder("training", image_size=(28, 28), channels=1, global_batch_size=2560,
                         shuffle=True)
with run.scope():
    model = keras.Sequential([...])
run.compile(model, optimizer=..., loss=..., metrics=["accuracy"])
model.fit(train, validation_data=test, epochs=5)
run.export(model, "exported/1")
"""

import contextlib
import os
import pathlib
from collections.abc import Sequence

import keras

from tfaccel import cluster as cluster_lib
from tfaccel import methods
from tfaccel import runtime as runtime_lib
from tfaccel.config import ImageConfig, RuntimeConfig, StepConfig, check_flag
from tfaccel.data import image_folder
from tfaccel.data.distribute import Loader
from tfaccel.export import export_model
from tfaccel.step import compile_model
from tfaccel.watchdog import Watchdog


def setup(
    *,
    gpu_ids: Sequence[int] | None = None,
    precision: str = "float32",
    memory: str | int = "growth",
    tf32: bool = True,
    xla: bool = True,
    seed: int = 0,
    peer_timeout_s: int = 60,
) -> "Run":
    """Prepares the process and returns the run. Call it once, before any other use of TensorFlow.

    Args:
      gpu_ids: indices among the GPUs that CUDA_VISIBLE_DEVICES leaves, one replica on each; () for
        the CPU; None for all of them, or the CPU where there is none.
      precision: a Keras dtype policy ("float32", "mixed_float16", "mixed_bfloat16", "float16") or
        an Apex level ("O0" to "O3").
      memory: "growth" to take GPU memory as it is needed, or a limit per GPU in MiB.
      tf32: whether float32 products may use TensorFloat-32.
      xla: whether steps are compiled with XLA.
      seed: weights, dropout, data order and augmentation all derive from it.
      peer_timeout_s: with several workers, how long one may be silent until the others stop; a
        worker that is busy in Python, however long, is not silent.

    Raises:
      UserError: a setting is not what it may be, a GPU is not there, or TensorFlow has started.
    """
    return Run(
        RuntimeConfig(
            gpu_ids=gpu_ids,
            precision=precision,
            memory=memory,
            tf32=tf32,
            xla=xla,
            seed=seed,
            peer_timeout_s=peer_timeout_s,
        )
    )


class Run:
    """A prepared process: devices, precision and strategy.

    Attributes:
      runtime: what was chosen.
      cluster: the job's workers, and this process's place among them.
      strategy: the `tf.distribute.Strategy` over this run's replicas.
      watchdog: its `guard()` goes around calls that wait for the other workers.
    """

    def __init__(self, config: RuntimeConfig):
        """Prepares the process. `tfaccel.setup` is the shorter way."""
        self.cluster = cluster_lib.from_environment(os.environ)
        # It chooses devices and sets the seed but starts no device: a cluster can still be joined.
        self.runtime = runtime_lib.configure(config, num_workers=self.cluster.num_workers)
        self.strategy = cluster_lib.make_strategy(
            self.cluster,
            tuple(device.name for device in self.runtime.devices),
            peer_timeout_s=config.peer_timeout_s,
        )
        self.watchdog = Watchdog(self.cluster, peer_timeout_s=config.peer_timeout_s)

    def scope(self) -> contextlib.AbstractContextManager:
        """Returns the context to build the model in."""
        return self.strategy.scope()

    def image_folder(
        self,
        root: str | os.PathLike,
        *,
        image_size: Sequence[int],
        channels: int,
        global_batch_size: int,
        shuffle: bool = False,
        rotation_degrees: float = 0.0,
        horizontal_flip: bool = False,
    ) -> Loader:
        """Returns a loader over `root/<class>/<image>`, ready for `fit`, `evaluate`, `predict`.

        Args:
          root: the folder of class folders.
          image_size: (height, width) in pixels; every image is resized to it.
          channels: 1 for grey, 3 for RGB.
          global_batch_size: images per step over all replicas.
          shuffle: whether every epoch has a new order.
          rotation_degrees: turns each image by a uniform angle in [-this, this]; for training.
          horizontal_flip: mirrors each image with probability 1/2; for training.

        Raises:
          UserError: the folder is not as it should be, or a setting is not what it may be.
        """
        check_flag("shuffle", shuffle)
        images = ImageConfig(
            image_size=image_size,
            channels=channels,
            global_batch_size=global_batch_size,
            rotation_degrees=rotation_degrees,
            horizontal_flip=horizontal_flip,
        )
        return Loader(
            image_folder.scan(root),
            images,
            runtime=self.runtime,
            cluster=self.cluster,
            strategy=self.strategy,
            shuffle=shuffle,
        )

    def compile(
        self,
        model: keras.Model,
        optimizer="rmsprop",
        loss=None,
        *,
        step: StepConfig | None = None,
        **compile_args,
    ) -> None:
        """Compiles a model that was built in `scope()`, as `model.compile` does, with XLA.

        Args:
          model: the model.
          optimizer: as for `keras.Model.compile`.
          loss: as for `keras.Model.compile`.
          step: `tfaccel.StepConfig(...)`: synchronized batch norm, accumulation, loss scale, audit.
          **compile_args: as for `keras.Model.compile`, less `jit_compile`.

        Raises:
          UserError: as `tfaccel.step.compile_model`.
        """
        step = step or StepConfig()
        compile_model(
            model,
            self.strategy,
            step,
            xla=self.runtime.xla,
            optimizer=optimizer,
            loss=loss,
            **compile_args,
        )
        methods.extend(model, step, guard=self.watchdog.guard)

    def export(self, model: keras.Model, path: str | os.PathLike, *, images=None) -> pathlib.Path:
        """Writes a SavedModel and `model.keras` into the new folder `path`.

        Args:
          model: built.
          path: a folder that does not exist yet.
          images: one batch of inputs to compare the loaded model on; random where none is given.

        Returns:
          The path, absolute.
        """
        return export_model(model, path, images=images)
