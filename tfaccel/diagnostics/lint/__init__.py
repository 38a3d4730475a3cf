"""Finds faults in an experiment, and reasons for idle Tensor Cores or input, before it runs.

facts.py           a model, its data and its step as plain values
products.py        a model's matrix products: their work, their tiles, the first and the last ones
words.py           numbers, shapes and layers in words
trace.py           records one symbolic call of a Keras model
read_model.py      turns the recorded call into facts
read_data.py       turns a data set into facts
script.py          findings in the source of a script
script_pixels.py   findings about the pixels in a script
script_text.py     reads a script
fits.py            rules: whether the model fits the data
layers.py          rules about layers, for any data
tensor_cores.py    rules about sizes that waste tiles of Tensor Cores
batches.py         rules about the batch size
speed.py           rules about how the step runs and how the data arrives
findings.py        a finding, and the table of findings
padded_head.py     the fix: pads a head for Tensor Cores without changing its outputs
light.py           measures the cost of activations that compute more than ReLU
measure.py         times the steps of several models in turn
fix.py             pads, measures, and keeps the padded model if it is faster
lint.py            `tfaccel.lint`, in order
run.py             `tfaccel lint`

Each rule is a function of the facts; `lint.RULES` lists them.
"""
