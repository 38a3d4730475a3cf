"""What is said of a wrong command, flag or field: the right one, or what there is instead."""

import pytest

from tfaccel import UserError
from tfaccel.cli import main
from tfaccel.common import meant
from tfaccel.config import all_fields, default_config, parse

FIELDS = all_fields()
LAST = {each.rpartition(".")[2] for each in FIELDS}


def test_every_synonym_stands_for_a_field_that_exists_and_is_accepted():
    for word, field in meant.FIELD_OF.items():
        name, equals, value = field.partition("=")
        assert name in FIELDS, word
        if equals:
            config = default_config()
            section, _, last = name.partition(".")
            config[section][last] = value
            parse(config)


def test_no_word_is_explained_away_that_exists():
    assert not set(meant.COMMAND_OF) & set(main.COMMANDS)
    assert not set(meant.FIELD_OF) & {each for each in LAST if f"train.{each}" in FIELDS}
    assert not {*meant.TRUTH_OF} & (LAST - {"name"})
    counted = [word for words in meant.SYNONYMS.values() for word in words.split()]
    assert len(counted) == len(set(counted))
    assert not set(meant.TRUTH_OF) & set(meant.FIELD_OF)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("train.lr", "did you mean 'train.learning_rate'?"),
        ("lr", "did you mean 'train.learning_rate'?"),
        ("optimizer.lr", "did you mean 'train.learning_rate'?"),
        ("epochs", "did you mean 'train.epochs'?"),
        ("model.epochs", "did you mean 'train.epochs'?"),
        ("train.batch_size", "did you mean 'data.global_batch_size'?"),
        ("train.seed", "did you mean 'runtime.seed'?"),
        ("data.num_workers", "did you mean 'dali.threads'?"),
        ("train.amp", "did you mean 'runtime.precision' (mixed_float16)?"),
        ("train_images.flip", "did you mean 'train_images.horizontal_flip'?"),
        ("test_images.crop_aera", "did you mean 'test_images.crop_area'?"),
        ("train.warmup_epoch", "did you mean 'train.warmup_epochs'?"),
        ("model.unfreeze", "'model.thaw_epochs' trains them"),
        ("model.linear_probe", "did you mean 'model.freeze' (backbone)?"),
        ("data.val_split", "did you mean 'data.validation_split'?"),
        ("train.resume", "flag of the command: --resume"),
        ("train.output_dir", "flag of the command: --workdir"),
        ("modle.nonsense", "'model' is a section"),
        ("runtime.nonsense", "expected one of: 'runtime.allow_public_network'"),
        ("x.y", "--help=all"),
    ],
)
def test_a_wrong_field_is_answered_with_the_right_one_or_the_truth(written, said):
    assert said in meant.field(written, FIELDS)


@pytest.mark.parametrize(
    ("section", "written", "said"),
    [
        ("train", "lr", "config.train has no field 'lr'; did you mean 'learning_rate'?"),
        ("train", "batch_size", "did you mean 'data.global_batch_size'?"),
        ("model", "unfreeze", "'model.thaw_epochs' trains them"),
        ("checkpoint", "seed", "did you mean 'runtime.seed'?"),
    ],
)
def test_a_config_file_is_answered_alike(section, written, said):
    config = default_config()
    config[section][written] = 1
    with pytest.raises(UserError) as raised:
        parse(config)
    assert said in str(raised.value)


# A command line, and words of the one sentence.
CALLS = [
    (["train", "--epochs=3"], "no flag --epochs of `tfaccel train`; did you mean --config.train."),
    (["train", "--epochs", "3"], "did you mean --config.train.epochs?"),
    (["train", "--lr=0.1"], "did you mean --config.train.learning_rate?"),
    (["train", "--batch-size=32"], "did you mean --config.data.global_batch_size?"),
    (["train", "--img_size=64"], "did you mean --config.data.image_size?"),
    (["train", "--fp16"], "did you mean --config.runtime.precision (mixed_float16)?"),
    (["train", "--freeze"], "did you mean --config.model.freeze?"),
    (["train", "--unfreeze"], "'model.thaw_epochs' trains them"),
    (["train", "--name=a"], "--workdir=runs/NAME"),
    (["train", "--output_dir=a"], "did you mean --workdir?"),
    (["train", "--project=a"], "did you mean --workdir?"),
    (["train", "--wrokdir=a"], "did you mean --workdir?"),
    (["train", "--learning_rate=1"], "did you mean --config.train.learning_rate?"),
    (["train", "--train.epochs=3"], "did you mean --config.train.epochs?"),
    (["train", "--workers=4"], "--config.dali.threads"),
    (["lint", "--epochs=3"], "no flag --epochs of `tfaccel lint`; did you mean --config.train.ep"),
    (["compare", "--lr=3"], "did you mean --config.train.learning_rate?"),
]


@pytest.mark.parametrize(("arguments", "said"), CALLS, ids=[" ".join(each) for each, _ in CALLS])
def test_a_wrong_flag_is_answered_with_the_right_one(arguments, said, request):
    command, *rest = arguments
    file = request.config.rootpath / "configs" / "digits.py"
    with pytest.raises(UserError) as raised:
        main.main([command, f"--config={file}", *rest])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_launchers_wrong_flag_names_the_one_of_the_command():
    for flag, said in (
        ("--epochs=3", "--config.train.epochs after `train`?"),
        ("--gpus=2", "did you mean --nproc-per-node?"),
        ("--nproc=2", "did you mean --nproc-per-node?"),
    ):
        with pytest.raises(UserError) as raised:
            main.main(["launch", flag, "train", "--workdir=x"])
        assert said in str(raised.value), flag


def test_commands_without_a_config_do_not_name_its_fields():
    for arguments, said in (
        (["predict", "--weights=a", "b.png"], "did you mean --model?"),
        (["plot", "a", "--out=b.png"], "did you mean --output?"),
        (["export", "--output=a"], "did you mean --out?"),
        (["doctor", "--lr=3"], "`tfaccel doctor --help` lists its flags"),
    ):
        with pytest.raises(UserError) as raised:
            main.main(arguments)
        assert said in str(raised.value), arguments
        assert "--config" not in str(raised.value)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("eval", "tfaccel evaluate --workdir=runs/a"),
        ("validate", "tfaccel predict"),
        ("confusion", "tfaccel evaluate"),
        ("tran", "did you mean 'train'?"),
        ("fit", "`tfaccel train --config=FILE`"),
        ("infer", "tfaccel predict"),
        ("resume", "the same --config and --workdir again"),
        ("benchmark", "tfaccel profile"),
        ("train.py", "tfaccel train --config=train.py"),
        ("selftes", "did you mean 'selftest'?"),
    ],
)
def test_a_wrong_command_is_answered_with_the_truth(written, said):
    with pytest.raises(UserError) as raised:
        main.main([written])
    assert said in str(raised.value)


def test_keywords_of_the_python_api_are_answered_alike():
    valid = ("image_size", "global_batch_size", "loader")
    assert meant.setting("batch_size", valid) == "; did you mean 'global_batch_size'?"
    assert meant.setting("img_size", valid) == "; did you mean 'image_size'?"
    assert meant.setting("loadr", valid) == "; did you mean 'loader'?"
