"""`tfaccel search`: Optuna chooses the fields of a config, and each trial is a training of its own.

Optuna's sampler chooses, its pruner ends bad trials early, and its storage keeps what happened.
Here are only the parts that start trainings: `space.py` reads the user's file, `slots.py` finds the
GPUs, `shared_study.py` lets several processes and later starts share a study, `trial.py` runs a
trial, and `run.py` is the whole search. No module here imports TensorFlow.
"""
