"""What `tfaccel evaluate` is asked for. Needs no TensorFlow, so a wrong call is refused at once.

asked = Asked(split="train")
config = asked.applied_to(read_config(workdir))
"""

import dataclasses
import pathlib

from tfaccel.common.errors import UserError
from tfaccel.common.local_path import local_path
from tfaccel.config import Config

SPLITS = ("test", "train")
LISTS = (".csv", ".tsv", ".txt")  # files that name images and labels
SEVERAL = ("multilabel", "regression")  # tasks whose labels are several an image, or numbers
NEEDS_LIST = (
    "--data={where} is a folder, whose images have one class each, but the task of the run is "
    "{task}; give a list of the images and their labels, with the columns of the run's list"
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The choices of a call. None leaves a choice to the run's config.

    Attributes:
      split: "test" or "train": which images of the run. Both are seen as the run tests them.
      data: other images instead: a folder or a list like the run's.
      targets: for other pairs of images, the folder of the targets.
      root: the folder of the run's data, if it has moved.
      checkpoint: "best", "newest" or the number of a step.
      export: the folder of an export, whose model.keras is used instead of a checkpoint.
      weights: "trained", or "average" for their moving average.
      loader: another loader.
      bad_files: "error" or "skip".
      gpu_ids: other GPUs.
      global_batch_size: another batch.
    """

    split: str = "test"
    data: pathlib.Path | None = None
    targets: pathlib.Path | None = None
    root: str | None = None
    checkpoint: str = "best"
    export: pathlib.Path | None = None
    weights: str | None = None
    loader: str | None = None
    bad_files: str | None = None
    gpu_ids: tuple[int, ...] | None = None
    global_batch_size: int | None = None

    def applied_to(self, config: Config) -> Config:
        """Returns the run's config with these changes.

        Every image counts once, so a short last batch is padded. The weights come from the
        checkpoint or the export, so the file that training started from may be gone.

        Raises:
          UserError: the changes contradict each other or the config.
        """
        if self.weights == "average" and config.train.ema_momentum is None:
            raise UserError(
                "--weights=average, but the run kept no average of its weights "
                "(train.ema_momentum); remove --weights"
            )
        if self.targets is not None and self.data is None:
            raise UserError(f"--targets={self.targets} without --data; give both, or neither")
        names = ("root", "loader", "bad_files")
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.global_batch_size is not None:
            changes |= {"global_batch_size": self.global_batch_size, "batch_per_replica": None}
        data = dataclasses.replace(config.data, last_batch="pad", **changes)
        if self.data is not None:
            data = self._of_other_data(data)
        # Weights of classes matter only to training, and would be counted in these images.
        train = dataclasses.replace(config.train, class_weights="none")
        model = dataclasses.replace(config.model, weights=None)
        runtime = config.runtime
        if self.gpu_ids is not None:
            runtime = dataclasses.replace(runtime, gpu_ids=self.gpu_ids)
        return dataclasses.replace(config, data=data, train=train, model=model, runtime=runtime)

    def _of_other_data(self, data):
        if self.split != "test":
            raise UserError(f"--data and --split={self.split} name two sets of images; give one")
        if (self.targets is None) == (data.source == "pairs"):
            raise UserError(
                "--data of a run of image pairs needs --targets, the folder of their masks or "
                "target images"
                if data.source == "pairs"
                else f"--targets={self.targets}, but the run's images have labels; remove it"
            )
        where = local_path(self.data).absolute()
        changes = {"test": str(where), "validation_split": None, "num_folds": None, "fold": 0}
        changes |= {"split_seed": 0, "group_column": None, "group_pattern": None}
        if self.targets is not None:
            changes["test_targets"] = str(local_path(self.targets).absolute())
        is_list = where.is_file() and where.suffix.lower() in LISTS
        if is_list and data.source == "folders":
            changes["source"] = "csv"
        elif where.is_dir() and data.source == "csv":
            if data.task in SEVERAL:
                raise UserError(NEEDS_LIST.format(where=where, task=data.task))
            own = ("path_column", "label_column", "label_columns", "label_separator")
            changes |= {"source": "folders", "images": "", "task": "auto", **dict.fromkeys(own)}
        return dataclasses.replace(data, **changes)
