"""Compiled artefacts kept between starts: what they depend on, where they lie, how they are filled.

Imports nothing of the engine, and torch only in functions that say so.
"""
