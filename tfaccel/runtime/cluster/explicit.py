"""Workers named by the caller: by flags, or by arguments of `tfaccel.setup`.

They have priority over all other sources.

    claim = explicit.claim(["10.0.0.1:2222", "10.0.0.2:2222"], 1, others=())
"""

from collections.abc import Sequence

from tfaccel.common.errors import UserError
from tfaccel.common.tables import counted
from tfaccel.runtime.cluster.addresses import check_addresses, neighbours
from tfaccel.runtime.cluster.place import Claim, Cluster


def claim(workers: Sequence[str], worker_index: int | None, *, others: Sequence[Claim]) -> Claim:
    """Returns the caller's claim.

    Args:
      workers: host:port of each worker, the chief's first.
      worker_index: this process's index in `workers`; None to take it from `others`, for example
        from `mpirun`.
      others: the claims of other sources.

    Raises:
      UserError: an address is invalid, or nothing says which worker this is.
    """
    addresses = tuple(workers)
    if not addresses:
        raise UserError("workers is empty; give host:port of each worker, or remove workers")
    if len(addresses) == 1 and addresses[0].isdigit():
        raise UserError(
            f"workers={addresses[0]}; expected host:port of each process of the job. To set the "
            "loader's CPU threads, use --config.dali.threads; to start processes, use `tfaccel "
            "launch --nproc-per-node`"
        )
    check_addresses(addresses, of="workers")
    index = worker_index
    if index is None:
        index = others[0].worker_index if others else None
    if index is None or not 0 <= index < len(addresses):
        raise UserError(
            f"worker_index={index} with {counted(len(addresses), 'worker')}; expected the index of "
            f"this process, 0 to {len(addresses) - 1}: give --worker-index, or pass worker_index "
            "to tfaccel.setup"
        )
    if len(addresses) == 1:
        cluster = Cluster(source="workers has one address")
    else:
        local = neighbours(addresses, index)
        cluster = Cluster(addresses, index, False, *local, source="the flags or arguments")
    words = f"workers={','.join(addresses)}, worker_index={worker_index}"
    return Claim("the caller", len(addresses), index, words, lambda: cluster)
