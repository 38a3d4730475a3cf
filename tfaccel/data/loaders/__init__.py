"""Each way from a source's bytes to one replica's batches, and what they share.

A stream takes the source, a Feed, which says what each batch holds, and a Placement; it is an
endless iterator that never ends an epoch and draws nothing by itself. `DaliStream` decodes on the
GPU or the CPU, `TfDataStream` on the CPU; `MemoryStream` takes images that were decoded once, by
`decode_all` into memory or by `cached` on disk. Yields (image, label) or, for pairs, (image,
target), on the replica's device; rows is the plan's `rows_per_replica`, always:

  image: [rows, height, width, channels] float16 or float32, (pixel / 255 - mean) / std.
  label: [rows] int64: TensorFlow passes int32 from function to function by way of the host, and
    each step would wait for the GPU.
  target: like image; where images.targets is "mask", [rows, height, width, 1] uint8, grey values
    as they are.
"""
