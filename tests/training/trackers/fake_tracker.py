"""A tracker that keeps what it is given, for tests that need no library."""

from tfaccel.training.trackers import Tracker


class FakeTracker(Tracker):
    """Keeps the runs in a list: it is the server, too."""

    key, name = "mlflow", "Fake"
    runs: list  # of the dicts of runs; a test sets it

    def __init__(self, *, project=None):
        self.project, self.faults = project, []

    def begin(self, before, *, name, config, folder):
        if before is None:
            self.runs.append({"name": name, "config": config, "records": [], "exports": []})
        self.run = self.runs[int(before) if before is not None else -1]
        self.run |= {"config": config, "outcome": "running"}
        return str(self.runs.index(self.run))

    def log(self, record):
        if self.faults:
            raise self.faults.pop()
        self.run["records"].append(record)

    def export(self, path):
        self.run["exports"].append(path)

    def end(self, outcome):
        self.run["outcome"] = outcome
