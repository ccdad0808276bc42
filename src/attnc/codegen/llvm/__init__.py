"""From the `tile` dialect to LLVM text and objects.

In the order of reading, each calling the next:

    module              a module's kernels as one text, with the record by which they are launched
    kernel              the frame of one kernel: arguments, scratch, the loop over tasks
    program             what a block of a `tile` body does, as a straight list of row operations
    body                one task: programs strip by strip, loops over key blocks, cases by class
    rows                row operations as loops over a strip's rows and their lanes
    products, leaves*   `tile.dot` as a call of a leaf routine, and the routines: matrix products and packing
    shared_sums         `tile.accumulate`: what tasks add to in turns, so that bits do not depend on threads
    operations, math*   the scalar operations of mods on vectors, and elementary functions

Beside them: `text` writes LLVM text, `compile` makes an object of it, `locate` finds where an index was out of range.
"""
