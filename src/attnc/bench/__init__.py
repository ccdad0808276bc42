"""`attnc bench`: attnc beside its peers and the machine's limits, in one run.

case.py      what one measurement computes: shapes, dtype, mod, mask, as plain data
problem.py   a case as tensors and torch mods, and its reference in f64
peers/       one library a file, each turning a case into something to call
worker.py    the process that runs one library, driven over a pipe
driver.py    the other end of the pipe: turn by turn, solo against interleaved
limits.py    the machine's own limits: FMA peak and read bandwidth
fresh.py     what needs fresh processes: first calls and peak memory
suites.py    the rows, with the bounds that are held against them
run.py       rows → results;  report.py, plot.py: results → tables, Markdown, the roofline
"""
