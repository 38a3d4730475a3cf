"""Programs as people write them (tests/programs): N replicas train as stock Keras on one device.

The default suite runs a sample. `-m slow` runs every program on 1, 2 and 3 replicas, with XLA and
without.
"""

import pytest
import tensorflow as tf
from conftest import strategy_of
from programs.harness import PROGRAMS, by_stock_keras, difference, here

from tfaccel.common.errors import UserError
from tfaccel.training.callbacks.finite import NonFiniteError

# The programs that do not train as they should yet, and how they fail: on 2 and 3 replicas, with
# XLA and without, unless ON_ONE says otherwise. A program that is mended fails its test until its
# line is removed here.
FAILS: dict[str, str] = {
    "mean teacher": "the copy is averaged with the weights from before the update",
    # These are wrong silently, unless a comment says more.
    "SimCLR": "all_gather in a step returns this replica's rows only",
    "SimCLR, loss by row": "all_gather in a step returns this replica's rows only",
    "BYOL": "the target is averaged with the weights from before the update",
    "MoCo": "keys are not gathered, the key encoder is averaged with the weights from before",
    "Barlow twins": "all_gather in a step returns this replica's rows only",
    "Siamese with triplet loss": "the gradient of a vector is divided by the number of replicas",
    "supervised contrastive": "all_gather in a step returns this replica's rows only",
    "SAM": "the first gradient, which moves the weights, is that of this replica's rows",
    "SAM with all_reduce": "all_reduce in a step returns this replica's value",
    "DQN": "the target is copied from the weights from before the update",
    # With XLA wrong silently, without XLA InvalidArgumentError at the index of a row.
    "mixup in the step": "all_gather in a step returns this replica's rows only",
    "clipping by hand": "each replica clips the gradient of its own rows",
    "accumulation by hand": "each replica applies sums with the gradient of its own rows",
    "accumulation in weights": "each replica applies sums with the gradient of its own rows",
    "DDPM": "the copy is averaged with the weights from before the update",
    "VQ-VAE": "each has the codes of its own rows, then averaged; silent",
    "VQ-VAE with all_reduce": "the replica context sums nothing, silently",
    "text classification, LSTM": "wrong silently: Keras's Adam squares the gradients of a repeated "
    "token one by one; several replicas add them up before",
    "sequence tagging": "refused: a loss is masked",
    "sequence tagging, weighted metrics": "refused: a loss is masked",
    "named entity recognition": "wrong, with a warning: a mean of the replicas' masked means",
    "masked language model": "refused: a loss is masked",
    "masked language model, own train_step": "wrong silently: a sum over rows is divided by the "
    "number of replicas",
    "translation transformer": "refused: a loss is masked",
    "translation transformer, own loss and metric": "wrong, with a warning: a mean of the "
    "replicas' masked means",
    "CTC in a layer": "wrong silently: add_loss of one number a row is a sum over rows, which is "
    "divided by the number of replicas",
    "U-Net with ignore_class": "refused: a loss is masked",
    "loss summed": "refused: the loss has reduction='sum'",
    "loss by the sum of the weights": "refused: the loss has reduction='mean_with_sample_weight'",
    "hand-masked loss": "wrong silently: a mean of the replicas' masked means",
    "Dice loss by hand": "wrong, with a warning: a mean of the replicas' Dice losses",
    "Dice loss of Keras": "refused: the loss has axis=None, over the whole batch",
    "compute_average_loss": "wrong silently: rows are divided by the global batch, then by the "
    "number of replicas",
    "stateful LSTM": "refused: the state is not the model's variable",
    # Losses of the whole batch: each replica computes them of its own rows, and they are averaged.
    "sum by tf.shape(x)[0], uneven": "weights are right, the log counts replicas alike",
    "sum by a constant": "each replica divides its sum by the constant, then they are averaged",
    "weighted mean by hand": "a mean of the replicas' weighted means",
    "RMSE by hand": "a mean of the replicas' roots",
    "RMSE by hand, uneven": "a mean of the replicas' roots",
    "worst row": "a mean of the replicas' maxima",
    "tilted loss": "a mean of the replicas' log-sum-exp",
    "standard deviation": "each replica has the deviation of its own rows",
    "concordance correlation": "each replica has the moments of its own rows",
    "coefficient of determination": "each replica has the variance of its own rows",
    "focal loss by positives": "each replica divides by its own positives",
    "class-balanced by batch": "each replica has its own share of negatives",
    "entropy of the mean": "each replica has the mean of its own rows",
    "mutual information": "a mean of the replicas' log-sum-exp",
    "normalized returns": "each replica has the mean and deviation of its own rows",
    "PPO": "each replica has the mean and deviation of its own rows",
    "VICReg": "each replica has the covariance of its own rows",
    "Barlow twins, one device's": "each replica has the correlation of its own rows",
    "deep CORAL": "each replica has the covariance of its own rows",
    "contrastive predictive coding": "all_gather in a step returns this replica's rows only",
    "hardest rows": "all_gather in a step returns this replica's rows only",
    # With XLA or without, NonFiniteError on three: a replica without an event divides by 0.
    "survival": "all_gather in a step returns this replica's rows only",
    "add_loss of a vector": "add_loss of one number a row is a sum over rows, which is divided by "
    "the number of replicas",
    "switch transformer's balance": "each replica has the shares of its own rows",
    "minibatch standard deviation": "each replica has the deviation of its own rows",
    "two outputs, two masks": "refused: a loss is masked",
    "mask and weights by step": "refused: a loss is masked",
    "ignore_class and class weights": "refused: a loss is masked",
    "ignore_class and sample weights": "refused: a loss is masked",
    "ignore_class, uneven": "refused: a loss is masked",
    "ignore_class, summed": "refused: the loss has reduction='sum'",
    "image captioning": "refused: the loss has reduction='none'",
    "no reduction, own mean": "a mean of the replicas' masked means",
    "labelled rows only": "a mean of the replicas' means of labelled rows",
    # Steps: each replica has the gradients of its own rows, and updates come after the step.
    "adaptive gradient clipping": "each replica clips the gradient of its own rows",
    "sign of gradients": "a mean of the replicas' signs",
    "gradient surgery": "each replica projects the gradients of its own rows",
    "virtual adversary": "the slope is that of the mean of this replica's rows",
    "slope of the batch's mean": "the slope is that of the mean of this replica's rows",
    "MAML, a task a batch": "the inner gradient is that of this replica's rows",
    "first-order MAML": "the inner gradient is that of this replica's rows",
    "extragradient": "the first gradient, which moves the weights, is that of this replica's rows",
    "Reptile": "refused: gradients are applied twice",
    "Keras's step twice": "refused: gradients are applied twice",
    "Keras's step and an average": "the copy is averaged with the weights from before the update",
    "optimizer.apply": "weights are right, a log of the optimizer's iterations is one too low",
    "alternating parts": "refused: gradients are applied twice",
    "stochastic weight averaging": "the copy is averaged with the weights from before the update",
    "lookahead": "slow weights follow the weights from before the update",
    "decay toward the first weights": "it decays the weights from before the update",
    "DINO": "the teacher is averaged with the weights from before the update",
    "NNCLR": "all_gather in a step returns this replica's rows only",
    "class centroids": "each replica has the centroids of its own rows, which are averaged",
    "tasks balanced by moving means": "each replica divides by the means of its own rows",
    "moving baseline": "each replica has the largest return of its own rows",
    "AdaMatch": "each replica has the threshold and the ratio of its own rows",
}
RAISES = (
    AssertionError,
    AttributeError,
    NonFiniteError,
    UserError,
    ValueError,
    TypeError,
    tf.errors.InvalidArgumentError,
)
ON_ONE: set[str] = set()  # those that fail on one replica with XLA, and only there
SAMPLE = ("LoRA",)


def check(program, num_replicas: int, *, xla: bool) -> None:
    """Raises AssertionError unless logs and variables are those of stock Keras."""
    wanted = by_stock_keras(program)
    figure, where = difference(here(program, strategy_of(num_replicas), xla=xla), wanted)
    assert figure <= program.rtol, where


def cases():
    """Yields (name, number of replicas, XLA), a sample of which is run by default."""
    for name in PROGRAMS:
        for num_replicas in (1, 2, 3):
            for xla in (False, True):
                is_one_with_xla = num_replicas == 1 and xla
                is_sample = name in SAMPLE and (num_replicas, xla) == (2, False)
                marks = [] if is_sample else [pytest.mark.slow]
                if name in FAILS and (num_replicas > 1 if name not in ON_ONE else is_one_with_xla):
                    marks.append(pytest.mark.xfail(strict=True, reason=FAILS[name], raises=RAISES))
                yield pytest.param(name, num_replicas, xla, marks=marks)


@pytest.mark.parametrize(("name", "num_replicas", "xla"), cases())
def test_a_program_trains_on_replicas_as_with_stock_keras(name, num_replicas, xla):
    check(PROGRAMS[name], num_replicas, xla=xla)
