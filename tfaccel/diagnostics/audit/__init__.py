"""What can be said of data and their loader before anything is trained.

run.py             all of it: `tfaccel audit`
dry_epochs.py      two epochs through a real loader: `run.audit`, too
proof.py           whether a loader gives every example once, in a new order, with draws of its own
contact_sheet.py   augmented examples with their labels, to look at

Which files cannot be trained on is data/scan/'s to say: loaders ask it too.
"""
