"""`tfaccel help TOPIC`: the pages, one about each task, which lie in the rooms that do it."""

import pathlib

from tfaccel.common.errors import UserError, did_you_mean

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
    "own-images": "data/README.md",
    "data": "data/LOADERS.md",
    "script": "training/SCRIPT.md",
    "transfer": "experiment/models/README.md",
    "segmentation": "experiment/README.md",
    "several-gpus": "step/README.md",
    "several-hosts": "launch/README.md",
    "surviving": "training/README.md",
    "export": "export/README.md",
    "diagnostics": "diagnostics/README.md",
    "notebook": "process/README.md",
    "security": "common/SECURITY.md",
}


def topics() -> str:
    """Returns the list of pages, for `tfaccel --help`: a line for each, with its heading."""
    lines = (f"  tfaccel help {topic:<14} {_heading(page(topic))}\n" for topic in PAGES)
    return "\nPages, one about each task:\n" + "".join(lines)


def page(topic: str) -> str:
    """Returns the page about a topic, as Markdown.

    Raises:
      UserError: there is no such page.
    """
    if topic not in PAGES:
        cure = did_you_mean(topic, list(PAGES)) or f"; the pages are {', '.join(PAGES)}"
        raise UserError(f"there is no page '{topic}'{cure}")
    return (ROOT / PAGES[topic]).read_text(encoding="utf-8")


def _heading(text: str) -> str:
    return text.split("\n", 1)[0].removeprefix("# ")
