"""A Slurm cluster of one controller and two nodes, n9 and n10, as processes of this machine.

Takes Slurm and munge as installed, or as tools/unpack_engines.py left them under TFACCEL_ENGINES;
gives a cluster, or the reason why there can be none.

    with SlurmCluster(folder) as cluster:
        cluster.run("srun", "-N2", "-n2", "hostname")

The names are in another order as text than as numbers, on purpose. A node is a process namespace,
so that nothing survives when it is killed, with an /etc/hosts of its own, in which both names lead
to this machine.
"""

import os
import pathlib
import shutil
import socket
import subprocess
import time

NODES = ("n9", "n10")

# A test does not wait for the default 120 s until a job may begin again (cred_expire), nor for
# 5 minutes until a silent node counts as lost.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
SlurmdTimeout=20
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser=root
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
JobRequeue=1
KillWait=5
ReturnToService=2
NodeName=n9 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n10 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=test Nodes=n9,n10 Default=YES MaxTime=60 State=UP
"""

ROOT = os.environ.get("TFACCEL_ENGINES", "")
LIBRARIES = pathlib.Path(f"{ROOT}/usr/lib/x86_64-linux-gnu")
PATH = f"{ROOT}/usr/bin:{ROOT}/usr/sbin:/usr/sbin:{os.environ['PATH']}"


def why_not() -> str:
    """Why no cluster can be started here; empty if one can."""
    needed = ("slurmctld-wlm", "slurmd-wlm", "slurmstepd-wlm", "munged", "srun")
    missing = [each for each in needed if not shutil.which(each, path=PATH)]
    if missing:
        return (
            f"there is no {', '.join(missing)}; run tools/unpack_engines.py --out=DIR and set "
            "TFACCEL_ENGINES=DIR"
        )
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    if os.getuid() != 0 or subprocess.run(namespaces, capture_output=True).returncode:
        return "a node is a namespace, and this user may make none; run it as root"
    return ""


class SlurmCluster:
    """Runs within its context; leaves no process."""

    def __init__(self, folder: pathlib.Path):
        """Starts nothing yet; `folder`, made by this, is for all its files."""
        folder.mkdir()
        self.folder, self._daemons = folder, {}
        ours = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        self.environment = ours | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": PATH,
            "LD_LIBRARY_PATH": f"{LIBRARIES}:{LIBRARIES}/slurm-wlm",
        }

    def __enter__(self) -> "SlurmCluster":
        """Starts it and waits until both nodes can be given work."""
        self._write_files()
        try:
            self._start("munged", *self._munged())
            self.wait_until((self.folder / "munge" / "socket").exists, timeout_s=10)
            self._start("slurmctld", "slurmctld-wlm", "-D", "-c")
            for name in NODES:
                self.start_node(name)
            self.wait_until(lambda: self.idle_nodes() == list(NODES), timeout_s=60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        """Ends every process of it, the nodes first."""
        for name in reversed(self._daemons.copy()):
            self.kill(name)

    def run(self, *command: str, check: bool = True, **options) -> subprocess.CompletedProcess:
        """Runs a command as a user of the cluster would."""
        options = {"timeout": 300, "env": self.environment, **options}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        assert not check or done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.logs()}"
        return done

    def start_node(self, name: str) -> None:
        """Starts a node with an empty disk, and waits for nothing."""
        shutil.rmtree(self.folder / f"spool-{name}", ignore_errors=True)
        hosts = self.folder / "hosts"
        stepd = shutil.which("slurmstepd-wlm", path=PATH)
        self._start(
            name,
            *["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"],
            f"mount --bind {hosts} /etc/hosts; exec slurmd-wlm -D -N {name} -d {stepd}",
        )

    def kill(self, name: str) -> None:
        """Ends a daemon at once; of a node, with all that runs there."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def idle_nodes(self) -> list[str]:
        """The nodes that can be given work."""
        listed = self.run("sinfo", "-hN", "--states=idle", "-o%N", check=False).stdout.split()
        return [name for name in NODES if name in listed]

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job, by its names, e.g. JobState, Restarts."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).stdout.split()
        return dict(each.partition("=")[::2] for each in words)

    def wait_until(self, condition, *, timeout_s: float) -> None:
        """Asks five times a second."""
        ends = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < ends, self.logs()
            time.sleep(0.2)

    def logs(self) -> str:
        """The last lines of each daemon's log."""
        return "\n".join(
            "\n".join([path.name, *path.read_text().splitlines()[-15:]])
            for path in sorted(self.folder.glob("*.log"))
        )

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out.log", "a") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def _munged(self) -> list[str]:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        files["seed-file"] = "seed"
        folder = self.folder / "munge"
        named = [f"--{option}={folder / file}" for option, file in files.items()]
        return ["munged", "--foreground", "--force", *named]

    def _write_files(self) -> None:
        (self.folder / "state").mkdir()
        (self.folder / "munge").mkdir(mode=0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.folder / "hosts").write_text("127.0.0.1 localhost n9 n10\n")
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=self.folder,
                host=socket.gethostname().partition(".")[0],
                ports=_free_ports(1 + len(NODES)),
                plugins=LIBRARIES / "slurm-wlm",
            )
        )


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
