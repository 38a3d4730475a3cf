"""Stands for `tfaccel train` in a trial: some epochs at once, of a loss that the config decides.

It notes each start in starts.jsonl. An epoch that is in metrics.jsonl already is not trained again.
The seed says what happens: 1 fails, 2 waits for the file `go` beside `trials` after one epoch.
"""

import json
import os
import pathlib
import sys
import time

from tfaccel.cli.flags import load
from tfaccel.config import parse

given = dict(each.lstrip("-").split("=", 1) for each in sys.argv[1:])
config, folder = parse(load(given["config"])), pathlib.Path(given["workdir"])
path = folder / "metrics.jsonl"
done = len(path.read_text().splitlines()) if path.exists() else 0
with open(folder / "starts.jsonl", "a") as starts:
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    noted = {"gpu": gpu, "epochs_before": done, "pid": os.getpid()}
    starts.write(json.dumps(noted | {"arguments": sys.argv[1:]}) + "\n")
if config.runtime.seed == 1:
    sys.exit("tfaccel: error: the loss is not finite")
for epoch in range(done + 1, config.train.epochs + 1):
    loss = config.train.learning_rate + 1 / epoch
    with open(path, "a") as log:
        log.write(json.dumps({"record": "epoch", "step": epoch, "epoch": epoch, "val_loss": loss}))
        log.write("\n")
    while config.runtime.seed == 2 and not (folder.parents[1] / "go").exists():
        time.sleep(0.02)
