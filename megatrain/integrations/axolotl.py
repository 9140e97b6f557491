"""MegatrainPlugin: axolotl's trainer with a model that streams.

In axolotl's configuration:

plugins:
  - megatrain.integrations.axolotl.MegatrainPlugin
device_map: cpu
megatrain_memory: 20GiB
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from megatrain.errors import OptionError


def _imported(module: str, name: str) -> Any:
    """A class of an optional library; without it this module can be imported, but not used."""
    return getattr(importlib.import_module(module), name) if find_spec(module.partition(".")[0]) else object


_Plugin: Any = _imported("axolotl.integrations.base", "BasePlugin")
_Settings: Any = _imported("pydantic", "BaseModel")
_OTHERS = ("rl", "reward_model", "process_reward_model", "trainer_cls", "kd_trainer", "diffusion")
"""What gets another trainer than axolotl's own; a plugin's trainer would take its place."""
_OFFLOADS = ("layer_offloading", "activation_offloading", "deepspeed", "fsdp", "fsdp_config")


@dataclass
class MegatrainTrainingArguments:
    """What axolotl's configuration may have in addition, as training arguments: there `Streamed` finds them."""

    megatrain_memory: int | str | None = None
    megatrain_precision: str | None = None
    megatrain_masters: str | None = None
    megatrain_activations: str | int | None = None
    megatrain_block_bytes: int | str | None = None
    megatrain_chunking: str | None = None
    megatrain_kernels: str | None = None
    megatrain_overlap: bool | None = None
    megatrain_spread: bool | None = None
    megatrain_on_nonfinite: str | None = None


_NAMES = tuple(field.name for field in fields(MegatrainTrainingArguments))


class MegatrainArguments(_Settings):
    """The same, as fields of pydantic, which axolotl merges into its own."""

    __annotations__ = MegatrainTrainingArguments.__annotations__
    locals().update(dict.fromkeys(_NAMES))


class MegatrainPlugin(_Plugin):
    """Makes axolotl's own trainer stream its model; see `megatrain.integrations.hf.Streamed`."""

    def get_input_args(self) -> str:
        """Names the class of the settings."""
        return f"{__name__}.MegatrainArguments"

    def get_training_args_mixin(self) -> str:
        """Names the class of the training arguments."""
        return f"{__name__}.MegatrainTrainingArguments"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Hands the settings on to the training arguments."""
        return {name: cfg[name] for name in _NAMES if cfg.get(name) is not None}

    def get_trainer_cls(self, cfg: Any) -> type:
        """Returns axolotl's trainer, which streams.

        Raises:
            OptionError: If the configuration asks for another trainer, or for another way to offload.
        """
        for name in _OTHERS:
            if cfg.get(name):
                raise OptionError(
                    f"axolotl's `{name}` has a trainer of its own, which this plugin would replace.\n"
                    "  The plugin makes the trainer of supervised fine-tuning and of pretraining stream.\n"
                    f"  Leave `{name}` out; or train with TRL's trainer and `megatrain.integrations.hf.Streamed`."
                )
        for name in _OFFLOADS:
            if cfg.get(name):
                raise OptionError(
                    f"axolotl's `{name}` and this plugin both move the model's state.\n"
                    "  The plugin's schedule says what is on the device at each time.\n  Leave one of them out."
                )
        from axolotl.core.trainers import AxolotlTrainer  # pyright: ignore

        # It imports transformers, which is slow; a configuration names this plugin long before there is a trainer.
        from megatrain.integrations.hf import Streamed

        kind: type = AxolotlTrainer  # pyright: ignore
        return type("StreamedAxolotlTrainer", (Streamed, kind), {})

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Looks where axolotl has put the model.

        Raises:
            OptionError: If it isn't in the memory of the host.
        """
        places = sorted({str(each.device) for each in model.parameters()} - {"cpu", "meta"})
        if places:
            raise OptionError(
                f"axolotl has put the model onto {', '.join(places)}.\n"
                "  A model that streams stays in host memory.\n  Write `device_map: cpu` into the configuration."
            )
