"""Rebuilding a mod so that all it reads of the outside world is seen: `Wrapping.wrap`, whichever library the mod uses.

A function is rebuilt around the same code with its closure cells, globals and defaults wrapped; an object becomes a stand-in
of a subclass of its class whose attributes are wrapped when they are read; tuples, lists and dicts are rebuilt; ints and
floats become number proxies. Each read writes its access and its condition into the plan. What tensors, arrays and other
objects of a library become is the front end's matter (`environment.py`, `numpy_environment.py`). What reads in ways that cannot
be listed (foreign C calls, class attributes, …) is left as it is and makes the plan give up.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from attnc.capture.code import (
    IMPURE_BUILTINS,
    PURE_MODULES,
    is_pure_builtin,
    is_trusted_function,
    names_of,
    not_rebuildable,
)
from attnc.capture.numbers import NumberProxy, concrete
from attnc.capture.objects import object_standin
from attnc.capture.reads import Node, Plan, attribute
from attnc.capture.recorder import Recorder
from attnc.errors import UnsupportedModError

LARGEST_CONTAINER = 256
NOT_OWN: Any = object()
_INT64 = f"{-(1 << 63)} <= {{}} <= {(1 << 63) - 1}"

ATOMS = (type(None), bool, str, bytes, type(Ellipsis), slice, range)
CLASSES = (int, float, bool, complex, str, tuple, list, dict, set, frozenset, range, slice, enumerate, zip, map, filter)
CLASSES += (reversed, object, type, functools.partial)
KEYS = (str, int, float, bool, tuple, type(None), enum.Enum)


class Wrapping:
    """The outside world of one trace. A front end's environment says what its own library's objects become."""

    atoms: tuple[type, ...] = ATOMS
    """Types of constants that are compared by value."""
    classes: tuple[type, ...] = CLASSES
    """Classes that a mod may use as they are."""
    imports: frozenset[str] = PURE_MODULES
    """Modules that a mod may import."""
    keys: tuple[type, ...] = KEYS
    """Types of keys of dicts that are rebuilt."""

    def __init__(self, tracer: Recorder):
        self.tracer: Any = tracer
        self.plan: Plan = tracer.plan
        self._known: dict[int, tuple[object, Any, Node]] = {}  # by id: the object itself, what stands for it, its first read
        self._globals: dict[int, LoggedGlobals] = {}
        self._cells: dict[int, tuple[object, types.CellType, str]] = {}
        self._containers: list[tuple[Any, Any]] = []  # rebuilt container, shallow copy: a mod must not write to it
        self._contents: list[tuple[types.CellType, Any, str]] = []  # the same of closure cells
        self._names: set[str] = set()
        self.attributes: list[dict[str, Any]] = []  # those that were read of each stand-in

    def read(self, value: Any, parent: Node, access: str, name: str) -> Any:
        """Wraps `value`, which is read from `parent` by `access` (with `{}` for the parent)."""
        return self.wrap(value, self.plan.read(access.replace("{}", parent.variable, 1), name))

    def wrap(self, value: Any, node: Node) -> Any:
        """What stands for `value`, read as `node`, while the mod is traced."""
        plan, variable = self.plan, node.variable
        kind = type(value)
        own = self.own(value, kind, node)
        if own is not NOT_OWN:
            return own
        if (kind is int and -(1 << 63) <= value < 1 << 63) or kind is float:
            plan.require(f"type({variable}) is {kind.__name__}")
            if kind is int:
                plan.require(_INT64.format(variable))
            return NumberProxy(plan, ("read", node), value)
        if value is None or kind is bool or value is Ellipsis or isinstance(value, enum.Enum):
            plan.require(f"{variable} is {plan.constant(value)}")
            return value
        if kind in self.atoms or isinstance(value, (int, float, str, frozenset)) or kind.__module__ == "numpy":
            return self._equal(value, node)
        known = self._known.get(id(value))
        if known is not None:
            plan.require(f"{variable} is {known[2].variable}")
            return known[1]
        wrapped = self._wrap_new(value, kind, node)
        self._known.setdefault(id(value), (value, wrapped, node))
        return wrapped

    def _equal(self, value: Any, node: Node) -> Any:
        if hasattr(value, "__array__") and getattr(value, "ndim", 0):
            return self.opaque(value, "a captured NumPy array")
        plan = self.plan
        plan.require(f"type({node.variable}) is {plan.constant(type(value))} and {node.variable} == {plan.constant(value)}")
        return value

    def _wrap_new(self, value: Any, kind: Any, node: Node) -> Any:
        if kind is types.FunctionType:
            return self._function(value, node)
        if kind is types.MethodType:
            return self._method(value, node)
        if kind is functools.partial:
            return self._partial(value, node)
        if kind in (tuple, list, dict, OrderedDict, set) or (isinstance(value, tuple) and hasattr(kind, "_make")):
            return self._container(value, kind, node)
        if isinstance(value, types.ModuleType):
            return self._module(value, node)
        if kind is functools._lru_cache_wrapper:
            return self._cached_function(value, node)
        if is_pure_builtin(value) or (isinstance(value, type) and self._is_harmless_class(value)):
            return self._same(value, node)
        if self.is_constant(value, kind):
            return self._same(value, node)
        if isinstance(value, type):
            return self.opaque(value, f"the class {value.__qualname__}")
        standin = object_standin(self, value, node)
        return self.opaque(value, f"an object of {kind.__qualname__}") if standin is None else standin

    def _is_harmless_class(self, value: type) -> bool:
        return value in self.classes or issubclass(value, (enum.Enum, BaseException))

    # -- what a front end says ----------------------------------------------------------------------------------------

    def own(self, value: Any, kind: type, node: Node) -> Any:
        """What stands for an object of the front end's own library; `NOT_OWN` where it is none."""
        return NOT_OWN

    def is_constant(self, value: Any, kind: type) -> bool:
        """Whether `value` is an object of the library that never changes."""
        return False

    def is_array(self, value: Any) -> bool:
        """Whether `value` is one of the library's arrays, or stands for one."""
        return False

    def is_computed(self, value: Any) -> bool:
        """Whether `value` is an array that the mod computed."""
        return False

    def finds_attributes(self, getattr_hook: Any) -> bool:
        """Whether this `__getattr__` of a class only finds what the object holds."""
        return False

    def untraced(self) -> AbstractContextManager:
        """A context in which the user's code runs for itself, outside of the trace."""
        return nullcontext()

    # -- objects in general -------------------------------------------------------------------------------------------

    def opaque(self, value: Any, what: str) -> Any:
        """`value` as it is: what the mod reads of it cannot be listed."""
        self.plan.give_up(f"the mod uses {what}, whose reads cannot be listed")
        return value

    def _same(self, value: Any, node: Node) -> Any:
        self.plan.require(f"{node.variable} is {self.plan.constant(value)}")
        return value

    def close(self) -> None:
        """Breaks the cycles through which what stands for the user's objects would outlive the trace."""
        for cell, _, _ in self._contents:
            cell.cell_contents = None
        for world in self._globals.values():
            world.close()
        for seen in self.attributes:
            seen.clear()
        for table in (self._known, self._cells, self._globals, self._containers, self._contents):
            table.clear()

    # -- functions ----------------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType, node: Node) -> Any:
        if is_trusted_function(function):
            return self._same(function, node)
        code = function.__code__
        plan, variable = self.plan, node.variable
        plan.require(f"type({variable}) is function and {variable}.__code__ is {plan.constant(code)}")
        if "_torchdynamo_orig_callable" in function.__dict__:
            original = function.__dict__["_torchdynamo_orig_callable"]  # what torch.compile wraps
            return self.read(original, node, "{}._torchdynamo_orig_callable", node.name)
        if reason := not_rebuildable(code, self.imports):
            return self.opaque(function, f"the function {code.co_qualname}, which {reason}")
        self._names |= names_of(code)
        cells = tuple(types.CellType() for _ in code.co_freevars)
        world = self._globals_of(function, node)
        rebuilt = types.FunctionType(code, world, function.__name__, None, cells)
        rebuilt.__qualname__ = function.__qualname__
        self._known[id(function)] = (function, rebuilt, node)
        shared = [self._cell(function, index, node) for index in range(len(cells))]
        if any(old is not None for old in shared):
            cells = tuple(new if old is None else old for old, new in zip(shared, cells, strict=True))
            rebuilt = types.FunctionType(code, world, function.__name__, None, cells)
            self._known[id(function)] = (function, rebuilt, node)
        for index, (old, cell) in enumerate(zip(shared, cells, strict=True)):
            if old is None:
                self._fill(function, index, cell, node)
        self._defaults(function, rebuilt, node)
        for name, value in function.__dict__.items():
            rebuilt.__dict__[name] = self.read(value, node, attribute(name), f"{function.__name__}.{name}")
        return rebuilt

    def _cell(self, function: types.FunctionType, index: int, node: Node) -> types.CellType | None:
        """The wrapped cell, where another function of this trace closes over the same one."""
        assert function.__closure__ is not None
        known = self._cells.get(id(function.__closure__[index]))
        if known is None:
            return None
        self.plan.require(f"{node.variable}.__closure__[{index}] is {known[2]}")
        return known[1]

    def _fill(self, function: types.FunctionType, index: int, cell: types.CellType, node: Node) -> None:
        assert function.__closure__ is not None
        real = function.__closure__[index]
        access = f"{node.variable}.__closure__[{index}]"
        self._cells[id(real)] = (real, cell, access)
        try:
            contents = real.cell_contents
        except ValueError:
            self.plan.give_up("a closure variable that has no value yet")
            return
        name = function.__code__.co_freevars[index]
        if name == "__class__":
            cell.cell_contents = self.opaque(contents, "super()")
            return
        cell.cell_contents = self.read(contents, node, f"{{}}.__closure__[{index}].cell_contents", name)
        self._contents.append((cell, cell.cell_contents, name))

    def _defaults(self, function: types.FunctionType, rebuilt: types.FunctionType, node: Node) -> None:
        code = function.__code__
        plan, variable = self.plan, node.variable
        defaults = function.__defaults__ or ()
        if defaults or code.co_argcount:
            plan.require(f"len({variable}.__defaults__ or ()) == {len(defaults)}")
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        rebuilt.__defaults__ = tuple(
            self.read(value, node, f"{{}}.__defaults__[{i}]", name)
            for i, (value, name) in enumerate(zip(defaults, names, strict=True))
        )
        if function.__kwdefaults__:
            plan.require(f"tuple({variable}.__kwdefaults__) == {tuple(function.__kwdefaults__)!r}")
            rebuilt.__kwdefaults__ = {
                name: self.read(value, node, f"{{}}.__kwdefaults__[{name!r}]", name)
                for name, value in function.__kwdefaults__.items()
            }
        elif code.co_kwonlyargcount:
            plan.require(f"not {variable}.__kwdefaults__")

    def _globals_of(self, function: types.FunctionType, node: Node) -> LoggedGlobals:
        real = function.__globals__
        if id(real) not in self._globals:
            self._globals[id(real)] = LoggedGlobals(self, real, f"{node.variable}.__globals__")
        else:
            self.plan.require(f"{node.variable}.__globals__ is {self._globals[id(real)].access}")
        return self._globals[id(real)]

    def _method(self, method: types.MethodType, node: Node) -> Any:
        self.plan.require(f"type({node.variable}) is method")
        first = method.__func__.__code__.co_varnames[:1] if isinstance(method.__func__, types.FunctionType) else ()
        owner = self.read(method.__self__, node, "{}.__self__", first[0] if first else "self")
        function = self.read(method.__func__, node, "{}.__func__", node.name)
        return types.MethodType(function, owner)

    def _partial(self, partial: functools.partial, node: Node) -> Any:
        plan, variable = self.plan, node.variable
        plan.require(f"type({variable}) is {plan.constant(functools.partial)} and len({variable}.args) == {len(partial.args)}")
        plan.require(f"tuple({variable}.keywords) == {tuple(partial.keywords)!r}")
        function = self.read(partial.func, node, "{}.func", node.name)
        code = getattr(partial.func, "__code__", None)
        names = code.co_varnames if code is not None else ()
        args = [
            self.read(value, node, f"{{}}.args[{i}]", names[i] if i < len(names) else f"args[{i}]")
            for i, value in enumerate(partial.args)
        ]
        keywords = {name: self.read(value, node, f"{{}}.keywords[{name!r}]", name) for name, value in partial.keywords.items()}
        return functools.partial(function, *args, **keywords)

    def _cached_function(self, function: Any, node: Node) -> Any:
        """An `lru_cache`: calls with tensors go to the function itself, others to the cache, as a read of its own."""
        inner = self.read(function.__wrapped__, node, "{}.__wrapped__", node.name)

        def call(*args, **kwargs):
            everything = [*args, *kwargs.values()]
            if kwargs or any(map(self.is_array, everything)):
                return inner(*args, **kwargs)
            plain = [concrete(value) for value in args]
            with self.untraced():
                result = function(*plain)
            constants = ", ".join(self.plan.constant(value) for value in plain)
            return self.read(result, node, f"{{}}({constants})", f"{node.name}({', '.join(map(str, plain))})")

        return call

    # -- containers and modules ---------------------------------------------------------------------------------------

    def _container(self, value: Any, kind: Any, node: Node) -> Any:
        plan, variable = self.plan, node.variable
        if len(value) > LARGEST_CONTAINER or kind is set:
            return self.opaque(value, f"a {kind.__name__} of {len(value)} items")
        plan.require(f"type({variable}) is {plan.constant(kind)} and len({variable}) == {len(value)}")
        if kind in (dict, OrderedDict):
            if not all(isinstance(key, self.keys) for key in value):
                return self.opaque(value, "a dict with keys of other types than str and int")
            if value:
                plan.require(f"tuple({variable}) == {plan.constant(tuple(value))}")
            rebuilt: Any = kind()
            self._known[id(value)] = (value, rebuilt, node)
            for key, item in value.items():
                rebuilt[key] = self.read(item, node, f"{{}}[{plan.constant(key)}]", f"{node.name}[{key!r}]")
        elif kind is list:
            rebuilt = []
            self._known[id(value)] = (value, rebuilt, node)
            rebuilt.extend(self._items(value, node))
        else:
            items = tuple(self._items(value, node))
            return items if kind is tuple else kind._make(items)
        self._containers.append((rebuilt, rebuilt.copy()))
        return rebuilt

    def _items(self, value: Any, node: Node):
        fields = getattr(value, "_fields", ())
        for index, item in enumerate(value):
            name = f"{node.name}.{fields[index]}" if fields else f"{node.name}[{index}]"
            yield self.read(item, node, f"{{}}[{index}]", name)

    def finish(self) -> None:
        """Refuses a mod that changed what it captured: the change was made to a copy. Then looks for reads that went unseen."""
        outside = "compute it before the call, outside of the mod"
        for cell, before, name in self._contents:
            if cell.cell_contents is not before:
                raise UnsupportedModError(f"a mod assigns the outer variable {name}", remedy=outside)
        for world in self._globals.values():
            if name := next((name for name in dict.keys(world) if name not in _MODULE_NAMES), None):
                raise UnsupportedModError(f"a mod assigns the global {name}", remedy=outside)
        for rebuilt, before in self._containers:
            same = len(rebuilt) == len(before)
            if same and isinstance(rebuilt, dict):
                same = all(rebuilt.get(key, self) is value for key, value in before.items())
            elif same:
                same = all(a is b for a, b in zip(rebuilt, before, strict=True))
            if not same:
                raise UnsupportedModError(f"a mod writes to a captured {type(rebuilt).__name__}", remedy=outside)

    def _module(self, module: types.ModuleType, node: Node) -> Any:
        self._same(module, node)
        if module.__name__.partition(".")[0] in PURE_MODULES:
            return module
        return LoggedModule(self, module, node)


# What Python itself reads of a function's globals.
_MODULE_NAMES = ("__builtins__", "__name__", "__package__", "__spec__", "__loader__", "__path__", "__file__")


class LoggedGlobals(dict):
    """A function's globals, wrapped as they are read. `LOAD_GLOBAL` asks `__getitem__` of a dict subclass."""

    def __init__(self, environment: Wrapping, real: dict[str, Any], access: str):
        super().__init__({name: real[name] for name in _MODULE_NAMES if name in real})
        self.environment = environment
        self.real = real
        self.access = access
        self._seen: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._seen:
            return self._seen[name]
        if name in _MODULE_NAMES or name in self:  # or assigned by the mod
            return super().__getitem__(name)
        plan = self.environment.plan
        if name not in self.real:
            plan.require(f"{name!r} not in {self.access}")
            if name in IMPURE_BUILTINS:
                plan.give_up(f"the mod calls {name}()")
            raise KeyError(name)
        node = plan.read(f"{self.access}[{name!r}]", name)
        value = self._seen[name] = self.environment.wrap(self.real[name], node)
        return value

    def close(self) -> None:
        self._seen.clear()


class LoggedModule(types.ModuleType):
    """A Python module, its names wrapped as they are read."""

    def __init__(self, environment: Wrapping, module: types.ModuleType, node: Node):
        super().__init__(module.__name__)
        seen: dict[str, Any] = {}
        object.__getattribute__(self, "__dict__")["_attnc_state"] = (environment, module, node, seen)
        environment.attributes.append(seen)

    def __getattribute__(self, name: str) -> Any:
        environment, module, node, seen = object.__getattribute__(self, "__dict__")["_attnc_state"]
        if name in seen:
            return seen[name]
        if name not in vars(module):
            environment.plan.give_up(f"the mod reads {module.__name__}.{name}, which the module makes when asked")
            return getattr(module, name)
        seen[name] = environment.read(vars(module)[name], node, attribute(name), f"{node.name}.{name}")
        return seen[name]
