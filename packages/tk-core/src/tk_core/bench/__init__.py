"""Benchmarks: the points of ``tk_core.cases``, timed on whatever backend is here, beside other libraries.

* ``timing``: device time by graph replay and by cold launches, host time of an enqueue, the copy rate.
* ``adapters``: one small file for each candidate.
* ``runner``: points x candidates, checked before they are timed, interleaved forward and then reversed.
* ``records``: JSON rows, the Markdown table, the plot, and the comparison of two revisions.
"""
