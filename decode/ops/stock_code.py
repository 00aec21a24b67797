"""Recognise functions that transformers copies into the file of each model, by their code."""

from __future__ import annotations

from types import FunctionType


def code_of(function: object) -> tuple[object, ...]:
    """What a function of transformers computes: its code without texts, such as the docstring, and its defaults."""
    if not isinstance(function, FunctionType):
        return (function,)
    code = function.__code__
    numbers = [constant for constant in code.co_consts if not isinstance(constant, str)]
    return code.co_code, code.co_names, code.co_varnames, numbers, function.__defaults__
