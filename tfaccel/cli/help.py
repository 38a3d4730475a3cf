"""What `tfaccel COMMAND --help` prints, beside what the flags say of themselves.

print(help_texts.AUDIT) print(help_texts.of_train(default_config(), "they are by
default"))
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable

import ml_collections

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.version import __version__
from tfaccel.config import Config
from tfaccel.launch.options import MASTER_PORT
from tfaccel.runtime.cluster.addresses import FIRST_PORT, LAST_PORT

ALL = f"""tfaccel {__version__}: train Keras models from images and keep GPUs busy.

usage: tfaccel COMMAND [flags]

  train   train, measure and export what a config file says
            tfaccel train --config=configs/digits.py
            tfaccel train --config=configs/mnist.py --config.data.root=/mnist
            tfaccel train --config=configs/digits.py --workdir=runs/a
            tfaccel train --config=configs/digits.py --dry-run

  launch   run many processes of one job, on one machine or several, and watch
           them
            tfaccel launch --nproc-per-node=2 train \\
              --config=configs/digits.py --workdir=runs/a

  audit   look through an experiment's images, and prove what its loader gives
          each replica
            tfaccel audit --config=configs/digits.py
            tfaccel audit --config=configs/digits.py --contact-sheet=digits.png

  lint   say what in model, data and step is wrong, or keeps Tensor Cores or the
         input idle
            tfaccel lint --config=configs/mnist.py --config.data.root=/mnist
            tfaccel lint --config=configs/digits.py --fix

  profile   say what bounds a run, step or loader, and find loader settings that
            suit it better
            tfaccel profile --config=configs/digits.py
            tfaccel profile --config=configs/digits.py --search --out=tuned.py

  export   write a run's model for serving, and prove that it answers as the
           trained one does
            tfaccel export --workdir=runs/a
            tfaccel export --workdir=runs/a --computes-in=float32 --onnx

  predict   name the classes of image files, by an export alone
            tfaccel predict --model=runs/a/export cat.jpg dog.png

  plot   draw loss, metrics and throughput of one or more runs
            tfaccel plot runs/a runs/b --output=curves.html

  compare   measure the same job plain, and with XLA, mixed precision, DALI and
            more GPUs
            tfaccel compare --config=configs/digits.py --minutes=5 --out=report

  autobatch   find the largest batch that fits in the GPUs' memory
            tfaccel autobatch --config=configs/mnist.py \\
              --config.data.root=/data/mnist

  selftest   check that this machine's replicas train as one device does
            tfaccel selftest
            tfaccel selftest --precision=mixed_float16 --xla=on

  doctor   look at what is installed and at the machine, and say whether it fits
            tfaccel doctor
            tfaccel doctor --quick

  tfaccel COMMAND --help       a command's flags; --help=all for every field
  tfaccel --version            the version
"""

TRAIN = """usage: tfaccel train --config=FILE [--workdir=DIR] [--dry-run]
                     [--config.SECTION.FIELD=VALUE]

  --config=FILE      an experiment: a Python file with get_config(), as in
                     configs/; FILE:smoke runs its smallest size. Or a run's
                     workdir, for what that was trained by
  --workdir=DIR      a folder for what the run leaves; runs/NAME-TIME by
                     default. Where it holds a run that was stopped, the same
                     command goes on from its newest checkpoint. Several workers
                     need one that they share
  --resume=auto      or "required" (an error if there is no checkpoint) or
                     "never" (if there is a run)
  --accept_changes   go on from a checkpoint although the config or the data
                     have changed since
  --verbose          show every choice and its reason, as TFACCEL_VERBOSE=1
                     does; DIR/log.txt has them in any case
  --dry-run          train two steps and print, in every process, which worker
                     it is, its GPUs and replicas, and its share of a batch;
                     write nothing
  --workers=HOST:PORT,...
                     the addresses of all workers, the chief's first. Without it
                     TF_CONFIG says, or Slurm or Open MPI, which started this
                     process, or it is one of its own
  --worker-index=N   which of them this process is, from 0, unless Slurm or Open
                     MPI says

  SIGTERM, SIGUSR1 and Ctrl-C let it save and stop, with exit code
  checkpoint.exit_code; a second one ends it at once.

  tfaccel train --config=configs/digits.py --config.train.epochs=3
  tfaccel train --config=configs/mnist.py --config.runtime.gpu_ids=0
"""

# What most runs change, with a word on each that fits beside it.
COMMON = {
    "data.root": "the images; see --help=data",
    "data.source": "folders, csv, tfrecord, ...",
    "data.train": "below root, to train on",
    "data.test": "below root, to test on",
    "data.image_size": "height,width in pixels",
    "data.channels": "3 for RGB, 1 for grey",
    "data.global_batch_size": "images a step, over all GPUs",
    "data.loader": "auto chooses, and says why",
    "data.bad_files": "skip trains without them",
    "train_images.horizontal_flip": "an augmentation of many",
    "model.name": "mnist_cnn, resnet50, ...",
    "model.weights": "a file to begin from",
    "train.epochs": "passes over the images",
    "train.optimizer": "of Keras, in any case",
    "train.learning_rate": "the largest of the run",
    "train.warmup_epochs": "in which the rate rises",
    "train.decay": "constant, step, cosine, linear",
    "train.weight_decay": "None: the optimizer's own",
    "train.early_stopping_epochs": "without a better monitor",
    "train.monitor": "by which the best is kept",
    "step.label_smoothing": "0.1, say",
    "step.mixup_alpha": "0.2, say",
    "step.accumulation_steps": "parts of a step, for memory",
    "checkpoint.every_steps": "beside those after epochs",
    "runtime.gpu_ids": "0,1; empty for the CPU",
    "runtime.precision": "or mixed_float16, mixed_bfloat16",
    "runtime.xla": "whether steps are compiled",
    "runtime.seed": "of weights, order and draws",
    "runtime.deterministic": "the same bits in each run",
}
TOPICS = ("all", *(each.name for each in dataclasses.fields(Config)))
TOPICS_TEXT = """
  --help=TOPIC shows the other fields and each meaning in full. Topics: all, or
  a section: runtime, data, train_images, test_images, dali, model, train, step,
  checkpoint. With --config=FILE, the values are the file's.
"""
SPLIT = """
  Photographs that are not split yet, photos/CLASS/IMAGE: these lines make
  photos-split/training and photos-split/testing, of links, with every fifth
  image of each class in testing. Then give --config.data.root=photos-split.

    old="$PWD/photos" new="$PWD/photos-split"
    for class in "$old"/*/; do
      n=0
      for image in "$class"*; do
        n=$((n+1)); [ $((n%5)) -eq 0 ] && part=testing || part=training
        folder="$new/$part/$(basename "$class")"
        mkdir -p "$folder"
        ln -s "$image" "$folder"
      done
    done
"""


AUDIT = """usage: tfaccel audit --config=FILE [--report=FILE]
                     [--contact-sheet=FILE.png] [--config.SECTION.FIELD=VALUE]

  Decodes every image once, in parallel, and lists those that cannot be trained
  on: missing, unreadable, empty, cut short, no image, animated and more. A
  second audit looks at changed files alone. Then runs two dry epochs through
  the real loader on this machine's replicas: whether each image comes once, in
  a new order, and whether replicas draw different random numbers. Trains
  nothing. Exit code 1 if there is a bad file (unless bad_files=skip leaves it
  out) or the loader is at fault.

  --config=FILE              an experiment, as for `tfaccel train`
  --report=FILE              a new text file for the list: severity, kind, path,
                             cause; in the cache folder by default
  --contact-sheet=FILE.png   a new picture of augmented training images with
                             their labels

  tfaccel audit --config=configs/cifar10.py --config.data.root=/data/cifar10
"""

LINT = """usage: tfaccel lint --config=FILE [--script=FILE] [--fix] [--json]
                    [--config.SECTION.FIELD=VALUE]

  Builds the model and opens the data, decodes and trains nothing, and says what
  is wrong, or keeps Tensor Cores or the input idle: sizes that are no multiple
  of 8 (16 in int8), a short last batch, outputs in float16, NCHW, layers
  without activations between them, inputs and outputs that do not suit the
  data, layers outside the scope, no shuffling, no XLA, waits for Python, batch
  norm of few rows. For each: where, why, the gain to expect, as a part of the
  model's arithmetic, and the fix. Exit code 1 if there is an error; 0 where
  there are warnings and notes alone.

  --config=FILE   an experiment, as for `tfaccel train`
  --script=FILE   look through a Python file too, which is not run: a loader
                  passed to a model, waits for the device in a loop, what Python
                  cannot read
  --fix           pad a Dense head to whole tiles, cut the rest off again so
                  that outputs stay the same, measure a step before and after
                  on this machine, and print that and the flags that mend the
                  rest. Where activations compute more than ReLU, measure what
                  they cost, too. Writes nothing
  --json          one JSON object, {"about", "findings": [{"severity", "where",
                  "what", "why", "gain", "fix", "change"}, ...], "errors",
                  "warnings", "notes", "remarks"}, and with --fix "fix";
                  "change" is a flag of `tfaccel train`, or null

  tfaccel lint --config=configs/cifar10.py --config.data.root=/data/cifar10
  In a script or a notebook: tfaccel.lint(model, dataset), for any Keras model
"""

EXPORT = """usage: tfaccel export WORKDIR [--out=DIR]
                      [--checkpoint=newest|best] [--weights=trained|average]
                      [--samples=256] [--computes-in=policy|float32]
                      [--pixel-dtype=float32|uint8] [--xla] [--onnx]
                      [--root=DIR] [--loader=NAME]

  Writes a run's model as a SavedModel that needs neither tfaccel nor DALI, as
  the next version below --out. It takes pixels (serving_default) or JPEG and
  PNG files (predict_bytes), which it decodes, resizes and normalises as the
  run's evaluation does, and answers in float32. Then, in a process of its own,
  asks it about test images, and compares pixels, outputs and top-1 with the
  trained model behind the run's own loader: where they differ too much, it says
  in which step, and nothing is exported. tfaccel.json beside it has class
  names, preprocessing and these figures. Training exports in the same way, with
  these defaults.

  --workdir=DIR         of a run of `tfaccel train`, which may still be training
  --out=DIR             a folder of versions, 1, 2, 3 and so on; DIR/export of
                        the run by default
  --checkpoint=newest   or "best" by the run's monitor; by default what training
                        itself exports: the newest or, of a run that may stop
                        early, the best
  --weights=trained     or "average", where the run keeps one (ema_momentum),
                        which is the default there
  --samples=256         test images to compare, spread over all of them
  --computes-in=policy  the precision that the run trained in, or "float32",
                        which CPUs compute much faster than float16
  --pixel-dtype=float32 of the pixels, 0 to 255, that serving_default takes, or
                        "uint8"
  --xla                 compile the model where it is served, anew for each
                        number of rows
  --onnx                write model.onnx, too, from pixels to answers, in
                        float32 (the extra `onnx`)
  --root=DIR            of the data, where they are no longer where the run
                        found them
  --loader=dali_cpu     of the test images, where the run's own cannot be had
                        here, e.g. for want of a GPU; any of the config's
                        data.loader

  tfaccel export --workdir=runs/a --out=served/flowers --computes-in=float32
"""

PREDICT = """usage: tfaccel predict --model=DIR IMAGE|FOLDER... [--top=3] [--json]

  Prints the likeliest classes of each image file and their probabilities. Needs
  the export alone, and none of the run's data. A file that cannot be read or
  decoded is an error of its own; the others are answered, and the exit code is
  1.

  --model=DIR   a run's workdir, an export, or the folder of its versions, of
                which the last is taken
  --top=3       how many classes for each file
  --json        a line of JSON for each file: path, error, classes

  A folder stands for all images in it and below it. In a file or a pipe each
  image has one line.

  tfaccel predict --model=runs/a cat.jpg dog.png photographs/
  tfaccel predict --model=served/flowers/3 --json photographs/*.jpg
"""

PROFILE = """usage: tfaccel profile --config=FILE [--seconds=5] [--trace=FOLDER]
                       [--search [--minutes=10] [--memory-mib=N]
                       [--out=FILE.py]] [--json]
                       [--config.SECTION.FIELD=VALUE]

  Measures three rates, in images/s over all replicas: of the step, on one batch
  that stays on the device; of the loader, whose batches nothing trains on; and
  of the run, which does both as `tfaccel train` does. Says which of the two
  bounds the run, by how much, what is lost between them, and what to do. Keeps
  nothing of what is trained. About half a minute, and what the step takes to
  compile.

  --config=FILE      an experiment, as for `tfaccel train`
  --seconds=5        that each rate is measured for, after the first steps,
                     which are dropped
  --trace=FOLDER     write TensorFlow's own profile of about ten steady steps
                     too: each operation on the host and the devices.
                     TensorBoard shows it with the package xprof
  --search           then try other settings of the loader: where it runs
                     (dali_gpu, dali_cpu, tf_data, memory, cache, those that
                     give these images the same pixels), threads, batches made
                     ahead, the hardware decoder's share. One at a time, from
                     the present ones, each in a process of its own. One that
                     seems faster is measured three times, in turn with the one
                     before, and kept if its slowest run beats the other's
                     fastest (or its first by half as much again); in the end
                     the best is compared with the start again
  --minutes=10       for the search: it begins no run that would not end in time
  --memory-mib=N     reject settings with which more is taken of a GPU, by all
                     processes (on the CPU: of this machine, by the run itself)
  --out=FILE.py      write the best, if it is another, as a new config file that
                     builds on --config
  --json             one JSON object, {"setup", "images_per_second", "verdict",
                     "memory_mib", "trace"}, and with --search "search"

  tfaccel profile --config=configs/digits.py --trace=/tmp/trace
  tfaccel profile --config=configs/digits.py --search --out=digits_tuned.py
  In a script or a notebook: tfaccel.profile(model, loader)
"""

SELFTEST = """usage: tfaccel selftest [flags]

  Trains small models on this machine's replicas and, by plain Keras, on one
  device, and compares: loss, weights, clipping, accumulation, batch norm, a
  partial batch, overflow on each replica, save and load, XLA. Prints a row for
  each; exit code 1 if any failed. Minutes, most of it compilation.
"""

PLOT = """usage: tfaccel plot WORKDIR... [--output=FILE]

  Draws loss, metrics and images per second of one or more runs over their
  epochs, finished or not. Each run has a colour; test images are the full line,
  training the dashed one. The heading and the legend say in which settings the
  runs differ. A folder of workdirs stands for all runs in it.

  --output=FILE   a new .png, or .html: one page with the picture and a table,
                  that needs no other file; plot.png by default

  tfaccel plot runs/digits-20261121-094702
  tfaccel plot runs/a runs/b --output=curves.html
"""

DOCTOR = """usage: tfaccel doctor [--quick] [--json] [--data=FOLDER]

  Looks at Python, TensorFlow, Keras, DALI and its plugin, driver, CUDA
  libraries, GPUs, who holds their memory, links between them, cores, memory,
  limits, disks, GPUDirect Storage and variables, and prints a line for each:
  ok, warning or error, with what was expected and the fix. Exit code 1 if there
  is an error. TensorFlow and DALI are started in a process of their own, so
  that an abort is a line too.

  --quick         in a few seconds, without starting them
  --json          one JSON object, {"checks": [{"name", "status", "found",
                  "fix"}, ...], "errors", "warnings", "left_out"}
  --data=FOLDER   time the reading of files there too, up to 256 MiB in 5
                  seconds

  tfaccel doctor --data=/data/imagenet
"""

COMPARE = """usage: tfaccel compare --config=FILE [--steps=50] [--repeats=5]
                       [--minutes=60] [--grid] [--out=FOLDER] [--json]
                       [--config.SECTION.FIELD=VALUE]

  Trains some steps of the same job (data, batch, seed, recipe) plain: tf.data,
  float32 without TF32, no XLA, one GPU. Then XLA, TF32, mixed_float16,
  mixed_bfloat16, DALI, images in memory and more GPUs (the batch divided over
  them) are added to the best so far, one at a time; the loaders come first if
  the plain one waits for its batches most of the time. Each is a process of its
  own, timed in turn with the best so far, and kept if the middle half of its
  stretches is above the other's and its losses agree with the plain one's; what
  was nearly as fast is tried once more if the best has changed since, and what
  was not half as fast in its first stretch has no other. In the end the best is
  measured against the plain one again. Pure float16 is shown as the ceiling and
  never chosen. One that fails is a row that says why.
  Prints the table, and the command that trains as the best does; exit code 1 if
  nothing ran, or if --minutes was too short for a second way to train: it then
  says how many minutes would do.
  Ctrl-C and SIGTERM end it with the report of what was measured before, in
  --out.

  --config=FILE   an experiment, as for `tfaccel train`
  --steps=50      of a stretch that is timed: about a second or more of each is
                  good
  --repeats=5     stretches of each, 3 or more
  --minutes=60    begins nothing that would not end in time; what is left out,
                  is said. A closer estimate is told once the plain one has run.
                  One on a GPU takes a minute or so, half of it compilation:
                  nothing compiled before is used
  --grid          measure every combination instead
  --out=FOLDER    a new folder for report.html (one file, with pictures),
                  report.md, results.json, speed.png, losses.png, and what each
                  process printed
  --json          print results.json instead

  tfaccel compare --config=configs/digits.py --minutes=6 --out=report
  In a notebook: tfaccel.compare(config, minutes=10), for what a config's
  get_config() returns
"""

AUTOBATCH = """usage: tfaccel autobatch --config=FILE [--keep-batch]
                         [--config.SECTION.FIELD=VALUE]

  Finds the largest global batch, a multiple of 8, that fits in the GPUs'
  memory: trains a few steps on one size after another, each in a process of its
  own, DALI's memory and 5% to spare counted. Prints it, and the flag to use, as
  JSON. A try takes about as long as a run to its first steps.

  --keep-batch    find instead the fewest parts (accumulation_steps) in which
                  the config's batch fits: the same mathematics but for batch
                  norm, which sees a part at a time

  tfaccel autobatch --config=configs/imagenet_resnet50.py \\
    --config.data.root=/data/imagenet
"""

LAUNCH = """usage: tfaccel launch [flags] train --config=FILE --workdir=DIR [flags of train]
       tfaccel launch [flags] SCRIPT.py [arguments]

  Starts the ranks of one job, each a process that trains on its share of every
  batch, and watches them. Where one fails, never starts or makes no progress,
  all are ended, with the reason and the last lines of the one at fault; with
  --max-restarts they start again from the last checkpoint. On several machines,
  start it once on each, with the same flags but --node-rank; inside a step of
  Slurm with one task for each node, nodes and addresses are known.

  --nproc-per-node=1   ranks on each machine
  --nnodes=1           machines
  --node-rank=0        which of them this is
  --master-addr=HOST   of node 0, as the others reach it
  --master-port={port}  on which it listens for them
  --max-restarts=0     how often all may start again, in all. Never after a
                       mistake in the call (exit code 2), nor once two restarts
                       came no further
  --start-timeout=1800 seconds until the first step has ended, compilation
                       included, for all machines to come, and for what a script
                       does after fit or evaluate
  --step-timeout=300, --evaluation-timeout=600, --save-timeout=600
                       seconds without progress in training, in an evaluation,
                       and in a checkpoint or export; what one execution of
                       several steps takes is without progress. 0, here and for
                       --start-timeout, is no limit
  --node-timeout=30    seconds for which a machine's launcher may be silent
  --grace=30           seconds from SIGTERM to SIGKILL, and for all that a
                       script does once `fit` has saved and stopped at a signal
  --log-dir=DIR        for each rank's output, DIR/attempt-0/rank-0.log;
                       WORKDIR/launch by default
  --engine=local       or what else starts the launchers:
                         slurm: writes a batch script and submits it
                         ray:   on the Ray cluster that is there (the extra
                                `ray`)
                         k8s:   with --print alone, a manifest of a JobSet
  --print              print the script of Slurm, or the manifest, and submit
                       nothing
  --name=tfaccel       of the job, for slurm and k8s
  --sbatch=OPTIONS     of slurm, e.g. '--partition=gpu --gpus-per-node=4
                       --time=8:00:00'
  --image=IMAGE        of k8s: a container image with tfaccel in it

  SIGTERM, SIGUSR1, Ctrl-C and a lost terminal (SIGHUP, as SIGTERM) are passed
  on: the ranks save and stop, and the exit code is theirs, 143. A second one
  ends them at once. Exit codes else: 0 done, 2 a mistake in the call, 128 + n
  where signal n ended a rank, 1 where a rank or a machine fell silent.

  A script is watched by its calls of tfaccel: one that never calls
  `tfaccel.setup` and `fit` counts as one that never starts. A loop of your own
  calls `tfaccel.beat(step=...)` before each step.

  WARNING: TensorFlow's ports between ranks have no password, and on each
  machine they listen on all interfaces, of one machine's ranks too. Whoever
  reaches one can read and write files as you. Run several ranks on a private
  network alone, or close the ports, {first} to {last}, to all but the job's
  machines, here 10.0.0.0/24:
    nft add table inet tfaccel
    nft add chain inet tfaccel in '{{ type filter hook input priority 0; }}'
    nft add rule inet tfaccel in iif lo accept
    nft add rule inet tfaccel in ip saddr 10.0.0.0/24 accept
    nft add rule inet tfaccel in tcp dport {first}-{last} drop
  Ranks of one machine need no network at all: `unshare --net --map-root-user sh
  -c 'ip link set lo up; exec tfaccel launch ...'`. Who may join as a node is
  settled by a secret in TFACCEL_LAUNCH_TOKEN, the same on all machines.
"""

LAUNCH_COMMON = """usage: tfaccel launch [flags] train --config=FILE --workdir=DIR [flags of train]
       tfaccel launch [flags] SCRIPT.py [arguments]

  Starts the ranks of one job, each a process that trains on its share of every
  batch, and watches them. Where one fails, never starts or makes no progress,
  all are ended, with the reason and the last lines of the one at fault.

  --nproc-per-node=1   ranks on each machine
  --nnodes=1           machines: start it once on each
  --node-rank=0        which of them this is
  --master-addr=HOST   of node 0, as the others reach it
  --master-port={port}  on which it listens for them
  --max-restarts=0     how often all may start again from the last checkpoint
  --start-timeout=1800 seconds until the first step has ended
  --step-timeout=300   seconds without progress in training
  --log-dir=DIR        for each rank's output; WORKDIR/launch by default
  --engine=local       or slurm, ray, k8s
  --help=all           all flags, exit codes, and how to close the ports

  WARNING: TensorFlow's ports between ranks, {first} to {last}, have no password.
  Run several ranks on a private network alone, or close the ports to others.

  tfaccel launch --nproc-per-node=2 train --config=FILE --workdir=runs/a
"""


def check_topic(topic: str, valid: Iterable[str]) -> None:
    """Raises UserError for a --help=TOPIC that there is not."""
    if topic and topic not in valid:
        raise UserError(f"there is no help on '{topic}'{did_you_mean(topic, valid)}")


def of_train(values: ml_collections.ConfigDict, source: str, topic: str = "") -> str:
    """Returns the help of `tfaccel train`.

    Args:
      values: what to show of each field.
      source: in words, where they come from.
      topic: "" for the flags and the common fields, "all" for every field, or a section's name.

    Raises:
      UserError: there is no such topic.
    """
    check_topic(topic, TOPICS)
    if topic and topic != "all":
        return of_fields(values, topic)
    if topic == "all":
        return TRAIN + f"\nEvery field of an experiment, as {source}:\n" + of_fields(values)
    lines = [TRAIN, f"The fields that are changed most, as {source}:"]
    for name, meaning in COMMON.items():
        section, _, field = name.partition(".")
        flag = f"  --config.{name}={_shown(values[section][field])}"
        apart = len(flag) > 42
        lines += [flag, f"{'':44}{meaning}"] if apart else [f"{flag:<44}{meaning}"]
    return "\n".join(lines) + "\n" + TOPICS_TEXT


def of_fields(values: ml_collections.ConfigDict, only: str | None = None) -> str:
    """Returns every field with its meaning, or those of one section."""
    lines = []
    for section in dataclasses.fields(Config):
        if only not in (None, section.name):
            continue
        meanings = _meanings(section.default_factory)
        for field in dataclasses.fields(section.default_factory):
            value = _shown(values[section.name][field.name])
            lines.append(f"  --config.{section.name}.{field.name}={value}")
            lines.append(textwrap.indent(textwrap.fill(meanings[field.name], 72), " " * 8))
    return "\n".join(lines) + "\n" + (SPLIT if only == "data" else "")


def _shown(value) -> object:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _meanings(kind: type) -> dict[str, str]:
    """Returns what the class's docstring, and those it inherits from, say of each field."""
    meanings = {}
    for each in reversed(kind.__mro__[:-1]):
        attributes = inspect.getdoc(each).partition("Attributes:")[2]
        meanings |= dict(re.findall(r"^  (\w+): (.+?)(?=^  \w|\Z)", attributes, re.M | re.S))
    return {name: " ".join(meaning.split()) for name, meaning in meanings.items()}


def of_launch(*, whole: bool) -> str:
    """Returns the help of `tfaccel launch`: the common flags, or all and how to close the ports."""
    text = LAUNCH if whole else LAUNCH_COMMON
    return text.format(port=MASTER_PORT, first=FIRST_PORT, last=LAST_PORT)
