"""The machinery behind :mod:`oasr_core.registry` and :mod:`oasr_core.hooks`; not public.

Nothing here imports torch, pydantic or a plugin; contracts are named by strings and imported when an entry is resolved.
"""
