"""The workers as the caller names them: by flags, or as arguments of `tfaccel.setup`.

Takes the addresses and the place; gives what they say, which goes before all else.

    claim = explicit.claim(["10.0.0.1:2222", "10.0.0.2:2222"], 1, others=())
"""

from collections.abc import Sequence

from tfaccel.common.errors import UserError
from tfaccel.common.tables import counted
from tfaccel.runtime.cluster.addresses import check_addresses, neighbours
from tfaccel.runtime.cluster.place import Claim, Cluster


def claim(workers: Sequence[str], worker_index: int | None, *, others: Sequence[Claim]) -> Claim:
    """Returns what the caller says.

    Args:
      workers: host:port of each worker, the chief's first.
      worker_index: which of them this is; None where another system says so, as `mpirun` does.
      others: what other systems say.

    Raises:
      UserError: an address is none, or nobody says which worker this is.
    """
    addresses = tuple(workers)
    if not addresses:
        raise UserError("workers names none; give host:port of each, or leave it out")
    if len(addresses) == 1 and addresses[0].isdigit():
        raise UserError(
            f"workers={addresses[0]}; expected host:port of each process of the job. CPU threads "
            "of the loader are --config.dali.threads; `tfaccel launch --nproc-per-node` starts "
            "processes"
        )
    check_addresses(addresses, of="workers")
    index = worker_index
    if index is None:
        index = others[0].worker_index if others else None
    if index is None or not 0 <= index < len(addresses):
        raise UserError(
            f"worker_index={index} with {counted(len(addresses), 'worker')}; expected the place of "
            f"this process among them, 0 to {len(addresses) - 1}: give --worker-index, or "
            "worker_index to tfaccel.setup"
        )
    if len(addresses) == 1:
        cluster = Cluster(source="workers has one address")
    else:
        local = neighbours(addresses, index)
        cluster = Cluster(addresses, index, False, *local, source="the flags or arguments")
    words = f"workers={','.join(addresses)}, worker_index={worker_index}"
    return Claim("the caller", len(addresses), index, words, lambda: cluster)
