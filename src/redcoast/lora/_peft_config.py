"""Reading the settings of adapters in PEFT's format."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core._read_json import read_json
from ..pretrained._files import file_inside
from ..pretrained._neutral import is_neutral
from ..pretrained._settings import Implemented, Settings
from ._peft_names import CONFIG, is_in

# Settings that do not matter for loading, in addition to those that `_neutral.py` describes.
_HARMLESS = frozenset(
    """
    auto_mapping inference_mode fan_in_fan_out loftq_config eva_config qalora_group_size
    runtime_config
    """.split()  # noqa: SIM905
)
_READ = frozenset(
    """
    peft_type r lora_alpha use_rslora rank_pattern alpha_pattern layers_to_transform
    init_lora_weights bias modules_to_save target_modules exclude_modules layers_pattern
    ensure_weight_tying
    """.split()  # noqa: SIM905
)
# Settings of PEFT that change results.
_MEANT = frozenset(("alora_invocation_tokens", "trainable_token_indices"))
MOST_REPEATED = 3
# Settings of which only some values are implemented, the default value first. All other
# initialisations also change the adapted weights.
_IMPLEMENTED: Implemented = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class PeftConfig:
    """The settings that determine the scale of each adapter.

    - `alpha`, `alphas`: the default alpha, and alphas of modules that match a pattern.
    - `stays_tied`: whether a head that shares the weights of an embedding follows one that is saved
        entirely.
    - `by_pattern`: whether a regular expression chooses the adapted modules. It is not evaluated,
        because that can take exponential time. Instead, the tensors of the file determine the
        modules.
    """

    alpha: int | float
    alphas: dict[str, int | float]
    by_root: bool  # whether alpha is divided by the square root of the rank instead of the rank
    saved: tuple[str, ...]  # the modules that are saved entirely
    stays_tied: bool = False
    by_pattern: bool = False
    targets: tuple[str, ...] = ()  # the names that adapted modules end with, if the file has them
    excluded: tuple[str, ...] = ()  # the names that modules without adapters end with
    layers: tuple[int, ...] | None = None  # the layers with adapters; all by default

    def expects(self, modules: Sequence[str], *, used: bool) -> bool:
        """Returns whether a module, which may have several names, must have an adapter. `used` is
        whether the same module has one in another layer."""
        return not self.by_pattern and any(self._expects(module, used) for module in modules)

    def _expects(self, module: str, used: bool) -> bool:
        is_target = used
        if self.targets:
            is_target = _ends_with(module, self.targets)
        if not is_target or _ends_with(module, self.excluded):
            return False
        if is_in(f"{module}.weight", self.saved):
            return False
        if self.layers is None:
            return True
        # The first number behind a name, as in `model.layers.3.mlp`. PEFT looks for it like this.
        index = re.match(r".*?\.[^.]*\.(\d+)\.", f".{module}")
        return index is not None and int(index[1]) in self.layers

    def scale(self, modules: Sequence[str], rank: int) -> float:
        """Returns the scale of the adapter of a module, which may have several names."""
        if self.by_root:
            return float(self._alpha(modules) / math.sqrt(rank))
        return float(self._alpha(modules) / rank)

    def _alpha(self, modules: Sequence[str]) -> int | float:
        for pattern, alpha in self.alphas.items():
            # PEFT matches the end of a name, from the beginning of a word on.
            if any(re.match(rf"(.*\.)?({pattern})$", module) for module in modules):
                return alpha
        return self.alpha


def _ends_with(module: str, names: Sequence[str]) -> bool:
    """Whether a module's name ends with one of these, whole words each."""
    return f".{module}".endswith(tuple(map(".{}".format, names)))


def read_adapter_config(path: Path) -> PeftConfig:
    """Reads the settings in a directory.

    Raises `ValueError` that names every setting that is not implemented.
    """
    if not (path / CONFIG).is_file():
        message = (
            f"There are no adapters at {path}: it has no {CONFIG}. Pass a directory that was "
            "written by PEFT or `lora.save_adapters`."
        )
        if path.exists():
            raise ValueError(message)
        raise FileNotFoundError(message)
    settings = read_json(file_inside(path, CONFIG))
    odd = []
    for name, value in settings.items():
        # Unknown settings are assumed to be disabled if they are null, false or empty.
        if not value or name in _READ or name in _HARMLESS:
            continue
        if name in _MEANT or not is_neutral(name, value):
            odd.append(f"`{name}` is {value!r}")
    for name, implemented in _IMPLEMENTED.items():
        value = settings.get(name, implemented[0])
        if value not in implemented:
            odd.append(f"`{name}` is {value!r}")
    if odd:
        raise ValueError(
            f"The adapters in {path} have settings that are not implemented: {', '.join(odd)}. "
            "Merge them with PEFT (`merge_and_unload`), and load the merged model."
        )
    alphas = settings.get("alpha_pattern") or {}
    # 8 is PEFT's default.
    numbers = [None]
    if isinstance(alphas, dict):
        numbers = [settings.get("lora_alpha", 8), *alphas.values()]
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
        raise ValueError(
            f"`lora_alpha` and the values of `alpha_pattern` in {path / CONFIG} must be finite "
            "numbers."
        )
    for pattern in alphas:
        # A repeated group, or many repetitions, can take exponential time to match.
        if re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+?{]", pattern)) > MOST_REPEATED:
            raise ValueError(
                f"`alpha_pattern` in {path / CONFIG} has a regular expression that is too complex "
                f"to be matched safely: {pattern!r}."
            )
        try:
            re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"`alpha_pattern` in {path / CONFIG} has {pattern!r}, which is not a regular "
                "expression."
            ) from error
    saved = settings.get("modules_to_save") or []
    if not (isinstance(saved, list) and all(isinstance(name, str) for name in saved)):
        raise ValueError(
            f"`modules_to_save` in {path / CONFIG} is {saved!r}. It must be a list of names."
        )
    return PeftConfig(
        settings.get("lora_alpha", 8),
        alphas,
        settings.get("use_rslora", False),
        tuple(saved),
        bool(settings.get("ensure_weight_tying")),
        **_chosen(settings, path),
    )


def _chosen(settings: Settings, path: Path) -> Settings:
    """Reads which modules have adapters."""
    targets = settings.get("target_modules") or []
    excluded = settings.get("exclude_modules") or []
    layers = settings.get("layers_to_transform") or []
    if isinstance(settings.get("layers_to_transform"), int):
        layers = [settings["layers_to_transform"]]
    _check_list(path, "target_modules", targets, str, "names")
    _check_list(path, "exclude_modules", excluded, str, "names")
    _check_list(path, "layers_to_transform", layers, int, "numbers")
    by_pattern = any(isinstance(value, str) for value in (targets, excluded, layers))
    # A pattern of layers is a part of a regular expression, too.
    if by_pattern or (layers and settings.get("layers_pattern")):
        return {"by_pattern": True}
    targets, excluded, layers = tuple(targets), tuple(excluded), tuple(layers)
    return {"targets": targets, "excluded": excluded, "layers": layers or None}


def _check_list(path: Path, name: str, value: object, kind: type, what: str) -> None:
    """Raises if a setting is neither a list nor a regular expression."""
    if isinstance(value, str):
        return
    if not isinstance(value, list) or any(type(entry) is not kind for entry in value):
        raise ValueError(f"`{name}` in {path / CONFIG} is {value!r}. It must be a list of {what}.")
