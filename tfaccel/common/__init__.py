"""What every room needs: errors, checks of values, words and tables, files and paths."""
