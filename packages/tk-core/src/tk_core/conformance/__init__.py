"""The conformance suite: every backend runs the same cases, against the reference, with the same assertions.

* ``engine``: what is asserted of one sample; used by all three ways in.
* ``plugin``: ``pytest -p tk_core.conformance.plugin --pyargs tk_core.conformance --tk-backend=NAME``.
* ``tk check``: the same with a progress bar and a table.
"""
