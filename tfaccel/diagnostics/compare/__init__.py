"""The same job in every way that this machine has, measured: what is faster, and as right.

variants.py    which variants there are, in which order, and what config each is
judge.py       whether one is faster beyond the spread, and whether its losses agree
contest.py     the best so far against one challenger after the other, in turns
arm.py         a variant's process, as this one sees it
child.py       the same from within: it trains, and times what it is told to
facts.py       what decides which variants there are
table.py       what was measured, as text, Markdown, HTML and JSON
plots.py       pictures of it
page.py        the HTML page, and the folder with all of it
run.py         `tfaccel.compare` and `tfaccel compare`, in order

The room is not called `compare`: Python would put the module in the place of the function
`tfaccel.compare`. Two processes are alive at a time, and one of them trains.
"""
