"""Opens images for a Loader: chooses the loader, decodes if needed, and makes the streams.

data = open_images(source, images, augment, shuffle=True, num_replicas=2, runtime=runtime)
stream = data.stream(placement, data.feed(replica_index=0))
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.checks import check_dali
from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import in_figures
from tfaccel.config import AugmentConfig, DaliConfig, ImageConfig
from tfaccel.data.choose import NUM_SAMPLED, Choice, choose_loader
from tfaccel.data.deferred import Deferred, dividing
from tfaccel.data.feed import Feed
from tfaccel.data.free_memory import all_bytes, mib
from tfaccel.data.loaders.cache import cached
from tfaccel.data.loaders.faults import wrong_size
from tfaccel.data.loaders.kept import kept
from tfaccel.data.loaders.memory import DeferredStream, MemoryStream, decode_all
from tfaccel.data.loaders.pixels import batch_spec, resizes
from tfaccel.data.loaders.tf_data import TfDataStream
from tfaccel.data.placement import Placement
from tfaccel.data.sampling import ClassSampling
from tfaccel.data.scan import files
from tfaccel.data.shards import Plan, check_even
from tfaccel.data.source import ArraySource, ImageSource, UnreadableError, as_stored, spread
from tfaccel.data.sources.classes import check_has_classes
from tfaccel.data.sources.kinds import check_kinds
from tfaccel.data.sources.mask_values import with_grey_masks
from tfaccel.data.sources.pillow import Headers, image_size
from tfaccel.runtime.devices import Device, Runtime

log = logging.getLogger("tfaccel")

# The share of a GPU's memory that batches may take while they wait for the others of their launch.
# HELD launches are in memory at once: this one and the next in TensorFlow's memory, later ones in
# DALI's. With this share ten batches of 256 images of 224x224 in float16, 4,410 MiB, are one launch
# on a GPU of 80 GB.
TOGETHER_SHARE, HELD = 0.06, 6


@dataclasses.dataclass(frozen=True)
class ImageData:
    """A source, the settings of its batches, and the loader that reads it.

    Attributes:
      source: encoded images, or arrays for the loaders "memory" and "cache".
      images: size, batch and other settings.
      augment: the settings of the augmentation.
      plan: how epochs are cut into steps and rows.
      loader: one of config.LOADERS, except "auto".
      dtype: dtype of the images: float16 if the model computes in float16, else float32.
      dali: DALI's settings.
      found: the source before it was decoded, with the same examples.
    """

    source: ImageSource | ArraySource
    images: ImageConfig
    augment: AugmentConfig
    plan: Plan
    loader: str
    dtype: str
    dali: DaliConfig
    found: ImageSource | ArraySource

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the labels, in order; empty for paired images."""
        return self.source.class_names

    @property
    def pixel_range(self) -> tuple[float, float] | None:
        """The least and the largest value of a pixel: (pixel / 255 - mean) / std.

        None for pixels of float32, whose range is not known.
        """
        if self.images.pixel_dtype == "float32":
            return None
        pairs = zip(self.images.mean, self.images.std, strict=True)
        ends = [(level - mean) / std for mean, std in pairs for level in (0, 1)]
        return min(ends), max(ends)

    @property
    def spec(self) -> tuple[tf.TensorSpec, tf.TensorSpec]:
        """The `tf.TensorSpec` of one replica's batch."""
        rows = self.plan.rows_per_replica
        return batch_spec(self.source, self.images, rows=rows, dtype=self.dtype)

    @property
    def skips_bad(self) -> bool:
        """Whether files that cannot be read are skipped."""
        return self.images.bad_files == "skip"

    def described(self) -> list[str]:
        """Returns lines of text: the images' shape and range, the loader and the augmentation."""
        height, width = self.images.image_size
        pixels = "pixels of any size"
        if self.pixel_range is not None:
            pixels = f"pixels {' to '.join(in_figures(each, 4) for each in self.pixel_range)}"
        lines = [
            f"images: {height} x {width} x {self.images.channels}, {self.dtype}, {pixels}",
            f"loader: {self.loader}",
        ]
        if self.plan.sampling is not None:
            lines.append(f"sampling: {self.plan.sampling}")
        if self.source.targets is not None:
            lines.append(f"targets: {self.images.targets}")
        if self.source.task == "multilabel":
            lines.append("labels: any number of classes an image")
        elif self.source.task == "regression":
            lines.append(f"labels: numbers, {', '.join(self.source.target_names)}")
        changed = [
            f"{each.name}={getattr(self.augment, each.name)}"
            for each in dataclasses.fields(self.augment)
            if getattr(self.augment, each.name) != each.default
        ]
        return [*lines, f"augmented: {', '.join(changed)}"] if changed else lines

    def facts(self) -> dict[str, object]:
        """Returns the facts that must be the same on all workers, by name: see `agreement`."""
        images = self.images
        pixels = images.image_size, images.channels, images.mean, images.std, images.targets
        pixels += (images.pixel_dtype,)
        facts = {"plan": self.plan, "augmentation": self.augment, "images": (*pixels, self.dtype)}
        return self.found.facts() | facts

    def stamps(self) -> dict[str, dict]:
        """Returns values that change if the data is replaced while a run is stopped."""
        return self.found.stamps()

    def feed(self, replica_index: int, *, first: int = 0, lost: frozenset = frozenset()) -> Feed:
        """Returns the feed of a replica from batch `first` on, counted from epoch 0."""
        return Feed(self.plan, self.augment, self.images.image_size, replica_index, first, lost)

    def stream(self, placement: Placement, feed: Feed) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """Returns an endless stream of one replica's batches."""
        settings = {"feed": feed, "placement": placement, "dtype": self.dtype}
        if self.loader == "tf_data":
            return TfDataStream(self.source, self.images, **settings)
        if self.loader in ("memory", "cache"):
            on_device = self.loader == "memory"
            return MemoryStream(self.source, self.images, on_device=on_device, **settings)
        from tfaccel.data.loaders.dali import DaliStream  # the import takes half a second

        on_gpu = self.loader == "dali_gpu"
        return DaliStream(
            self.source, self.images, dali=self.dali, decode_on_gpu=on_gpu, **settings
        )

    @property
    def deferred_are_made(self) -> bool:
        """Whether `deferred` gives finished batches, which wait for the others of their launch."""
        return self.loader == "dali_gpu"

    def at_a_time(self, devices: Sequence[Device], most: int) -> tuple[int, str]:
        """Returns how many batches one launch of several steps takes, and why not more.

        Images in a GPU's memory become batches inside the step, unless they are resized. XLA
        resizes fast only in a program that does nothing else. As part of a step it computes the
        weights again for every pixel: 155 ms instead of 7 (32 windows of 320x320 to 128x128 on the
        CPU, 2026-11-22). (The operations on grey levels are kept apart within a step: see
        `loaders/apart.py`.)

        Batches that DALI makes on a GPU wait there for the others of their launch. Their number
        divides `most`, so that all launches of an execution have one length, and their memory stays
        below `TOGETHER_SHARE` on each GPU.

        Args:
          devices: devices of the replicas.
          most: number of steps in an execution, at least 2.

        Returns:
          The number, and a reason in words: `most` and "" if an execution is one launch.
        """
        if self.deferred_are_made:
            return self._fit_together(devices, most)
        if self.loader != "memory":
            return 1, f"the loader is {self.loader}"
        if devices[0].cuda_ordinal is None:
            return 1, "the device is the CPU"
        stored, size = self.source.images.shape[1:3], self.images.image_size
        if resizes(stored, size, self.augment):
            return 1, "images in memory are resized"
        return most, ""

    def _fit_together(self, devices: Sequence[Device], most: int) -> tuple[int, str]:
        batch = HELD * sum(each.shape.num_elements() * each.dtype.size for each in self.spec)
        room = min(all_bytes(each) for each in devices)
        fit = min(int(TOGETHER_SHARE * room / batch), most)
        number, advice = dividing(most, fit)
        if number == most:
            return most, ""
        why = f"{most} batches would take up to {most * batch >> 20:,} MiB, more than "
        why += f"{TOGETHER_SHARE:.0%} of the GPU's {room >> 20:,} MiB"
        return number, why + advice

    def deferred(self, placement: Placement, feed: Feed, number: int) -> Iterator[Deferred]:
        """Returns a stream of one replica's batches, for launches of several steps.

        Args:
          placement: where and how the stream runs.
          feed: the examples and draws of each batch.
          number: batches in a launch, from `at_a_time`; an epoch's last launch may have fewer.
        """
        settings = {"feed": feed, "placement": placement, "dtype": self.dtype, "most": number}
        if not self.deferred_are_made:
            return DeferredStream(self.source, self.images, **settings)
        from tfaccel.data.loaders.dali import TogetherStream

        return TogetherStream(
            self.source, self.images, dali=self.dali, decode_on_gpu=True, **settings
        )


def open_images(
    source: ImageSource | ArraySource,
    images: ImageConfig,
    augment: AugmentConfig,
    *,
    shuffle: bool,
    num_replicas: int,
    runtime: Runtime,
    num_local: int,
    num_threads: int,
    dali: DaliConfig,
    sampling: str = "uniform",
) -> ImageData:
    """Chooses the loader and, for "memory" and "cache", decodes the images.

    Args:
      source: the images.
      images: size, batch and other settings.
      augment: the settings of the augmentation.
      shuffle: whether every epoch has a new order.
      num_replicas: number of replicas over all workers.
      runtime: devices, seed and precision.
      num_local: number of workers on this machine, which share its memory.
      num_threads: number of threads that scan and decode images.
      dali: DALI's settings.
      sampling: how often an epoch has the images of each class, as in DataConfig.

    Raises:
      UserError: settings contradict each other, or a file cannot be used.
    """
    source = as_stored(source, images)
    _check(source, images, augment)
    if sampling != "uniform":
        _check_sampling(source, sampling, shuffle=shuffle)
    global_batch_size = images.whole_batch(num_replicas)
    check_even(global_batch_size, num_replicas=num_replicas)  # before decoding, which takes minutes
    headers = Headers()
    if images.targets == "mask" and isinstance(source, ImageSource):
        source = with_grey_masks(source, headers=headers)
    if images.bad_files == "skip" and isinstance(source, ImageSource):
        smallest, masks = files.smallest_window(images, augment), images.targets == "mask"
        report = files.scan_files(
            source, num_workers=num_threads, progress=True, smallest=smallest, masks=masks
        )
        source = files.usable(source, report)
    choice = choose_loader(
        source,
        images,
        augment,
        device=runtime.devices[0],
        num_local=num_local,
        num_threads=num_threads,
    )
    log.info("loader: %s, because %s", choice.loader, choice.reason)
    if choice.loader.startswith("dali"):
        check_dali()
    if choice.loader == "dali_gpu":
        _log_decoder_memory(dali)
    _log_resize(source, images, augment)
    if isinstance(source, ImageSource):
        by_pillow = choice.stored_size is not None
        _check_some(source, images, augment, by_pillow=by_pillow, headers=headers)
    found = source
    if choice.stored_size is not None:
        found, source = _decoded(source, images, choice, num_threads=num_threads)
    plan = Plan(
        num_examples=len(source),
        global_batch_size=global_batch_size,
        num_replicas=num_replicas,
        seed=runtime.seed,
        shuffle=shuffle,
        last_batch=images.last_batch,
        sampling=None if sampling == "uniform" else _sampled(source, sampling),
    )
    compute_dtype = keras.DTypePolicy(runtime.precision).compute_dtype
    return ImageData(
        source=source,
        images=images,
        augment=augment,
        plan=plan,
        loader=choice.loader,
        dtype="float16" if compute_dtype == "float16" else "float32",  # DALI has no bfloat16
        dali=dali,
        found=found,
    )


def _check_some(
    source: ImageSource,
    images: ImageConfig,
    augment: AugmentConfig,
    *,
    by_pillow: bool,
    headers: Headers,
) -> None:
    """Raises UserError if a sampled image has a kind or size that the loader does not take.

    The loaders check each other image when they first read it.
    """
    sample = spread(len(source), NUM_SAMPLED)
    for each in filter(None, (source.images, source.targets)):
        each.ahead(sample)
    how = {"by_pillow": by_pillow, "headers": headers}
    check_kinds(source.images, sample, are_masks=False, **how)
    if source.targets is not None:
        check_kinds(source.targets, sample, are_masks=images.targets == "mask", **how)
    cut_out = augment if files.smallest_window(images, augment) else AugmentConfig()
    wrong = wrong_size(source, images, cut_out, sample.tolist(), headers=headers)
    if wrong:
        raise UserError(wrong)


def _check(source, images: ImageConfig, augment: AugmentConfig) -> None:
    if images.channels == 1 and (augment.saturation or augment.hue_degrees):
        raise UserError(
            "channels=1 makes grey images, which have no hue; use saturation=0 and hue_degrees=0"
        )
    if fault := _unsuitable(images, augment):
        raise UserError(fault)
    if images.targets == "mask" and source.targets is None:
        raise UserError("targets='mask' needs pairs of images, but these have labels; remove it")


def _unsuitable(images: ImageConfig, augment: AugmentConfig) -> str | None:
    """Returns why the augmentation does not suit the images' channels or data type, or None."""
    if images.channels not in (1, 3):
        colours = {"saturation": augment.saturation, "hue_degrees": augment.hue_degrees}
        asked = [f"{name}={value}" for name, value in colours.items() if value]
        asked += [f"policy={augment.policy!r}"] if augment.policy != "none" else []
        if asked:
            return (
                f"{', '.join(asked)} with channels={images.channels}; it needs RGB or grey images: "
                "remove it (brightness, contrast, windows, flips, rotation and shift "
                "suit any number of channels)"
            )
    if images.pixel_dtype == "uint8":
        return None
    if augment.has_level_operations:
        return (
            f"pixel_dtype={images.pixel_dtype!r} with a policy, a blur, posterizing, solarizing or "
            "erasing, which work on the 256 grey levels of 8 bits; remove them"
        )
    if images.pixel_dtype == "float32":
        names = ("contrast", "saturation", "hue_degrees")
        asked = [f"{name}={getattr(augment, name)}" for name in names if getattr(augment, name)]
        if asked:
            return (
                f"{', '.join(asked)} with pixel_dtype='float32'; it needs pixels of a known range: "
                "remove it (brightness suits all pixels)"
            )
    return None


def _check_sampling(source: ImageSource | ArraySource, sampling: str, *, shuffle: bool) -> None:
    check_has_classes(source, f"sampling={sampling!r}")
    if not shuffle:
        raise UserError(
            f"sampling={sampling!r} without shuffle=True; it is for training, where each epoch has "
            "a new order: add shuffle=True, or use sampling='uniform'"
        )


def _sampled(source: ImageSource | ArraySource, how: str) -> ClassSampling:
    sampling = ClassSampling(how, source.labels)
    said = sampling.in_words(source.class_names)
    summary("data: sampling=%s: images of each class, in the data -> in an epoch: %s", how, said)
    return sampling


def _decoded(
    source: ImageSource, images, choice: Choice, *, num_threads
) -> tuple[ImageSource, ArraySource]:
    """Returns the images that could be decoded, and their pixels, in the same order."""
    size = choice.stored_size
    if size != images.image_size:
        log.info("loader: images are stored as %dx%d, and windows are cut out of these", *size)
    settings = {"stored_size": size, "channels": images.channels, "targets": images.targets}
    store = cached if choice.loader == "cache" else kept if images.loader == "auto" else decode_all
    try:
        return source, store(source, num_threads=num_threads, **settings)
    except UnreadableError as error:
        if images.bad_files != "skip":
            raise
        # They could be read when the files were scanned.
        log.warning("data: %s; skipped", error)
        left = source.without(np.array(error.ids))
        return left, store(left, num_threads=num_threads, **settings)


def _log_decoder_memory(dali: DaliConfig) -> None:
    """Logs the memory that the decoder takes before the first image, on the GPU and on the host."""
    own = "DALI's own default"
    device, pinned = (
        own if each is None else mib(each)
        for each in (dali.device_memory_padding, dali.host_memory_padding)
    )
    size = dali.preallocate_width_hint, dali.preallocate_height_hint
    log.info(
        "loader: each thread of the decoder starts with %s of GPU memory and twice %s of pinned "
        "memory, the hardware decoder with %s; larger images make steps wait for more memory "
        "(dali.device_memory_padding, dali.host_memory_padding; dali.preallocate_width_hint, "
        "dali.preallocate_height_hint)",
        device,
        pinned,
        own if None in size else "enough for {}x{} pixels".format(*size),
    )


def _log_resize(source, images: ImageConfig, augment: AugmentConfig) -> None:
    """Logs whether images are resized, judging from the first one."""
    found = source.images.shape[1:3] if isinstance(source, ArraySource) else None
    found = found or image_size(source.images, 0)
    if augment.window == "stretch" and found != images.image_size:
        size = images.image_size
        log.info("data: images are resized to %dx%d; the first is %dx%d", *size, *found)
