"""How much memory a step will need, estimated from its trace before XLA compiles it."""
