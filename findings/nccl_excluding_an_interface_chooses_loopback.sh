#!/usr/bin/env bash
# NCCL: with NCCL_SOCKET_IFNAME=^docker, or any other name to leave out, it gives other hosts the address of lo.
#
# Versions: nvidia-nccl-cu12 2.32.3, Linux. No GPU is needed.
#
# Behaviour: without the variable NCCL leaves out loopback and docker interfaces by itself, and takes the first one
# that is left. A list that begins with ^ does not add to that: it takes the place of it. Loopback is then a candidate
# like any other, and it comes first in the system's list. So who leaves out docker, which was left out before, turns
# a job of several hosts that works into one that waits: the address in NCCL's unique id is 127.0.0.1. The call
# succeeds, and on one host all goes well. lo must be named, too: ^docker,lo.
#
# Output seen, the interface of ncclGetUniqueId on a machine with lo and eth0:
#   not set: not lo    ^docker: lo    ^docker,lo: not lo
#
# The script exits with 1 if this behaviour changes, and with 2 on a machine whose only interface is lo.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-deps nvidia-nccl-cu12==2.32.3

cat > "$work/id.py" <<'PY'
import ctypes
import pathlib
import sys

library = next(pathlib.Path(sys.prefix).glob("lib/python*/site-packages/nvidia/nccl/lib/libnccl.so.2"))
sys.exit(ctypes.CDLL(str(library)).ncclGetUniqueId(ctypes.create_string_buffer(128)))
PY

# The interface in the line "NCCL INFO Bootstrap: Using eth0:192.0.2.1<0>", as "lo" or "not lo".
using() {
    NCCL_DEBUG=INFO NCCL_CONF_FILE=/dev/null "$work/env/bin/python" "$work/id.py" > "$work/log" 2>&1 || {
        cat "$work/log"
        return 1
    }
    name=$(sed -n 's/.*Bootstrap: Using \([^:]*\):.*/\1/p' "$work/log" | head -1)
    [ "$name" = lo ] && echo lo || echo "not lo"
}

unset NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_COMM_ID
default=$(using)
if [ "$default" = lo ]; then
    echo "this machine has no interface but lo"
    exit 2
fi
docker=$(NCCL_SOCKET_IFNAME=^docker using)
both=$(NCCL_SOCKET_IFNAME=^docker,lo using)
echo "not set: $default    ^docker: $docker    ^docker,lo: $both"
[ "$default" = "not lo" ] && [ "$docker" = lo ] && [ "$both" = "not lo" ]
