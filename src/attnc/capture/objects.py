"""Stand-ins for captured objects: an instance of a subclass whose attribute reads are written into the plan.

isinstance still holds, methods run with the stand-in as `self`, properties and dunder methods too, so what they read is seen
as well. `nn.Module` finds its parameters and buffers as ever.
"""

from __future__ import annotations

import abc
import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from attnc.capture.locations import refuse
from attnc.capture.numbers import concrete
from attnc.capture.reads import attribute
from attnc.errors import UnsupportedModError

if TYPE_CHECKING:
    from attnc.capture.reads import Node
    from attnc.capture.wrapping import Wrapping


class _State(NamedTuple):
    environment: Wrapping
    real: Any
    node: Node
    seen: dict[str, Any]


_CLASSES: weakref.WeakKeyDictionary[type, type | None] = weakref.WeakKeyDictionary()
_MISSING = object()
_ORDINARY_READS = (object.__getattribute__, types.SimpleNamespace.__getattribute__)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_NOT_FORWARDED = frozenset(
    {"__new__", "__init__", "__init_subclass__", "__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__del__"}
    | {"__class_getitem__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__dir__", "__sizeof__"}
    | {"__subclasshook__", "__post_init__", "__set_name__", "__prepare__", "__copy__", "__deepcopy__"}
)


def object_standin(environment: Wrapping, value: Any, node: Node) -> Any | None:
    """What stands for the object `value`, read as `node`; None where its reads cannot be seen."""
    cls = type(value)
    standin_class = _CLASSES.get(cls, _MISSING)
    if standin_class is _MISSING:
        standin_class = _CLASSES[cls] = _make_class(cls)
    if standin_class is None:
        return None
    assert isinstance(standin_class, type)
    standin = _new(standin_class)
    if node.name in ("score_mod", "mask_mod"):
        node = node._replace(name="self")
    environment.plan.require(f"type({node.variable}) is {environment.plan.constant(cls)}")
    seen: dict[str, Any] = {}
    environment.attributes.append(seen)
    object.__setattr__(standin, "_attnc_state", _State(environment, value, node, seen))
    return standin


class _Standin:
    """The first base of every stand-in class."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass  # the user's own hook is not called

    def __getattribute__(self, name: str) -> Any:
        return _read(self, object.__getattribute__(self, "_attnc_state"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        state = object.__getattribute__(self, "_attnc_state")
        if state.environment.is_computed(value):
            raise refuse(UnsupportedModError, f"a mod stores what it computed in the attribute {name}", "return it instead")
        state.environment.plan.give_up(f"the mod assigns the attribute {name}")
        state.seen.clear()
        setattr(state.real, name, concrete(value))

    def __delattr__(self, name: str) -> None:
        state = object.__getattribute__(self, "_attnc_state")
        state.environment.plan.give_up(f"the mod deletes the attribute {name}")
        state.seen.clear()
        delattr(state.real, name)


def _make_class(cls: type) -> type | None:
    if type(cls) not in (type, abc.ABCMeta) or cls.__getattribute__ not in _ORDINARY_READS:
        return None
    heap = cls.__flags__ & (1 << 9)  # a class statement made it
    if cls.__module__ in ("builtins", "random", "threading", "logging") or not (heap or cls is types.SimpleNamespace):
        return None
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__slots__": ("_attnc_state",)}
    for base in cls.__mro__[:-1]:
        for name, value in vars(base).items():
            if name.startswith("__") and name.endswith("__") and isinstance(value, types.FunctionType):
                if name not in _NOT_FORWARDED and name not in body:
                    body[name] = _forward(name)
    try:
        metaclass: Any = type(cls)
        standin = metaclass(cls.__name__, (_Standin, cls), body)
        _new(standin)
    except Exception:
        return None
    return standin


def _new(cls: type) -> Any:
    """An instance without its `__init__`. Raises TypeError where the memory is not an ordinary object's."""
    return (types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object).__new__(cls)  # pyright: ignore[reportCallIssue]


def _forward(name: str):
    def method(self, *args, **kwargs):
        return _read(self, object.__getattribute__(self, "_attnc_state"), name)(*args, **kwargs)

    method.__name__ = name
    return method


def _lookup(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return _MISSING


def _read(standin: Any, state: _State, name: str) -> Any:
    """`object.name`, as Python looks it up, with every function rebuilt and the value wrapped."""
    if name in state.seen:
        return state.seen[name]
    value = _find(standin, state, name)
    state.seen[name] = value
    return value


def _find(standin: Any, state: _State, name: str) -> Any:
    environment, real, node, _ = state
    cls = type(real)
    if name == "__class__":
        return cls
    if name == "__dict__":
        return environment.opaque(real.__dict__, "the __dict__ of an object")
    shown = f"{node.name}.{name}"
    found = _lookup(cls, name)
    if isinstance(found, property):
        getter = environment.read(found.fget, node, attribute(name, "type({})") + ".fget", shown)
        return getter(standin)
    own = getattr(real, "__dict__", {})
    if name in own and not isinstance(found, _SLOTS):
        return environment.read(own[name], node, attribute(name), shown)
    if found is _MISSING:
        return _dynamic(environment, real, cls, node, name, shown)
    if isinstance(found, (types.FunctionType, staticmethod)) and hasattr(real, "__dict__"):
        environment.plan.require(f"{name!r} not in {node.variable}.__dict__")
    if isinstance(found, types.FunctionType):
        return types.MethodType(environment.read(found, node, attribute(name, "type({})"), shown), standin)
    if isinstance(found, staticmethod):
        return environment.read(found.__func__, node, attribute(name, "type({})"), shown)
    if isinstance(found, _SLOTS) or not hasattr(type(found), "__get__"):
        return environment.read(getattr(real, name), node, attribute(name), shown)
    with environment.untraced():
        value = getattr(real, name)
    if isinstance(found, functools.cached_property):
        return environment.read(value, node, attribute(name), shown)
    return environment.opaque(value, f"the attribute {shown}")


def _dynamic(environment: Wrapping, real: Any, cls: type, node: Node, name: str, shown: str) -> Any:
    hook = _lookup(cls, "__getattr__")
    plain = environment.finds_attributes(hook)
    if plain and hasattr(real, name):
        return environment.read(getattr(real, name), node, attribute(name), shown)
    if hook is not _MISSING and not plain:
        with environment.untraced():
            value = getattr(real, name)
        return environment.opaque(value, f"the attribute {shown}")
    environment.plan.require(f"not hasattr({node.variable}, {name!r})")
    return getattr(real, name)  # raises
