"""Finds how fast a training run could be, what limits it, and which loader settings are faster.

api.py           `tfaccel.profile`: the three rates of a script's model and loader
ceilings.py      measures the rates of the step alone, the loader alone, and the real run
resident.py      gives the step the same batch again and again
rates.py         turns times into images per second
verdict.py       decides from the rates what limits the run, and gives advice
table.py         the rates and the verdict as text, HTML and JSON
trace.py         writes TensorFlow's own profile of some steps
knobs.py         the loader settings that a search may change
search.py        searches for the fastest setting; it calls a function that measures one
search_table.py  the result of a search as text, HTML and JSON
config_file.py   writes the result of a search as a config file
child.py         the measurements that run in child processes
options.py       the checked flags of `tfaccel profile`
run.py           measures an experiment and searches, through child processes
command.py       `tfaccel profile` itself: measures, prints and writes
"""
