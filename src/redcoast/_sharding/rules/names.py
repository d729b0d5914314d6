"""What names say. Rules ask them only where shapes leave a question open."""

import re

from .units import Unit

_ROLES = {
    "q": "query",
    "query": "query",
    "k": "key",
    "key": "key",
    "v": "value",
    "value": "value",
    "kv": "fused",
    "key_value": "fused",
    "qkv": "fused",
    "query_key_value": "fused",
    "in": "fused",
    "c_attn": "fused",
    "pack": "fused",
    "o": "output",
    "out": "output",
    "output": "output",
    "c": "output",
    "attn_vec": "output",
    "": "output",
}
_SUFFIX = re.compile(r"(^|_)(proj|projection|linear|lin|layer|weight|kernel|dense|einsum|w)$")
_PREFIX = re.compile(r"^(w|to|linear)_?(?=(q|k|v|o|qkv|kv|out|pack)$)")
_READS = re.compile(r"w?_?(gate|up|fc_?1|c_fc|fc_?in|wi(_\d)?|expand|intermediate).*|.*h_to_4h")
_WRITES = re.compile(r"w?_?(down|fc_?2|fc_?out|contract).*|.*4h_to_h")


def role_of(unit: Unit) -> str | None:
    """What a name says: query, key, value, fused (several of them in one matrix) or output."""
    for name in unit.names:
        stem = re.sub("qkv.*", "qkv", name.lower())
        while _SUFFIX.search(stem):
            stem = _SUFFIX.sub("", stem)
        role = _ROLES.get(_PREFIX.sub("", stem))
        if role is not None:
            return role
    return None


def reads_width(unit: Unit) -> bool:
    """Whether the name is that of a matrix from the residual width to an inner one."""
    return any(_READS.fullmatch(name.lower()) for name in unit.names)


def writes_width(unit: Unit) -> bool:
    """Whether the name is that of a matrix from an inner width back to the residual one."""
    return any(_WRITES.fullmatch(name.lower()) for name in unit.names)
