"""Reads examples and gives each replica its batches.

`sources` finds the examples. `shards`, `draws` and `feed` decide, in pure arithmetic, which
examples each replica reads at each step, and with which random numbers. `choose` picks one of the
`loaders`, which turn the examples into tensors, and `images` opens it. `distribute` passes the
tensors to Keras. `user_examples` and `user_pipeline` replace the loaders for a user's own data.
"""
