"""Images in object stores and on web servers, which are read through a cache on this host.

  urls.py      which places are URLs
  store.py     lists and fetches files, by fsspec: s3://, gs://, https:// and others
  cache.py     a folder of fetched files that never takes more than a number of bytes
  files.py     the files of a source: fetched when they are read, or before
  ahead.py     fetches the files of the batches that come next

The listing comes from the store (sources/stored.py), and the loaders read the fetched files. So the
order, the length, a resume and an evaluation are those of the same files on a disk.
"""
