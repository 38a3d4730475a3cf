"""Lists and fetches the files of a store, and says in one sentence why it cannot.

    store = Store("s3://bucket/photos")
    store.files_below("s3://bucket/photos/training")     # [Entry(url, size, version), ...]
    store.fetch("s3://bucket/photos/training/cat/1.jpg", "/tmp/1.jpg")

Each kind of store is a library of fsspec: s3fs for s3://, gcsfs for gs://, aiohttp for https://.
They find credentials where their own tools do: variables such as AWS_ACCESS_KEY_ID, files such as
~/.aws/credentials, or the role of the machine.
"""

import contextlib
import errno
import hashlib
import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

from tfaccel.common.errors import RunError, UserError
from tfaccel.common.extras import how_to_add, is_installed
from tfaccel.common.redact import shown
from tfaccel.data.stores.urls import check_spelled, scheme

log = logging.getLogger("tfaccel")

# Seconds to wait before a fetch is tried again, after an error that may pass.
PAUSES_S = (0.5, 2.0, 8.0)
CONNECT_S, READ_S = 30, 60  # the longest waits for a web server; a file may take any time in all
# What stores say of a file that tells one version from another; the first that is there counts.
VERSIONS = (
    *("ETag", "etag", "generation", "md5Hash", "content_md5", "version_id"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created"),
)
UNKNOWN = -1  # the size of a file of which the store has not been asked
_WITHOUT_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
_REFUSED = (
    *("AccessDenied", "Access Denied", "Forbidden", "Unauthorized"),
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "403", "401"),
)
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public "
    "bucket",
    "gs": "run `gcloud auth application-default login`, or set FSSPEC_GS_TOKEN=anon for a public "
    "bucket",
}


class Entry(NamedTuple):
    """A file of a store.

    Attributes:
      url: where it is.
      size: in bytes; UNKNOWN if the listing does not say.
      version: a number that changes with the file; 0 if nothing is known of it.
    """

    url: str
    size: int
    version: int


class Store:
    """One kind of store. Several threads may use it at once."""

    def __init__(self, url: str):
        """Opens the store of a URL. Nothing is asked of it yet.

        Raises:
          UserError: the library for such URLs is not installed, there is none, or the scheme has
            capital letters.
        """
        if not is_installed("fsspec"):
            raise UserError(f"{url} needs fsspec; add the extra: {how_to_add('remote')}")
        import fsspec

        check_spelled(url)
        self._scheme = scheme(url)
        if "::" in url:
            raise UserError(f"{url} is a chain of URLs; give the URL of the files alone")
        options = {"use_listings_cache": False}  # of a million files it would take a gigabyte
        if self._scheme in ("http", "https") and is_installed("aiohttp"):
            import aiohttp

            waits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S)
            options["client_kwargs"] = {"timeout": waits}
        try:
            self._files = fsspec.url_to_fs(url, **options)[0]
        except ImportError as error:
            raise UserError(
                f"{url} needs a library that is not installed ({_in_short(error)}); add the extra: "
                f"{how_to_add('remote')}"
            ) from None
        except ValueError as error:
            raise UserError(
                f"{url} is of a kind that fsspec does not know ({_in_short(error)}); expected "
                "s3://, gs://, https:// or a path of this machine"
            ) from None

    def files_below(self, url: str) -> list[Entry]:
        """Returns all files below a folder, in no special order; [] if there are none.

        Raises:
          UserError: the store cannot be listed.
        """
        with _explained(url):
            found = self._files.find(url, detail=True)
            if not found:
                self._files.ls(url)  # says why there are none
        return [self._entry(name, each) for name, each in found.items()]

    def check_folder(self, url: str) -> None:
        """Raises UserError unless there is such a folder."""
        with _explained(url):
            self._files.ls(url)

    def matching(self, pattern: str) -> list[Entry]:
        """Returns the files that match a pattern with * or [], in no special order.

        Raises:
          UserError: the store cannot be listed.
        """
        with _explained(pattern):
            found = self._files.glob(pattern, detail=True)
            if not found:
                self._files.ls(pattern.rpartition("/")[0])
        entries = found.items()
        return [self._entry(name, each) for name, each in entries if each["type"] == "file"]

    def entry(self, url: str) -> Entry:
        """Returns the size and the version of a file.

        Raises:
          FileNotFoundError: there is no such file.
          UserError, RunError: the store cannot be asked.
        """
        with _explained(url, starts=False):
            return self._entry(url, self._files.info(url))

    def fetch(self, url: str, path: str) -> None:
        """Writes a whole file to a path.

        Raises:
          FileNotFoundError: there is no such file.
          OSError: the path cannot be written.
          UserError, RunError: the file cannot be read.
        """
        self._again(url, lambda: self._files.get_file(url, path))

    def fetch_range(self, url: str, start: int, end: int) -> bytes:
        """Returns a range of a file's bytes; the errors are those of `fetch`."""
        return self._again(url, lambda: self._files.cat_file(url, start=start, end=end))

    def _again(self, url: str, call):
        """Returns what a call returns, which is made again after an error that may pass."""
        for pause_s in (*PAUSES_S, None):
            try:
                with _explained(url, starts=False):
                    return call()
            except RunError as error:
                if pause_s is None:
                    raise
                log.info("data: %s; tries again", error)
                time.sleep(pause_s)

    def _entry(self, name: str, info: dict) -> Entry:
        said = next((str(info[each]) for each in VERSIONS if info.get(each)), "")
        number = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest())
        size = info.get("size")
        return Entry(
            name if "://" in name else f"{self._scheme}://{name.lstrip('/')}",
            UNKNOWN if size is None else int(size),
            number if said else 0,
        )


@contextlib.contextmanager
def _explained(url: str, *, starts: bool = True) -> Iterator[None]:
    """Within the context, replaces the errors of a store's library by sentences.

    Args:
      url: the place that is asked for.
      starts: whether the data are just being opened, where a missing place is a mistake.

    Raises:
      FileNotFoundError: there is no such file, unless `starts`.
      UserError: the place is missing or may not be read.
      RunError: the store cannot be reached.
    """
    try:
        yield
    except FileNotFoundError as error:
        if not starts:
            raise FileNotFoundError(errno.ENOENT, "no such file in the store", url) from error
        no_bucket = "bucket does not exist" in str(error)
        what = "there is no such bucket" if no_bucket else "nothing is there"
        raise UserError(f"{url} cannot be read: {what}; give the URL of the images") from None
    except (UserError, RunError):
        raise
    except Exception as error:  # each library has errors of its own
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise  # of this host's disk
        name, said = type(error).__name__, _in_short(error)
        if name in _WITHOUT_CREDENTIALS:
            fix = _CREDENTIALS.get(scheme(url), "give them as the library for such URLs wants them")
            raise UserError(f"{url} cannot be read without credentials; {fix}") from None
        if isinstance(error, PermissionError) or any(each in said for each in _REFUSED):
            raise UserError(
                f"{url} may not be read with these credentials ({said}); use others, or ask for "
                "the right to list and to read it"
            ) from None
        raise RunError(
            f"{url} cannot be read ({name}: {said}); check the network and the store, and start "
            "again: what was fetched is kept"
        ) from error


def _in_short(error: Exception) -> str:
    """Returns the first line of an error's text."""
    lines = shown(str(error)).splitlines() or [type(error).__name__]
    return lines[0][:200]
