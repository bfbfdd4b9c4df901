"""Numbers of the modules and optimizers that steps call; an object that replaces another one takes over its number.

A module that is copied for each task or each fold of a cross-validation is a new object each time, but the step is the
same. So a module or an optimizer is identified by its form: its class, the classes of the modules inside, the settings
of torch's own modules, the shapes of parameters. If a program uses several objects of one form side by side, each has
its own number; one of them is replaced if

- it has been deleted, and a new object of its form appears, or
- it was registered `REPLACEABLE_AFTER` steps ago or more, takes no part in the open step, and a new object of its form
  appears in training: the model of the next fold, while the models of earlier folds are kept.

If an object that was replaced in the second way is used again in a step with its successor, the successor gets a number
of its own.

The layout of a module's input is stored under its number: which dimension counts samples, if the class determines it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable, MutableSequence, Sequence
from functools import partial
from typing import Any, NamedTuple

REPLACEABLE_AFTER = 8
"""Steps after which a living object may be replaced. Objects that alternate all appear within the first few steps."""

_RESERVED = 2
"""Numbers with another meaning in an outline, see `xsp.collector.Token`."""

_Form = tuple[type, int | None]

_SCALARS = (bool, int, float, str, type(None))

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Classes that pass their input on to the module in this attribute."""

_LAYOUT_PRESERVING = ("Identity", "Linear", "LayerNorm", "Dropout", "ReLU", "GELU", "SiLU", "Tanh", "Sigmoid")
"""Classes of `torch.nn` (beginnings of names) whose output has the dimensions of the input in the same order."""


class InputLayout(NamedTuple):
    """The position of the samples in a module's input."""

    dimensions: int
    """Number of dimensions of an input with several samples; an input with one fewer is a single sample."""

    axis: int
    """The dimension that counts samples."""

    is_sure: bool = True
    """Whether the class determines the layout; else a module inside does, and the program may transpose its input."""

    has_bags: bool = False
    """Whether a sample is a bag of any number of indices: an input of one dimension has those of all samples."""

    def samples(self, shape: Sequence[int]) -> int | None:
        """Return the number of samples in an input of this shape; the first dimension if it does not fit the layout.

        Returns:
            None if the shape does not tell it.
        """
        if self.has_bags and len(shape) == 1:
            return None
        if len(shape) == self.dimensions:
            return shape[self.axis]
        return 1 if len(shape) == self.dimensions - 1 and self.is_sure else shape[0]

    def is_known(self, shape: Sequence[int]) -> bool:
        """Return whether the number of samples in such an input is known, and not guessed."""
        return self.is_sure or (self.axis == 0 and len(shape) == self.dimensions)


class _Role:
    """A number, and the objects that have it."""

    def __init__(self, number: int, siblings: list[_Role]) -> None:
        self.number = number
        self.siblings = siblings
        """All roles of this form, including this one."""

        siblings.append(self)
        self.holders: set[int] = set()
        """`id` of the living objects that have the number."""

        self.retired: set[int] = set()
        """`id` of the objects that were replaced while they were alive, and have not been used since."""

        self.last_step = 0
        """The step in which the last holder was registered."""


class Subjects:
    """Numbers of modules and optimizers, by their roles in the program's steps."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        """Numbers by `id`, of the known objects that are alive and not retired."""

        self.step = 0
        """Number of the open step, or of the last one."""

        self.layouts: dict[int, InputLayout | None] = {}
        """Layouts of the modules' inputs, by number; None if unknown."""

        self._roles: dict[tuple[_Form, bool], list[_Role]] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._role_of: dict[int, _Role] = {}
        self._owners: dict[int, int] = {}
        """`id` of modules, by the `id` of their first parameter."""

        self._next = itertools.count(_RESERVED)
        self._lock = threading.RLock()

    def register(self, subject: Any, trains: bool, outline: MutableSequence[tuple[Any, ...]]) -> int:
        """Return the number of a module or an optimizer that is not in `numbers`, and put it there.

        Args:
            subject: the module or the optimizer.
            trains: whether it is an optimizer, or called in training mode with gradients on.
            outline: words of the open step so far; empty between steps. Its words are corrected if a replaced object
                turns out to be used beside its successor.
        """
        object_id = id(subject)
        with self._lock:
            form = self._form(subject)
            # an object registered in training never takes the number of an untrained copy: an average, the best epoch
            roles = self._roles.setdefault((form, trains or form[1] is None), [])
            role = self._role_of.get(object_id)
            if role is not None:
                self._restore(role, object_id, outline)
            else:
                role = self._role(roles, trains, outline, shared=form[1] is None)
                self._watch(subject, role)
            self.numbers[object_id] = role.number
            if role.number not in self.layouts:
                self.layouts[role.number] = layout_of(subject)
            return role.number

    def of(self, subject: object) -> int:
        """Return the number of a known module or optimizer; of an unknown one, an `id`."""
        number = self.numbers.get(id(subject))
        return number if number is not None else id(type(subject) if is_empty_module(subject) else subject)

    def _role(self, roles: list[_Role], trains: bool, outline: MutableSequence[tuple[Any, ...]], shared: bool) -> _Role:
        """Return the role for a new object: a free one, one that it takes over, or a new one."""
        if roles and shared:
            return roles[0]
        role = next((candidate for candidate in roles if not candidate.holders - candidate.retired), None)
        if role is None and trains:
            used_numbers = {word[1] for word in outline if len(word) > 2}
            replaceable = (
                candidate
                for candidate in roles
                if candidate.last_step + REPLACEABLE_AFTER <= self.step and candidate.number not in used_numbers
            )
            role = next(replaceable, None)
            if role is not None:
                role.retired |= role.holders
                for holder in role.holders:
                    self.numbers.pop(holder, None)
        if role is None:
            role = _Role(next(self._next), roles)
        role.last_step = self.step
        return role

    def _restore(self, role: _Role, object_id: int, outline: MutableSequence[tuple[Any, ...]]) -> None:
        """Restore a replaced object that is used again; its successor gets a new number if this step uses it too."""
        role.retired.discard(object_id)
        positions = [position for position, word in enumerate(outline) if len(word) > 2 and word[1] == role.number]
        if not positions:
            return
        successor = _Role(next(self._next), role.siblings)
        successor.last_step = self.step
        successor.holders = {holder for holder in role.holders if self.numbers.get(holder) == role.number}
        role.holders -= successor.holders
        self._role_of.update(dict.fromkeys(successor.holders, successor))
        self.numbers.update(dict.fromkeys(successor.holders, successor.number))
        for position in positions:
            kind, _, *rest = outline[position]
            outline[position] = (kind, successor.number, *rest)

    def _form(self, subject: Any) -> _Form:
        """Return the form of an object; objects of the same form may replace each other.

        For a module that holds nothing it is the class alone. For an optimizer it includes the module whose parameters
        it changes: in meta-learning the inner and the outer optimizer have the same class.
        """
        try:
            groups = getattr(subject, "param_groups", None)
            if groups is not None:
                parameters = [parameter for group in groups for parameter in group["params"]]
                owner = next(
                    (
                        self.numbers.get(self._owners[parameter_id])
                        for parameter_id in map(id, parameters)
                        if parameter_id in self._owners
                    ),
                    None,
                )
                return type(subject), hash(
                    (owner, tuple(len(group["params"]) for group in groups), _shapes(parameters))
                )
            if is_empty_module(subject):
                return type(subject), None
            modules = tuple((type(module), _settings(module)) for module in subject.modules())
            parameters = list(subject.parameters())
            if parameters:
                self._owners[id(parameters[0])] = id(subject)
            return type(subject), hash((modules, _shapes(parameters)))
        except Exception:  # the program's own classes may raise anything
            return type(subject), id(subject)

    def _watch(self, subject: Any, role: _Role) -> None:
        """Add an object to the holders of a role, and free the role when the object is deleted."""
        object_id = id(subject)
        role.holders.add(object_id)
        self._role_of[object_id] = role
        try:
            self._references[object_id] = weakref.ref(subject, partial(self._forget, object_id))
        except TypeError:  # without weak references, the object counts as alive for ever
            return

    def _forget(self, object_id: int, _: object) -> None:
        """Forget a deleted object. The garbage collector may call this anywhere, so it takes no lock."""
        self._references.pop(object_id, None)
        self.numbers.pop(object_id, None)
        for parameter_id in [key for key, owner in list(self._owners.items()) if owner == object_id]:
            self._owners.pop(parameter_id, None)
        role = self._role_of.pop(object_id, None)
        if role is not None:
            role.holders.discard(object_id)
            role.retired.discard(object_id)


def is_empty_module(module: object) -> bool:
    """Return whether a module has neither parameters nor modules inside, such as a loss.

    Many programs create such a module for each step, which does not change the kind of step: its class identifies it.
    """
    return not (getattr(module, "_modules", None) or getattr(module, "_parameters", None))


def layout_of(module: Any) -> InputLayout | None:
    """Return the layout of a module's input; None if it has none, or it is unknown."""
    try:
        return _layout(module)
    except Exception:  # the program's own classes may raise anything
        return None


def _layout(module: Any) -> InputLayout | None:
    names = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.")]
    wrapped_attribute = next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)
    if wrapped_attribute is not None:
        return _layout(getattr(module, wrapped_attribute))
    own_layout = _own_layout(module, names)
    if own_layout is not None:
        return own_layout
    children = list(module.children())
    if "Sequential" in names:
        for child in children:
            child_layout = _layout(child)
            if child_layout is not None or not type(child).__name__.startswith(_LAYOUT_PRESERVING):
                return child_layout
        return None
    layouts = [_own_layout(child, [base.__name__ for base in type(child).__mro__]) for child in children]
    time_first = [layout for layout in layouts if layout is not None and layout.axis == 1]
    if time_first and not any(layout is not None and layout.dimensions == 3 and layout.axis == 0 for layout in layouts):
        has_embedding = any(type(child).__name__ == "Embedding" for child in children)
        return InputLayout(3 - has_embedding, 1, is_sure=False)
    first_module = next((submodule for submodule in module.modules() if submodule._parameters), None)
    if any(type(submodule).__name__ == "EmbeddingBag" for submodule in module.modules()):
        return InputLayout(2, 0, is_sure=False, has_bags=True)
    image_layout = _own_layout(first_module, [base.__name__ for base in type(first_module).__mro__])
    return image_layout._replace(is_sure=False) if image_layout is not None and image_layout.dimensions > 3 else None


def _own_layout(module: Any, names: Sequence[str]) -> InputLayout | None:
    """Return the input layout of a class of torch; None if the class does not define one."""
    for name in names:
        if name in ("_ConvNd", "_ConvTransposeNd"):
            return InputLayout(len(module.kernel_size) + 2, 0)
        if name in ("RNNBase", "MultiheadAttention", "Transformer"):
            return InputLayout(3, 0 if module.batch_first else 1)
        if name in ("TransformerEncoderLayer", "TransformerDecoderLayer"):
            return InputLayout(3, 0 if module.self_attn.batch_first else 1)
        if name in ("TransformerEncoder", "TransformerDecoder"):
            return InputLayout(3, 0 if module.layers[0].self_attn.batch_first else 1)
    return None


def _shapes(parameters: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in parameters)


def _settings(module: Any) -> tuple[Hashable, ...]:
    """Return strides, sizes and other settings of torch's own modules; other modules may keep counters in theirs."""
    if not type(module).__module__.startswith("torch.nn."):
        return ()
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if name != "training"
        and (
            isinstance(value, _SCALARS)
            or (isinstance(value, tuple) and all(isinstance(element, _SCALARS) for element in value))
        )
    )
