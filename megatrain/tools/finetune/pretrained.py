"""The model and the tokenizer of a command, by names or folders: on paper first, then with their weights."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatrain.base.counts import counted
from megatrain.errors import MegatrainError, OptionError


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters of peft on all linear layers."""

    rank: int
    alpha: float
    dropout: float = 0.0

    def onto(self, model: Any) -> Any:
        """Returns the model with adapters, which alone are trained."""
        from peft import LoraConfig, get_peft_model

        adapters: Any = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # pyright: ignore[reportArgumentType]  # any number, by its use
            lora_dropout=self.dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that will go
            return get_peft_model(model, adapters)


def need_libraries(command: str, *names: str) -> None:
    """Looks for optional libraries, without importing them.

    Raises:
        OptionError: With the line that installs what is missing.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"megatrain {command} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed.\n"
            "  Models, adapters and data are those of Hugging Face's libraries, which are optional dependencies.\n"
            f"  Install what is missing: pip install {' '.join(missing)}"
        )


def read_config(name: str) -> Any:
    """Reads the configuration of a folder, of a config.json, or of a name on the hub.

    Raises:
        OptionError: If there is none, or it can't be read.
    """
    from transformers import AutoConfig

    with readable(f"the configuration of `{name}`"):
        return AutoConfig.from_pretrained(name, local_files_only=Path(name).exists())


def read_tokenizer(name: str) -> Any:
    """Reads a tokenizer.

    Raises:
        OptionError: If there is none, or it can't be read.
    """
    from transformers import AutoTokenizer

    with readable(f"the tokenizer of `{name}`", "  Name a folder that has one with --tokenizer."):
        return AutoTokenizer.from_pretrained(name, local_files_only=Path(name).exists())


def positions_of(config: Any) -> int | None:
    """Returns how many positions a model has, the most tokens of a sequence; None if nothing says a number."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def longest(config: Any, asked: int | None, usual: int, flag: str) -> int:
    """Returns the most tokens of a sequence: as asked, else the usual number, or as many as the model has positions.

    Raises:
        OptionError: If more are asked for than the model has positions.
    """
    most = positions_of(config)
    if asked is None:
        return usual if most is None else min(usual, most)
    if most is not None and asked > most:
        raise OptionError(
            f"{flag} {asked} is longer than what the model takes: {most} tokens.\n"
            "  A model has `max_position_embeddings` positions, by its configuration.\n"
            f"  Give {flag} {most}, or less."
        )
    return asked


def model_on_paper(name: str, config: Any, precision: str, adapters: Adapters | None) -> Any:
    """Makes the model without memory for its parameters; buffers that it computes are there.

    Raises:
        OptionError: If it isn't a causal language model that transformers knows, or its weights are quantized.
    """
    from accelerate import init_empty_weights

    model = _without_memory(name, config, _dtype(precision, adapters))
    with readable(f"adapters of `{name}`"), init_empty_weights(include_buffers=False):
        return model if adapters is None else adapters.onto(model)


def _without_memory(name: str, config: Any, dtype: torch.dtype) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    if getattr(config, "quantization_config", None):
        # A model of the configuration alone has plain weights: other bytes than those of the files.
        raise OptionError(
            f"the weights of `{name}` are quantized.\n"
            "  Without its files a model has plain weights, and would be planned with too many bytes.\n"
            "  Name the folder that it was quantized from, or train it by a script with a trainer "
            "(docs/tasks/lora-on-32b.md)."
        )
    with readable(f"a language model of `{name}`"), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # each parameter that was made empty is one of its own
    return model


def model_in_files(name: str, config: Any, precision: str, adapters: Adapters) -> Any:
    """Makes the model with adapters, whose base has no memory, for `compile(weights=)`.

    The adapters have the values that `read_model` gives them.

    Raises:
        OptionError: As `model_on_paper`.
    """
    model = _without_memory(name, config, _dtype(precision, adapters))
    # peft makes adapters where a weight is. Weights of one element, seen as often as needed, are on the host.
    one = torch.zeros(1)
    away = {id(p): (p, nn.Parameter(one.to(p.dtype).expand(p.shape))) for p in model.parameters()}
    _replace(model, {key: stand_in for key, (_, stand_in) in away.items()})
    with readable(f"adapters of `{name}`"):
        adapted = adapters.onto(model)
    for parameter, stand_in in away.values():
        parameter.requires_grad_(stand_in.requires_grad)
    _replace(adapted, {id(stand_in): parameter for parameter, stand_in in away.values()})
    return adapted


def _replace(model: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in others:
                setattr(module, key, others[id(parameter)])


def read_model(name: str, config: Any, precision: str, adapters: Adapters | None) -> Any:
    """Makes the model with its weights, in host memory.

    Raises:
        OptionError: If the weights can't be read, or some are missing.
    """
    from transformers import AutoModelForCausalLM

    with readable(f"the weights of `{name}`"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=_dtype(precision, adapters),
            use_safetensors=True,
            local_files_only=Path(name).exists(),
            output_loading_info=True,
        )
    model, said = loaded
    if missing := sorted(said["missing_keys"]):
        raise OptionError(
            f"the files of `{name}` lack {counted(len(missing), 'weight')} of the model: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}.\n"
            "  Training would begin with random values there.\n  Give a folder with all weights of a language model."
        )
    return model if adapters is None else adapters.onto(model)


def _dtype(precision: str, adapters: Adapters | None) -> torch.dtype:
    # What isn't trained has no master, so it may be read in the dtype in which blocks compute. Trained weights begin
    # with all bits of the file; megatrain makes bf16 halves and the rest of them.
    return torch.bfloat16 if adapters is not None and precision == "bf16" else torch.float32


@contextmanager
def readable(
    what: str, way: str = "  Check the path, and that the installed libraries know what it has."
) -> Generator[None]:
    """Turns what a library raises for files that it can't use into an error of ours, with the library's words."""
    try:
        yield
    except MegatrainError:
        raise
    except Exception as error:  # these libraries, and a model's own code, raise anything for files that they can't use
        said = " ".join(str(error).split()) or type(error).__name__
        raise OptionError(f"{what} can't be read: {said[:300]}\n  Hugging Face's libraries read it.\n{way}") from error
