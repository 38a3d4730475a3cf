"""Whether all workers read the same data: asked before the first step, in which they would part.

Takes what each worker found; raises where they differ. A worker that sees one file fewer than the
others would have shorter epochs, and they would wait for it for ever; one that sees other names
would read some examples twice.

    check_same({"number of examples": 60000, "files": "5f0c..."}, strategy)
"""

import hashlib
from collections.abc import Mapping

import tensorflow as tf

from tfaccel import collectives
from tfaccel.errors import UserError


def check_same(facts: Mapping[str, object], strategy: tf.distribute.Strategy) -> None:
    """Raises UserError unless every worker calls this with equal facts. Returns when all have.

    Args:
      facts: what was found, by what to call it: anything that `repr` tells apart.
      strategy: over all workers.
    """
    digests = [hashlib.blake2b(repr(each).encode(), digest_size=8) for each in facts.values()]
    numbers = [int.from_bytes(each.digest(), signed=True) for each in digests]
    with strategy.scope():
        found = collectives.all_gather(tf.constant([numbers], tf.int64)).numpy()
    for (name, own), column in zip(facts.items(), found.T, strict=True):
        if len(set(column.tolist())) > 1:
            raise UserError(
                f"workers differ in the {name} of their data: here {own}; expected the same in "
                "all, so give each the same files, settings and seed"
            )
