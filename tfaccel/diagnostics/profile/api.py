"""`tfaccel.profile`: the three rates of a script's own model and loader, in its own process.

tfaccel.profile(model, loader)      # a table, in a notebook too
"""

import keras

from tfaccel.common.checks import check_number
from tfaccel.common.errors import UserError
from tfaccel.data.distribute import Loader
from tfaccel.diagnostics.profile.ceilings import beside, real_rate
from tfaccel.diagnostics.profile.table import Profile
from tfaccel.diagnostics.profile.verdict import Setup
from tfaccel.keras_internals.float32_layers import policy_of
from tfaccel.step import in_xla


def profile(model: keras.Model, loader: Loader, *, seconds: float = 5.0) -> Profile:
    """Returns how fast step, loader and run are, and which bounds the run.

    It trains: the model's weights and the loader's place are others afterwards.

    Args:
      model: compiled by `run.compile`.
      loader: that `fit` would train on, of the same run.
      seconds: that each of the three is measured for, after some that are dropped.

    Raises:
      UserError: the model was not compiled by `run.compile`, or the data are no loader of a run.
    """
    check_number("seconds", seconds, above=0)
    if not isinstance(loader, Loader):
        raise UserError(
            f"profile of a {type(loader).__name__}; expected a loader, of run.loader, "
            "run.image_folder, run.examples or run.pipeline"
        )
    if not hasattr(getattr(model, "train_function", None), "nonfinite"):
        raise UserError("profile of a model that run.compile did not compile; call that first")
    real = real_rate(model, loader, seconds=seconds)
    ceilings = beside(real, model, loader, seconds=seconds)
    return Profile(setup_of(model, loader, from_config=False), ceilings)


def setup_of(
    model: keras.Model,
    loader: Loader,
    *,
    threads: int | None = None,
    cores: int | None = None,
    from_config: bool,
) -> Setup:
    """Returns what there is to know of a run, for its verdict.

    Args:
      model: compiled by `run.compile`.
      loader: its data.
      threads: of each replica's loader.
      cores: for each replica.
      from_config: whether flags of `tfaccel train` can change it.
    """
    strategy = model.distribute_strategy
    kinds = {"ExamplesData": "examples", "PipelineData": "pipeline"}
    return Setup(
        model=model.name,
        loader=getattr(loader.data, "loader", None) or kinds[type(loader.data).__name__],
        global_batch_size=loader.global_batch_size,
        replicas=strategy.num_replicas_in_sync,
        on_gpu=any("GPU" in each.upper() for each in strategy.extended.worker_devices),
        precision=policy_of(model),
        xla=model.train_function.xla,
        not_for_xla=model.train_function.without_xla
        or in_xla.of_layers(model)
        or in_xla.of_batch(loader.element_spec),
        steps_per_execution=model.steps_per_execution,
        threads=threads,
        cores=cores,
        epoch_steps=loader.num_batches,
        from_config=from_config,
    )
