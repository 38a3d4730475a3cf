#!/usr/bin/env bash
# TensorFlow: tf.function passes a decorated function the default values of the function that it decorates.
#
# Version: tensorflow 2.21.0, Python 3.11 to 3.13.
#
# Behaviour: a decorator that uses functools.wraps may take fewer parameters than the function that it decorates, as
# `def call(*arguments)` does. Python calls it with what the caller passes. tf.function follows `__wrapped__` to the
# inner function, takes that one's signature for its own, fills in the default values, and passes them to the
# decorator. So the decorator gets an argument that nobody passed. A default of a keyword-only parameter comes as a
# keyword, and so do the keywords of a functools.partial. A decorator of positional arguments then fails with
# "TypeError: ... got an unexpected keyword argument", though the same call works without tf.function. The cure is to
# decorate a function that has no such default, or to take **keywords, too.
#
# Output seen:
#   positional default: called by Python 1 positional, {}; by tf.function 2 positional, {}
#   keyword-only default: called by Python 1 positional, {}; by tf.function 1 positional, {'factor': 3}
#   functools.partial: called by Python 1 positional, {}; by tf.function 1 positional, {'factor': 3}
#   a decorator of positional arguments alone: by Python 6.0; by tf.function TypeError
#
# The script exits with 1 if tf.function passes what the caller passed, or the last call works.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet tensorflow==2.21.0

CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=3 "$work/env/bin/python" - <<'PY'
import functools
import sys

import tensorflow as tf


def with_default(x, factor=3):
    return x * factor


def with_keyword(x, *, factor=3):
    return x * factor


def without_default(x, *, factor):
    return x * factor


def watched(function, calls):
    @functools.wraps(function)
    def call(*arguments, **keywords):
        calls.append((len(arguments), keywords))
        return function(*arguments, **keywords)

    return call


def positional(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)

    return call


found = []
for name, function in (
    ("positional default", with_default),
    ("keyword-only default", with_keyword),
    ("functools.partial", functools.partial(without_default, factor=3)),
):
    calls = []
    call = watched(function, calls)
    call(tf.constant(2.0))
    tf.function(call, autograph=False)(tf.constant(2.0))
    (one, one_named), (other, other_named) = calls
    print(f"{name}: called by Python {one} positional, {one_named}; ", end="")
    print(f"by tf.function {other} positional, {other_named}")
    found.append((one, one_named) == (1, {}) and (other, other_named) != (1, {}))

call = positional(functools.partial(without_default, factor=3))
try:
    by_tensorflow = tf.function(call, autograph=False)(tf.constant(2.0)).numpy()
except TypeError:
    by_tensorflow = "TypeError"
by_python = call(tf.constant(2.0)).numpy()
print(f"a decorator of positional arguments alone: by Python {by_python}; by tf.function {by_tensorflow}")
sys.exit(0 if all(found) and (by_python, by_tensorflow) == (6.0, "TypeError") else 1)
PY
