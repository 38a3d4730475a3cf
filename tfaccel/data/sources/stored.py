"""Finds images in stores: class folders, shards, and the file of an image list.

files, labels, class_names = list_classes("s3://bucket/photos/training", cache_gib=50.0)
files = list_shards("s3://bucket/imagenet/train-*", cache_gib=50.0)
"""

import hashlib
import logging
import os
import pathlib
import urllib.parse
import uuid
from collections.abc import Iterable, Sequence

import numpy as np

from tfaccel.common.disk_errors import mib, not_written
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.data.file_names import FileNames
from tfaccel.data.sources.clutter import is_clutter
from tfaccel.data.stores.files import DEFAULT_CACHE_GIB, StoreFiles, open_cache
from tfaccel.data.stores.store import Entry, Store
from tfaccel.data.stores.urls import scheme
from tfaccel.process.cache_folder import cache_folder

log = logging.getLogger("tfaccel")

MAGIC = "*["  # characters of a pattern. "?" begins the query of a URL.


def list_classes(
    root: str, suffixes: tuple[str, ...], *, cache_gib: float
) -> tuple[StoreFiles, np.ndarray, list[str]]:
    """Lists class folders: the files by class and name, their classes, and the classes' names.

    Args:
      root: the URL of the folder of class folders.
      suffixes: suffixes of images, in lowercase.
      cache_gib: the bound of the cache, in GiB.

    Returns:
      The files; [num_files] int32, the class of each, an index into the names; the names, sorted.

    Raises:
      UserError: the folder is missing or empty, or holds something else than folders of images.
    """
    root = root.rstrip("/")
    store, classes, is_web = Store(root), {}, scheme(root) in ("http", "https")
    for entry in store.files_below(root):
        parts = _below(entry.url, root).split("/")
        if any(map(is_clutter, parts)) or not parts[-1]:  # some tools make empty files of folders
            continue
        if len(parts) != 2 or not parts[1].lower().endswith(suffixes):
            raise _stray(root, parts)
        name = urllib.parse.unquote(parts[0]) if is_web else parts[0]
        classes.setdefault(name, []).append(entry)
    if not classes:
        raise UserError(f"image folder {root} is empty; expected one folder of images per class")
    names = sorted(classes)
    entries = [each for name in names for each in sorted(classes[name])]
    files = _files(store, entries, cache_gib=cache_gib)
    counts = [len(classes[name]) for name in names]
    return files, np.repeat(np.arange(len(names), dtype=np.int32), counts), names


def _stray(root: str, parts: list[str]) -> UserError:
    wanted = "expected one folder per class with only images in it"
    if len(parts) == 1:
        return UserError(
            f"image folder {root} holds the file '{parts[0]}'; {wanted}: move the file away"
        )
    if len(parts) == 2:
        return UserError(
            f"class folder {root}/{parts[0]} holds '{parts[1]}', which is not an image; {wanted}: "
            "move it away"
        )
    return UserError(
        f"class folder {root}/{parts[0]} holds the folder '{parts[1]}'; {wanted}: is "
        f"{root}/{parts[0]} the image folder?"
    )


def list_shards(patterns: Sequence[str], skipped: tuple[str, ...], *, cache_gib: float):
    """Returns the shards that URLs with * or [] match, sorted, each once, as StoreFiles.

    Args:
      patterns: URLs of one kind of store.
      skipped: suffixes of files that are no shards.
      cache_gib: the bound of the cache, in GiB.

    Raises:
      UserError: nothing matches, a shard is missing or empty, or the store cannot be listed.
    """
    store, found = Store(patterns[0]), {}
    for pattern in patterns:
        if scheme(pattern) != scheme(patterns[0]):
            raise UserError(f"{patterns[0]} and {pattern} are in two stores; give those of one")
        for each in _matches(store, pattern):
            if not each.url.endswith(skipped):
                found[each.url] = each
    if not found:
        raise UserError(
            f"no shard matches {patterns[0]}; expected files that its * or [] stand for"
        )
    entries = [found[url] for url in sorted(found)]
    for each in entries:
        if each.size == 0:
            raise UserError(f"shard {each.url} is empty; write it again, or remove it")
    # A web server's listing has no sizes.
    entries = [each if each.version else store.entry(each.url) for each in entries]
    files = _files(store, entries, cache_gib=cache_gib, are_shards=True)
    if not files.fit:
        summary(
            "data: the %d shards of %s do not fit into the cache of %g GiB, so each image is "
            "fetched alone",
            len(files),
            patterns[0],
            cache_gib,
        )
    return files


def _matches(store: Store, pattern: str) -> list[Entry]:
    if any(each in pattern for each in MAGIC):
        return store.matching(pattern)
    try:
        return [store.entry(pattern)]
    except FileNotFoundError:
        raise UserError(f"shard {pattern} does not exist; give the URL of the shards") from None


def list_images(urls: FileNames, *, cache_gib: float) -> StoreFiles:
    """Returns the files of an image list, of whose sizes and versions nothing is known yet.

    Raises:
      UserError: the store's library is missing.
    """
    return StoreFiles(Store(urls[0]), urls, None, cache=open_cache(cache_gib))


def check_there(url: str, *, is_folder: bool) -> None:
    """Raises UserError unless a store has the folder, the file, or a file that matches a pattern.

    Args:
      url: the folder, the file or the pattern.
      is_folder: whether it is a folder.
    """
    store = Store(url)
    if is_folder:
        store.check_folder(url)
    elif any(each in url for each in MAGIC):
        list_shards([url], (), cache_gib=DEFAULT_CACHE_GIB)
    elif not is_there(url):
        raise UserError(f"{url} does not exist; give the URL of the images")


def is_there(url: str) -> bool:
    """Returns whether a store has a file."""
    try:
        Store(url).entry(url)
    except FileNotFoundError:
        return False
    return True


def fetched_list(url: str) -> pathlib.Path:
    """Returns a copy of an image list on this host. It is fetched at each start.

    Raises:
      UserError: there is no such file, or it cannot be read.
    """
    folder = cache_folder("lists") / hashlib.sha256(url.encode()).hexdigest()[:16]
    copy = folder / (url.rpartition("/")[2].partition("?")[0] or "list")
    unfinished = copy.with_name(f".{uuid.uuid4().hex}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        Store(url).fetch(url, str(unfinished))
        os.replace(unfinished, copy)
    except FileNotFoundError as error:
        if error.filename != url:
            raise RunError(f"{copy} {not_written(error, folder)}") from error
        raise UserError(f"image list {url} does not exist; give the URL of a list") from None
    except OSError as error:
        raise RunError(f"{copy} {not_written(error, folder)}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return copy


def _files(store: Store, entries: Iterable[Entry], *, cache_gib: float, **settings) -> StoreFiles:
    names = FileNames.of([each.url for each in entries])
    files = StoreFiles(store, names, entries, cache=open_cache(cache_gib), **settings)
    size = sum(max(0, each.size) for each in entries)  # nobody says the sizes on some web servers
    if size > cache_gib * 2**30 and not settings.get("are_shards"):
        summary(
            "data: %s with %s do not all fit into the cache of %g GiB, so a part of them is "
            "fetched in each epoch; raise data.store_cache_gib if the disk has room",
            *(counted(len(files), "file"), mib(size), cache_gib),
        )
    return files


def _below(url: str, root: str) -> str:
    return url.removeprefix(root).lstrip("/")
