"""Finds what a user meant by a command, flag or field that tfaccel does not have.

The functions take the wrong name and return the end of an error sentence. Many people know other
toolkits, so tables list those toolkits' names.

    field("train.lr", all_fields())       # "; did you mean 'train.learning_rate'?"
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable

from absl import flags

from tfaccel.common.errors import UserError, did_you_mean

ABSL_FLAGS = ("flagfile", "undefok")  # every FlagValues has them
NEAR = 0.75  # a spelling mistake, not another word

# Fields, and other toolkits' names for them; after "=" is the value that such a name means.
SYNONYMS = {
    "train.epochs": "epoch num_epochs n_epochs max_epochs num_train_epochs",
    "train.backbone_factor": "backbone_lr_factor backbone_lr_mult lr_mult backbone_multiplier",
    "train.learning_rate": "lr lr0 base_lr init_lr initial_lr max_lr learning_rate_init",
    "train.optimizer": "opt optim optimiser",
    "train.weight_decay": "wd l2 decay_weight",
    "train.momentum": "mom beta",
    "train.decay": "sched scheduler lr_scheduler lr_schedule lr_scheduler_type lr_policy schedule "
    "cos_lr lr_decay",
    "train.decay_epochs": "milestones lr_steps lr_step_epochs step_size lr_step_size",
    "train.decay_factor": "gamma lr_gamma lr_factor decay_rate",
    "train.warmup_epochs": "warmup warmup_steps warmup_iters warmup_ratio lr_warmup_epochs",
    "train.global_clipnorm": "clip clip_grad grad_clip clipnorm clip_norm max_grad_norm "
    "gradient_clip_val gradient_clipping",
    "train.loss": "criterion loss_fn loss_function loss_name",
    "train.class_weights=balanced": "class_weight balanced_weights auto_class_weights",
    "data.validation_split": "val_split split test_split test_size val_size valid_split "
    "val_fraction holdout",
    "data.num_folds": "k_folds n_splits kfold folds n_folds num_splits",
    "data.ignore_class": "ignore_index ignore_label ignore_value void_class",
    "train.ema_momentum": "ema ema_decay model_ema model_ema_decay ema_rate",
    "train.early_stopping_epochs": "patience early_stopping early_stop es_patience",
    "train.monitor": "metric best_metric eval_metric metric_for_best_model",
    "train.base_batch_size": "base_batch lr_base_batch lr_base_size",
    "data.root": "data dataset dataset_dir dataset_path data_dir data_path data_root datadir "
    "root_dir data_folder image_dir images_dir imagenet_dir",
    "data.train": "train_dir train_data train_path train_split training_dir train_folder",
    "data.test": "val validation val_dir val_data val_path val_split_name valdir valid test_dir "
    "eval_dir validation_dir validation_data val_folder",
    "data.global_batch_size": "batch_size bs batch batchsize b train_batch_size mini_batch_size",
    "data.batch_per_replica": "batch_size_per_gpu per_device_batch_size per_gpu_batch_size "
    "per_device_train_batch_size local_batch_size",
    "data.image_size": "img_size imgsz input_size size img input_shape resolution crop_size res "
    "train_crop_size image_shape img_dim",
    "data.channels": "in_chans in_channels num_channels color_mode num_bands bands",
    "data.pixel_dtype": "bit_depth bits bits_per_sample bits_per_pixel image_dtype",
    "data.last_batch": "drop_last drop_remainder",
    "data.loader": "dataloader data_loader cache_images cache_data dali use_dali",
    "data.source": "format data_format dataset_type data_type",
    "dali.threads": "num_workers workers num_threads nthreads dataloader_num_workers "
    "loader_workers j cpus",
    "dali.prefetch_batches": "prefetch prefetch_factor prefetch_size",
    "runtime.precision=mixed_float16": "amp fp16 half mixed_precision use_amp float16 autocast "
    "opt_level dtype use_fp16",
    "runtime.precision=mixed_bfloat16": "bf16 bfloat16 amp_dtype",
    "runtime.gpu_ids": "gpu gpus device devices cuda num_gpus gpu_id ngpu n_gpu accelerator "
    "visible_devices",
    "runtime.memory": "gpu_memory memory_growth memory_limit gpu_memory_limit allow_growth",
    "runtime.xla": "jit jit_compile compile torch_compile use_xla torchcompile",
    "runtime.seed": "random_seed random_state manual_seed rng_seed",
    "runtime.deterministic": "determinism cudnn_deterministic reproducible",
    "runtime.tf32": "allow_tf32 use_tf32",
    "model.name": "arch model architecture backbone model_name net network base_model",
    "model.new_layers": "new_head reset_head reinit_layers skip_layers",
    "model.weights": "pretrained weights_path init_from checkpoint_path initial_checkpoint "
    "finetune_from pretrained_weights load_weights pretrained_path from_pretrained",
    "model.thaw_epochs": "thaw_epoch unfreeze_epoch unfreeze_epochs freeze_epochs thaw",
    "model.freeze": "freeze_layers frozen frozen_layers",
    "model.freeze=backbone": "freeze_backbone freeze_base linear_probe",
    "model.num_outputs": "num_classes nc n_classes num_labels",
    "data.classes": "class_names class_list labels_to_use only_classes names",
    "data.sampling=balanced": "balanced_sampling sampler weighted_sampler oversample "
    "class_balanced weighted_random_sampler balance_classes",
    "step.accumulation_steps": "accum accumulate accum_iter grad_accum grad_accum_steps "
    "gradient_accumulation_steps accumulate_grad_batches grad_accumulation",
    "step.allreduce_dtype=float16": "float16_allreduce fp16_allreduce fp16_compress_hook "
    "fp16_compression gradient_compression grad_compression communication_data_type",
    "step.allreduce_dtype=bfloat16": "bfloat16_allreduce bf16_allreduce bf16_compress_hook",
    "step.sync_batchnorm": "sync_bn syncbn sync_batch_norm synchronized_batchnorm",
    "step.label_smoothing": "smoothing label_smooth label_smoothing_factor",
    "step.mixup_alpha": "mixup mix_up",
    "step.cutmix_alpha": "cutmix cut_mix",
    "step.cutout_pixels": "cutout random_erase reprob erasing random_erasing",
    "train_images.horizontal_flip": "hflip fliplr random_flip flip",
    "train_images.vertical_flip": "vflip flipud",
    "train_images.rotation_degrees": "degrees rotation rotate rotation_range",
    "train_images.brightness": "hsv_v brightness_range",
    "train_images.saturation": "hsv_s",
    "train_images.hue_degrees": "hue hsv_h",
    "train_images.crop_area": "scale crop_scale rrc_scale",
    "train_images.shift_pixels": "translate width_shift_range height_shift_range",
    "checkpoint.every_epochs": "save_every save_freq save_period save_interval checkpoint_freq "
    "checkpoint_interval save_epochs",
    "checkpoint.every_steps": "save_steps checkpoint_steps steps_per_checkpoint",
    "checkpoint.keep_last": "max_to_keep save_total_limit keep_checkpoint_max num_checkpoints keep "
    "checkpoint_hist",
    "checkpoint.keep_best": "save_best save_best_only save_top_k",
}
FIELD_OF = {word: field for field, words in SYNONYMS.items() for word in words.split()}

# The commands' flags, and other toolkits' names for them. The first flag that a command has counts.
FLAGS = {
    ("workdir", "out", "output"): "output output_dir out_dir outdir out save_dir savedir logdir "
    "log_dir work_dir model_dir default_root_dir experiment_dir run_dir project run_name exp_name "
    "checkpoint_dir results_dir",
    ("resume",): "resume resume_from resume_training auto_resume resume_from_checkpoint ckpt_path "
    "continue overwrite exist_ok",
    ("dry-run",): "fast_dev_run dryrun dry overfit_batches",
    ("worker-index", "node-rank"): "rank node_rank machine_rank task_index",
    ("workers", "nnodes"): "nodes num_nodes num_machines world_size",
    ("nproc-per-node",): "nproc np gpus num_gpus num_processes nprocs devices n",
    ("master-addr",): "main_process_ip rdzv_endpoint master",
    ("top",): "k topk top_k",
    ("model",): "weights checkpoint export saved_model",
    ("workdir",): "run",
}
FLAG_OF = {
    word: tuple(
        dict.fromkeys(
            each for names, others in FLAGS.items() if word in others.split() for each in names
        )
    )
    for words in FLAGS.values()
    for word in words.split()
}

# Answers to names for which there is no field.
TRUTHS = {
    "trainable fine_tune finetune unfreeze freeze_bn": (
        "; 'model.freeze' freezes layers, and 'model.thaw_epochs' trains them from a later epoch "
        "on (`tfaccel help transfer`)"
    ),
    "name": (
        "; the architecture is 'model.name' (--config.model.name), and the name of a run is that "
        "of its folder, --workdir=runs/NAME"
    ),
    "max_steps steps num_steps iterations max_iter total_steps train_steps steps_per_epoch": (
        "; training is measured in epochs: 'train.epochs' (--config.train.epochs)"
    ),
    "augment aug augmentation aa auto_augment transforms color_jitter randaugment": (
        "; each augmentation has its own field in 'train_images', such as train_images.policy: see "
        "`tfaccel train --help=train_images`"
    ),
    "metrics": (
        "; the data decide the metrics; to choose others, write a Keras script (`tfaccel help "
        "script`)"
    ),
    "wandb tensorboard mlflow logger report_to wandb_project tracker": (
        "; a run writes metrics.csv, metrics.jsonl and TensorBoard files in its --workdir, and no "
        "other logs"
    ),
    "log_every log_interval log_freq print_freq log_steps logging_steps verbose quiet": (
        "; a run always logs each epoch, and every 50 steps in metrics.jsonl"
    ),
    "local_rank dist_url dist_backend distributed ddp strategy launcher": (
        "; `tfaccel launch`, Slurm, Open MPI or TF_CONFIG tell each process its rank"
    ),
    "evaluate eval test_only eval_only do_eval do_train val_interval eval_every": (
        "; `tfaccel train` tests the model after every epoch, and writes the last results to "
        "result.json in its workdir; `tfaccel evaluate --workdir=DIR` shows its mistakes"
    ),
    "run_eagerly eager eagerly debug enable_eager": (
        "; `tfaccel train` always compiles its steps. To look inside a step, write a Keras script "
        "with run.compile(model, ..., run_eagerly=True) (`tfaccel help several-gpus`)"
    ),
    "shuffle": "; training images are always shuffled, with 'runtime.seed', and test images never",
    "drop drop_rate drop_path drop_path_rate": (
        "; dropout belongs to the architecture ('model.name'): Vision Transformers have "
        "'vit.dropout' and 'vit.stochastic_depth', the others have their own"
    ),
}
TRUTH_OF = {word: truth for words, truth in TRUTHS.items() for word in words.split()}

# Commands of other toolkits, and the answers to them.
COMMANDS = {
    "eval validate val test score": (
        "; did you mean `tfaccel evaluate --workdir=runs/a`? It shows which images a run gets "
        "wrong. `tfaccel train` tests the model after every epoch; `tfaccel predict "
        "--model=runs/a IMAGE...` classifies images without labels"
    ),
    "confusion confusion-matrix errors mistakes calibration report": (
        "; did you mean `tfaccel evaluate --workdir=runs/a`?"
    ),
    "fit run start finetune fine-tune main": "; did you mean `tfaccel train --config=FILE`?",
    "resume continue restart": (
        "; run `tfaccel train` with the same --config and --workdir again: it continues from the "
        "newest checkpoint"
    ),
    "infer inference classify detect label recognise recognize": (
        "; did you mean `tfaccel predict --model=runs/a IMAGE...`?"
    ),
    "save convert freeze onnx saved_model serve serving deploy": (
        "; did you mean `tfaccel export --workdir=runs/a`? It writes a SavedModel for a server, "
        "and with --onnx an ONNX file"
    ),
    "bench benchmark speed time timing": (
        "; `tfaccel profile` measures what limits a run, and `tfaccel compare` measures all ways "
        "to train it on this machine"
    ),
    "tune sweep hpo optimize": (
        "; `tfaccel search` finds values of a config's fields, `tfaccel profile --search` loader "
        "settings, `tfaccel compare` the fastest way to train, and `tfaccel autobatch` the largest "
        "batch"
    ),
    "distributed torchrun multi-gpu spawn srun mpirun": (
        "; did you mean `tfaccel launch --nproc-per-node=2 train ...`?"
    ),
    "check verify diagnose env info status": (
        "; `tfaccel doctor` checks the machine, `tfaccel audit` the images, `tfaccel lint` the "
        "model and settings, and `tfaccel selftest` the arithmetic of replicas"
    ),
    "scan data dataset inspect show": "; did you mean `tfaccel audit --config=FILE`?",
    "tensorboard": "; use TensorBoard's own command: tensorboard --logdir runs",
    "curves graph draw": "; did you mean `tfaccel plot runs/a runs/b`?",
    "version": "; did you mean `tfaccel --version`?",
    "models list list-models": (
        "; 'model.name' in a config takes mnist_cnn, cifar_resnet, restoration_cnn, vit_tiny, "
        "vit_small, vit_base, vit_large or any architecture of keras.applications, and for masks "
        "unet_ or deeplab_ before one of these architectures, such as unet_resnet50"
    ),
}
COMMAND_OF = {word: truth for words, truth in COMMANDS.items() for word in words.split()}


def command(name: str, commands: Iterable[str]) -> str:
    """Returns what to use in place of a command that does not exist."""
    commands = sorted(commands)
    word = name.lower().replace("_", "-")
    if difflib.get_close_matches(word, commands, n=1, cutoff=0.8) and word not in COMMAND_OF:
        return did_you_mean(word, commands)
    if word in COMMAND_OF:
        return COMMAND_OF[word]
    if name.endswith(".py"):
        return (
            f"; did you mean `tfaccel train --config={name}`, for a config, or `python {name}`, "
            "for a script?"
        )
    return did_you_mean(name, commands)


def unknown_flag(
    command: str, name: str, values: flags.FlagValues, fields: Collection[str]
) -> UserError:
    """Returns the error for a flag that a command does not have, with the flag that was meant.

    The name has no hyphens before it. The fields are those of a config, with their sections.
    """
    own = [each for each in values if each.partition(".")[0] not in ("config", *ABSL_FLAGS)]
    launches = command == "launch"
    hint = flag(name, own=own, fields=fields if "config" in values or launches else ())
    if launches:
        hint = re.sub(r"(--config\.[\w.]+)", r"\1 after `train`", hint)
    more = "" if "--help" in hint else f" (`tfaccel {command} --help` lists its flags)"
    return UserError(f"there is no flag --{name} of `tfaccel {command}`{hint}{more}")


def flag(name: str, *, own: Collection[str], fields: Collection[str]) -> str:
    """Returns what to use in place of a flag that a command does not have.

    Args:
      name: the flag's name, without hyphens before it.
      own: the command's own flags.
      fields: the fields of a config, if the command has flags for them, too.
    """
    word = _word(name)
    spelled = {each.replace("-", "_"): each for each in own}
    near = difflib.get_close_matches(word, spelled, n=1, cutoff=NEAR)
    exact = [each for each in fields if _last(each) == word]
    if near and not exact and word not in FIELD_OF:
        return f"; did you mean --{spelled[near[0]]}?"
    if word in ("out", "output") and (found := [each for each in ("out", "output") if each in own]):
        return f"; did you mean --{found[0]}?"
    if found := [each for each in FLAG_OF.get(word, ()) if each in own]:
        return f"; did you mean --{found[0]}?"
    if fields:
        return _meant(name, fields, shown=lambda each: f"--config.{each}")
    return did_you_mean(name, own).replace("'", "")


def field(
    name: str,
    fields: Collection[str],
    valid: Collection[str] | None = None,
    *,
    section: str = "",
) -> str:
    """Returns what to use in place of a field that a config, or a section of it, does not have.

    Args:
      name: the wrong name, such as `train.lr` or `lr`.
      fields: all fields of a config, with their sections.
      valid: the valid names; None for all fields of a config.
      section: the section of `valid`, if they are without it. A field of another section is then
        returned with its section.
    """
    if valid is None:
        sections = {each.partition(".")[0] for each in fields}
        if "." not in name and difflib.get_close_matches(name, sections, n=1, cutoff=NEAR):
            return did_you_mean(name, sections)
        return _meant(name, fields, shown=lambda each: f"'{each}'")

    def shown(each: str) -> str:
        place, _, last = each.rpartition(".")
        return f"'{last}'" if last in valid and place in ("", section) else f"'{each}'"

    full = [f"{section}.{each}" if section else each for each in valid]
    others = [each for each in fields if each not in full] if section else []
    return _meant(name, [*full, *others], shown=shown, section=section)


def setting(name: str, valid: Collection[str]) -> str:
    """Returns what to use in place of a keyword that a Python function does not have."""
    word = _word(name)
    known = _last(FIELD_OF.get(word, "").partition("=")[0])
    if known in valid:
        return f"; did you mean '{known}'?"
    return did_you_mean(name, valid)


def _meant(
    name: str, fields: Collection[str], *, shown: Callable[[str], str], section: str = ""
) -> str:
    """Returns the end of the sentence about a wrong name: the field that was probably meant."""
    word, place = _word(_last(name)), name.rpartition(".")[0] or section
    if word in TRUTH_OF and not (place and f"{place}.{word}" in fields):
        return TRUTH_OF[word]
    if exact := _nearest_section([each for each in fields if _last(each) == word], place):
        return f"; did you mean {shown(exact)}?"
    if word in FIELD_OF:
        meant, equals, value = FIELD_OF[word].partition("=")
        if meant in fields:
            return f"; did you mean {shown(meant)}{f' ({value})' if equals else ''}?"
    if word in FLAG_OF:
        return f"; it is a flag of the command: --{FLAG_OF[word][0]}"
    near = difflib.get_close_matches(word, {_last(each) for each in fields}, n=1, cutoff=NEAR)
    if near:
        found = _nearest_section([each for each in fields if _last(each) == near[0]], place)
        return f"; did you mean {shown(found)}?"
    return _in_section(name, word, fields, shown, place)


def _in_section(name, word, fields, shown, place) -> str:
    """Returns the nearest name or, if none is near, all names in the section."""
    parts = [each for each in fields if set(word.split("_")) & set(_last(each).split("_"))]
    if found := _nearest_section(parts, place):
        return f"; did you mean {shown(found)}?"
    there = [shown(each) for each in fields if place and each.rpartition(".")[0] == place]
    if there:
        return f"; expected one of: {', '.join(sorted(there))}"
    sections = dict.fromkeys(each.rpartition(".")[0] for each in fields)
    if near := difflib.get_close_matches(name.partition(".")[0], sections, n=1, cutoff=NEAR):
        return f"; '{near[0]}' is a section: see `tfaccel train --help={near[0]}`"
    return "; see `tfaccel train --help=all` for every field"


def _nearest_section(fields: list[str], place: str) -> str | None:
    """Returns the field whose section is most similar to the one that was written."""
    if not fields:
        return None
    return max(
        fields,
        key=lambda each: difflib.SequenceMatcher(None, each.rpartition(".")[0], place).ratio(),
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _word(name: str) -> str:
    return name.lower().replace("-", "_").strip("_")
