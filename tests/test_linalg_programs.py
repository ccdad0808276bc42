"""Programs by chance: elementwise operations, reductions, views, slices, insertions in any order, against the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnc
from attention_modules import close, exact


@dataclass
class Program:
    """A function in the making: values are (name, shape) of f32 tensors."""

    lines: list[str] = field(default_factory=list)
    values: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    arguments: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def new(self, shape: tuple[int, ...], text: str, setup: str = "") -> None:
        name = f"%v{len(self.values)}"
        self.lines.append(f"{setup}  {name} = {text}")
        self.values.append((name, shape))

    def empty(self, shape: tuple[int, ...]) -> tuple[str, str]:
        name = f"%e{len(self.lines)}"
        return name, f"  {name} = tensor.empty() : {type_of(shape)}\n"


def type_of(shape: tuple[int, ...]) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}f32>"


def map_of(rank: int, results: list[str]) -> str:
    return f"affine_map<({', '.join(f'd{n}' for n in range(rank))}) -> ({', '.join(results)})>"


BODIES = ("arith.addf %a, %b", "arith.mulf %a, %c", "arith.subf %b, %a", "arith.maximumf %a, %c")


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, list[np.ndarray]]:
    program = Program()
    for n in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        program.arguments.append((f"%x{n}", shape))
        program.values.append((f"%x{n}", shape))
    for _ in range(draw(st.integers(3, 9))):
        step(program, draw)
    count = draw(st.integers(1, 3))
    chosen = [program.values[-1], *(draw(st.sampled_from(program.values)) for _ in range(count - 1))]
    types = ", ".join(type_of(shape) for _, shape in chosen)
    header = ", ".join(f"{name}: {type_of(shape)}" for name, shape in program.arguments)
    body = "\n".join(program.lines)
    names = ", ".join(name for name, _ in chosen)
    text = f"func.func @main({header}) -> ({types}) {{\n{body}\n  return {names} : {types}\n}}\n"
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return text, [rng.standard_normal(shape).astype(np.float32) for _, shape in program.arguments]


def step(program: Program, draw: st.DrawFn) -> None:
    name, shape = draw(st.sampled_from(program.values))
    rank = len(shape)
    kind = draw(st.sampled_from(["elementwise", "elementwise", "transpose", "reduce", "collapse", "expand", "slice", "insert"]))
    if kind == "elementwise":
        elementwise(program, draw, name, shape)
    elif kind == "transpose" and rank > 1:
        order = draw(st.permutations(range(rank)))
        moved = tuple(shape[p] for p in order)
        init, setup = program.empty(moved)
        types = f"ins({name} : {type_of(shape)}) outs({init} : {type_of(moved)})"
        program.new(moved, f"linalg.transpose {types} permutation = {list(order)}", setup)
    elif kind == "reduce":
        reduced = draw(st.sets(st.integers(0, rank - 1), min_size=1)) if rank else set()
        kept = [n for n in range(rank) if n not in reduced]
        result = tuple(shape[n] for n in kept)
        init, setup = program.empty(result)
        zero, fill = f"%z{len(program.lines)}", f"%f{len(program.lines)}"
        setup += f"  {zero} = arith.constant 0.5 : f32\n"
        setup += f"  {fill} = linalg.fill ins({zero} : f32) outs({init} : {type_of(result)}) -> {type_of(result)}\n"
        maps = f"{map_of(rank, [f'd{n}' for n in range(rank)])}, {map_of(rank, [f'd{n}' for n in kept])}"
        iterators = ", ".join('"reduction"' if n in reduced else '"parallel"' for n in range(rank))
        text = f"linalg.generic {{indexing_maps = [{maps}], iterator_types = [{iterators}]}} ins({name} : {type_of(shape)}) "
        text += f"outs({fill} : {type_of(result)}) {{\n  ^bb0(%a: f32, %o: f32):\n    %y = arith.addf %a, %o : f32\n"
        program.new(result, f"{text}    linalg.yield %y : f32\n  }} -> {type_of(result)}", setup)
    elif kind == "collapse" and rank > 1:
        at = draw(st.integers(0, rank - 2))
        groups = [[n] for n in range(at)] + [[at, at + 1]] + [[n] for n in range(at + 2, rank)]
        merged = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
        program.new(merged, f"tensor.collapse_shape {name} {groups} : {type_of(shape)} into {type_of(merged)}")
    elif kind == "expand" and 0 < rank < 4:
        at = draw(st.integers(0, rank - 1))
        first = draw(st.sampled_from([d for d in range(1, shape[at] + 1) if shape[at] % d == 0]))
        split = (*shape[:at], first, shape[at] // first, *shape[at + 1 :])
        groups = [[n] for n in range(at)] + [[at, at + 1]] + [[n + 1] for n in range(at + 1, rank)]
        sizes = ", ".join(map(str, split))
        text = f"tensor.expand_shape {name} {groups} output_shape [{sizes}] : {type_of(shape)} into {type_of(split)}"
        program.new(split, text)
    elif kind in ("slice", "insert") and rank:
        sizes = tuple(draw(st.integers(1, size)) for size in shape)
        offsets = [draw(st.integers(0, limit - size)) for limit, size in zip(shape, sizes, strict=True)]
        where = f"[{', '.join(map(str, offsets))}] [{', '.join(map(str, sizes))}] [{', '.join('1' * rank)}]"
        program.new(sizes, f"tensor.extract_slice {name}{where} : {type_of(shape)} to {type_of(sizes)}")
        if kind == "insert":
            fitting = [value for value in program.values if value[1] == sizes]
            source = draw(st.sampled_from(fitting))[0]
            target = draw(st.sampled_from([value for value in program.values if value[1] == shape]))[0]
            program.new(shape, f"tensor.insert_slice {source} into {target}{where} : {type_of(sizes)} into {type_of(shape)}")


def elementwise(program: Program, draw: st.DrawFn, name: str, shape: tuple[int, ...]) -> None:
    """With another value whose dimensions are some of this one's."""
    rank = len(shape)
    others = []
    for other, theirs in program.values:
        places: list[int] = []
        for size in theirs:
            free = [n for n in range(rank) if shape[n] == size and n not in places]
            if free:
                places.append(free[0])
        if len(places) == len(theirs):
            others.append((other, theirs, places))
    other, theirs, places = draw(st.sampled_from(others))
    init, setup = program.empty(shape)
    identity = map_of(rank, [f"d{n}" for n in range(rank)])
    maps = f"{identity}, {map_of(rank, [f'd{n}' for n in places])}, {identity}"
    iterators = ", ".join(['"parallel"'] * rank)
    text = f"linalg.generic {{indexing_maps = [{maps}], iterator_types = [{iterators}]}} "
    text += f"ins({name}, {other} : {type_of(shape)}, {type_of(theirs)}) outs({init} : {type_of(shape)}) {{\n"
    text += "  ^bb0(%a: f32, %b: f32, %o: f32):\n    %c = arith.constant 0.75 : f32\n"
    body = draw(st.sampled_from(BODIES))
    if rank and draw(st.booleans()):
        text += f"    %i = linalg.index {draw(st.integers(0, rank - 1))} : index\n    %j = arith.index_cast %i : index to i32\n"
        text += f"    %k = arith.sitofp %j : i32 to f32\n    %w = {body} : f32\n    %y = arith.addf %w, %k : f32\n"
    else:
        text += f"    %y = {body} : f32\n"
    program.new(shape, f"{text}    linalg.yield %y : f32\n  }} -> {type_of(shape)}", setup)


@given(programs())
@settings(deadline=None, derandomize=True, database=None, max_examples=20, suppress_health_check=[*HealthCheck])  # pyright: ignore[reportArgumentType]
def test_programs_are_right(program: tuple[str, list[np.ndarray]]):
    text, inputs = program
    results = attnc.compile(text)(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    for n, (result, wanted) in enumerate(zip(results, exact(text, inputs), strict=True)):
        close(result, wanted, "f32", f"result {n} of\n{text}", factor=200)
