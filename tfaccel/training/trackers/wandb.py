"""Weights & Biases: a run's config, metrics and artefacts.

Its own environment variables apply. With WANDB_MODE=offline it needs no login and no network, and
writes to the run's folder; `wandb sync` sends the files later.

    tracker = WandB(project=None)

If your script has begun a run itself (`wandb.init()`), that run is used and stays open.
"""

import os
import pathlib

from tfaccel.common.errors import UserError
from tfaccel.training.logs import Record
from tfaccel.training.trackers import Tracker, metrics_of

EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 143}
WITHOUT_LOGIN = ("offline", "disabled", "dryrun")


class WandB(Tracker):
    """A run of Weights & Biases."""

    key, name = "wandb", "Weights & Biases"

    def __init__(self, *, project: str | None):
        """Takes the name of the project."""
        import wandb  # noqa: F401  here, because 1.4 s (2 CPU cores, 2026-11-30) are no training

        self._project, self._run, self._is_own = project, None, False

    def begin(
        self, before: str | None, *, name: str, config: dict, folder: pathlib.Path
    ) -> str | None:
        """Begins a run or goes on with one, and gives it the config."""
        import wandb

        self._is_own = wandb.run is None
        if self._is_own:
            # `init` would ask for a key on a terminal, where nobody may be.
            mode = wandb.setup().settings.mode
            if mode not in WITHOUT_LOGIN and not wandb.login(prompt=False):
                raise UserError(
                    "Weights & Biases has no key of yours; call `wandb login`, set "
                    "WANDB_API_KEY, or set WANDB_MODE=offline"
                )
            self._run = wandb.init(
                project=self._project,
                name=None if before else name,
                id=before,
                resume="allow" if before else None,
                dir=os.environ.get("WANDB_DIR", str(folder)),
                config=config,
                allow_val_change=True,  # a resumed run may have accepted changes
                settings=wandb.Settings(console=os.environ.get("WANDB_CONSOLE", "off")),
            )
        else:
            self._run = wandb.run
            self._run.config.update(config, allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def log(self, record: Record) -> None:
        """Logs the numbers; the x axis of their charts is the step."""
        self._run.log({"step": int(record["step"])} | metrics_of(record))

    def export(self, path: pathlib.Path) -> None:
        """Logs the folder as an artefact of the type "model"."""
        import wandb

        artefact = wandb.Artifact(f"export-{self._run.id}", type="model")
        artefact.add_dir(str(path))
        self._run.log_artifact(artefact)

    def end(self, outcome: str) -> None:
        """Sends what is left, and sets the run's state."""
        if self._run is None or not self._is_own:
            return
        if outcome == "stopped":
            self._run.mark_preempting()  # its state is then "preempted" and not "failed"
        self._run.finish(exit_code=EXIT_CODES[outcome])
