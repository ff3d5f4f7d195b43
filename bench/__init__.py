"""Measurements, run as `python -m bench.NAME` or `fullgraph bench NAME`; results/ holds theirs."""
