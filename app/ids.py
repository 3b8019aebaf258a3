"""Ids of objects: a prefix that says what it is, and 120 random bits that nobody can count up to."""

import secrets

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def new_id(prefix: str) -> str:
    """A fresh id such as `ftjob-4fGk...`; `prefix` ends with its own dash or underscore."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(24))
