"""The loaders: each turns a source's bytes into one replica's batches.

`DaliStream` decodes on the GPU or the CPU, and `TfDataStream` on the CPU. `MemoryStream` reads
images that `decode_all` has decoded into memory or `cached` to disk. A stream is an endless
iterator that knows no epochs and draws no random numbers. It takes:

  source: the images.
  images: an ImageConfig with size, channels and normalisation.
  feed: a Feed with the examples and draws of each batch.
  placement: a Placement with the replica's device and the number of threads.
  dtype: dtype of the images, "float16" or "float32".

It yields (image, label) or, for pairs, (image, target), on the replica's device. A batch always has
the plan's `rows_per_replica` rows:

  image: [rows, height, width, channels] float16 or float32, (pixel / 255 - mean) / std,
    or with another divisor: see `ImageConfig.pixel_scale`.
  label: one class, [rows] int64 (TensorFlow passes int32 between functions through the host, so
    that each step would wait for the GPU); or several classes or numbers, [rows, labels] float32.
  target: like image; if images.targets is "mask", [rows, height, width, 1] uint8, the grey levels
    of the file.
"""
