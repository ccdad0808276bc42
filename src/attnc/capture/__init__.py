"""From the user's mods to IR: tracing, the plan of reads, BlockMask, the torch dialect.

`capture(score_mod, mask_mod)` gives a `Captured`: a `Record` (the key of the compiled code) with the tensors and numbers of
now. `to_torch.build` makes the module of stage "torch" of a record. Importing this package imports nothing else.
"""
