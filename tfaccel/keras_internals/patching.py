"""Replaces an attribute of a class or module for a while."""

import contextlib


@contextlib.contextmanager
def patched(owner, name: str, value):
    """Within the context, an attribute of a class or module has another value."""
    is_own, original = name in owner.__dict__, owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:  # a base class has it
            delattr(owner, name)
