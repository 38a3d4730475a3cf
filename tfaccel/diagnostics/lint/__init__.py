"""What keeps Tensor Cores or the input idle in an experiment, or is plainly wrong, before it runs.

facts.py           a model, its data and its step as plain values
products.py        a model's matrix products: their work, their tiles, which are the ends
words.py           numbers, shapes and layers in words
trace.py           one symbolic call of a Keras model, watched
read_model.py      what it shows, as these facts
read_data.py       a data set to these facts
script.py          what a script's source alone shows
fits.py            rules: whether model and data belong together
layers.py          rules: what the layers do
tensor_cores.py    rules: which products Tensor Cores waste tiles on
batches.py         rules: what the size of the batch leaves empty, or makes noisy
speed.py           rules: how the step runs, and how the input comes
findings.py        a finding, and the table of them
padded_head.py     the fix: a head padded for Tensor Cores, whose outputs stay the same
light.py           ReLU in place of activations that compute more
measure.py         models' steps, timed in turn
fix.py             all three: padded, measured, and kept if it is faster; what activations cost
lint.py            `tfaccel.lint`, in order
run.py             `tfaccel lint`

The room is not called `lint`: Python would put the module in the place of the function
`tfaccel.lint`. Each rule is a function of the facts; `lint.RULES` lists them.
"""
