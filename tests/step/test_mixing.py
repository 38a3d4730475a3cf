"""Label smoothing, mixup, cutmix and cutout in the step, against the same in NumPy."""

import functools
import types

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from conftest import compiled
from keras import layers
from keras.src.utils.rng_utils import get_random_seed

from tfaccel import UserError
from tfaccel.config import StepConfig
from tfaccel.step import blend, cutout, draws, mixing

SIZE = (16, 12)
CLASSES = 5


def classifier(num_classes=CLASSES):
    x = image = keras.Input((*SIZE, 1))
    x = layers.Dense(num_classes, kernel_initializer="zeros")(layers.Flatten()(x))
    return keras.Model(image, x)


COUNT = tf.Variable(0, dtype=tf.int64)  # of updates


def model():
    """What `mixed` asks of a model."""
    counter = types.SimpleNamespace(_value=COUNT)
    optimizer = types.SimpleNamespace(_iterations=counter)
    return types.SimpleNamespace(output_shape=(None, CLASSES), optimizer=optimizer)


def batch_of(rows, *, dtype=np.float32, weight=None):
    """Images of which every row's pixels are its own number, and one-hot labels likewise."""
    random = np.random.default_rng(0)
    x = np.broadcast_to(np.arange(rows)[:, None, None, None], (rows, *SIZE, 1)).astype(dtype)
    y = random.integers(0, CLASSES, rows).astype(np.int32)
    batch = (tf.constant(x), tf.constant(y))
    return batch if weight is None else (*batch, tf.constant(weight, tf.float32))


@functools.cache
def change_of(config, replica, xla, traced, seed):
    change = functools.partial(mixing.mixed(model(), config), types.SimpleNamespace(index=replica))
    return tf.function(change, jit_compile=xla, autograph=False) if xla or traced else change


def changed(batch, *, xla=False, traced=False, count=3, replica=0, seed=0, **settings):
    """What the step is given for a batch, as NumPy arrays.

    It is traced where XLA or many calls are worth it: eagerly, one call takes less.
    """
    if get_random_seed() != seed:
        keras.utils.set_random_seed(seed)
    COUNT.assign(count)
    batch = change_of(StepConfig(**settings), replica, xla, traced, seed)(batch)
    return [None if each is None else each.numpy() for each in batch]


def one_hot(batch):
    return np.eye(CLASSES, dtype=np.float32)[batch[1]]


def next_row(array):
    return np.roll(array, -1, axis=0)


ALL = {
    "mixup": {"mixup_alpha": 0.4},
    "cutmix": {"cutmix_alpha": 1.0},
    "either": {"mixup_alpha": 0.4, "cutmix_alpha": 1.0, "label_smoothing": 0.1},
}
CUT = {**ALL, "cutout": {"cutout_pixels": 6}, "all": {**ALL["either"], "cutout_pixels": 6}}


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_labels_become_probabilities(dtype, shape):
    y = np.array([0, 4, 2, 2, 1, 3])
    change = mixing.as_probabilities(model())
    _, got = change(None, (tf.zeros((6, 2)), tf.constant(y.reshape(shape).astype(dtype))))
    assert got.dtype == tf.float32
    np.testing.assert_array_equal(got, np.eye(CLASSES)[y])


def test_labels_that_are_probabilities_stay():
    y = np.random.default_rng(0).random((6, CLASSES))
    (_, got) = mixing.as_probabilities(model())(None, (tf.zeros((6, 2)), tf.constant(y)))
    np.testing.assert_array_equal(got, y.astype(np.float32))


def test_a_number_that_is_no_class_is_nan_as_in_the_sparse_loss():
    (_, got) = mixing.as_probabilities(model())(None, (tf.zeros(3), tf.constant([0, 5, -1])))
    assert np.isnan(got).all(axis=1).tolist() == [False, True, True]


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_smoothing_is_keras_own(xla):
    batch = batch_of(8)
    logits = np.random.default_rng(1).normal(size=(8, CLASSES)).astype(np.float32)
    _, y = changed(batch, xla=xla, label_smoothing=0.2)
    ours = keras.losses.CategoricalCrossentropy(from_logits=True)(y, logits)
    theirs = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2)
    assert float(ours) == pytest.approx(float(theirs(one_hot(batch), logits)), rel=1e-6)


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 4.0])
def test_what_stays_of_a_row_is_beta_distributed(alpha):
    rows = 20_000
    # Labels are 0 and 1 by turns, so that they say what stayed.
    _, y = changed((tf.zeros((rows, 1)), tf.range(rows) % 2), mixup_alpha=alpha)
    stays = y[np.arange(rows), np.arange(rows) % 2].astype(np.float64)
    beta = scipy.stats.beta(alpha, alpha)
    # Kolmogorov's distance at 1%, and the table's; at the very ends float32 is too coarse for it.
    at = np.linspace(0.001, 0.999, 999)
    parts = np.searchsorted(np.sort(stays), at) / rows
    assert np.abs(parts - beta.cdf(at)).max() < 1 / 1024 + 1.63 / rows**0.5
    assert stays.mean() == pytest.approx(0.5, abs=4 * beta.std() / rows**0.5)
    assert stays.var() == pytest.approx(beta.var(), rel=0.05)
    assert abs(np.corrcoef(stays[1:], stays[:-1])[0, 1]) < 4 / rows**0.5


@pytest.mark.parametrize(
    ("dtype", "xla"),
    [
        (np.float32, False),
        (np.float16, True),  # it rounds
        pytest.param(np.float32, True, marks=pytest.mark.slow),
        pytest.param(np.float16, False, marks=pytest.mark.slow),
    ],
)
def test_mixup_blends_image_and_label_by_the_same_number(dtype, xla):
    batch = batch_of(8, dtype=dtype)
    x, y = changed(batch, xla=xla, mixup_alpha=1.0)
    before, labels = batch[0].numpy().astype(np.float32), one_hot(batch)
    number = np.arange(8)
    own = 1 - (x[:, 0, 0, 0].astype(np.float64) - number) / (next_row(number) - number)
    assert x.dtype == dtype
    assert len(np.unique(own.round(4))) == 8
    tolerance = 1e-6 if dtype == np.float32 else 2**-10
    blended = own[:, None, None, None] * before + (1 - own[:, None, None, None]) * next_row(before)
    np.testing.assert_allclose(x, blended, rtol=tolerance, atol=tolerance)
    expected = own[:, None] * labels + (1 - own[:, None]) * next_row(labels)
    np.testing.assert_allclose(y, expected, atol=4 * tolerance)


@pytest.mark.parametrize(  # of both ways `test_xla_gives_the_same` says that they are alike
    ("dtype", "xla"),
    [
        (np.float32, False),
        (np.float16, False),
        pytest.param(np.float32, True, marks=pytest.mark.slow),
        pytest.param(np.float16, True, marks=pytest.mark.slow),
    ],
)
def test_cutmix_pastes_a_box_and_the_label_has_its_area(dtype, xla):
    batch = batch_of(64, dtype=dtype)
    x, y = changed(batch, xla=xla, cutmix_alpha=1.0)
    before, labels = batch[0].numpy(), one_hot(batch)
    pasted = x == next_row(before)
    assert x.dtype == dtype
    assert (pasted | (x == before)).all()
    for mask in pasted[..., 0]:
        rows, columns = mask.any(axis=1), mask.any(axis=0)
        np.testing.assert_array_equal(mask, rows[:, None] & columns)  # a box:
        for side in (rows, columns):
            assert np.abs(np.diff(side.astype(int))).sum() <= 2  # in one piece
    area = pasted.mean(axis=(1, 2))
    assert 0.2 < area.mean() < 0.5  # the borders cut some of the 1/2
    np.testing.assert_allclose(y, (1 - area) * labels + area * next_row(labels), atol=1e-6)


def test_cutmix_boxes_are_those_of_yun_et_al():
    drawn = np.random.default_rng(0).random((200, 3)).astype(np.float32)
    own, share = blend._cutmix(1.0, tf.constant(drawn), SIZE)
    for row, (uniform, y, x) in enumerate(drawn):
        expected = np.ones(SIZE)
        height, width = (int(np.sqrt(1 - uniform) * each) for each in SIZE)  # Beta(1, 1): uniform
        y, x = int(y * SIZE[0]), int(x * SIZE[1])
        top, left = max(y - height // 2, 0), max(x - width // 2, 0)
        expected[top : y + height // 2, left : x + width // 2] = 0
        np.testing.assert_array_equal(own[row, ..., 0], expected)
        assert float(share[row, 0]) == pytest.approx(expected.mean(), abs=1e-6)


@pytest.mark.parametrize("side", [1, 5, 8])
def test_cutout_squares_are_those_of_devries_and_taylor(side):
    drawn = np.random.default_rng(0).random((200, 2)).astype(np.float32)
    drawn[0], drawn[1] = 0, 1 - 2**-24  # a corner; the one across
    hole = cutout._hole(tf.constant(drawn), side, tf.constant(SIZE, tf.float32))
    for row, (y, x) in enumerate(drawn):
        expected = np.zeros(SIZE, bool)
        top, left = int(y * SIZE[0]) - side // 2, int(x * SIZE[1]) - side // 2
        expected[max(top, 0) : top + side, max(left, 0) : left + side] = True
        np.testing.assert_array_equal(hole[row, ..., 0], expected)


@pytest.mark.parametrize(
    ("dtype", "xla"),
    [
        (np.float16, False),
        (np.uint8, False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (np.float32, False),
                (np.float32, True),
                (np.float16, True),
                (np.uint8, True),
            ]
        ),
    ],
)
def test_cutout_leaves_the_labels_and_all_other_pixels(dtype, xla):
    rows = 64
    y = np.arange(rows).astype(np.int32)
    x = np.random.default_rng(0).integers(1, 256, (rows, *SIZE, 3)).astype(dtype)
    weight = tf.ones(rows)
    cut, labels, weights = changed(
        (tf.constant(x), tf.constant(y), weight), xla=xla, cutout_pixels=6
    )
    hole = cut == 0
    assert (cut.dtype, labels.dtype) == (dtype, np.int32)
    np.testing.assert_array_equal(cut, np.where(hole, 0, x))
    np.testing.assert_array_equal(labels, y)
    np.testing.assert_array_equal(weights, weight)
    assert (hole.all(axis=3) == hole.any(axis=3)).all()  # in all channels
    area = hole[..., 0].sum(axis=(1, 2))
    assert 9 <= area.min() < area.max() == 36  # the borders cut some
    assert len({each.tobytes() for each in hole}) > 50  # each row has its own


def test_cutout_comes_after_what_is_blended():
    both, cut = (changed(batch_of(8), **each) for each in (CUT["all"], CUT["either"]))
    hole = changed((tf.ones((8, *SIZE, 1)), batch_of(8)[1]), cutout_pixels=6)[0] == 0
    np.testing.assert_array_equal(both[0], np.where(hole, 0, cut[0]))
    np.testing.assert_array_equal(both[1], cut[1])


def test_squares_have_nothing_to_do_with_cutmix_boxes():
    rows, count = 20_000, tf.constant(3, tf.int64)
    one, other = (
        draws.uniform((rows, 3), count=count, replica=None, purpose=each).numpy()
        for each in (draws.BLEND, draws.CUTOUT)
    )
    correlation = np.corrcoef(one.T, other.T)[:3, 3:]
    assert np.abs(correlation).max() < 4 / rows**0.5


def test_with_both_each_step_takes_one_for_all_rows():
    kinds, draw = [], functools.partial(changed, batch_of(8), traced=True, **ALL["either"])
    for count in range(40):
        (x, _), (again, _) = (draw(count=count, replica=replica) for replica in range(2))
        is_cutmix = [np.isin(each, np.arange(8)).all() for each in (x, again)]
        assert is_cutmix[0] == is_cutmix[1]  # on all replicas
        kinds.append(is_cutmix[0])
    assert 8 < sum(kinds) < 32


def test_xla_gives_the_same():
    for count in (0, 1, 2, 1_000_000):
        both = [changed(batch_of(8), xla=xla, count=count, **CUT["all"]) for xla in (False, True)]
        for one, other in zip(*both, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        # Of several together, one that differs would hide one that does not.
        pytest.param(each, id=name, marks=[pytest.mark.slow] * (name in ("either", "all")))
        for name, each in CUT.items()
    ],
)
def test_draws_are_a_function_of_seed_update_and_replica(settings):
    draw = functools.partial(changed, batch_of(8), **settings)
    first, again = draw(count=7), draw(count=7)
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    for other in (draw(count=8), draw(count=7, replica=1), draw(count=7, seed=1)):
        assert not np.array_equal(first[0], other[0])


@pytest.mark.gpu
def test_a_gpu_draws_what_a_cpu_draws():
    def draw(device, xla):
        uniform = functools.partial(draws.uniform, (64, 3), replica=types.SimpleNamespace(index=1))
        function = tf.function(lambda count: uniform(count=count), jit_compile=xla, autograph=False)
        with tf.device(device):
            return function(tf.constant(7, tf.int64)).numpy()

    expected = draw("/cpu:0", False)
    for device, xla in (("/cpu:0", True), ("/gpu:0", False), ("/gpu:0", True)):
        np.testing.assert_array_equal(draw(device, xla), expected)


@pytest.mark.parametrize("settings", ALL.values(), ids=ALL)
def test_no_row_is_mixed_with_padding(settings):
    weight = [1, 1, 0, 1, 0, 0, 2, 1]
    batch = batch_of(8, weight=weight)
    x, y, after = changed(batch, **settings)
    smoothing = settings.get("label_smoothing", 0)
    plain = one_hot(batch) * (1 - smoothing) + smoothing / CLASSES
    np.testing.assert_array_equal(after, weight)
    for row, partner in enumerate(next_row(np.array(weight))):
        if partner == 0:
            np.testing.assert_array_equal(x[row], batch[0][row])
            np.testing.assert_allclose(y[row], plain[row], rtol=1e-6)
    assert not np.array_equal(x[0], batch[0][0])


def test_a_replica_without_rows_is_no_error():
    x, y = changed(tuple(each[:0] for each in batch_of(2)), **CUT["all"])
    assert (len(x), y.shape) == (0, (0, CLASSES))


# In the step.


def loss():
    return keras.losses.CategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    ("num_replicas", "num_parts", "policy", "xla"),
    [
        pytest.param(1, 1, "float32", True, marks=pytest.mark.slow),
        (1, 1, "mixed_float16", False),
        pytest.param(1, 2, "mixed_float16", False, marks=pytest.mark.slow),
        pytest.param(2, 1, "mixed_float16", False, marks=pytest.mark.slow),
        (2, 2, "float32", False),
        pytest.param(2, 2, "float32", True, marks=pytest.mark.slow),
    ],
)
def test_a_step_trains_on_the_changed_batch(num_replicas, num_parts, policy, xla):
    rows, both = 8, CUT["all"]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    try:
        model = compiled(
            classifier,
            num_replicas,
            optimizer=keras.optimizers.SGD(1.0),
            xla=xla,
            config=StepConfig(**both, accumulation_steps=num_parts),
            loss=loss(),
            metrics=["accuracy"],
        )
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = batch_of(rows * num_replicas)
    x = x / rows
    logs = model.train_on_batch(x, y, return_dict=True)
    parts = [
        changed((x[start : start + rows], y[start : start + rows]), count=0, replica=index, **both)
        for index, start in enumerate(range(0, rows * num_replicas, rows))
    ]
    x_mixed, y_mixed = (np.concatenate(each) for each in zip(*parts, strict=True))
    # Of zero weights: every class has probability 1/5, and the gradient is that minus the label.
    gradient = x_mixed.reshape(len(x), -1).T @ (1 / CLASSES - y_mixed) / len(x)
    tolerance = 1e-6 if policy == "float32" else 2e-3
    np.testing.assert_allclose(model.layers[-1].kernel, -gradient, atol=tolerance)
    assert logs["loss"] == pytest.approx(np.log(CLASSES), rel=1e-4)
    # Of equal scores, Keras takes the first class for the model's answer.
    assert logs["accuracy"] == pytest.approx((y_mixed.argmax(axis=1) == 0).mean())


@pytest.mark.parametrize(
    ("num_replicas", "num_parts", "xla"),
    [
        (1, 1, False),
        # On several replicas and in parts cutout is one of all, above.
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, 1, True), (2, 2, False)]),
    ],
)
def test_a_step_with_cutout_alone_keeps_whole_number_labels(num_replicas, num_parts, xla):
    rows, cut = 8, CUT["cutout"]
    keras.utils.set_random_seed(0)
    model = compiled(
        classifier,
        num_replicas,
        optimizer=keras.optimizers.SGD(1.0),
        xla=xla,
        config=StepConfig(**cut, accumulation_steps=num_parts),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    x, y = batch_of(rows * num_replicas)
    x = (x + 1) / rows
    for count in range(2):
        before, bias = model.get_weights()
        model.train_on_batch(x, y)
        parts = [
            changed((x[start : start + rows], y[:rows]), count=count, replica=index, **cut)[0]
            for index, start in enumerate(range(0, rows * num_replicas, rows))
        ]
        flat = np.concatenate(parts).reshape(len(x), -1)
        error = tf.nn.softmax(flat @ before + bias) - np.eye(CLASSES)[y]
        gradient = flat.T @ error / len(x)
        np.testing.assert_allclose(model.layers[-1].kernel, before - gradient, atol=1e-6)
    # In testing nothing is cut: the loss is that of the whole images.
    kernel, bias = model.get_weights()
    logits = x.numpy().reshape(len(x), -1) @ kernel + bias
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, logits)
    assert model.test_on_batch(x, y)[0] == pytest.approx(float(expected), rel=1e-5)


def test_target_images_stay_whole():
    x = tf.ones((4, *SIZE, 1))
    cut, target = changed((x, 2 * x), cutout_pixels=6)
    assert (cut == 0).any()
    np.testing.assert_array_equal(target, 2 * x)


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_testing_is_on_the_labels_as_they_are(num_replicas):
    model = compiled(
        classifier,
        num_replicas,
        optimizer="sgd",
        xla=False,
        config=StepConfig(label_smoothing=0.5, mixup_alpha=1.0, zero_weight_is_padding=True),
        loss=loss(),
        metrics=["accuracy", keras.metrics.TopKCategoricalAccuracy(2, name="top2")],
    )
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8, *SIZE, 1)), random.integers(0, CLASSES, 8)
    model.layers[-1].kernel.assign(random.normal(size=(SIZE[0] * SIZE[1], CLASSES)) / 10)
    weight = np.array([1, 1, 1, 1, 1, 1, 1, 0])
    data = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(4)
    result = model.evaluate(data, verbose=0, return_dict=True)
    logits = x[:7].reshape(7, -1).astype(np.float32) @ model.layers[-1].kernel.numpy()
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    top2 = keras.ops.in_top_k(y[:7], logits, 2)
    assert result["loss"] == pytest.approx(float(sparse(y[:7], logits)), rel=1e-5)
    assert result["accuracy"] == pytest.approx((logits.argmax(axis=1) == y[:7]).mean())
    assert result["top2"] == pytest.approx(np.mean(top2))
    logs = model.train_on_batch(x[:4], y[:4], weight[:4], return_dict=True)
    assert np.isfinite(logs["loss"])


def two_inputs():
    inputs = [keras.Input((4,)), keras.Input((4,))]
    return keras.Model(inputs, layers.Dense(3)(layers.Add()(inputs)))


def flat():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3)])


# Model, settings, compile arguments, and words of the one sentence that says what is wrong.
WRONG = [
    (lambda: keras.Sequential([layers.Dense(3)]), {}, {}, "gives no known outputs for a row"),
    (
        lambda: classifier(1),
        {},
        {},
        "gives (1,) for a row; expected one output with a score for each",
    ),
    (flat, {"cutmix_alpha": 1.0}, {}, "cutmix_alpha=1 with a model of inputs (4,) for a row"),
    (two_inputs, {"mixup_alpha": 0.2}, {}, "with a model of inputs (4,), (4,) for a row"),
    (
        flat,
        {},
        {"loss": "sparse_categorical_crossentropy"},
        "labels become probabilities in the step; use CategoricalCrossentropy",
    ),
]


@pytest.mark.parametrize(("make", "settings", "args", "words"), WRONG, ids=[e[-1] for e in WRONG])
def test_each_mistake_is_one_sentence(make, settings, args, words):
    config = StepConfig(**{"label_smoothing": 0.1, **settings})
    with pytest.raises(UserError) as error:
        compiled(make, 1, optimizer="sgd", config=config, **{"loss": loss(), **args})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("x", "side", "words"),
    [
        (
            np.zeros((2, 5)),
            6,
            "cutout_pixels=6 with inputs of (5,) for a row; expected one input, (heig",
        ),
        ((np.zeros((2, *SIZE, 1)),) * 2, 6, "with inputs of (16, 12, 1), (16, 12, 1) for a row"),
        (np.zeros((2, *SIZE, 1)), 12, "cutout_pixels=12 with images of 16x12; expected a side"),
    ],
)
def test_cutout_is_of_images(x, side, words):
    with pytest.raises(UserError) as error:
        changed((tf.nest.map_structure(tf.constant, x), tf.zeros(2)), cutout_pixels=side)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.zeros((2, *SIZE, 1), np.uint8), np.zeros(2), "images of uint8 with mixup or cutmix"),
        (np.zeros((2, *SIZE, 1)), np.zeros((2, 4)), "labels of shape (2, 4) with label_smoothing"),
        (np.zeros((2, *SIZE, 1)), (np.zeros(2), np.zeros(2)), "2 sets of labels"),
    ],
)
def test_each_mistake_in_a_batch_is_one_sentence(x, y, words):
    with pytest.raises(UserError) as error:
        changed((tf.constant(x), tf.nest.map_structure(tf.constant, y)), mixup_alpha=1.0)
    assert words in str(error.value)
