"""The shapes of the zoo."""

from __future__ import annotations

from zoo.entry import Sizes

_SMALL = Sizes(batch=1, heads=2, kv_heads=2, queries=70, keys=90)

HEAD_DIMS = [_SMALL.but(head_dim=d, value_dim=d) for d in (1, 17, 24, 64, 94, 96, 121, 128, 256)]
VALUE_DIMS = [_SMALL.but(head_dim=e, value_dim=v) for e, v in ((64, 128), (128, 64), (17, 1), (1, 17), (96, 121), (192, 128))]
LENGTHS = [_SMALL.but(queries=n, keys=n, head_dim=64, value_dim=64) for n in (1, 2, 16, 127, 128, 129, 255, 257, 1025)]
UNEQUAL_LENGTHS = [
    _SMALL.but(queries=q, keys=k)
    for q, k in ((1, 1025), (1025, 1), (16, 257), (257, 16), (127, 128), (129, 64), (2, 300), (300, 2))
]
EMPTY = [_SMALL.but(queries=0, keys=16), _SMALL.but(queries=16, keys=0), _SMALL.but(queries=0, keys=0)]
GROUPS = [
    Sizes(batch=2, heads=kv * ratio, kv_heads=kv, queries=q, keys=150)
    for kv, ratio, q in (
        (3, 1, 65),
        (2, 2, 65),
        (2, 3, 65),
        (1, 6, 65),
        (2, 8, 65),
        (1, 7, 65),
        (2, 8, 1),
        (2, 3, 2),
        (1, 32, 1),
    )
]
BATCHES = [
    Sizes(batch=b, heads=2, kv_heads=2, queries=65, keys=70, kv_batch=kv) for b, kv in ((1, 1), (2, 2), (2, 1), (3, 3), (3, 1))
]
SHAPES = [*HEAD_DIMS, *VALUE_DIMS, *LENGTHS, *UNEQUAL_LENGTHS, *EMPTY, *GROUPS, *BATCHES]
