"""The Python API: what a Keras script adds to train on tfaccel.

run = tfaccel.setup(gpu_ids=[0], precision="mixed_float16", memory="growth")
train = run.image_folder("training", image_size=(28, 28), channels=1, global_batch_size=2560,
                         shuffle=True)
with run.scope():
    model = keras.Sequential([...])
run.compile(model, optimizer=..., loss=..., metrics=["accuracy"])
model.fit(train, validation_data=test, epochs=5)
run.export(model, "exported/1", loader=test)
"""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence

import keras

from tfaccel.common import run_log
from tfaccel.common.checks import (
    check_batch,
    check_choice,
    check_dali,
    check_flag,
    check_names,
    check_type,
)
from tfaccel.common.errors import UserError
from tfaccel.common.local_path import local_path
from tfaccel.common.tables import counted, in_figures
from tfaccel.config import (
    AugmentConfig,
    CheckpointConfig,
    DaliConfig,
    ExportConfig,
    ImageConfig,
    RuntimeConfig,
    StepConfig,
)
from tfaccel.config.presets import preset
from tfaccel.data import sources, user_examples
from tfaccel.data.distribute import Loader
from tfaccel.data.images import ImageData, open_images
from tfaccel.data.proof.dry_epochs import dry_epochs
from tfaccel.data.proof.proof import Verdict
from tfaccel.data.source import ArraySource, ImageSource
from tfaccel.export.at_start import check_at_start, warn_at_start
from tfaccel.export.export import export_model
from tfaccel.keras_internals import mirrored  # noqa: F401  so that Keras reads files with its layers
from tfaccel.process import progress
from tfaccel.runtime import devices as runtime_lib
from tfaccel.runtime.cluster import Cluster, check_one_process, find
from tfaccel.runtime.cluster.addresses import check_private
from tfaccel.runtime.cluster.ray import undo_legacy_keras
from tfaccel.runtime.cluster.share import num_cores
from tfaccel.runtime.strategy import latest, make_strategy
from tfaccel.runtime.watchdog import Watchdog
from tfaccel.step import compile_model, parameters_of_compile
from tfaccel.training import methods
from tfaccel.training.callbacks.checkpoints import Checkpoints
from tfaccel.training.workdir import RESUMES

log = logging.getLogger("tfaccel")


def setup(
    *,
    gpu_ids: Sequence[int] | None = None,
    precision: str = "float32",
    memory: str | int = "growth",
    tf32: bool = True,
    xla: bool | None = None,
    compile_cache: bool = True,
    seed: int = 0,
    deterministic: bool = False,
    peer_timeout_s: int = 60,
    allow_public_network: bool = False,
    workers: Sequence[str] | None = None,
    worker_index: int | None = None,
) -> "Run":
    """Prepares the process and returns the run. Call it before any other use of TensorFlow.

    In a notebook a cell may call it again: the last call holds. GPUs and memory are then fixed.

    Args:
      gpu_ids: indices among the GPUs that CUDA_VISIBLE_DEVICES leaves, one replica on each; () for
        the CPU; None for all of them, or the CPU where there is none.
      precision: a Keras dtype policy ("float32", "mixed_float16", "mixed_bfloat16", "float16") or
        an Apex level ("O0" to "O3").
      memory: "growth" to take GPU memory as it is needed, or a limit per GPU in MiB.
      tf32: whether float32 products may use TensorFloat-32.
      xla: whether steps are compiled with XLA; None for on with GPUs and off on the CPU, where it
        makes most steps slower.
      compile_cache: whether what XLA compiles for a GPU is kept for the next process.
      seed: weights, dropout, data order and augmentation all derive from it.
      deterministic: whether two runs alike give the same bits, by kernels that may be slower.
      peer_timeout_s: with several workers, how long one may be silent until the others stop; a
        worker that is busy in Python, however long, is not silent.
      allow_public_network: whether workers may have public addresses, where a firewall closes
        their ports: TensorFlow's have no password.
      workers: host:port of each worker, the chief's first; None for what TF_CONFIG, Slurm or Open
        MPI say, or a process on its own.
      worker_index: which of `workers` this process is; None for what they say.

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
            compile_cache=compile_cache,
            seed=seed,
            deterministic=deterministic,
            peer_timeout_s=peer_timeout_s,
            allow_public_network=allow_public_network,
        ),
        find(os.environ, workers=workers, worker_index=worker_index),
        summarizes=True,
    )


def _say_what_changes(config: RuntimeConfig) -> None:
    """Warns where a process that was prepared before makes other models from now on."""
    before = keras.config.dtype_policy().name
    if latest() is not None and before != config.precision:
        log.warning(
            "precision: %s from now on, in the scopes of earlier runs, too, which had %s",
            config.precision,
            before,
        )


class Run:
    """A prepared process: devices, precision and strategy.

    Attributes:
      runtime: what was chosen.
      cluster: the job's workers, and this process's place among them.
      strategy: the `tf.distribute.Strategy` over this run's replicas.
      watchdog: its `guard()` goes around calls that wait for the other workers.
    """

    def __init__(
        self, config: RuntimeConfig, cluster: Cluster | None = None, *, summarizes: bool = False
    ):
        """Prepares the process. `tfaccel.setup` is the shorter way.

        Args:
          config: what is asked for.
          cluster: which worker of the job this process is; None for what the environment says.
          summarizes: whether each loader says in a line what it is, and not only in the whole log;
            a command says that of all that it makes.
        """
        self._said_of_loaders = run_log.SUMMARY if summarizes else logging.INFO
        progress.beat("start")
        undo_legacy_keras(os.environ)
        self.cluster = cluster or find(os.environ)
        _say_what_changes(config)
        # It chooses devices and sets the seed but starts no device: a cluster can still be joined.
        self.runtime = runtime_lib.configure(config, self.cluster)
        log.info("cluster: %d worker(s): %s", self.cluster.num_workers, self.cluster.source)
        if not config.allow_public_network:
            check_private(self.cluster.addresses)
        self.strategy = make_strategy(
            self.cluster,
            tuple(device.name for device in self.runtime.devices),
            peer_timeout_s=config.peer_timeout_s,
        )
        progress.beat("start")  # all workers are here
        self.watchdog = Watchdog(self.cluster, peer_timeout_s=config.peer_timeout_s)
        self._said_ranges = set()  # of pixels
        self._warned_of = set()  # numbers of threads: loaders of one run mostly share theirs

    def __repr__(self):
        """Returns what was chosen, in a line."""
        runtime = self.runtime
        replicas = counted(self.strategy.num_replicas_in_sync, "replica")
        workers = counted(self.cluster.num_workers, "worker")
        devices = ", ".join(each.name for each in runtime.devices)
        xla = "on" if runtime.xla else "off"
        return (
            f"<tfaccel run: {replicas} in {workers} (here {devices}), {runtime.precision}, "
            f"XLA {xla}, seed {runtime.seed}>"
        )

    @property
    def first_replica(self) -> int:
        """This worker's first replica, counted over all workers."""
        return self.cluster.worker_index * len(self.runtime.devices)

    def scope(self) -> contextlib.AbstractContextManager:
        """Returns the context to build the model in."""
        return self.strategy.scope()

    def loader(
        self,
        source: ImageSource | ArraySource,
        *,
        shuffle: bool = False,
        augment: AugmentConfig | str = "none",
        dali: DaliConfig | None = None,
        **images,
    ) -> Loader:
        """Returns a loader over images, ready for `fit`, `evaluate`, `predict`.

        A batch is (image, label, weight), or (image, label) where nothing is padded: image [rows,
        height, width, channels] float16 where the model computes in it, else float32; label [rows]
        int64; weight [rows] float32, 0 for padding. Of paired images it has (input, target).

        Args:
          source: from `tfaccel.sources`: class_folders, image_list, tfrecord, webdataset, arrays,
            npy_folders or image_pairs.
          shuffle: whether every epoch has a new order, a function of seed and epoch alone.
          augment: a preset's name, `tfaccel.preset(name, ...)` with changes, or an AugmentConfig.
          dali: DALI's settings.
          **images: fields of `tfaccel.ImageConfig`: image_size, channels, mean, std,
            global_batch_size or batch_per_replica, last_batch, loader, stored_size, bad_files,
            targets.

        Raises:
          UserError: a setting is not what it may be, or the images cannot be used.
        """
        check_flag("shuffle", shuffle)
        check_names("loader", images, [field.name for field in dataclasses.fields(ImageConfig)])
        dali = DaliConfig() if dali is None else dali
        _check_source(source)
        augment = preset(augment) if isinstance(augment, str) else augment
        if not isinstance(augment, AugmentConfig):
            raise UserError(
                f"augment={augment!r}; expected a preset's name or tfaccel.AugmentConfig(...)"
            )
        check_type("dali", dali, DaliConfig)
        num_threads = self._threads(dali.threads)
        data = open_images(
            source,
            ImageConfig(**images),
            augment,
            shuffle=shuffle,
            num_replicas=self.strategy.num_replicas_in_sync,
            runtime=self.runtime,
            num_local=self.cluster.num_local,
            num_threads=num_threads,
            dali=dali,
        )
        if data.pixel_range not in self._said_ranges:  # training and test mostly share theirs
            self._said_ranges.add(data.pixel_range)
            cure = "" if data.pixel_range[1] > 2 else " (0 to 255 by mean=0, std=1/255)"
            ends = (in_figures(each, 4) for each in data.pixel_range)
            said = "data: pixels come as %s to %s%s"
            log.log(self._said_of_loaders, said, *ends, cure)
        return self._loader(data, num_threads)

    def image_folder(self, root: str | os.PathLike, **settings) -> Loader:
        """Returns a loader over `root/<class>/<image>`: `loader` of `sources.class_folders(root)`.

        Args:
          root: the folder of class folders.
          **settings: as for `loader`.

        Raises:
          UserError: the folder is not as it should be, or as `loader`.
        """
        return self.loader(sources.class_folders(root), **settings)

    def audit(
        self, source: ImageSource | ArraySource, *, shuffle: bool = False, **settings
    ) -> Verdict:
        """Returns what two dry epochs prove of the loader that `loader` would return.

        Whether each example comes once, in a new order where it is to be shuffled, each replica's
        apart from the others', and with random draws of its own. Print it: a line for each.

        Args:
          source: from `tfaccel.sources`. A file that cannot be decoded is an error: `tfaccel audit`
            of a config lists them.
          shuffle: as for `loader`.
          **settings: likewise.

        Raises:
          UserError: as `loader`; or there are several workers, of which each sees its own share.
        """
        check_one_process(self.cluster, "the audit")
        _check_source(source)
        return dry_epochs(
            self,
            source,
            functools.partial(self.loader, shuffle=shuffle, **settings),
            shuffle=shuffle,
            last_batch=settings.get("last_batch", ImageConfig.last_batch),
        )

    def examples(
        self,
        source,
        *,
        global_batch_size: int | None = None,
        batch_per_replica: int | None = None,
        shuffle: bool = False,
        last_batch: str = "pad",
        steps_per_epoch: int | None = None,
    ) -> Loader:
        """Returns a loader over what your own Python gives, as it gives it.

        Args:
          source: an object with `__len__` and `__getitem__(index)`, or a callable of an index
            without end; either returns an example: a tuple (x,), (x, y) or (x, y, weight), or x
            alone, where each is an array or number, or a tuple or dict of them, all of fixed
            shapes. A dict alone is x. Read from several threads.
          global_batch_size: examples per step over all replicas.
          batch_per_replica: examples per step on each replica, instead.
          shuffle: whether every epoch has a new order.
          last_batch: "pad", "drop" or "repeat", as for `tfaccel.ImageConfig`.
          steps_per_epoch: of a callable, which has no end; None for an object with a length.

        Raises:
          UserError: a setting is not what it may be, or the source fails at its first example.
        """
        data = user_examples.open_examples(
            source,
            global_batch_size=self._whole_batch(global_batch_size, batch_per_replica),
            num_replicas=self.strategy.num_replicas_in_sync,
            seed=self.runtime.seed,
            shuffle=shuffle,
            last_batch=last_batch,
            steps_per_epoch=steps_per_epoch,
        )
        return self._loader(data, self.runtime.loader_threads)

    def pipeline(
        self,
        function,
        *,
        global_batch_size: int | None = None,
        batch_per_replica: int | None = None,
        last_batch: str = "pad",
        steps_per_epoch: int | None = None,
        dali: DaliConfig | None = None,
        **arguments,
    ) -> Loader:
        """Returns a loader over a DALI pipeline of your own: one runs on each replica.

        Args:
          function: decorated with `nvidia.dali.pipeline_def`. Those of its parameters that are
            called shard_id, num_shards, replica_index or device are given by name.
          global_batch_size: examples per step over all replicas.
          batch_per_replica: examples per step on each replica, instead.
          last_batch: "pad", "drop" or "repeat", as for `tfaccel.ImageConfig`.
          steps_per_epoch: of a pipeline without a reader, which has no end.
          dali: threads and prefetching; what concerns decoding is the pipeline's own affair.
          **arguments: the function's other parameters.

        Raises:
          UserError: the pipeline cannot be built or run, or its reader is not sharded.
        """
        check_dali()
        from tfaccel.data import user_pipeline  # DALI: half a second, of those that use it

        dali = DaliConfig() if dali is None else dali
        check_type("dali", dali, DaliConfig)
        num_threads = self._threads(dali.threads)
        data = user_pipeline.open_pipeline(
            function,
            arguments,
            global_batch_size=self._whole_batch(global_batch_size, batch_per_replica),
            num_replicas=self.strategy.num_replicas_in_sync,
            last_batch=last_batch,
            steps_per_epoch=steps_per_epoch,
            device=self.runtime.devices[0],
            num_threads=num_threads,
            prefetch_batches=dali.prefetch_batches,
        )
        return self._loader(data, num_threads)

    def _whole_batch(self, global_batch_size: int | None, batch_per_replica: int | None) -> int:
        check_batch(global_batch_size, batch_per_replica)
        batch = ImageConfig(
            global_batch_size=global_batch_size, batch_per_replica=batch_per_replica
        )
        return batch.whole_batch(self.strategy.num_replicas_in_sync)

    def _loader(self, data, num_threads: int) -> Loader:
        plan = data.plan
        batch = plan.global_batch_size
        if plan.rows_per_replica * plan.num_replicas < batch:
            log.info("data: a step is of all %d examples, fewer than %d", plan.num_examples, batch)
            batch = plan.num_examples
        log.log(
            self._said_of_loaders,
            "data: %s examples, %d steps of %d an epoch, %d rows on each of %s%s",
            "endless" if plan.num_examples is None else plan.num_examples,
            plan.num_steps,
            batch,
            plan.rows_per_replica,
            counted(plan.num_replicas, "replica"),
            f", by the loader {data.loader}" if isinstance(data, ImageData) else "",
        )
        return Loader(
            data,
            devices=self.runtime.devices,
            seed=self.runtime.seed,
            num_threads=num_threads,
            first_replica=self.first_replica,
            strategy=self.strategy,
        )

    def _threads(self, asked: int | None) -> int:
        """Returns the CPU threads of each replica's loader; warns once of more than cores."""
        if asked is None:
            return self.runtime.loader_threads
        replicas, cores = len(self.runtime.devices), num_cores(os.environ, self.cluster)
        if asked * replicas > cores and asked not in self._warned_of:
            self._warned_of.add(asked)
            log.warning(
                "loader: %d threads for each of %d replicas, but %d cores; they will wait for "
                "each other: %d or fewer",
                asked,
                replicas,
                cores,
                max(1, cores // replicas),
            )
        return asked

    def compile(
        self,
        model: keras.Model,
        *args,
        step: StepConfig | None = None,
        **compile_args,
    ) -> None:
        """Compiles a model that was built in `scope()`, as `model.compile` does, with XLA.

        Args:
          model: the model.
          *args: as the model's `compile` takes them: `optimizer` and `loss` of Keras's.
          step: `tfaccel.StepConfig(...)`: synchronized batch norm, accumulation, loss scale, audit.
          **compile_args: as the model's `compile` takes them, less `jit_compile`: a `compile` of
            the model's own may take several optimizers, say.

        Raises:
          UserError: a setting of `step` beside it, or as `tfaccel.step.compile_model`.
        """
        step = StepConfig() if step is None else step
        check_type("step", step, StepConfig)
        of_step = {each.name for each in dataclasses.fields(StepConfig)}
        for name in compile_args.keys() & (of_step - set(parameters_of_compile(model))):
            raise UserError(f"{name} is of the step; give step=tfaccel.StepConfig({name}=...)")
        compile_model(model, self.strategy, step, *args, xla=self.runtime.xla, **compile_args)
        methods.extend(
            model,
            step,
            guard=self.watchdog.guard,
            cluster=self.cluster,
            at_start=self._look_at_export if self.cluster.is_chief else None,
        )

    def _look_at_export(self, model: keras.Model, train, test) -> None:
        """Says as `fit` begins what `export` would refuse: see `warn_at_start`."""
        train, test = (each if isinstance(each, Loader) else None for each in (train, test))
        if train or test:
            warn_at_start(model, train, test, self.runtime)

    def checkpoints(
        self,
        folder: str | os.PathLike,
        config: CheckpointConfig | None = None,
        *,
        monitor: str = "val_loss",
        resume: str = "auto",
        accept_changes: bool = False,
        facts: Mapping[str, object] | None = None,
    ) -> Checkpoints:
        """Returns a callback for `fit`, which saves the state of training and resumes from it.

        `fit` then goes on from the newest checkpoint in the folder, in the middle of an epoch too:
        weights, optimizer, loss scale, random seeds, the place in the data, callbacks and History
        are as they were. On SIGTERM, SIGUSR1 or SIGINT it saves and raises SystemExit.

        Args:
          folder: for the checkpoints of this training alone; made if it is not there. With several
            workers, one that all of them see.
          config: `tfaccel.CheckpointConfig(...)`: when they are made, and how many are kept.
          monitor: the log by which the best is kept; losses should fall, all others rise.
          resume: "auto" to go on where there is a checkpoint, "required" for an error where there
            is none, "never" for an error where there is one.
          accept_changes: whether a checkpoint that was made with other data, settings or `facts`
            may be gone on with.
          facts: of your own program, what a resumed run must share with the one before, by name:
            numbers and text.

        Raises:
          UserError: a setting is not what it may be. What `fit` finds in the folder, it says.
        """
        check_choice("resume", resume, RESUMES)
        check_flag("accept_changes", accept_changes)
        config = CheckpointConfig() if config is None else config
        check_type("config", config, CheckpointConfig)
        own = {"seed": self.runtime.seed, "precision": self.runtime.precision}
        return Checkpoints(
            local_path(folder).absolute(),
            config,
            monitor=monitor,
            is_chief=self.cluster.is_chief,
            resume=resume,
            accept_changes=accept_changes,
            facts={**own, **(facts or {})},
        )

    def export(
        self,
        model: keras.Model,
        path: str | os.PathLike,
        *,
        loader: Loader | None = None,
        images=None,
        **export,
    ) -> pathlib.Path:
        """Writes a SavedModel, `model.keras` and `tfaccel.json` into a new folder, and proves them.

        `check_export`, before the training, tells whether it will.

        With a loader, the SavedModel takes images: `serving_default` their pixels, [rows, height,
        width, channels] in 0 to 255, and `predict_bytes` files, [rows] string, JPEG or PNG, which
        it decodes, resizes and normalises as the loader does. It answers "logits" and
        "probabilities", [rows, classes] float32, or "image", [rows, height, width, channels]
        float32 in 0 to 255; `predict_bytes` answers "class_name", too. Without a loader,
        `serving_default` is the model itself, with float32 outputs.

        In a process of its own, without tfaccel, DALI and a GPU, it is then compared with the
        trained model, behind the loader's own pipeline where there is one.

        Of several workers the chief alone writes; the others are not kept waiting.

        Args:
          model: functional or Sequential; or a subclassed one that was trained, or takes what
            `loader` or `images` give, without `model.keras` where its config does not make it
            again. With a loader, compiled.
          path: a folder that does not exist yet. For TensorFlow Serving its name is a whole number.
          loader: that evaluates, from `loader` or `image_folder`; nothing in it is random.
          images: without a loader, one batch of the model's inputs to compare on; random ones in
            0..2 where none is given.
          **export: fields of `tfaccel.ExportConfig`: samples, pixel_dtype, computes_in, weights,
            xla, onnx.

        Returns:
          The path, absolute.

        Raises:
          UserError: the path exists or cannot be made, the model's inputs are unknown, a layer's
            config does not make it again, the loader does not suit, or ONNX's libraries are not
            installed.
          RunError: it cannot be written, as on a full disk; it does not answer in time in a process
            of its own; or it does not answer as the trained model does: what was written stays
            beside `path`, as `<name>.<random>.rejected`.
        """
        check_names("export", export, [field.name for field in dataclasses.fields(ExportConfig)])
        config = ExportConfig(**export)
        if not self.cluster.is_chief:
            path = local_path(path).absolute()
            log.info("export: %s, by the chief alone, which writes for all workers", path)
            return path
        return export_model(
            model,
            path,
            config=config,
            runtime=self.runtime,
            loader=loader,
            images=images,
        )

    def check_export(
        self,
        model: keras.Model,
        path: str | os.PathLike,
        *,
        loader: Loader | None = None,
        images=None,
        **export,
    ) -> None:
        """Raises before the training what `export` would raise after it. Call it before `fit`.

        The untrained model is exported into a temporary folder, and asked in a process of its own:
        7 s for a small model, 30 s for ResNet-50 (2 cores, 2026-11-27). All of several workers may
        call it; the chief alone tries. (Without it, `fit` with a loader looks for what takes no
        such time, and warns of it.)

        Args:
          model: as for `export`.
          path: likewise.
          loader: likewise.
          images: likewise.
          **export: likewise.

        Raises:
          UserError: as `export`; or there is no room for it, or the model answers the same input in
            two ways.
          RunError: as `export`, but for what only trained weights show.
        """
        check_names("export", export, [field.name for field in dataclasses.fields(ExportConfig)])
        config = ExportConfig(**export)
        if self.cluster.is_chief:
            how = {"config": config, "loader": loader, "images": images}
            with check_at_start(model, path, runtime=self.runtime, **how) as rehearsal:
                rehearsal.wait()


def _check_source(source) -> None:
    if not isinstance(source, ImageSource | ArraySource):
        raise UserError(
            f"source={source!r}; expected one of tfaccel.sources, e.g. "
            "sources.class_folders('train'); or use run.examples or run.pipeline"
        )
