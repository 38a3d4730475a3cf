"""From image files to each replica's batches.

`image_folder` finds the files, `shards` decides which replica reads which of them when, `dali`
turns them into tensors, `distribute` gives them to Keras; `digits` is the embedded data set.
"""
