"""What file managers, archives and editors leave in folders of images: no part of the data.

is_clutter(".ipynb_checkpoints"), is_clutter("__MACOSX"), is_clutter("Thumbs.db")
"""

# In lowercase. Names that start with a dot are passed over anyway.
NAMES = frozenset(
    {
        "$recycle.bin",
        "@eadir",  # Synology's thumbnails
        "__macosx",  # of archives that macOS has made
        "__pycache__",
        "desktop.ini",
        "ehthumbs.db",
        "icon\r",
        "lost+found",
        "system volume information",
        "thumbs.db",
    }
)


def is_clutter(name: str) -> bool:
    """Returns whether a file or folder of that name is passed over in every source."""
    return name.startswith(".") or name.lower() in NAMES
