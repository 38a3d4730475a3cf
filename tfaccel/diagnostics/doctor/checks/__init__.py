"""Whether it fits: pure functions from facts to findings, each with what to do."""
