from dataclasses import dataclass


@dataclass(frozen=True, init=False)
class Tensor:
    name: str
    pattern: str
    fixed: dict

    def __init__(self, name: str, pattern: str, **fixed):
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "fixed", fixed)
