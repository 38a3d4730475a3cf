"""From where images lie to each replica's batches.

`sources` find the examples; `shards`, `draws` and `feed` decide, in pure arithmetic, which of them
each replica reads when and with which random numbers; one of the `loaders`, which `choose` picks
and `images` opens, makes tensors of them; `distribute` gives these to Keras. `user_examples` and
`user_pipeline` stand in the loaders' place.
"""
