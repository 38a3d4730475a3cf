"""What people look at after a run: its curves, and the page that has all of it."""
