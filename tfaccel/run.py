"""The Python API: the calls that a Keras script adds to train with tfaccel.

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
import difflib
import functools
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence

import keras

from tfaccel.common import meant, run_log
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
    LogConfig,
    RuntimeConfig,
    StepConfig,
)
from tfaccel.config.images import SAMPLINGS
from tfaccel.config.presets import preset
from tfaccel.data import sources, user_examples
from tfaccel.data.distribute import Loader
from tfaccel.data.images import ImageData, open_images
from tfaccel.data.proof.dry_epochs import dry_epochs
from tfaccel.data.proof.proof import Verdict
from tfaccel.data.source import ArraySource, ImageSource
from tfaccel.export.at_start import check_at_start, warn_at_start
from tfaccel.export.export import export_model
from tfaccel.keras_internals import (
    bilinear,  # noqa: F401  so that Keras reads files with its layers
    device_iterators,  # noqa: F401  it changes TensorFlow
    mirrored,  # noqa: F401  likewise
)
from tfaccel.keras_internals.attention import obey_flash_attention
from tfaccel.keras_internals.replica import agree_on_reductions
from tfaccel.process import progress, waits
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
from tfaccel.training.callbacks.reporting import Reporting
from tfaccel.training.callbacks.tracking import Tracking
from tfaccel.training.trackers import check_installed
from tfaccel.training.trackers.tracked import Tracked, make_trackers
from tfaccel.training.workdir import RESUMES

log = logging.getLogger("tfaccel")


def setup(
    *,
    gpu_ids: Sequence[int] | None = None,
    precision: str = "float32",
    memory: str | int = "growth",
    tf32: bool = True,
    xla: bool | None = None,
    flash_attention: bool = True,
    begin_without_xla: bool = False,
    compile_cache: bool = True,
    seed: int = 0,
    deterministic: bool = False,
    peer_timeout_s: int = 60,
    allow_public_network: bool = False,
    workers: Sequence[str] | None = None,
    worker_index: int | None = None,
) -> "Run":
    """Prepares the process and returns the run. Call it before any other use of TensorFlow.

    In a notebook a cell may call it again, and the last call counts. GPUs and memory cannot change
    after the first call.

    Args:
      gpu_ids: indices among the GPUs in CUDA_VISIBLE_DEVICES, with one replica on each; () for the
        CPU; None for all GPUs, or for the CPU if there are none.
      precision: a Keras dtype policy ("float32", "mixed_float16", "mixed_bfloat16", "float16") or
        an Apex level ("O0" to "O3").
      memory: "growth" to take GPU memory as it is needed, or a limit per GPU in MiB.
      tf32: whether float32 products may use TensorFloat-32.
      xla: whether steps are compiled with XLA. None turns XLA on with GPUs, and off on the CPU,
        where it makes most steps slower.
      flash_attention: whether cuDNN's flash kernels compute attentions in steps that XLA compiles
        for GPUs: see tfaccel/step/attention/README.md.
      begin_without_xla: whether training on one replica begins without XLA while XLA compiles the
        step for the first time. The first step comes sooner, and full speed later. With
        `deterministic` and on several replicas it waits.
      compile_cache: whether to keep what XLA compiles for a GPU, and which kernels it chose by
        timing, for later processes.
      seed: the seed of weights, dropout, data order and augmentation.
      deterministic: whether two equal runs give the same bits; it may select slower kernels.
      peer_timeout_s: with several workers, the seconds that a worker may be silent before the
        others stop. A worker that is busy in Python, however long, is not silent.
      allow_public_network: whether workers may have public addresses. TensorFlow's ports have no
        password, so allow this only behind a firewall that closes them.
      workers: host:port of each worker, the chief's first. None reads TF_CONFIG, Slurm or Open MPI;
        without them the process runs alone.
      worker_index: the index of this process in `workers`; None reads it from the same place.

    Raises:
      UserError: a setting is not valid, a GPU does not exist, or TensorFlow has already started.
    """
    return Run(
        RuntimeConfig(
            gpu_ids=gpu_ids,
            precision=precision,
            memory=memory,
            tf32=tf32,
            xla=xla,
            flash_attention=flash_attention,
            begin_without_xla=begin_without_xla,
            compile_cache=compile_cache,
            seed=seed,
            deterministic=deterministic,
            peer_timeout_s=peer_timeout_s,
            allow_public_network=allow_public_network,
        ),
        find(os.environ, workers=workers, worker_index=worker_index),
        summarizes=True,
    )


def _warn_of_precision(config: RuntimeConfig) -> None:
    """Warns if this process was prepared before with another precision."""
    before = keras.config.dtype_policy().name
    if latest() is not None and before != config.precision:
        log.warning(
            "precision: %s from here on, also in the scopes of earlier runs, which had %s",
            config.precision,
            before,
        )


class Run:
    """A prepared process: devices, precision and strategy.

    Attributes:
      runtime: the chosen devices and settings.
      cluster: the job's workers, and this process's index among them.
      strategy: the `tf.distribute.Strategy` over this run's replicas.
      watchdog: has `guard()`, a context for calls that wait for the other workers.
    """

    def __init__(
        self, config: RuntimeConfig, cluster: Cluster | None = None, *, summarizes: bool = False
    ):
        """Prepares the process. `tfaccel.setup` is the shorter way.

        Args:
          config: the settings.
          cluster: the workers and this process's index; None reads them from the environment.
          summarizes: whether each loader logs a summary line. A command logs its own summary.
        """
        self._loader_level = run_log.SUMMARY if summarizes else logging.INFO
        undo_legacy_keras(os.environ)
        obey_flash_attention()
        progress.beat("start")
        self.cluster = cluster or find(os.environ)
        _warn_of_precision(config)
        # This chooses devices and sets the seed, but starts no device, so a cluster can be joined.
        self.runtime = runtime_lib.configure(config, self.cluster)
        log.info("cluster: %d worker(s): %s", self.cluster.num_workers, self.cluster.source)
        if not config.allow_public_network:
            check_private(self.cluster.addresses)
        self.strategy = make_strategy(
            self.cluster,
            tuple(device.name for device in self.runtime.devices),
            peer_timeout_s=config.peer_timeout_s,
        )
        progress.beat("start")  # all workers have joined
        self.watchdog = Watchdog(self.cluster, peer_timeout_s=config.peer_timeout_s)
        self.watchdog.check_reach()
        with self.watchdog.guard():
            agree_on_reductions(self.strategy, xla=self.runtime.xla)
        self._logged_ranges = set()  # pixel ranges
        self._warned_of = set()  # numbers of threads: most loaders of a run have the same

    def __repr__(self):
        """Returns the chosen devices and settings in one line."""
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
        """The index of this worker's first replica, counted over all workers."""
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
        sampling: str = "uniform",
        **images,
    ) -> Loader:
        """Returns a loader over images, ready for `fit`, `evaluate` and `predict`.

        A batch is (image, label, weight), or (image, label) if no batch is padded. The image is
        [rows, height, width, channels], float16 if the model computes in float16, else float32. The
        label is [rows] int64, or [rows, labels] float32 for several classes an image and for
        numbers. The weight is [rows] float32, 0 for padding. Image pairs give (input, target) in
        place of (image, label).

        Args:
          source: a source from `tfaccel.sources`: class_folders, image_list, tfrecord, webdataset,
            array_record, tfds, arrow, random_access, arrays, npy_folders or image_pairs.
          shuffle: whether every epoch has a new order. The order depends only on seed and epoch.
          augment: a preset's name, `tfaccel.preset(name, ...)` with changes, or an AugmentConfig.
          dali: DALI's settings.
          sampling: "uniform", or for training "balanced" or "square_root", which show images of
            rare classes more often: see `sampling` of `tfaccel.config.DataConfig`.
          **images: fields of `tfaccel.ImageConfig`: image_size, channels, mean, std,
            global_batch_size or batch_per_replica, last_batch, loader, stored_size, bad_files,
            targets.

        Raises:
          UserError: a setting is not valid, or the images cannot be used.
        """
        check_flag("shuffle", shuffle)
        check_choice("sampling", sampling, SAMPLINGS)
        images = _config("loader", ImageConfig, images)
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
            images,
            augment,
            shuffle=shuffle,
            num_replicas=self.strategy.num_replicas_in_sync,
            runtime=self.runtime,
            num_local=self.cluster.num_local,
            num_threads=num_threads,
            dali=dali,
            sampling=sampling,
        )
        # Training and test mostly share a range.
        if data.pixel_range and data.pixel_range not in self._logged_ranges:
            self._logged_ranges.add(data.pixel_range)
            hint = "" if data.pixel_range[1] > 2 else " (for 0 to 255 set mean=0, std=1/255)"
            ends = (in_figures(each, 4) for each in data.pixel_range)
            log.log(self._loader_level, "data: pixels range from %s to %s%s", *ends, hint)
        return self._make_loader(data, num_threads)

    def image_folder(self, root: str | os.PathLike, **settings) -> Loader:
        """Returns a loader over `root/<class>/<image>`, as `loader(sources.class_folders(root))`.

        Args:
          root: the folder that has a folder of images for each class.
          **settings: as for `loader`.

        Raises:
          UserError: the folder has another layout; or as for `loader`.
        """
        return self.loader(sources.class_folders(root), **settings)

    def audit(
        self, source: ImageSource | ArraySource, *, shuffle: bool = False, **settings
    ) -> Verdict:
        """Checks in two dry epochs the loader that `loader` would return.

        It checks that each epoch has each example once, in a new order if `shuffle` is True (or
        with `sampling`, as many examples of each class as it says); that
        no two replicas read the same example; and that each example has its own random draws.

        Args:
          source: a source from `tfaccel.sources`. A file that cannot be decoded is an error; the
            command `tfaccel audit` lists all such files.
          shuffle: as for `loader`.
          **settings: as for `loader`.

        Returns:
          The verdict. Print it: it has one line for each check.

        Raises:
          UserError: as for `loader`; or there are several workers, each of which reads only its
            own shard.
        """
        check_one_process(self.cluster, "the audit")
        _check_source(source)
        return dry_epochs(
            self,
            source,
            functools.partial(self.loader, shuffle=shuffle, **settings),
            shuffle=shuffle,
            last_batch=settings.get("last_batch", ImageConfig.last_batch),
            sampling=settings.get("sampling", "uniform"),
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
        """Returns a loader over examples from your own Python code, unchanged.

        Args:
          source: an object with `__len__` and `__getitem__(index)`, or a callable that takes any
            index. Either returns one example: a tuple (x,), (x, y) or (x, y, weight), or x alone.
            Each of them is an array or number, or a tuple or dict of these, with fixed shapes. A
            dict alone is x. Several threads call it.
          global_batch_size: examples per step over all replicas.
          batch_per_replica: examples per step on each replica, in place of global_batch_size.
          shuffle: whether every epoch has a new order.
          last_batch: "pad", "drop" or "repeat", as for `tfaccel.ImageConfig`.
          steps_per_epoch: required for a callable, which has no end; None for an object with a
            length.

        Raises:
          UserError: a setting is not valid, or the source fails at its first example.
        """
        data = user_examples.open_examples(
            source,
            global_batch_size=self._global_batch_size(global_batch_size, batch_per_replica),
            num_replicas=self.strategy.num_replicas_in_sync,
            seed=self.runtime.seed,
            shuffle=shuffle,
            last_batch=last_batch,
            steps_per_epoch=steps_per_epoch,
        )
        return self._make_loader(data, self.runtime.loader_threads)

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
        """Returns a loader over your own DALI pipeline, which runs once on each replica.

        Args:
          function: a function decorated with `nvidia.dali.pipeline_def`. If it has parameters named
            shard_id, num_shards, replica_index or device, they are passed by name.
          global_batch_size: examples per step over all replicas.
          batch_per_replica: examples per step on each replica, in place of global_batch_size.
          last_batch: "pad", "drop" or "repeat", as for `tfaccel.ImageConfig`.
          steps_per_epoch: required for a pipeline without a reader, which has no end.
          dali: only its threads and prefetching are used; your pipeline decides how to decode.
          **arguments: the function's other parameters.

        Raises:
          UserError: the pipeline cannot be built or run, or its reader is not sharded.
        """
        check_dali()
        from tfaccel.data import user_pipeline  # imports DALI, which takes half a second

        dali = DaliConfig() if dali is None else dali
        check_type("dali", dali, DaliConfig)
        num_threads = self._threads(dali.threads)
        data = user_pipeline.open_pipeline(
            function,
            arguments,
            global_batch_size=self._global_batch_size(global_batch_size, batch_per_replica),
            num_replicas=self.strategy.num_replicas_in_sync,
            last_batch=last_batch,
            steps_per_epoch=steps_per_epoch,
            device=self.runtime.devices[0],
            num_threads=num_threads,
            prefetch_batches=dali.prefetch_batches,
        )
        return self._make_loader(data, num_threads)

    def _global_batch_size(
        self, global_batch_size: int | None, batch_per_replica: int | None
    ) -> int:
        check_batch(global_batch_size, batch_per_replica)
        batch = ImageConfig(
            global_batch_size=global_batch_size, batch_per_replica=batch_per_replica
        )
        return batch.whole_batch(self.strategy.num_replicas_in_sync)

    def _make_loader(self, data, num_threads: int) -> Loader:
        plan = data.plan
        batch = plan.global_batch_size
        if plan.rows_per_replica * plan.num_replicas < batch:
            log.info("data: each step has all %d examples, fewer than %d", plan.num_examples, batch)
            batch = plan.num_examples
        log.log(
            self._loader_level,
            "data: %s examples, %d steps of %d an epoch, %d rows on each of %s%s",
            "endless" if plan.num_examples is None else plan.num_examples,
            plan.num_steps,
            batch,
            plan.rows_per_replica,
            counted(plan.num_replicas, "replica"),
            f", with the loader {data.loader}" if isinstance(data, ImageData) else "",
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
        """Returns the CPU threads of each replica's loader; warns once if there are few cores."""
        if asked is None:
            return self.runtime.loader_threads
        replicas, cores = len(self.runtime.devices), num_cores(os.environ, self.cluster)
        if asked * replicas > cores and asked not in self._warned_of:
            self._warned_of.add(asked)
            log.warning(
                "loader: %d threads for each of %d replicas, but only %d cores, so threads will "
                "wait for each other; use at most %d",
                asked,
                replicas,
                cores,
                max(1, cores // replicas),
            )
        return asked

    def compile(
        self, model: keras.Model, *args, step: StepConfig | None = None, **compile_args
    ) -> None:
        """Compiles a model that was built in `scope()`, as `model.compile` does, but for tfaccel.

        Args:
          model: the model.
          *args: positional arguments of the model's `compile`, such as Keras's optimizer and loss.
          step: `tfaccel.StepConfig(...)`: synchronized batch norm, accumulation, loss scale, audit.
          **compile_args: keyword arguments of the model's `compile`. A model's own `compile` may
            take several optimizers, for example. `jit_compile` is refused.

        Raises:
          UserError: a field of StepConfig was passed on its own; the model's `fit` is running; or
            as for `tfaccel.step.compile_model`.
        """
        step = StepConfig() if step is None else step
        check_type("step", step, StepConfig)
        methods.check_is_not_training(model)
        of_step = {each.name for each in dataclasses.fields(StepConfig)}
        known = parameters_of_compile(model)
        takes_all = any(each.kind == each.VAR_KEYWORD for each in known.values())
        for name in compile_args.keys() - known.keys():
            near = 1.0 if takes_all else meant.NEAR
            for field in difflib.get_close_matches(name, of_step, n=1, cutoff=near):
                other = "" if name == field else f"{name} is no argument of compile; "
                raise UserError(
                    f"{other}{field} is a field of StepConfig; use "
                    f"step=tfaccel.StepConfig({field}=...)"
                )
        names = ("xla", "flash_attention", "begin_without_xla")
        own = {name: getattr(self.runtime, name) for name in names}
        with waits.on("preparing the step"):
            compile_model(model, self.strategy, step, *args, **own, **compile_args)
        methods.extend(
            model,
            step,
            guard=self.watchdog.guard,
            cluster=self.cluster,
            at_start=self._warn_of_export if self.cluster.is_chief else None,
        )

    def _warn_of_export(self, model: keras.Model, train, test) -> None:
        """Warns when `fit` begins of what `export` would refuse: see `warn_at_start`."""
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
        """Returns a callback for `fit` that saves the state of training and resumes from it.

        `fit` continues from the newest checkpoint in the folder, also in the middle of an epoch. It
        restores weights, optimizer, loss scale, random seeds, the place in the data, callbacks and
        History. On SIGTERM, SIGUSR1 or SIGINT the callback saves and raises SystemExit.

        Args:
          folder: a folder for the checkpoints of this training only. It is created if it does not
            exist. With several workers, all of them must see it.
          config: `tfaccel.CheckpointConfig(...)`: when to save, and how many checkpoints to keep.
          monitor: the log that decides which checkpoint is the best. Losses should fall; all other
            logs should rise.
          resume: "auto" to continue if there is a checkpoint, "required" to raise if there is none,
            "never" to raise if there is one.
          accept_changes: whether to continue from a checkpoint that was made with other data,
            settings or `facts`.
          facts: numbers and text from your own program, by name, that a resumed run must share with
            the run that made the checkpoint.

        Raises:
          UserError: a setting is not valid. `fit` raises if the folder does not suit.
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

    def track(
        self,
        trackers: str | Sequence[str],
        folder: str | os.PathLike,
        *,
        config: Mapping[str, object] | None = None,
        project: str | None = None,
    ) -> Tracking:
        """Returns a callback that sends each epoch's logs to MLflow or Weights & Biases.

        It is also a context, whose end is the end of the run: the tracker is told whether the run
        finished, failed, or was stopped by a signal.

            with run.track("mlflow", "runs/photos", config={"batch": 256}) as tracking:
                model.fit(train, epochs=3, callbacks=[checkpoints, tracking])
                tracking.log_export(run.export(model, "exported/1", loader=test))

        A `fit` that resumes from a checkpoint goes on in the same run of the tracker. With several
        workers only the chief sends. If the script has begun a run itself, by `mlflow.start_run()`
        or `wandb.init()`, that run is used, and it stays open.

        Args:
          trackers: "mlflow", "wandb", or both.
          folder: this training's own folder, which keeps the id of the run. Its name is the run's.
          config: the script's settings, also nested; values under names of secrets, such as
            api_key, are not sent.
          project: MLflow's experiment and the project of Weights & Biases; None for that of their
            environment variables, or their default.

        Raises:
          UserError: there is no such tracker, or its library is not installed. `fit` raises if you
            have not logged in.
        """
        log_config = LogConfig(trackers=trackers, project=project)
        names = log_config.trackers or ()
        check_installed(names)
        folder = local_path(folder).absolute()
        kept = make_trackers(names, project=project) if self.cluster.is_chief else []
        return Tracking(Tracked(kept, folder, name=folder.name), config or {})

    def report(self, folder: str | os.PathLike, train: Loader | None = None) -> Reporting:
        """Returns a callback that draws this training's page, `report.html`, when `fit` ends.

        The page has the curves of all epochs, also of those before a resume, their figures, the
        memory of the GPUs, and the first images. It is one file, which needs no other. The callback
        also writes `metrics.jsonl`, a line for each epoch, which `tfaccel plot` reads. It does
        nothing at a batch's end. A `tfaccel.Throughput` before it adds the images per second.

            model.fit(train, epochs=3, callbacks=[checkpoints, run.report("runs/photos", train)])

        With several workers only the chief writes. A page that cannot be written is a warning.

        Args:
          folder: this training's own folder.
          train: the loader of `fit`, from `loader` or `image_folder`, to show its first images;
            None to show none.
        """
        if train is not None:
            check_type("train", train, Loader)
        return Reporting(
            local_path(folder).absolute(),
            train,
            devices=self.runtime.devices,
            is_chief=self.cluster.is_chief,
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
        """Exports the model to a new folder, and checks that the export gives the same answers.

        The folder has a SavedModel, `model.keras` and `tfaccel.json`. To find out before training
        whether the export will work, call `check_export`.

        With a loader, the SavedModel takes images:

        - `serving_default` takes pixels, [rows, height, width, channels] in 0 to 255.
        - `predict_bytes` takes JPEG or PNG files, [rows] string. It decodes, resizes and normalizes
          them as the loader does.

        Both answer with "logits" and "probabilities", [rows, classes] float32, or with "image",
        [rows, height, width, channels] float32 in 0 to 255. `predict_bytes` also answers with
        "class_name". Without a loader, `serving_default` is the model itself, with float32 outputs.

        A new process, without tfaccel, DALI and a GPU, then runs the exported model. Its answers
        are compared with the trained model's. The trained model gets its inputs from the loader, if
        there is one.

        With several workers only the chief writes. The others do not wait.

        Args:
          model: a functional or Sequential model. A subclassed model must have been trained, or
            accept the inputs from `loader` or `images`; `model.keras` is left out if the model's
            config does not rebuild it. With a loader the model must be compiled.
          path: a folder that does not exist yet. TensorFlow Serving needs a whole number as its
            name.
          loader: a loader for evaluation from `loader` or `image_folder`, without random changes.
          images: if there is no loader, one batch of the model's inputs to compare on. None takes
            random inputs in 0..2.
          **export: fields of `tfaccel.ExportConfig`: samples, pixel_dtype, computes_in, weights,
            xla, onnx, litert.

        Returns:
          The absolute path.

        Raises:
          UserError: the path exists or cannot be created; the model's inputs are unknown; a layer's
            config does not rebuild it; the loader does not suit; or ONNX's libraries are not
            installed.
          RunError: the folder cannot be written, for example because the disk is full; the exported
            model does not answer in time; or its answers differ from the trained model's. The
            rejected export stays beside `path`, as `<name>.<random>.rejected`.
        """
        config = _config("export", ExportConfig, export)
        if not self.cluster.is_chief:
            path = local_path(path).absolute()
            log.info("export: only the chief writes %s, for all workers", path)
            return path
        return export_model(
            model, path, config=config, runtime=self.runtime, loader=loader, images=images
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
        """Raises before training what `export` would raise after it. Call it before `fit`.

        It exports the untrained model to a temporary folder and runs it in a new process: 7 s for a
        small model, 30 s for ResNet-50 (2 cores, 2026-11-27). Every worker may call it, but only
        the chief exports. (Without it, `fit` with a loader makes only the quick checks, and logs
        warnings.)

        Args:
          model, path, loader, images, **export: as for `export`.

        Raises:
          UserError: as for `export`; or there is no room for the temporary folder, or the model
            gives two answers for the same input.
          RunError: as for `export`, except for faults that only trained weights show.
        """
        config = _config("export", ExportConfig, export)
        if self.cluster.is_chief:
            how = {"config": config, "loader": loader, "images": images}
            with check_at_start(model, path, runtime=self.runtime, **how) as rehearsal:
                rehearsal.wait()


def _config(call: str, kind: type, settings: dict):
    """Returns the config of a call's keyword arguments; refuses unknown names."""
    check_names(call, settings, [field.name for field in dataclasses.fields(kind)])
    return kind(**settings)


def _check_source(source) -> None:
    if not isinstance(source, ImageSource | ArraySource):
        raise UserError(
            f"source={source!r}; expected a source from tfaccel.sources, for example "
            "sources.class_folders('train'); or use run.examples or run.pipeline"
        )
