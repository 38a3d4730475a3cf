"""Lets TensorFlow and Keras work in another thread as they do in this one.

Both keep much for each thread: the default graph and its devices, names and control dependencies,
the strategy in scope, Keras's dtype policy, a default `tf.summary` writer, and more. A new thread
starts without. Gradient tapes are not carried over: no thread can record for another.

    context = carried_over()
    threading.Thread(target=run_within, args=(context,)).start()    # with context(): ...

Private names relied on:
  TensorFlow 2.21: the stacks of a Graph, python.eager.context's device and callbacks, and
    python.ops.summary_ops_v2._summary_state. tf.distribute carries the same to its threads.
  Keras 3.15: src.backend.common.global_state.GLOBAL_STATE_TRACKER.
"""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager import context
from tensorflow.python.ops import summary_ops_v2

from tfaccel.keras_internals import function_names

# What a Graph keeps for each thread, and how it is copied.
_STACKS = {
    "_device_function_stack": lambda stack: stack.copy(),
    "_colocation_stack": lambda stack: stack.copy(),
    "_control_dependencies_stack": list,
    "_distribution_strategy_stack": list,
    "_variable_creator_stack": list,
    "_name_stack": str,
}


def carried_over() -> Callable[[], contextlib.AbstractContextManager]:
    """Returns a function that makes a context, to be entered in another thread.

    Within the context, that thread has what this thread has now. It is entered once for a thread,
    and changes there are not carried back, except what Keras keeps under a new name, such as its
    global generator of random numbers.
    """
    graphs = [_Graph()]
    with tf.init_scope():
        graphs.insert(0, _Graph())
    ours, numbers = vars(global_state.GLOBAL_STATE_TRACKER), function_names.numbers_in_use()
    of_keras, of_summaries = dict(ours), dict(vars(summary_ops_v2._summary_state))
    is_filtered = tf.debugging.is_traceback_filtering_enabled()
    device, callbacks = context.context().device_name, context.context().op_callbacks
    scope = tf.get_current_name_scope()

    @contextlib.contextmanager
    def carried() -> Iterator[None]:
        theirs = vars(global_state.GLOBAL_STATE_TRACKER)
        # Keras changes its lists in place: stacks of scopes, and variables without a value yet.
        theirs.update(
            (name, list(each) if isinstance(each, list) else each)
            for name, each in of_keras.items()
        )
        vars(summary_ops_v2._summary_state).update(of_summaries)
        if is_filtered:
            tf.debugging.enable_traceback_filtering()
        else:
            tf.debugging.disable_traceback_filtering()
        context.context()._thread_local_data.op_callbacks = list(callbacks)
        with contextlib.ExitStack() as stack:
            for each in graphs:
                stack.enter_context(each.entered())
            if tf.executing_eagerly():  # else the graph has both
                stack.enter_context(tf.device(device or None))
                stack.enter_context(
                    tf.name_scope(f"{scope}/") if scope else contextlib.nullcontext()
                )
            stack.enter_context(function_names.using(numbers))
            yield
        for name in theirs.keys() - of_keras.keys():
            if ours.get(name) is None:
                ours[name] = theirs[name]

    return carried


class _Graph:
    """The default graph, its state for this thread, and whether operations run at once."""

    def __init__(self):
        self._graph, self._is_eager = tf.compat.v1.get_default_graph(), tf.executing_eagerly()
        if not self._is_eager:
            # Otherwise a `tf.device` in one thread holds for the operations of the others.
            self._graph.switch_to_thread_local()
        self._stacks = {name: copy(getattr(self._graph, name)) for name, copy in _STACKS.items()}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Within the context, this thread has them."""
        # Not the `as_default` of a function's graph, which would also end its scope.
        with tf.Graph.as_default(self._graph), contextlib.ExitStack() as stack:
            for name, value in self._stacks.items():
                setattr(self._graph, name, _STACKS[name](value))
            if self._is_eager:
                stack.enter_context(context.eager_mode())
            yield
