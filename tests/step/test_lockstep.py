"""Lanes run in turn, one at a time, and meet; eagerly and while a function is traced."""

import contextlib
import io
import os
import pdb
import signal
import threading
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfaccel.common.errors import UserError
from tfaccel.keras_internals import function_names
from tfaccel.keras_internals.one_replica import own_losses
from tfaccel.keras_internals.patching import patched, with_entry
from tfaccel.step import lockstep


@pytest.fixture(autouse=True)
def no_thread_stays():
    before = set(threading.enumerate())
    yield
    assert {
        each for each in threading.enumerate() if each.name.startswith(lockstep.THREAD)
    } <= before


def test_lanes_run_in_turn_and_each_gets_all_values():
    order = []

    def lane(lane):
        order.append(f"{lane.index} begins")
        first = lane.meet(10 + lane.index)
        order.append(f"{lane.index} goes on")
        second = lane.meet(first[lane.index] * 2)
        return lane.index, first, second

    results = lockstep.run([lane] * 3)
    assert results == [(index, [10, 11, 12], [20, 22, 24]) for index in range(3)]
    assert order == [f"{index} {does}" for does in ("begins", "goes on") for index in range(3)]


def test_one_lane_is_a_call_in_this_thread():
    def lane(lane):
        return threading.current_thread(), lane.meet("own")

    assert lockstep.run([lane]) == [(threading.current_thread(), ["own"])]


def test_the_first_exception_ends_all_lanes_and_shows_its_line():
    ended = []

    def lane(lane):
        try:
            lane.meet(None)
            if lane.index == 1:
                raise KeyError("mine")  # this line is shown
            lane.meet(None)
        except Exception:
            ended.append(f"{lane.index} fails")
            raise
        finally:
            ended.append(f"{lane.index} ends")

    with pytest.raises(KeyError, match="mine") as error:
        lockstep.run([lane] * 3)
    assert ended == ["1 fails", "1 ends", "0 ends", "2 ends"]
    assert "this line is shown" in traceback.extract_tb(error.value.__traceback__)[-1].line


def test_a_lane_that_holds_on_to_the_end_of_all_ends_too():
    def lane(lane):
        with contextlib.suppress(BaseException):
            lane.meet(None)
        with contextlib.suppress(BaseException):
            lane.meet(None)
        if lane.index == 1:
            raise ValueError("wrong")

    def wrong(lane):
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        lockstep.run([lane, wrong])


@pytest.mark.parametrize("meets_more", [0, 1])
def test_different_numbers_of_meetings_are_explained(meets_more):
    def lane(lane):
        lane.meet(None)
        if lane.index == meets_more:
            lane.meet(None)

    with pytest.raises(UserError) as error:
        lockstep.run([lane] * 2, names=["replica 0", "replica 1"])
    words = f"replica {meets_more} waits in its collective number 2, but replica {1 - meets_more}"
    assert str(error.value).startswith(f"{words} has ended after 1: the steps make different")


def test_what_a_lane_replaces_holds_only_while_it_runs():
    class Owner:
        name = "nobody"

    entries, outside = {"name": "nobody"}, []

    def lane(lane):
        own = f"lane {lane.index}"
        with patched(Owner, "name", own), with_entry(entries, "name", own):
            lane.meet(None)
            with with_entry(entries, "more", own):
                del entries["more"]  # and it stays deleted in this lane
                lane.meet(None)
                assert "more" not in entries
            seen = [Owner.name, entries["name"], lane.meet(None) and Owner.name]
        outside.append((Owner.name, dict(entries)))
        return seen

    results = lockstep.run([lane] * 2)
    assert results == [["lane 0"] * 3, ["lane 1"] * 3]
    assert outside == [("nobody", {"name": "nobody"})] * 2
    assert (Owner.name, entries) == ("nobody", {"name": "nobody"})


def test_a_lane_within_a_lane_meets_in_its_place():
    class Owner:
        name = "nobody"

    def replica(outer):
        def part(inner):
            with patched(Owner, "name", (outer.index, inner.index)):
                of_parts = inner.meet(inner.index)
                found = outer.meet((outer.index, inner.index))
                return of_parts, found, Owner.name

        with patched(Owner, "name", outer.index):
            return lockstep.run([part] * 2)

    results = lockstep.run([replica] * 2)
    for outer, parts in enumerate(results):
        for inner, found in enumerate(parts):
            assert found == ([0, 1], [(0, inner), (1, inner)], (outer, inner))
    assert Owner.name == "nobody"


def test_an_exception_ends_the_lanes_within_lanes():
    def replica(outer):
        def part(inner):
            outer.meet(None)
            if outer.index == 1:
                raise ValueError("wrong")
            outer.meet(None)

        return lockstep.run([part] * 2)

    with pytest.raises(ValueError, match="wrong"):
        lockstep.run([replica] * 2)


def test_a_debugger_stops_in_each_lane_in_turn():
    said = io.StringIO()

    def lane(lane):
        lane.meet(None)
        typed = io.StringIO("p 40 + lane.index\ncontinue\n")
        pdb.Pdb(stdin=typed, stdout=said, nosigint=True, readrc=False).set_trace()
        return lane.meet(lane.index)

    assert lockstep.run([lane] * 2) == [[0, 1], [0, 1]]
    assert [each for each in said.getvalue().split() if each in ("40", "41")] == ["40", "41"]


def kill(number):
    """Sends a signal to this process, and waits until it interrupts this thread."""
    os.kill(os.getpid(), number)
    for _ in range(5000):
        threading.Event().wait(0.001)
    pytest.fail("the signal was not raised in this lane")


@pytest.fixture
def interrupts():
    """Ctrl-C raises KeyboardInterrupt, which is not so for what a shell runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_interrupts_the_lane_that_runs(interrupts):
    where = []

    def lane(lane):
        lane.meet(None)
        if lane.index == 1:
            try:
                kill(signal.SIGINT)
            except KeyboardInterrupt:
                where.append(lane.index)
                raise
        lane.meet(None)

    with pytest.raises(KeyboardInterrupt):
        lockstep.run([lane] * 2)
    assert where == [1]


def test_a_lane_may_go_on_after_an_interrupt_as_a_debugger_does(interrupts):
    def lane(lane):
        if lane.index == 0:
            with contextlib.suppress(KeyboardInterrupt):
                kill(signal.SIGINT)
        return lane.meet(lane.index)

    assert lockstep.run([lane] * 2) == [[0, 1], [0, 1]]


def test_a_signal_that_raises_something_else_ends_all():
    class StopError(SystemExit):
        def __init__(self, code, why):
            super().__init__(code)
            self.why = why

    def stop(*_):
        raise StopError(143, "asked")

    def lane(lane):
        lane.meet(None)
        kill(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(StopError) as error:
            lockstep.run([lane] * 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (error.value.code, error.value.why) == (143, "asked")


def test_a_lane_has_the_callers_keras_and_tensorflow():
    def lane(lane):
        lane.meet(None)
        return (
            keras.config.dtype_policy().name,
            tf.summary.experimental.get_step(),
            tf.constant(1.0).device[-5:],
            tf.get_current_name_scope(),
            tf.distribute.get_strategy() is strategy,
            function_names.numbers_in_use() is numbers,
        )

    keras.config.set_dtype_policy("mixed_bfloat16")
    tf.summary.experimental.set_step(7)
    numbers = function_names.own_numbers()
    strategy = tf.distribute.OneDeviceStrategy("/cpu:2")
    try:
        with (
            strategy.scope(),
            tf.device("/cpu:1"),
            tf.name_scope("own"),
            function_names.using(numbers),
        ):
            found = lockstep.run([lane] * 2)
    finally:
        keras.config.set_dtype_policy("float32")
        tf.summary.experimental.set_step(None)
    assert found == [("mixed_bfloat16", 7, "CPU:1", "own", True, True)] * 2


def test_tapes_of_lanes_do_not_mix():
    variable = tf.Variable(3.0)

    def lane(lane):
        with tf.GradientTape() as tape:
            loss = variable * (lane.index + 1.0)
            lane.meet(None)
            loss = loss * variable
        gradient = tape.gradient(loss, variable)
        return sum(each.numpy() for each in lane.meet(gradient))

    assert lockstep.run([lane] * 2) == [18.0, 18.0]  # 2 * 3 * (1 + 2)


def all_reduced(lane, value):
    @tf.custom_gradient
    def summed(each):
        return tf.add_n(lane.meet(each)), lambda upstream: tf.add_n(lane.meet(upstream))

    return summed(value)


def mean_square_in_parts(x, weight):
    """The gradient of the variance of x * weight, of two parts whose sums meet."""

    def lane(lane):
        own = x[lane.index * 2 : lane.index * 2 + 2]
        with tf.GradientTape() as tape:
            value = own * weight
            mean = all_reduced(lane, tf.reduce_sum(value)) / 4.0
            loss = tf.reduce_sum(tf.square(value - mean))
        return tape.gradient(loss, weight)

    return tf.add_n(lockstep.run([lane] * 2))


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "in a graph"])
def test_gradients_flow_through_sums_over_lanes(traced):
    weight, x = tf.Variable(2.0), tf.constant([1.0, 2.0, 3.0, 6.0])
    function = lambda: mean_square_in_parts(x, weight)  # noqa: E731
    found = (tf.function(function, autograph=False) if traced else function)()
    with tf.GradientTape() as tape:
        value = x * weight
        loss = tf.reduce_sum(tf.square(value - tf.reduce_mean(value)))
    assert float(found) == pytest.approx(float(tape.gradient(loss, weight)), rel=1e-6)


def test_lanes_add_to_the_callers_graph_each_with_its_own_scopes():
    variable, captured = tf.Variable([1.0, 2.0]), tf.constant([10.0, 20.0])
    seen = []

    def lane(lane):
        with tf.device(f"/cpu:{lane.index + 1}"), tf.name_scope(f"part_{lane.index}"):
            own = variable * captured[lane.index]
            total = tf.add_n(lane.meet(own))
            seen.append((total.op.name, total.op.device[-5:], total.graph))
            with tf.init_scope():
                assert tf.executing_eagerly()
        after = tf.identity(total)
        seen.append((after.op.name.split("/")[0], after.op.device[-5:], after.graph))
        variable.assign_add(own)
        return after

    @tf.function(autograph=False)
    def traced(x):
        with tf.device("/cpu:0"), tf.name_scope("outer"):
            results = lockstep.run([lane] * 2)
            ours = tf.identity(x)
        assert (ours.op.name.split("/")[0], ours.op.device[-5:]) == ("outer", "CPU:0")
        return results

    first, second = traced(tf.constant(1.0))
    np.testing.assert_allclose(first, [30, 60])
    # The second lane reads the variable after the first one's wait, but before any is assigned.
    np.testing.assert_allclose(second, [30, 60])
    np.testing.assert_allclose(variable, [31, 62])  # += 10 * [1, 2], then += 20 * [1, 2]
    assert [name for name, *_ in seen] == [
        "outer/part_0/AddN",
        "outer",
        "outer/part_1/AddN",
        "outer",
    ]
    assert [device for _, device, _ in seen] == ["CPU:1", "CPU:0", "CPU:2", "CPU:0"]
    assert len({graph for *_, graph in seen}) == 1


@pytest.mark.parametrize("inner", ["function", "cond"])
def test_a_meeting_within_an_inner_graph_is_refused(inner):
    def lane(lane):
        meet = lambda: tf.add_n(lane.meet(tf.constant(1.0)))  # noqa: E731
        if inner == "function":
            return function(meet)
        return tf.cond(tf.constant(True), meet, lambda: tf.constant(0.0))

    function = tf.function(lambda meet: meet(), autograph=False)
    run = lambda: lockstep.run([lane] * 2, names=["replica 0", "replica 1"])  # noqa: E731
    if inner == "cond":
        run = tf.function(run, autograph=False)
    with pytest.raises(UserError, match=r"replica 0 makes a collective within a tf.function"):
        run()


def test_an_exception_while_a_function_is_traced_is_raised():
    def lane(lane):
        lane.meet(None)
        if lane.index == 1:
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        tf.function(lambda: lockstep.run([lane] * 2), autograph=False)()


def test_add_loss_of_a_lane_is_its_own():
    class Adds(layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_sum(x))
            return x

    model = keras.Sequential([keras.Input((1,)), Adds()])

    def lane(lane):
        with own_losses(model):
            model(tf.constant([[lane.index + 1.0]]))
            lane.meet(None)
            return [float(each) for each in model.losses]

    assert lockstep.run([lane] * 2) == [[1.0], [2.0]]
