import ml_collections
import pytest

from tfaccel import UserError
from tfaccel.config import (
    Config,
    ImageConfig,
    RuntimeConfig,
    StepConfig,
    TrainConfig,
    deciding,
    default_config,
    parse,
)


def test_defaults_are_a_valid_config():
    assert parse(default_config()) == Config()


def test_a_config_may_leave_out_what_it_does_not_change():
    parsed = parse(ml_collections.ConfigDict({"train": {"epochs": 3}}))
    assert parsed.train.epochs == 3
    assert parsed.data == Config().data


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"trian": {}}, "config has no field 'trian'; did you mean 'train'?"),
        ({"train": {"epoch": 1}}, "config.train has no field 'epoch'; did you mean 'epochs'?"),
        ({"train": 3}, "config.train=3; expected a group of fields"),
        ({"train": {"epochs": 0}}, "epochs=0; expected a whole number of at least 1"),
        ({"train": {"learning_rate": -1.0}}, "learning_rate=-1.0; expected a number above 0"),
        ({"train": {"learning_rate": float("nan")}}, "learning_rate=nan"),
        ({"train": {"global_clipnorm": 0.0}}, "global_clipnorm=0.0; expected a number above 0"),
        ({"model": {"weights": 3}}, "weights=3; expected a file's path, or None"),
        ({"model": {"name": None}}, "name=None; expected an architecture's name"),
        ({"train": {"optimizer": None}}, "optimizer=None; expected an optimizer's name"),
        (
            {"train": {"loss": "mse"}},
            "several classes, cross_entropy or focal; for numbers, squared",
        ),
        ({"train": {"loss": "huberr"}}, "loss='huberr'; did you mean 'huber'? expected auto; for"),
        ({"train": {"monitor": ""}}, "monitor=''; expected a metric's name"),
        ({"data": {"train": None}}, "train=None; expected a path below root"),
        ({"data": {"test": ""}}, "test=''; expected a path below root, or '.' for root"),
        ({"data": {"source": "tfrecord", "image_key": None}}, "image_key=None; expected a name"),
        ({"train": {"steps_per_execution": 0}}, "steps_per_execution=0; expected a whole number"),
        ({"checkpoint": {"every_steps": 0}}, "every_steps=0; expected a whole number of at least"),
        ({"model": {"num_outputs": 0}}, "num_outputs=0; expected a whole number of at least 1"),
        ({"data": {"global_batch_size": 0}}, "global_batch_size=0; expected a whole number"),
        ({"data": {"global_batch_size": 2.5}}, "global_batch_size=2.5"),
        ({"data": {"batch_per_replica": "x"}}, "batch_per_replica='x'; expected a whole number"),
        (
            {"data": {"global_batch_size": 8, "batch_per_replica": 4}},
            "global_batch_size=8 and batch_per_replica=4; expected one of the two, and None for",
        ),
        ({"data": {"image_size": (28,)}}, "image_size=(28,); expected (height, width)"),
        ({"data": {"image_size": (0, 28)}}, "image_size=(0, 28)"),
        ({"data": {"channels": 0}}, "channels=0; expected a whole number of at least 1"),
        ({"data": {"pixel_dtype": "uint17"}}, "pixel_dtype='uint17'; did you mean 'uint16'?"),
        (
            {"data": {"pixel_dtype": "uint16", "mean": 300}},
            "because pixels are in 0..1; divide mean and std by 65535",
        ),
        ({"data": {"last_batch": "paid"}}, "last_batch='paid'; did you mean 'pad'?"),
        ({"data": {"loader": "dali"}}, "loader='dali'; did you mean 'dali_"),
        ({"data": {"source": "tar"}}, "source='tar'; "),
        ({"data": {"source": "pairs"}}, "train_targets=None with source='pairs'; expected the"),
        (
            {"data": {"train_targets": "x"}},
            "train_targets='x' with source='folders'; expected None",
        ),
        (
            {"data": {"mean": (0.1, 0.2)}},
            "mean=(0.1, 0.2); expected 1 number, or 3: one per channel",
        ),
        (
            {"data": {"first_label": 1}},
            "first_label=1 needs source='tfrecord' or 'array_record', but",
        ),
        ({"data": {"targets": "mask"}}, "targets='mask' needs source='pairs', but source='f"),
        (
            {"data": {"stored_size": (8, 8), "loader": "tf_data"}},
            "stored_size with loader='tf_data', which stores no images",
        ),
        ({"data": {"std": "a,b"}}, "std='a,b'; expected numbers, e.g."),
        ({"data": {"std": 0.0}}, "std=(0.0, 0.0, 0.0); expected numbers above 0"),
        ({"data": {"mean": 127.5}}, "mean=(127.5, 127.5, 127.5); expected numbers of at most 1"),
        ({"data": {"stored_size": 8}}, "stored_size=8; expected (height, width)"),
        ({"data": {"bad_files": "ignore"}}, "bad_files='ignore'; expected one of: error, skip"),
        ({"dali": {"prefetch_batches": 0}}, "prefetch_batches=0; expected a whole number of at"),
        ({"dali": {"hw_decoder_load": 2.0}}, "hw_decoder_load=2.0; expected a number at least 0"),
        ({"dali": {"threads": 0}}, "threads=0; expected a whole number of at least 1"),
        (
            {"train_images": {"rotation_degrees": 200}},
            "expected a number at least 0 and at most 180",
        ),
        ({"train_images": {"horizontal_flip": "yes"}}, "horizontal_flip='yes'; expected True or"),
        ({"train_images": {"window": "crop"}}, "window='crop'; did you mean '"),
        ({"train_images": {"crop_area": (0.5, 0.1)}}, "crop_area=(0.5, 0.1); expected the small"),
        ({"train_images": {"crop_area": 0.5}}, "crop_area=0.5; expected (smallest, largest)"),
        ({"train_images": {"brightness": 1.5}}, "brightness=1.5; expected a number at least 0"),
        ({"train_images": {"shift_pixels": 1.5}}, "shift_pixels=1.5; expected a whole number"),
        ({"runtime": {"precision": "fp16"}}, "precision='fp16'; expected one of float32"),
        ({"runtime": {"memory": "all"}}, "memory='all'; expected 'growth' or a limit"),
        ({"runtime": {"gpu_ids": (-1,)}}, "gpu_ids=(-1,); expected GPU indices"),
        ({"runtime": {"gpu_ids": (0, 0)}}, "gpu_ids=(0, 0) names a GPU twice"),
        ({"runtime": {"seed": -1}}, "seed=-1"),
        (
            {"runtime": {"seed": 2**32}},
            "seed=4294967296; expected a whole number of at least 0 and",
        ),
        ({"train": {"learning_rate": float("inf")}}, "learning_rate=inf"),
        ({"data": {"channels": 3.0}}, "channels=3.0"),
        (
            {"runtime": {"peer_timeout_s": 0}},
            "peer_timeout_s=0; expected a whole number of at least",
        ),
        ({"step": {"loss_scal": 1}}, "config.step has no field 'loss_scal'; did you mean 'loss_"),
        ({"step": {"sync_batchnorm": 1}}, "sync_batchnorm=1; expected True or False"),
        ({"step": {"accumulation_steps": 0}}, "accumulation_steps=0; expected a whole number of"),
        ({"step": {"cutout_pixels": 0.25}}, "cutout_pixels=0.25; expected a whole number of"),
        ({"step": {"allreduce_dtype": "fp16"}}, "allreduce_dtype='fp16'"),
        ({"data": {"validation_split": 1.0}}, "validation_split=1.0"),
        ({"data": {"validation_split": 0.2, "num_folds": 5}}, "give one of them"),
        ({"data": {"num_folds": 5, "fold": 5}}, "fold=5"),
        ({"data": {"fold": 1}}, "fold=1 has no effect without num_folds"),
        ({"data": {"split_seed": 1}}, "split_seed=1 has no effect without validation_split"),
        ({"data": {"validation_split": 0.2, "group_column": "a"}}, "find the groups in the paths"),
        ({"data": {"ignore_class": 255}}, "ignore_class=255 needs targets='mask'"),
        ({"data": {"sampling": "sqrt"}}, "sampling='sqrt'; did you mean 'square_root'?"),
        (
            {
                "data": {
                    "source": "pairs",
                    "targets": "mask",
                    "train_targets": "a",
                    "test_targets": "b",
                    "classes": "dog,cat",
                    "sampling": "balanced",
                }
            },
            "sampling='balanced' needs images with one class each",
        ),
        ({"data": {"classes": "dog"}}, "classes='dog' has fewer than two classes; expected names"),
        (
            {"data": {"sampling": "balanced"}, "train": {"class_weights": "balanced"}},
            "data.sampling='balanced' with train.class_weights='balanced': both make rare classes",
        ),
        ({"train": {"loss": "diec"}}, "did you mean 'dice'?"),
        ({"train": {"focal_gamma": 1.0}}, "focal_gamma=1.0 needs loss='focal'"),
        ({"train": {"loss": "dice", "class_weights": "balanced"}}, "counts all classes alike"),
        (
            {"train": {"bce_target_threshold": 0.2}},
            "bce_target_threshold=0.2 needs loss='binary_cross_entropy', but loss='auto'",
        ),
        (
            {"train": {"loss": "binary_cross_entropy", "class_weights": "balanced"}},
            "which has no weights of classes",
        ),
        ({"step": {"loss_scale": "static"}}, "loss_scale='static'; expected 'dynamic' or a number"),
        ({"step": {"loss_scale": 0}}, "loss_scale=0; expected 'dynamic' or a number above 0"),
        ({"step": {"loss_scale": float("nan")}}, "loss_scale=nan; expected 'dynamic' or a number"),
        ({"step": {"loss_scale": None}}, "loss_scale=None; expected 'dynamic' or a number above"),
        ({"step": {"loss_scale_initial": 0.0}}, "loss_scale_initial=0.0; expected a number above"),
        ({"step": {"loss_scale_growth_steps": 0}}, "loss_scale_growth_steps=0; expected a whole"),
        ({"step": {"loss_scale_floor": -1.0}}, "loss_scale_floor=-1.0; expected a number above 0"),
        ({"step": {"audit_steps": -1}}, "audit_steps=-1; expected a whole number of at least 0"),
        (
            {"train_images": {"crop_area": (0.5, 1.0)}},
            "crop_area=(0.5, 1.0) needs window='random_resized_crop', but window='stretch'; remove "
            "crop_area, or set it to (0.08, 1.0)",
        ),
        (
            {"test_images": {"window": "center_crop", "center_fraction": 0.5}},
            "center_fraction=0.5 needs window='resized_center_crop', but window='center_crop'",
        ),
        ({"train_images": {"policy": "randaug"}}, "policy='randaug'; did you mean 'randaugment'?"),
        (
            {"train_images": {"policy_magnitude": 5.0}},
            "policy_magnitude=5.0 has no effect with policy='none'; remove it, or use "
            "policy='randaugment' or 'randaugment_timm'",
        ),
        (
            {"train_images": {"policy": "trivialaugment", "policy_operations": 3}},
            "policy_operations=3 has no effect with policy='trivialaugment'",
        ),
        (
            {"train_images": {"policy": "randaugment_timm", "policy_magnitude": 11.0}},
            "policy_magnitude=11.0; expected a number at least 0 and at most 10",
        ),
        (
            {"train_images": {"policy": "randaugment", "policy_magnitude_std": 0.5}},
            "policy_magnitude_std=0.5 needs policy='randaugment_timm'",
        ),
        (
            {"train_images": {"policy_fill": "mean"}},
            "policy_fill='mean' has no effect with policy='none'; set a policy, or remove it",
        ),
        (
            {"train_images": {"erase_fill": "random"}},
            "erase_fill='random' has no effect with erase_probability=0; set erase_probability, or "
            "remove erase_fill",
        ),
        ({"train_images": {"blur_probability": 1.5}}, "blur_probability=1.5; expected a number"),
        (
            {"train_images": {"blur_probability": 1.0, "blur_sigma": (2.0, 1.0)}},
            "blur_sigma=(2.0, 1.0); expected the smaller number first",
        ),
        (
            {"train_images": {"posterize_probability": 1.0, "posterize_bits": 8}},
            "posterize_bits=8; expected a whole number",
        ),
        (
            {"step": {"loss_scale": 128, "loss_scale_initial": 2.0}},
            "loss_scale_initial=2.0 needs loss_scale='dynamic', but loss_scale=128.0",
        ),
        ({"step": {"loss_scale": 128, "loss_scale_floor": 2.0}}, "loss_scale_floor=2.0 needs loss"),
        (
            {"step": {"nonfinite": "skip", "max_rollbacks": 5}},
            "max_rollbacks=5 needs nonfinite='rollback', but nonfinite='skip'",
        ),
    ],
)
def test_each_mistake_is_one_sentence(config, words):
    with pytest.raises(UserError) as error:
        parse(ml_collections.ConfigDict(config))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ("O0", "float32"),
        ("O1", "mixed_float16"),
        ("o2", "mixed_float16"),
        ("O3", "float16"),
        ("mixed_bfloat16", "mixed_bfloat16"),
    ],
)
def test_apex_levels_are_dtype_policies(given, policy):
    assert RuntimeConfig(precision=given).precision == policy


@pytest.mark.parametrize(
    ("given", "ids"),
    [(None, None), ((), ()), ("", ()), (2, (2,)), ("0,1", (0, 1)), ([3, 1], (1, 3))],
)
def test_gpu_ids_as_script_and_command_line_give_them(given, ids):
    assert RuntimeConfig(gpu_ids=given).gpu_ids == ids


def test_memory_as_script_and_command_line_give_it():
    assert RuntimeConfig(memory="8192").memory == RuntimeConfig(memory=8192).memory == 8192


@pytest.mark.parametrize(
    ("given", "scale"),
    [("dynamic", "dynamic"), (128, 128.0), ("128", 128.0), ("2e3", 2000.0), (0.5, 0.5)],
)
def test_loss_scale_as_script_and_command_line_give_it(given, scale):
    assert StepConfig(loss_scale=given).loss_scale == scale
    config = default_config()
    config.step.loss_scale = given
    assert parse(config).step.loss_scale == scale


def test_a_config_file_may_give_memory_as_a_number():
    config = default_config()
    config.runtime.memory = 8192
    assert parse(config).runtime.memory == 8192


def test_what_is_no_config_is_refused():
    with pytest.raises(UserError, match="returned None; expected default_config"):
        parse(None)


def test_a_mean_for_every_channel_or_one_for_all():
    config = default_config()
    config.data.channels = 1
    assert parse(config).data.mean == (0.0,)
    assert ImageConfig(mean="0.5,0.4,0.3").mean == (0.5, 0.4, 0.3)
    assert ImageConfig(std=0.5).std == (0.5, 0.5, 0.5)


def test_a_list_is_an_image_size():
    assert ImageConfig(image_size=[8, 9]).image_size == (8, 9)


@pytest.mark.parametrize(
    ("given", "kept"), [(None, None), ("true", True), ("False", False), (1, True), (False, False)]
)
def test_xla_may_be_left_to_the_machine(given, kept):
    assert RuntimeConfig(xla=given).xla is kept


def test_xla_that_is_no_flag_is_refused():
    with pytest.raises(UserError, match="xla='maybe'; expected True or False, or None"):
        RuntimeConfig(xla="maybe")


def test_a_checkpoint_of_an_earlier_version_has_the_loss_of_today():
    # It was the default until 2026-11-30, when "auto" came, which is the same for its tasks.
    assert deciding(Config())["train.loss"] == "cross_entropy"
    assert deciding(Config(train=TrainConfig(loss="focal")))["train.loss"] == "focal"
