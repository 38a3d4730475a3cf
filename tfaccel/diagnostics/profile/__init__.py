"""How fast a training run could be, what holds it back, and which loader settings suit it better.

rates.py and verdict.py are arithmetic and words; ceilings.py measures; search.py tries settings by
a function that is given to it; run.py puts them together for `tfaccel profile`.
"""
