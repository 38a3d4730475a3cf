"""Checks the data and its loader before training.

run.py             the whole check: `tfaccel audit`

The other parts are elsewhere: data/proof/ runs two epochs through a real loader, data/scan/ finds
files that cannot be trained on, and training/logs/ writes the contact sheet.
"""
