"""Pure functions that are traced: parameters, KV cache and step inputs in, next tokens out.

Never imports engine.
"""
