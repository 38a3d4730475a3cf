"""Trains the same job in every way that this machine offers, and reports which way is fastest.

A way to train is a variant: a loader, an arithmetic, XLA or not, and a number of GPUs. A variant
counts as better only if its losses also agree with those of the plain variant.

variants.py    the variants, their order, and the config of each
judge.py       decides whether a variant is faster beyond the spread, and whether its losses agree
contest.py     measures the best variant so far against one challenger after the other, in turns
arm.py         a variant's process, seen from the comparison
child.py       the same process from within: it trains, and times steps on request
protocol.py    the files through which the two talk
pace.py        how many steps fit into the time
table.py       the result as text, Markdown, HTML and JSON
plots.py       the result as pictures
page.py        the HTML page, and the folder with the whole report
run.py         `tfaccel.compare` and `tfaccel compare`, in order

At most two processes are alive at a time, and only one of them trains.
"""
