"""Names that file managers, archives and editors leave in folders of images.

is_clutter(".ipynb_checkpoints"), is_clutter("__MACOSX"), is_clutter("Thumbs.db")
"""

# In lowercase. Names that start with a dot are always skipped.
NAMES = frozenset(
    {
        "$recycle.bin",
        "@eadir",  # Synology's thumbnails
        "__macosx",  # in archives that macOS has made
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
    """Returns whether every source skips a file or folder of that name."""
    return name.startswith(".") or name.lower() in NAMES
