"""Whether all workers read the same data: asked when they begin to fit, evaluate or predict.

Takes what each worker found; raises where they differ. A worker that sees one file fewer than the
others would have shorter epochs, and they would wait for it for ever; one that sees other names
would read some examples twice.

    check_same({"number of examples": 60000, "files": "5f0c..."}, strategy)
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfaccel import collectives
from tfaccel.errors import UserError

MOST_FACTS = 8  # a collective needs one length


def check_same(facts: Mapping[str, object], strategy: tf.distribute.Strategy) -> None:
    """Raises UserError unless every worker calls this with equal facts. Returns when all have.

    Args:
      facts: what was found, by what to call it: anything that `repr` tells apart.
      strategy: over all workers.
    """
    # Of other kinds of data there are other facts, so their names are one of them.
    facts = {"kind": tuple(facts), **facts}
    numbers = np.zeros((1, MOST_FACTS), np.int64)
    for place, each in enumerate(facts.values()):
        digest = hashlib.blake2b(repr(each).encode(), digest_size=8).digest()
        numbers[0, place] = int.from_bytes(digest, signed=True)
    with strategy.scope():
        found = collectives.all_gather(tf.constant(numbers)).numpy()
    for (name, own), column in zip(facts.items(), found.T, strict=False):
        if len(set(column.tolist())) > 1:
            raise UserError(
                f"workers differ in the {name} of their data: here {own}; expected the same in "
                "all, so give each the same files, settings and seed"
            )
