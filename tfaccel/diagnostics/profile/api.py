"""`tfaccel.profile`: measures a script's own model and loader, in the process of the script.

tfaccel.profile(model, loader)      # returns a table, which a notebook displays
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
    """Measures the step alone, the loader alone and the real run, and says what limits the run.

    The measurement trains: it changes the model's weights and the loader's position.

    Args:
      model: a model that `run.compile` compiled.
      loader: the loader to train on, made by the same run.
      seconds: how long each of the three is measured, after a warm-up.

    Raises:
      UserError: `run.compile` did not compile the model, or the loader is not a run's loader.
    """
    check_number("seconds", seconds, above=0)
    if not isinstance(loader, Loader):
        raise UserError(
            f"loader is of type {type(loader).__name__}; expected a loader from run.loader, "
            "run.image_folder, run.examples or run.pipeline"
        )
    if not hasattr(getattr(model, "train_function", None), "nonfinite"):
        raise UserError(
            "run.compile did not compile this model; call run.compile(model, ...) first"
        )
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
    """Returns the facts about a run that its verdict needs.

    Args:
      model: a model that `run.compile` compiled.
      loader: the loader that it trains on.
      threads: the threads of each replica's loader.
      cores: the CPU cores for each replica.
      from_config: True if flags of `tfaccel train` can change the run.
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
