"""Lets an optimizer of Keras keep its moments in other variables, and compute in float32.

Keras's `update_step` reads and assigns moments as variables of the weight's shape. Here a `State`
stands for such a variable. While a weight is updated, the state is a float32 tensor, which a codec
decodes before and encodes afterwards. So the arithmetic of an update is Keras's own.

    pack(optimizer, codec, fits=lambda weight: True, bits=bits)    # built already, or not yet
    states_of(model)                                               # once it is built

A codec is one of tfaccel/step/states/codecs.py. The variables of a sharded optimizer
(sharded_states.py) have slices of what the codec stores.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

from tfaccel.keras_internals.model_view import every_optimizer, optimizers_of
from tfaccel.keras_internals.optimizers import num_updates
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.sharded_states import is_sharded, slices_in
from tfaccel.keras_internals.variables import is_distributed

# The attribute that has a state of all weights, by what Keras calls the state; and whether its
# values may be negative. Averages of weights and sums of gradients are no states.
_MOMENTS = {
    "momentum": ("_momentums", True),
    "velocity": ("_velocities", False),
    "velocity_hat": ("_velocity_hats", False),
}
_STATES = {
    keras.optimizers.Adam: _MOMENTS,
    keras.optimizers.AdamW: _MOMENTS,
    keras.optimizers.Nadam: _MOMENTS,
    keras.optimizers.Lamb: _MOMENTS,
    keras.optimizers.RMSprop: _MOMENTS,
    keras.optimizers.Lion: {"momentum": ("_momentums", True)},
    keras.optimizers.SGD: {"momentum": ("momentums", True)},
}
KNOWN = [kind.__name__ for kind in _STATES]


def is_known(optimizer) -> bool:
    """Returns whether the states of an optimizer can be packed. A subclass may have others."""
    return type(optimizer) in _STATES


def num_states(optimizer) -> int:
    """Returns how many states a known optimizer has of each weight: SGD may have none."""
    has_velocity = "velocity" in _STATES[type(optimizer)]
    has_momentum = getattr(optimizer, "momentum", 1) != 0  # of SGD and RMSprop it is a setting
    return has_velocity + has_momentum + getattr(optimizer, "amsgrad", False)


@dataclasses.dataclass(eq=False)
class State:
    """A moment of a weight, in place of a Keras variable in an optimizer's list.

    Attributes:
      path: of the variable that Keras would make.
      shape: of the weight.
      codec: what the values are stored by; None for Keras's own variable.
      is_signed: whether values may be negative.
      parts: the Keras variables that are stored; within a step of a sharded optimizer, slices.
      bits: makes random bits for so many values, while a step is traced.
    """

    path: str
    shape: tuple[int, ...]
    codec: object
    is_signed: bool
    parts: list
    bits: Callable[[int], tf.Tensor]
    dtype = "float32"

    def __post_init__(self):
        """Begins without a value that an update computes with."""
        self._value = None

    @property
    def shape_here(self) -> tuple[int, ...]:
        """The shape of the weight; within a step of a sharded optimizer [slice]."""
        first = self.parts[0]  # has as many values as the state
        is_slice = is_sharded(first) and not is_distributed(first)
        return tuple(first.shape) if is_slice else self.shape

    def read(self) -> tf.Tensor:
        """Returns the values, in float32 and `shape_here`."""
        stored = [tf.convert_to_tensor(each.value) for each in self.parts]
        return self.codec.decode(stored, self.shape_here, is_signed=self.is_signed)

    def gathered(self, strategy: tf.distribute.Strategy) -> tf.Tensor:
        """Returns the values of a sharded state. With several workers, all must call it."""
        stored = [each.gathered(strategy) for each in self.parts]
        if self.codec is None:
            return stored[0]
        return self.codec.decode(stored, self.shape, is_signed=self.is_signed)

    def write(self, values, *, at_random: bool) -> None:
        """Stores values, rounded at random or to the nearest."""
        values = tf.ensure_shape(tf.cast(values, tf.float32), self.shape_here)
        bits = self.bits if at_random else None
        stored = self.codec.encode(values, is_signed=self.is_signed, bits=bits)
        for part, each in zip(self.parts, stored, strict=True):
            part.assign(each)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Within the context, the state is a float32 tensor that can be assigned."""
        before = self._value = self.read()
        try:
            yield
            if self._value is not before:
                self.write(self._value, at_random=True)
        finally:
            self._value = None

    # What an update of Keras does with a variable.

    def __tf_tensor__(self, dtype=None, name=None):
        """Returns the values."""
        values = self.read() if self._value is None else self._value
        return values if dtype is None else tf.cast(values, dtype)

    def assign(self, value):
        """Changes the values that this update computes with."""
        if self._value is None:
            return self.write(value, at_random=False)
        self._value = tf.convert_to_tensor(value)
        return None

    def assign_add(self, value):
        """Adds to the values."""
        self.assign(tf.convert_to_tensor(self) + value)

    def assign_sub(self, value):
        """Subtracts from the values."""
        self.assign(tf.convert_to_tensor(self) - value)


@dataclasses.dataclass(eq=False)
class _Packed:
    """How an optimizer stores its states now, and those that are not Keras's own variables.

    Attributes:
      codec: stores the states; None for Keras's own variables.
      fits: says of a weight whether the codec stores its states.
      bits: makes random bits: see `pack`.
      states: by the index of their weight, and by name.
    """

    codec: object = None
    fits: Callable | None = None
    bits: Callable | None = None
    states: dict[int, dict[str, State]] = dataclasses.field(default_factory=dict)

    def all(self) -> list[State]:
        """Returns all states that are packed."""
        return [state for of_weight in self.states.values() for state in of_weight.values()]


_ATTRIBUTE = "_tfaccel_states"  # of an optimizer that was packed: its _Packed


def packed_by(optimizer):
    """Returns the codec that stores an optimizer's states; None for Keras's own variables."""
    packed = vars(optimizer).get(_ATTRIBUTE)
    return packed and packed.codec


def states_of(model) -> list[State]:
    """Returns every state that can be packed, of the known optimizers that are built.

    A state that is Keras's own variable has the codec None, and that variable as its only part.
    """
    inner = [each for own in every_optimizer(model) for each in optimizers_of(own)]
    return [state for each in inner if is_known(each) for state in _states_of(each)]


def _states_of(optimizer) -> Iterator[State]:
    for attribute, is_signed in _STATES[type(optimizer)].values():
        for each in getattr(optimizer, attribute, None) or ():
            if isinstance(each, State):
                yield each
            elif each is not None:
                yield State(each.path, tuple(each.shape), None, is_signed, [each], None)


def pack(optimizer, codec, *, fits: Callable, bits: Callable) -> None:
    """Lets an optimizer store its states by a codec, or in Keras's variables if that is None.

    States that exist already are converted, with rounding to the nearest.

    Args:
      optimizer: one that `is_known`, built or not.
      codec: what stores the states.
      fits: says of a weight, a Keras variable, whether the codec stores its states.
      bits: makes random bits, `bits(num_values, key)`; the key is the number of updates and the
        number of the state. So all replicas draw alike, and each update draws anew.
    """
    if _ATTRIBUTE not in vars(optimizer):
        vars(optimizer)[_ATTRIBUTE] = _Packed()  # past Keras's tracking of attributes
        _replace_methods(optimizer, vars(optimizer)[_ATTRIBUTE])
    packed = vars(optimizer)[_ATTRIBUTE]
    packed.codec, packed.fits, packed.bits = codec, fits, bits
    if optimizer.built:
        _convert(optimizer, packed)


def _replace_methods(optimizer, packed: _Packed) -> None:
    own_variable, update = optimizer.add_variable_from_reference, optimizer.update_step
    kinds = _STATES[type(optimizer)]

    def add_variable(reference_variable, name=None, initializer="zeros"):
        is_packed = packed.codec is not None and name in kinds and packed.fits(reference_variable)
        if not is_packed:
            return own_variable(reference_variable, name=name, initializer=initializer)
        return _new_state(optimizer, packed, reference_variable, name)

    def update_step(gradient, variable, learning_rate):
        states = packed.states.get(optimizer._get_variable_index(variable), {})
        with contextlib.ExitStack() as opened:
            for each in states.values():
                opened.enter_context(each.open())
            update(gradient, variable, learning_rate)

    optimizer.add_variable_from_reference, optimizer.update_step = add_variable, update_step


def save_as_keras(optimizer) -> None:
    """Lets `model.save` write an optimizer as Keras keeps it, and `load_model` read it so.

    Args:
      optimizer: a packed one, or one that wraps others.
    """
    optimizer.save_own_variables = functools.partial(_save, optimizer)
    optimizer.load_own_variables = functools.partial(_load, optimizer)


def _new_state(optimizer, packed: _Packed, weight, name: str) -> State:
    """Makes a state of a weight, with the value 0, and tracks its variables."""
    is_signed = _STATES[type(optimizer)][name][1]
    wanted = packed.codec.parts(weight.shape, is_signed=is_signed)
    prefix = f"{weight.path.replace('/', '_')}_{name}"  # as Keras names it
    colocated = optimizer._distribution_strategy.extended.colocate_vars_with(weight.value)
    add, sizes = optimizer.add_variable, [()] * len(wanted)
    if (slices := slices_in(optimizer)) is not None:
        own = packed.codec.parts((slices.size_of(weight),), is_signed=is_signed)
        add, sizes = slices.add, [(each.shape[0],) for each in own]
    with colocated, _same_on_all_workers():
        parts = [
            add(each.shape, *size, dtype=each.dtype, name=prefix + each.suffix)
            for each, size in zip(wanted, sizes, strict=True)
        ]
    index = optimizer._get_variable_index(weight)
    number = index * len(_MOMENTS) + list(_MOMENTS).index(name)

    def bits(num: int) -> tf.Tensor:
        return packed.bits(num, (num_updates(optimizer), number))

    path = parts[0].path.removesuffix(wanted[0].suffix)
    made = State(path, tuple(weight.shape), packed.codec, is_signed, parts, bits)
    packed.states.setdefault(index, {})[name] = made
    return made


def _same_on_all_workers() -> contextlib.AbstractContextManager:
    """Within the context, new variables of several workers have the initial value of their worker.

    TensorFlow would send that of the first worker, but its collective takes neither bfloat16 nor
    uint8. The value is 0 on all of them.
    """
    name = "_get_variable_creator_initial_value"
    return patched(CollectiveAllReduceExtended, name, getattr(MirroredExtended, name))


def _convert(optimizer, packed: _Packed) -> None:
    """Makes the states of a built optimizer again, where they are stored in another way now."""
    packed.states.clear()
    strategy = optimizer._distribution_strategy
    for name, (attribute, _) in _STATES[type(optimizer)].items():
        states = getattr(optimizer, attribute, None) or []
        for index, old in enumerate(states):
            weight = optimizer._trainable_variables[index]
            wanted = packed.codec if packed.codec and packed.fits(weight) else None
            if old is None or wanted is getattr(old, "codec", None):
                if isinstance(old, State):
                    packed.states.setdefault(index, {})[name] = old
                continue
            shares = slices_in(optimizer) is not None
            value = old.gathered(strategy) if shares else tf.convert_to_tensor(old)
            states[index] = new = optimizer.add_variable_from_reference(weight, name=name)
            new.assign(value)
            _put_in_place(optimizer, _variables_of(old), _variables_of(new))


def _variables_of(state) -> list:
    return state.parts if isinstance(state, State) else [state]


def _put_in_place(optimizer, old: list, new: list) -> None:
    """Gives new variables, the last ones of an optimizer, the place of old ones among them."""
    variables = optimizer._variables
    place = next(index for index, each in enumerate(variables) if each is old[0])
    for _ in new:
        variables.pop()
    for each in old:
        optimizer._tracker.untrack(each)
    for each in reversed(new):
        variables.insert(place, each)


def _as_keras_keeps(optimizer) -> list:
    """Returns the variables in Keras's order, with a `State` for the variables that it has."""
    packed = [vars(each).get(_ATTRIBUTE) for each in optimizers_of(optimizer)]
    states = [state for each in packed if each is not None for state in each.all()]
    by_part = {id(part): each for each in states for part in each.parts}
    found = [by_part.get(id(each), each) for each in optimizer.variables]
    return list({id(each): each for each in found}.values())


def _save(optimizer, store) -> None:
    """Gives `model.save` the states in float32, so that stock Keras can load the file."""
    for index, each in enumerate(_as_keras_keeps(optimizer)):
        store[str(index)] = keras.ops.convert_to_numpy(tf.convert_to_tensor(each))


def _load(optimizer, store) -> None:
    """Loads what `_save`, or stock Keras, has saved."""
    variables = _as_keras_keeps(optimizer)
    if len(store.keys()) != len(variables):
        return type(optimizer).load_own_variables(optimizer, store)  # which warns
    for index, each in enumerate(variables):
        each.assign(store[str(index)])
    return None
