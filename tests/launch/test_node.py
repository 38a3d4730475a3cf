"""`tfaccel launch` with ranks that only pretend to train: who is ended, when, and what is left."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

LIMIT_S = 300  # what is waited for comes in seconds; the machine may be slow

# Two steps; then the rank at fault does what `mode` says, and the others wait for it in the third.
PROGRAM = """
import faulthandler, importlib.util, json, os, pathlib, signal, subprocess, sys, time, types
# A package of tfaccel's that imports nothing but what is asked for: all of it takes longer than
# the rank does.
package = types.ModuleType("tfaccel")
package.__path__ = importlib.util.find_spec("tfaccel").submodule_search_locations
sys.modules["tfaccel"] = package
from tfaccel.process import progress
mode, at_fault, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
begun = len(list(folder.glob(f"rank-{rank}-*")))
(folder / f"rank-{rank}-{begun}").write_text(json.dumps([os.getpid(), dict(os.environ)]))
is_mine = rank == at_fault
if mode == "never starts" and is_mine:
    time.sleep(1000)

def stop(number, frame):
    progress.asked()
    print("saving", flush=True)
    time.sleep(0.5)
    progress.beat("end")
    sys.exit(143)

def waits_for_nobody():
    time.sleep(1000)

def say(number, frame):
    os.write(2, b"heard " + signal.Signals(number).name.encode() + b"\\n")
    if number == signal.SIGTERM:
        os._exit(1)

if "SIGUSR2" in mode:
    signal.signal(signal.SIGTERM, say)
if mode == "takes SIGUSR2":
    signal.signal(signal.SIGUSR2, say)
if mode == "has SIGUSR2 for faulthandler":
    faulthandler.register(signal.SIGUSR2)
if mode == "never speaks, to SIGUSR2 either" and is_mine:
    time.sleep(1000)
if mode.startswith("talks"):
    for line in range(20000):
        print("line", line, "of many")
if mode == "keeps a child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", str(folder)])
if mode == "saves":
    signal.signal(signal.SIGTERM, stop)
if "ignores" in mode or mode == "mistake of one that others outlive":
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: (folder / f"heard-{rank}").touch())
progress.beat("start")
if mode != "never starts":  # one may be slow to come, which is not what the limits below are for
    num_ranks = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    (folder / f"begun-{rank}-{begun}").touch()
    while len(list(folder.glob(f"begun-*-{begun}"))) < num_ranks:
        time.sleep(0.01)
if mode == "takes SIGUSR2 late":
    signal.signal(signal.SIGUSR2, say)
if mode == "takes SIGUSR2 away":
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
print("rank", rank, "begins", flush=True)
for step in (1, 2):
    progress.beat("train", step=step)
(folder / f"there-{rank}-{begun}").touch()
if is_mine:
    if mode == "raises":
        raise ValueError("row 7 is broken")
    if mode == "exits":
        sys.exit(3)
    if mode == "exits once" and not begun:
        sys.exit(3)
    if mode.startswith("mistake"):
        while "outlive" in mode and len(list(folder.glob("there-*"))) < 4:
            time.sleep(0.01)
        sys.exit(2)
    if mode == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "sleeps" or "SIGUSR2" in mode:
        waits_for_nobody()
    if mode == "saves slowly":
        with progress.within("save"):
            time.sleep(2.5)
    if mode == "has a child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", str(folder)])
        sys.exit(3)
    if mode == "is done":
        sys.exit(0)
progress.beat("train", step=3)
if mode in ("ends", "exits once", "saves slowly", "talks and ends"):
    if mode == "saves slowly" and not is_mine:
        time.sleep(3)
    sys.exit(0)
time.sleep(1000)
"""


class Launched:
    """A launcher in a process of its own."""

    def __init__(self, folder, mode, at_fault=1, flags=(), environment=None, **pipes):
        self.folder, self.arguments = folder, (mode, at_fault, *flags)
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tfaccel", "launch", "--nproc-per-node=2", "--grace=60"),
                *(f"--log-dir={folder / 'logs'}", *flags),
                *(str(program), mode, str(at_fault), str(folder)),
            ],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes},
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def wait_for(self, *names):
        ends = time.monotonic() + LIMIT_S
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < ends
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)

    def end(self):
        """Returns the exit code and what was printed."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err

    def pids(self):
        """The first attempt's ranks."""
        return [json.loads((self.folder / f"rank-{rank}-0").read_text())[0] for rank in range(2)]

    def left(self):
        """What still runs of the job, by its command line."""
        found = []
        for each in psutil.process_iter(["cmdline", "status"]):
            ours = str(self.folder) in (each.info["cmdline"] or ())
            if ours and each.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(each)
        return found

    def kill(self):
        self.process.kill()
        self.process.wait()
        for orphan in self.left():
            orphan.kill()


@pytest.fixture
def launch(tmp_path):
    started = []

    def launch(mode, at_fault=1, *flags, **more):
        started.append(Launched(tmp_path, mode, at_fault, flags, **more))
        return started[-1]

    yield launch
    for each in started:
        each.kill()


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("is killed", 137, "was ended by SIGKILL, exit code 137"),
        ("raises", 1, "ended with exit code 1"),
        pytest.param("exits", 3, "ended with exit code 3", marks=pytest.mark.slow),
        ("has a child", 3, "ended with exit code 3"),
    ],
)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_p6_a_rank_that_fails_ends_all_with_its_code(launch, rank, mode, code, words):
    job = launch(mode, rank)
    received, _, err = job.end()
    assert received == code
    assert f"[launch] launch: rank {rank} {words}" in err
    assert not job.left()
    if mode == "raises":
        assert "[launch] launch: its first error: ValueError: row 7 is broken" in err
        assert '    raise ValueError("row 7 is broken")' in err


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mode", "flag", "words"),
    [
        pytest.param(
            *("is stopped", "--step-timeout=2", "made no progress in training for"),
            marks=pytest.mark.slow,
        ),
        ("sleeps", "--step-timeout=2", "made no progress in training for"),
        pytest.param(
            *("never starts", "--start-timeout=2", "made no progress before its first step ended"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("saves slowly", "--save-timeout=1", "made no progress in saving for"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_p7_a_rank_that_hangs_is_found_within_its_limit(launch, rank, mode, flag, words):
    job = launch(mode, rank, flag, "--grace=1")
    code, _, err = job.end()
    assert code == 1
    assert f"[launch] launch: rank {rank} {words}" in err
    assert not job.left()


def test_p3_a_rank_that_hangs_says_where_its_python_is(launch, tmp_path):
    code, _, err = launch("sleeps", 1, "--step-timeout=2").end()
    assert code == 1
    folder = tmp_path / "logs" / "attempt-0"
    assert "in waits_for_nobody\n" in (folder / "rank-1.log").read_text()
    assert re.search(r"^\[rank 1\]   File .* in waits_for_nobody$", err, re.M)
    assert f"; the stacks of rank 1 are in its log in {folder}\n" in err
    # Rank 0 waits for it, as it should.
    assert "most recent call first" not in (folder / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("mode", "flag"),
    [
        ("takes SIGUSR2", "--step-timeout=2"),
        pytest.param("takes SIGUSR2 late", "--step-timeout=2", marks=pytest.mark.slow),
        pytest.param("takes SIGUSR2 away", "--step-timeout=2", marks=pytest.mark.slow),
        ("has SIGUSR2 for faulthandler", "--step-timeout=2"),
        pytest.param(
            "never speaks, to SIGUSR2 either", "--start-timeout=2", marks=pytest.mark.slow
        ),
    ],
)
def test_p3_a_rank_whose_sigusr2_is_its_own_hears_nothing_before_sigterm(
    launch, tmp_path, mode, flag
):
    code, _, err = launch(mode, 1, flag).end()
    assert code == 1
    assert "launch: rank 1 made no progress" in err
    assert "stacks" not in err
    log = (tmp_path / "logs" / "attempt-0" / "rank-1.log").read_text()
    assert re.findall("heard .*|most recent call first", log) == ["heard SIGTERM"]


def test_p7_a_peer_that_is_slow_in_saving_is_no_false_alarm(launch):
    code, _, err = launch("saves slowly", 0, "--step-timeout=2", "--save-timeout=10").end()
    assert code == 0, err


@pytest.mark.slow
def test_ranks_that_do_not_hear_sigterm_are_killed_after_the_grace(launch):
    job = launch("ignores", 0, "--step-timeout=2", "--grace=1")
    code, _, _ = job.end()
    assert code == 1
    assert all((job.folder / f"heard-{rank}").exists() for rank in range(2))
    assert not job.left()


FOREIGN = {"SLURM_PROCID": "5", "OMPI_COMM_WORLD_RANK": "5", "TFACCEL_LAUNCH_TOKEN": "secret"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A job whose ranks end well: its folder, exit code, and what it printed."""
    folder = tmp_path_factory.mktemp("ended")
    job = Launched(folder, "ends", environment=FOREIGN)
    try:
        return folder, *job.end()
    finally:
        job.kill()


def test_all_is_shown_with_its_rank_and_kept_in_files(ended):
    tmp_path, code, out, err = ended
    assert code == 0
    assert sorted(out.splitlines()) == ["[rank 0] rank 0 begins", "[rank 1] rank 1 begins"]
    assert err.splitlines()[-1] == "[launch] launch: all ranks are done"
    for rank in range(2):
        log = tmp_path / "logs" / "attempt-0" / f"rank-{rank}.log"
        header, *lines = log.read_text().splitlines()
        assert header.startswith("--- launched 2")
        assert header.endswith(f"program.py ends 1 {tmp_path}")
        assert lines == [f"rank {rank} begins"]


def test_exit_codes_are_read_where_a_parent_has_children_ignored(launch):
    ignored = {"preexec_fn": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)}
    assert launch("exits", **ignored).end()[0] == 3


def test_a_rank_knows_its_job_from_tf_config_alone(ended):
    received = json.loads((ended[0] / "rank-1-0").read_text())[1]
    assert not FOREIGN.keys() & received.keys()
    cluster = json.loads(received["TF_CONFIG"])
    assert cluster["task"] == {"type": "worker", "index": 1}
    ports = [int(each.removeprefix("127.0.0.1:")) for each in cluster["cluster"]["worker"]]
    assert len(set(ports)) == 2
    assert all(20000 <= each < 32000 for each in ports)


def test_all_start_again_where_one_has_failed(launch, tmp_path):
    code, _, err = launch("exits once", 1, "--max-restarts=2").end()
    assert code == 0, err
    assert "rank 1 ended with exit code 3; restart 1 of 2 from the last checkpoint in 1 s" in err
    assert (tmp_path / "logs" / "attempt-1" / "rank-0.log").exists()
    assert len(list(tmp_path.glob("rank-1-*"))) == 2


def test_a_mistake_in_the_call_is_not_tried_again(launch):
    code, _, err = launch("mistake", 1, "--max-restarts=2").end()
    assert code == 2
    assert "not restarted: exit code 2 is a mistake in the call" in err


def test_a_signal_is_passed_on_and_ranks_have_time_to_save(launch):
    job = launch("saves", 1, "--max-restarts=2")
    job.wait_for("there-0-0", "there-1-0")
    job.process.send_signal(signal.SIGTERM)
    code, out, err = job.end()
    assert code == 143
    assert out.count("saving") == 2
    assert "launch: stopped as asked, with its state saved; not restarted: it was told to" in err
    assert "lines" not in err
    assert not job.left()


def test_a_signal_that_a_scheduler_sends_to_all_comes_to_each_rank_once(launch):
    job = launch("saves")
    job.wait_for("there-0-0", "there-1-0")
    for pid in job.pids():
        os.kill(pid, signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)
    code, out, _ = job.end()
    assert code == 143
    assert out.count("saving") == 2


@pytest.mark.slow  # of SIGINT; test_two_signals_end_all_although_nobody_reads is of SIGTERM
def test_a_second_signal_ends_all_at_once(launch):
    job = launch("ignores", 1, "--grace=1000")  # which is not waited for
    job.wait_for("there-0-0", "there-1-0")
    job.process.send_signal(signal.SIGINT)
    job.wait_for("heard-0", "heard-1")
    job.process.send_signal(signal.SIGINT)
    code, _, _ = job.end()
    assert code == 137
    assert not job.left()


def test_a_lost_terminal_lets_ranks_save(launch):
    job = launch("saves", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    job.wait_for("there-0-0", "there-1-0")
    job.process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    job.process.send_signal(signal.SIGHUP)
    code, out, _ = job.end()
    assert code == 143
    assert out.count("saving") == 2


def test_a_stdout_that_nobody_reads_stops_nothing(launch, tmp_path):
    job = launch("talks", 1, "--step-timeout=2")
    job.wait_for("there-0-0", "there-1-0")
    assert job.process.wait(LIMIT_S) == 1
    assert "made no progress in training" in job.process.stderr.read()
    assert not job.left()
    for rank in range(2):
        text = (tmp_path / "logs" / "attempt-0" / f"rank-{rank}.log").read_text()
        assert text.count("of many") == 20000


def test_two_signals_end_all_although_nobody_reads(launch):
    job = launch("talks and ignores", 1, "--grace=1000", stderr=subprocess.STDOUT)
    job.wait_for("there-0-0", "there-1-0")
    job.process.send_signal(signal.SIGTERM)
    job.wait_for("heard-0", "heard-1")
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(LIMIT_S) == 137
    assert not job.left()


@pytest.mark.parametrize("output", [pytest.param("full", marks=pytest.mark.slow), "closed", "log"])
def test_ranks_do_not_die_of_an_output_that_cannot_be_written(launch, tmp_path, output):
    pipes = {}
    if output == "full":
        pipes["stdout"] = os.open("/dev/full", os.O_WRONLY)
    if output == "closed":
        pipes["preexec_fn"] = lambda: os.close(1)
    if output == "log":
        (tmp_path / "logs" / "attempt-0").mkdir(parents=True)
        (tmp_path / "logs" / "attempt-0" / "rank-1.log").symlink_to("/dev/full")
    code, _, err = launch("talks and ends", **pipes).end()
    assert code == 0, err
    name = f"{tmp_path}/logs/attempt-0/rank-1.log" if output == "log" else "to stdout"
    assert err.count(f"[launch] launch: cannot write {name} (") == 1


def test_a_log_dir_that_cannot_be_written_is_a_mistake_in_the_call(launch, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = launch("ends", 1, f"--log-dir={tmp_path}/file/logs").end()
    assert code == 2
    assert "cannot write the ranks' output to" in err
    assert "give a writable folder by --log-dir=DIR" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("mode", ["sleeps", "keeps a child"])
def test_ranks_die_with_their_launcher(launch, mode):
    job = launch(mode)
    job.wait_for("there-0-0", "there-1-0")
    job.process.kill()
    job.process.wait()
    ends = time.monotonic() + LIMIT_S
    while job.left():
        assert time.monotonic() < ends
        time.sleep(0.01)


# Two launchers on one machine, as if they were on two.


@pytest.fixture
def nodes(launch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def nodes(mode, at_fault, *flags, tokens=("", ""), graces_s=(60, 60)):
        every = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", *flags]
        return [
            launch(
                mode,
                at_fault,
                *every,
                f"--node-rank={node}",
                f"--grace={graces_s[node]}",
                environment={"TFACCEL_LAUNCH_TOKEN": token},
            )
            for node, token in enumerate(tokens)
        ]

    return nodes


def test_two_nodes_of_two_ranks_run_a_job(nodes, tmp_path):
    for job in nodes("ends", 1, tokens=("secret", "secret")):
        code, _, err = job.end()
        assert code == 0, err
    workers = [
        json.loads(json.loads((tmp_path / f"rank-{rank}-0").read_text())[1]["TF_CONFIG"])
        for rank in range(4)
    ]
    assert [each["task"]["index"] for each in workers] == [0, 1, 2, 3]
    assert all(each["cluster"] == workers[0]["cluster"] for each in workers)


@pytest.mark.slow
def test_p6_a_rank_that_fails_on_one_node_ends_both_and_both_start_again(nodes):
    first, second = nodes("exits once", 2, "--max-restarts=1")
    for job in (first, second):
        code, _, err = job.end()
        assert code == 0, err
        assert "rank 2 ended with exit code 3; restart 1 of 1" in err


def test_p6_both_nodes_name_the_rank_at_fault_and_its_error(nodes):
    for job in nodes("raises", 3):
        code, _, err = job.end()
        assert code == 1
        assert "launch: rank 3 ended with exit code 1; not restarted" in err
        assert "its first error: ValueError: row 7 is broken" in err
        assert not job.left()


def test_p3_a_rank_that_hangs_on_another_node_says_where_on_its_own(nodes):
    first, second = (job.end() for job in nodes("sleeps", 3, "--step-timeout=2"))
    for code, _, err in (first, second):
        assert code == 1
        assert "launch: rank 3 made no progress in training" in err
    assert "stacks" not in first[2]
    assert "in waits_for_nobody\n" in second[2]
    assert "; the stacks of rank 3 are in its log in " in second[2]


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_p6_a_node_that_is_lost_is_named_by_the_other(nodes, lost):
    jobs = nodes("sleeps", 3, "--node-timeout=2")
    for job in jobs:
        job.wait_for("there-0-0", "there-3-0")
    jobs[lost].process.kill()
    jobs[lost].process.wait()
    code, _, err = jobs[1 - lost].end()
    assert code == 1
    assert ("node 1 (127.0.0.1) is lost" if lost else "node 0's launcher at 127.0.0.1:") in err
    assert not jobs[1].left()


def test_p6_a_mistake_is_every_nodes_exit_code_though_a_scheduler_ends_them_then(nodes):
    first, second = nodes("mistake of one that others outlive", 0, graces_s=(1, 1000))
    first.wait_for("there-3-0")
    # Slurm's srun -K1 ends the other launchers once the first has ended ill.
    code, _, err = first.end()
    assert code == 2, err
    assert second.process.poll() is None
    while second.process.poll() is None:  # in its last milliseconds too
        second.process.send_signal(signal.SIGTERM)
        time.sleep(0.002)
    code, _, err = second.end()
    assert code == 2, err
    assert not second.left()


@pytest.mark.slow
def test_the_second_of_two_launchers_of_one_node_is_sent_away(nodes, launch):
    first, second = nodes("saves slowly", 0)
    for job in (first, second):
        job.wait_for("there-0-0", "there-3-0")
    again = launch(*second.arguments)
    code, _, err = again.end()
    assert code == 2, err
    assert "two launchers are node 1, the first one on 127.0.0.1; give" in err
    for job in (first, second):
        code, _, err = job.end()
        assert code == 0, err


@pytest.mark.slow
def test_a_launcher_without_the_token_is_refused(nodes):
    first, second = nodes("ends", 1, "--start-timeout=4", tokens=("secret", "other"))
    code, _, err = second.end()
    assert code == 2
    assert "rejects the token of TFACCEL_LAUNCH_TOKEN" in err
    code, _, err = first.end()
    assert code == 1
    assert "node 1 did not join within 4 s" in err
