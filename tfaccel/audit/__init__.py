"""What can be said of data and their loader before anything is trained.

files.py           which images cannot be trained on, and why
proof.py           whether a loader gives every example once, in a new order, with draws of its own
contact_sheet.py   augmented examples with their labels, to look at
run.py             all three: `tfaccel audit`
"""
