"""The terms of the RL objective, token by token. Pure functions of tensors; ``docs/algorithms.md`` has the notation.

Every function takes a mask and neither reads what it hides, not even a NaN, nor lets gradient through it.
"""
